"""The capacity curve on a terminal: one table, what it means, and what to try next."""

from collections.abc import Iterator

from ..baselines.baselines import AllocatorUsage
from ..cache.capacity_curve import ASSUMPTIONS, CapacityCurve
from ..cache.lru_curve import CachePoint
from ..cache.reuse import reuse_distances, reuse_times, working_sets
from ..figures import duration, memory, millions, percent
from ..scenario.compare import CompareResult, assumptions, compare_sentences
from ..scenario.curve import CurveResult
from .console import console, table

# Reuse on a terminal: by block size, by distance and time, and how much is in use at once.


def print_reuse(curve: CapacityCurve, bytes_per_block: int | None) -> None:
    """Print to standard output; for a curve whose trace reuses blocks."""
    out = console()
    out.print()
    out.print(_by_block_size(curve))
    for line in _sentences(curve, bytes_per_block):
        out.print(line)


def _by_block_size(curve: CapacityCurve):
    own = curve.info.trace_block_size or 1
    rows = [
        (
            f"{row['block_size']:,}",
            f"{row['hit_rate'] * 100:.2f}",
            millions(row["lost_tokens"]),
            f"{row['near_miss_requests']:,}",
            f"up to {millions(row['unknown_tokens'])}" if row["block_size"] < own else "",
        )
        for row in curve.shared.table(curve.block_sizes)
    ]
    columns = (
        "block size",
        "hit rate,\ninfinite cache",
        "tokens lost\nto rounding",
        "near\nmisses",
        "shared unknown\nto the trace",
    )
    return table(None, columns, rows, left=())


def _sentences(curve: CapacityCurve, bytes_per_block: int | None) -> Iterator[str]:
    here = curve.near_misses()
    yield (
        f"Of {curve.info.num_requests:,} requests {here['requests_that_share']:,} share a prefix with an earlier one; "
        f"{here['requests']:,} of them share less than one block of {curve.block_size} (near misses: no hit at all)."
    )
    distances, times = reuse_distances(curve.lru), reuse_times(curve.prompts)
    yield (
        f"A block is asked for again after {distances['p50']:,} other blocks in the median and {distances['p90']:,} at "
        f"the 90th percentile; after {duration(times['p50'])} and {duration(times['p90'])}."
    )
    for each in working_sets(curve.prompts)[-1:]:
        size = f"{millions(each.max_blocks * curve.block_size)} tokens"
        if bytes_per_block is not None:
            size += f", {memory(each.max_blocks * bytes_per_block)}"
        yield (
            f"Working set of {duration(each.window_s)}: {each.mean_blocks:,.0f} blocks in the mean, "
            f"{each.max_blocks:,} at most ({size})."
        )


def print_curve(result: CurveResult) -> None:
    """Print to standard output."""
    curve, bytes_per_block = result.curve, result.bytes_per_block
    from rich.markup import escape

    out = console()
    title, *lines = map(escape, _what_was_read(curve))
    out.print(f"[bold]{title}[/bold]")
    for line in lines:
        out.print(line)
    out.print()
    out.print(_table(curve, bytes_per_block))
    for line in _headlines(curve, bytes_per_block):
        out.print(line)
    if curve.infinite.hit_blocks:
        print_reuse(curve, bytes_per_block)
    out.print(f"[dim]Counted: {'; '.join(ASSUMPTIONS)}.[/dim]")
    out.print(
        "[dim]Next: `kvledger replay` runs the same requests through a whole engine, with outputs and latency.[/dim]"
    )


def _what_was_read(curve: CapacityCurve) -> Iterator[str]:
    info, window = curve.info, curve.info.window
    source = f"workload {info.name}, seed {info.workload['seed']}" if info.workload else f"{info.name} ({info.format})"
    yield f"Prefix-cache hit rate of {source}"
    yield (
        f"Window: {info.num_requests:,} requests ({'lines' if info.path else 'numbers'} {window.first_place:,} to "
        f"{window.last_place:,}), {window.start_s:,.0f} s to {window.end_s:,.0f} s, "
        f"{millions(curve.input_tokens)} prompt tokens"
    )
    source = info.trace_block_size_source
    if curve.block_size != info.trace_block_size:
        source = "given"
        if info.trace_block_size is not None:
            source += f"; one hash id stands for {info.trace_block_size}, {info.trace_block_size_source}"
    yield (
        f"Blocks of {curve.block_size} tokens ({source}): {curve.num_block_events:,} asked for, "
        f"{curve.num_distinct_blocks:,} of them distinct"
    )
    for note in info.notes():
        yield f"Note: {note}"


def _table(curve: CapacityCurve, bytes_per_block: int | None):
    others = [policy for policy in curve.policies if policy != "lru"]
    has_lru = "lru" in curve.policies
    columns = ["blocks", "tokens" if bytes_per_block is None else "memory"]  # both would not fit 80 columns
    columns += (["lru", "lru by\ntokens", "lru, vLLM\nrule"] if has_lru else []) + others
    first = next(iter(curve.policies.values()))
    rows = [
        _row(curve, bytes_per_block, point, [curve.policies[policy][i] for policy in others], has_lru)
        for i, point in enumerate(first)
    ]
    infinite = curve.infinite
    rows.append(["infinite", *_row(curve, bytes_per_block, infinite, [infinite] * len(others), has_lru)[1:]])
    return table(None, columns, rows, left=())


def _row(
    curve: CapacityCurve, bytes_per_block: int | None, point: CachePoint, others: list[CachePoint], has_lru: bool
) -> list[str]:
    num_blocks = curve.num_distinct_blocks if point.num_blocks is None else point.num_blocks
    size = millions(num_blocks * curve.block_size) if bytes_per_block is None else memory(num_blocks * bytes_per_block)
    row = [f"{num_blocks:,}", size]
    if has_lru:
        lru = curve.lru.at(num_blocks)
        row += [
            _rate(curve.block_hit_rate(lru)),
            _rate(curve.token_hit_rate(lru)),
            _rate(curve.full_block_token_hit_rate(lru)),
        ]
    return row + [_rate(curve.block_hit_rate(each)) for each in others]


def _headlines(curve: CapacityCurve, bytes_per_block: int | None) -> Iterator[str]:
    ceiling = curve.infinite
    yield (
        "Hit rates in percent of all prompt blocks; 'by tokens' and 'vLLM rule' of all prompt tokens, the latter where "
        "only full blocks hit and one token a prompt is computed."
    )
    if not curve.info.claims_reuse:
        yield "The trace does not say which prompts share blocks, so 0.00 here is no measurement."
        return
    if not ceiling.hit_blocks:
        yield "No block is asked for twice: there is nothing for a prefix cache to serve."
        return
    enough = curve.lru.smallest_for(0.9)
    size = f"{millions(enough * curve.block_size)} tokens"
    if bytes_per_block is not None:
        size += f", {memory(enough * bytes_per_block)} of keys and values over all GPUs"
    yield (
        f"The ceiling is {percent(curve.block_hit_rate(ceiling))}. LRU serves 90 % of it from {enough:,} blocks on "
        f"({size})."
    )
    yield from _optimum_beside_lru(curve)


def _optimum_beside_lru(curve: CapacityCurve) -> Iterator[str]:
    """Where the gap between LRU and the optimum is widest: what a better policy could win at most."""
    optimum = curve.policies.get("optimum")
    if not optimum:
        return
    gap, point = max(
        ((best.hit_blocks - curve.lru.at(best.num_blocks or 0).hit_blocks, best) for best in optimum),
        key=lambda each: each[0],
    )
    if gap <= 0:
        return
    num_blocks = point.num_blocks or 0
    yield (
        f"No policy serves more than the optimum, which knows the future: at {num_blocks:,} blocks it reaches "
        f"{percent(curve.block_hit_rate(point))}, LRU {percent(curve.block_hit_rate(curve.lru.at(num_blocks)))}."
    )


def _rate(share: float) -> str:
    """In percent, without the sign: the line under the table says so once."""
    return f"{share * 100:.2f}"


DEFINITIONS = (
    "Shares of all KV memory, each slot counted once. Tokens: holds a token. Reserved: held by a running request that "
    "will fill it. Internal: held and never filled. External: the allocator's rounding, holes, and what no waiting "
    "request got."
)


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


def print_compare(result: CompareResult) -> None:
    """Print the table and the sentences."""
    usages, setup = result.usages, result.setup
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


def _shares(usage: AllocatorUsage) -> tuple[float, float, float, float]:
    return usage.token_pct, usage.reservation_pct, usage.internal_pct, usage.external_pct
