"""Prints `kvledger plan`: the memory ledger as a table and a bar, the pool, users by length, values to paste."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from ...core.deployment.diagnosis import Diagnosis
from ...core.deployment.plan import DeploymentPlan
from ...core.deployment.remedies import fitting_values
from ...core.deployment.startup_log import log_lines
from ...core.memory.ledger import LedgerRow, RowRole, RowSource
from ...core.planner.report import CapacityRow
from ...core.quantities import GIB, MIB, format_bytes, format_gib
from ..figures import Document, percent
from ..scenario.deployment import PlanQuestion
from ..scenario.plan import LogExplanation, PlanResult, explanation, option_of, totals, with_options
from .console import console, print_hanging, print_list, table

# Part of the bar -> its character and its colour.
_FILLS = {
    "weights": ("█", "blue"),
    "libraries and workspace": ("▓", "magenta"),
    "activations and graphs": ("▒", "yellow"),
    "KV cache": ("=", "green"),
    "left over in the budget": ("-", "green"),
    "in use by others": ("x", "red"),
    "outside the budget": ("·", "white"),
}
_BETWEEN = "   "  # separates entries of the legend


def print_plan(result: PlanResult, *, explain: bool, mix: str | None = None) -> None:
    """Print everything, the most important figures first; then the users of the mix that was asked about."""
    question, plan = result.question, result.plan
    out = console()
    out.print(_headline(question, plan), style="bold", markup=False)
    out.print(_answer(plan), markup=False)
    out.print()
    _print_ledger(out, plan)
    _print_pool(out, plan)
    if plan.fits:
        _print_capacity(out, plan, result.capacity)
        _print_values(out, plan)
    for diagnosis in result.diagnoses:
        _print_diagnosis(out, diagnosis)
    print_list(out, "Warnings", [with_options(warning) for warning in result.warnings])
    print_list(out, "Assumed, because not given", question.assumptions)
    print_list(out, "The lines that a vLLM server logs", log_lines(plan))
    if explain:
        out.print("\n[bold]Formulas with their numbers[/bold]")
        for line in explanation(plan):
            out.print(line, markup=False, soft_wrap=True)
    if result.mix is not None:
        out.print(f"Concurrent users of the mix {mix}: {result.mix['users']:,}", markup=False)


def _headline(question: PlanQuestion, plan: DeploymentPlan) -> str:
    deployment = plan.deployment
    names = {"TP": "tensor", "PP": "pipeline", "DP": "data", "DCP": "decode_context"}
    all_sizes = {name: getattr(deployment, f"{kind}_parallel_size") for name, kind in names.items()}
    sizes = [f"{name} {size}" for name, size in all_sizes.items() if size > 1]
    layout = f" ({', '.join(sizes)})" if sizes else ""
    verdict = "fits" if plan.fits else "does not fit"
    gpus = f"{deployment.num_gpus} x {question.device_name}{layout}, {format_gib(deployment.total_bytes)} each"
    return f"{deployment.geometry.name} on {gpus}: {verdict}"


# Share of the pool from which on the headline has the range that the estimates allow.
WIDE_RANGE = 0.1


def _answer(plan: DeploymentPlan) -> str:
    """The size of the pool and how many longest requests it holds."""
    pool = plan.pool
    if not plan.fits:
        return f"The pool cannot hold one request of {pool.max_model_len:,} tokens; see the reasons below."
    users = max(pool.num_usable_blocks, 0) // pool.blocks_per_request
    low, high = plan.blocks_range
    is_wide = high - low > WIDE_RANGE * plan.num_blocks
    return (
        f"{plan.num_blocks:,} blocks = {pool.kv_cache_size_tokens:,} tokens of KV cache, enough for {users:,}"
        f" {'request' if users == 1 else 'requests'} of {pool.max_model_len:,} tokens"
        f" at once{' per engine' if plan.deployment.data_parallel_size > 1 else ''}."
        f"{f' The estimates allow {low:,} to {high:,} blocks.' if is_wide else ''}"
    )


def _print_ledger(out: Any, plan: DeploymentPlan) -> None:
    stage = plan.bottleneck_stage
    rows = plan.rows(stage)
    total = plan.deployment.total_bytes
    where = "one GPU" if plan.deployment.num_gpus == 1 else f"each GPU of stage {stage.stage} (the tightest)"
    if len(plan.stages) == 1 and plan.deployment.num_gpus > 1:
        where = "each GPU"
    cells = [
        (row.name, f"{row.num_bytes / GIB:,.2f}", percent(row.num_bytes / total, 1), str(row.source), _span(row))
        for row in rows
    ]
    shown = table(f"Memory of {where}", ["", "GiB", "share", "source", "range, GiB"], cells, left=(0, 3))
    shown.add_section()
    shown.add_row("total", f"{total / GIB:,.2f}", percent(1, 1), "", "")
    out.print(shown)
    out.print(ledger_bar(rows, total, min(out.width, 120) - 2))


def _span(row: LedgerRow) -> str:
    if row.source is not RowSource.ESTIMATE or row.low_bytes == row.high_bytes:
        return ""
    return f"{row.low_bytes / GIB:,.2f} to {row.high_bytes / GIB:,.2f}"


def bar_segments(rows: Sequence[LedgerRow]) -> dict[str, int]:
    """Bytes of each part of the bar, in the order of the memory ledger."""
    segments = dict.fromkeys(_FILLS, 0)
    for row in rows:
        segments[_segment(row)] += max(row.num_bytes, 0)
    return segments


def _segment(row: LedgerRow) -> str:
    if row.name in ("weights", "weights held externally"):
        return "weights"
    if row.role is RowRole.RESIDENT:
        return "libraries and workspace"
    if row.role in (RowRole.TRANSIENT, RowRole.GRAPHS):
        return "activations and graphs"
    if row.role is RowRole.POOL:
        return "KV cache" if row.name == "KV cache blocks" else "left over in the budget"
    return "in use by others" if row.name == "in use before start" else "outside the budget"


def ledger_bar(rows: Sequence[LedgerRow], total_bytes: int, width: int) -> Any:
    """A bar of `width` characters and its legend, without parts below a tenth of a character."""
    from rich.text import Text

    segments = bar_segments(rows)
    whole = max(total_bytes, sum(segments.values()))
    segments = {name: size for name, size in segments.items() if size * width * 10 > whole}
    cells = {name: max(round(size / whole * width), 1) for name, size in segments.items()}
    widest = max(cells, key=lambda name: cells[name])
    cells[widest] += width - sum(cells.values())
    bar, legend, line_length = Text(), Text(), 0
    for name, count in cells.items():
        fill, colour = _FILLS[name]
        bar.append(fill * count, style=colour)
        entry = f"{fill} {name} {segments[name] / GIB:,.2f}"
        if line_length:
            fits = line_length + len(_BETWEEN) + len(entry) <= width
            legend.append(_BETWEEN if fits else "\n")
            line_length = line_length + len(_BETWEEN) if fits else 0
        legend.append(entry, style=colour)
        line_length += len(entry)
    return Text("\n").join([bar, legend, Text()])


def _print_pool(out: Any, plan: DeploymentPlan) -> None:
    pool, deployment = plan.pool, plan.deployment
    block_size, _ = deployment.resolved_block_size()
    low, high = plan.blocks_range
    span = f"  ({low:,} to {high:,} given the ranges above)" if low != high else ""
    rank = " on the tightest rank" if len(pool.ranks) > 1 else ""
    lines = [
        ("num_gpu_blocks", f"{plan.num_blocks:,} blocks of {block_size} tokens{span}"),
        ("bytes per block", f"{format_bytes(plan.bytes_per_block)}{rank}: {_groups(plan)}"),
        ("KV cache size", f"{max(pool.kv_cache_size_tokens, 0):,} tokens"),
        ("maximum concurrency", f"{max(pool.max_concurrency, 0):.2f}x at {pool.max_model_len:,} tokens per request"),
    ]
    all_gpus = totals(plan)
    if all_gpus["gpus"] > 1:
        lines.append(("all GPUs together", _totals_sentence(plan, all_gpus)))
    width = max(len(name) for name, _ in lines)
    out.print("[bold]KV cache[/bold]")
    for name, text in lines:
        print_hanging(out, f"  {name:<{width}}  ", text)
    out.print()
    _print_ranks(out, plan)


def _groups(plan: DeploymentPlan) -> str:
    """`10 full and 52 sliding caches in 7 groups of up to 10`."""
    groups = plan.pool.groups
    counts = Counter(spec.kind for group in groups for spec in group.layer_specs)
    kinds = " and ".join(f"{count} {kind}" for kind, count in counts.items())
    widest = max(len(group.layer_names) for group in groups)
    return f"{kinds} caches in {len(groups)} groups of up to {widest}" if len(groups) > 1 else f"{kinds} caches"


def _totals_sentence(plan: DeploymentPlan, all_gpus: Document) -> str:
    held = f"{format_gib(all_gpus['kv_cache_bytes'])} of KV cache for {all_gpus['kv_cache_tokens']:,} tokens"
    deployment = plan.deployment
    effects = {
        "TP adds bytes, not tokens: each rank holds its heads of every block": deployment.tensor_parallel_size,
        "PP adds bytes, not tokens: each stage holds its layers of every block": deployment.pipeline_parallel_size,
        f"DP adds both: {deployment.data_parallel_size} independent engines": deployment.data_parallel_size,
    }
    reasons = [effect for effect, size in effects.items() if size > 1]
    return f"{held} ({'; '.join(reasons)})" if reasons else held


def _print_ranks(out: Any, plan: DeploymentPlan) -> None:
    """Print a row per pipeline stage, whose tensor-parallel ranks are alike; nothing for a single stage."""
    if len(plan.stages) == 1:
        return
    rows: list[tuple[str, ...]] = []
    for stage in plan.stages:
        rank = plan.pool.ranks[stage.ranks.start]
        names = f"{stage.ranks.start}-{stage.ranks.stop - 1}" if len(stage.ranks) > 1 else f"{stage.ranks.start}"
        rows.append(
            (
                f"{names} *" if rank.is_bottleneck else names,
                f"{stage.layers.start}-{stage.layers.stop - 1}",
                f"{rank.available_bytes / GIB:,.2f}",
                f"{rank.bytes_per_block / MIB:,.3f}",
                f"{max(rank.num_blocks_alone, 0):,}",
                f"{max(rank.bytes_used, 0) / GIB:,.2f}",
                f"{rank.idle_bytes / GIB:,.2f}",
            )
        )
    out.print("[bold]The tightest rank (*) decides the size of the pool[/bold]")
    columns = ["ranks", "layers", "KV GiB", "MiB per block", "blocks that fit", "used GiB", "idle GiB"]
    out.print(table(None, columns, rows))


def _print_capacity(out: Any, plan: DeploymentPlan, capacity: Sequence[CapacityRow]) -> None:
    """Print users per context length.

    If windowed or state layers make them differ, also users that all decode, and users by bytes alone.
    """
    engines = plan.deployment.data_parallel_size
    differs = any(row.decode_users != row.users for row in capacity)
    rows: list[list[str]] = []
    for row in capacity:
        users = (row.users, row.decode_users, row.floor_users) if differs else (row.users,)
        figures = ["too long" if row.exceeds_max_model_len else f"{count * engines:,}" for count in users]
        size = f"{row.peak_blocks * plan.bytes_per_block / GIB:,.3f}"
        rows.append([f"{row.context_tokens:,}", f"{row.peak_blocks:,}", size, *figures])
    columns = ["context, tokens", "blocks each", "GiB each", "users"]
    if differs:
        columns += ["all decoding", "by bytes alone"]
    out.print("[bold]Concurrent users if all have this context length (limited by KV capacity only)[/bold]")
    out.print(table(None, columns, rows, left=()))


def _print_values(out: Any, plan: DeploymentPlan) -> None:
    values = fitting_values(plan)
    vllm = values.suggested_vllm
    one = values.same_pool.bytes_per_block
    pools = {
        "this pool": values.same_pool,
        "largest within --gpu-memory-utilization": values.to_requested_limit,
        "largest on this GPU": values.to_gpu_limit,
    }
    rows = [(name, f"{pool.num_bytes}", f"{pool.num_blocks:,}") for name, pool in pools.items()]
    suggested = {"within utilization": vllm.to_requested_limit_bytes, "whole GPU": vllm.to_gpu_limit_bytes}
    rows += [(f"vLLM's suggestion, {name}", f"{size}", f"{size // one:,}") for name, size in suggested.items()]
    out.print(table("Options that fix the size of the pool", ["", "--kv-cache-memory-bytes", "blocks"], rows))


def _print_diagnosis(out: Any, diagnosis: Diagnosis) -> None:
    from rich.text import Text

    out.print(Text(f"Why: {diagnosis.complaint}", style="bold"))
    for finding in diagnosis.findings:
        print_hanging(out, "  - ", with_options(finding))
    if diagnosis.remedies:
        out.print(Text("Smallest single change that makes it fit", style="bold"))
        for remedy in diagnosis.remedies:
            value = "" if remedy.value is None else f" {remedy.value}"
            change = f"{option_of(remedy)}{value}"
            print_hanging(out, "  - ", f"{change} ({remedy.num_blocks:,} blocks; {remedy.cost})")
    else:
        out.print(Text("No single option makes it fit.", style="bold"))
    out.print()


def print_explanation(explanation: LogExplanation) -> None:
    """Print what two lines of a vLLM log mean."""
    print_list(console(), "What these two lines mean", explanation.sentences())
