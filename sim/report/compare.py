"""What `kvledger compare` tells: one payload for programs, one table and a few sentences for people."""

from typing import Any

from ..baselines.baselines import AllocatorUsage
from .console import console, gib, percent, table

DEFINITIONS = (
    "Shares of all KV memory, each slot counted once. Tokens: holds a token. Reserved: held by a running request that "
    "will fill it. Internal: held and never filled. External: the allocator's rounding, holes, and what no waiting "
    "request got."
)
SATURATED_QUEUE = (
    "arrival times are not used: requests are served in their order, as many at a time as fit, and the shares are "
    "averaged over the iterations in which one waits"
)


def compare_payload(usages: list[AllocatorUsage], setup: dict[str, Any]) -> dict[str, Any]:
    """The JSON of `kvledger compare`: the setup by name, then `allocators` and `assumptions`."""
    return {**setup, "allocators": [usage.as_dict() for usage in usages], "assumptions": assumptions(usages, setup)}


def assumptions(usages: list[AllocatorUsage], setup: dict[str, Any]) -> list[str]:
    """What the figures rest on, one sentence each."""
    watermark, max_num_seqs = setup["watermark"], setup["max_num_seqs"]
    out = [
        SATURATED_QUEUE,
        f"paged: blocks of {setup['block_size']} tokens, one of them the null block; {percent(watermark)} of the "
        "blocks stay free at admission",
        "static, pow2 and oracle take chunks of a buddy allocator, whose sizes are powers of two",
        "growing gives a request twice its prompt and doubles a full region, in place or by copying",
        "growing and paged preempt the last request admitted, which is computed again",
        "no prefix is shared between requests",
    ]
    if max_num_seqs is not None:
        out.append(f"at most {max_num_seqs:,} requests run at a time")
    idle = [usage.name for usage in usages if not usage.queue_saturated and usage.finished]
    if idle:
        out.append(
            f"no request ever waited for {', '.join(idle)}: averaged over the whole run, and the batch is the work"
        )
    return out


def compare_table(usages: list[AllocatorUsage]):
    """The allocators side by side; fits 80 columns."""
    columns = ("Allocator", "Tokens", "Reserved", "Internal", "External", "Batch", "Max", "Preempted")
    rows = [
        (
            usage.name,
            *(f"{share:.1f} %" for share in _shares(usage)),
            f"{usage.mean_batch:,.2f}",
            usage.max_batch,
            usage.preemptions,
        )
        for usage in usages
    ]
    return table("Where the KV memory goes", columns, rows)


def print_compare(usages: list[AllocatorUsage], setup: dict[str, Any]) -> None:
    """The table and the sentences on standard output."""
    out = console()
    trace, window = setup["trace"], setup["window"]
    out.print(
        f"{trace['name']}: {window['num_requests']:,} requests on {setup['num_slots']:,} token slots "
        f"({setup['num_slots_source']}), max_model_len {setup['max_model_len']:,} ({setup['max_model_len_source']}), "
        f"blocks of {setup['block_size']}.",
        markup=False,
    )
    out.print()
    out.print(compare_table(usages))
    out.print(DEFINITIONS, style="dim")
    for sentence in compare_sentences(usages, setup):
        out.print(f"\n{sentence}", markup=False)
    out.print("\nAssumptions", style="bold")
    for assumption in assumptions(usages, setup):
        out.print(f"- {assumption}", markup=False)


def compare_sentences(usages: list[AllocatorUsage], setup: dict[str, Any]) -> list[str]:
    """The answer in words, the costs of growing, and what was refused."""
    by_name = {usage.name: usage for usage in usages}
    paged, reserving = by_name["paged"], [by_name[name] for name in ("static", "pow2", "oracle")]
    out: list[str] = []
    if paged.mean_batch and all(usage.mean_batch for usage in reserving):
        ratios = ", ".join(f"{paged.mean_batch / usage.mean_batch:.2f} x {usage.name}" for usage in reserving)
        out.append(f"Requests that paged memory runs at a time: {paged.mean_batch:,.1f} on average, that is {ratios}.")
    growth = by_name["growing"].growth
    if growth is not None and growth.num_copies:
        size = "" if growth.copied_bytes is None else f" ({gib(growth.copied_bytes)})"
        out.append(
            f"growing copied {growth.copied_tokens:,} tokens{size} in {growth.num_copies:,} moves; on average "
            f"{percent(growth.fragmentation.mean, 0)} of its free memory lay outside the largest hole."
        )
    refusals: dict[str, list[str]] = {}
    for usage in usages:
        if usage.refused:
            refusals.setdefault(_refusal(usage, setup), []).append(usage.name)
    for refusal, names in refusals.items():
        who = "Every allocator" if len(names) == len(usages) else ", ".join(names)
        out.append(f"{who} refused {refusal}")
    return out


def _refusal(usage: AllocatorUsage, setup: dict[str, Any]) -> str:
    too_long = f"longer than max_model_len {setup['max_model_len']:,}"
    never_fit = f"larger than its {setup['num_slots']:,} slots can ever hold"
    never_fitting = usage.refused - usage.refused_too_long
    reasons = [
        reason if count == usage.refused else f"{count:,} {reason}"
        for count, reason in ((usage.refused_too_long, too_long), (never_fitting, never_fit))
        if count
    ]
    total = usage.finished + usage.refused + usage.empty
    return f"{usage.refused:,} of {total:,} requests: {' and '.join(reasons)}."


def _shares(usage: AllocatorUsage) -> tuple[float, float, float, float]:
    return usage.token_pct, usage.reservation_pct, usage.internal_pct, usage.external_pct
