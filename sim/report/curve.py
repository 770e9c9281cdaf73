"""Prints the capacity curve and the comparison of allocators."""

from collections.abc import Iterable, Iterator

from ..cache.capacity_curve import ASSUMPTIONS, CapacityCurve
from ..cache.lru_curve import CachePoint
from ..cache.reuse import reuse_distances, reuse_times, working_sets
from ..figures import Document, duration, memory, millions, percent
from ..scenario.compare import CompareResult, assumptions, compare_sentences
from ..scenario.curve import CurveResult
from ..traces.trace import format_and_unit
from .console import console, headline, print_trace, table


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
        "hit rate,\nunlimited cache",
        "tokens lost\nto rounding",
        "near\nmisses",
        "sharing not\nin the trace",
    )
    return table(None, columns, rows, left=())


def _reuse(curve: CapacityCurve, bytes_per_block: int | None) -> Iterator[str]:
    """Near misses, reuse distances and times, and the largest working set."""
    here = curve.near_misses()
    yield (
        f"{here['requests_that_share']:,} of {curve.info.num_requests:,} requests share a prefix with an earlier one; "
        f"{here['requests']:,} of these share less than one block of {curve.block_size} tokens and hit nothing "
        "(near misses)."
    )
    distances, times = reuse_distances(curve.lru), reuse_times(curve.prompts)
    yield (
        f"Reuse distance of a block: {distances['p50']:,} other blocks (median), {distances['p90']:,} (p90). "
        f"Time between uses: {duration(times['p50'])} (median), {duration(times['p90'])} (p90)."
    )
    for each in working_sets(curve.prompts)[-1:]:
        size = f"{millions(each.max_blocks * curve.block_size)} tokens"
        if bytes_per_block is not None:
            size += f", {memory(each.max_blocks * bytes_per_block)}"
        yield (
            f"Blocks used within {duration(each.window_s)}: mean {each.mean_blocks:,.0f}, max {each.max_blocks:,} "
            f"({size})."
        )


def print_curve(result: CurveResult) -> None:
    """Print the table, what it means, and what to try next."""
    curve, bytes_per_block = result.curve, result.bytes_per_block
    title, *lines = _what_was_read(curve)
    out = headline(title)
    for line in (*lines, *map("Warning: {}".format, result.model_warnings)):
        out.print(line, markup=False)
    out.print()
    out.print(_table(curve, bytes_per_block))
    for line in _headlines(curve, bytes_per_block):
        out.print(line)
    if curve.infinite.hit_blocks:
        out.print()
        out.print(_by_block_size(curve))
        for line in _reuse(curve, bytes_per_block):
            out.print(line)
    out.print(f"[dim]Assumptions: {'; '.join(ASSUMPTIONS)}.[/dim]")
    out.print("[dim]Next: `kvledger replay` runs the same requests through an engine, with outputs and latency.[/dim]")


def _what_was_read(curve: CapacityCurve) -> Iterator[str]:
    info, window = curve.info, curve.info.window
    source = f"workload {info.name}, seed {info.workload['seed']}" if info.workload else info.name
    yield f"Prefix-cache hit rate of {source}"
    yield (
        f"Window: {info.num_requests:,} requests ({'lines' if info.path else 'numbers'} {window.first_place:,} to "
        f"{window.last_place:,}), {window.start_s:,.0f} s to {window.end_s:,.0f} s, "
        f"{millions(curve.input_tokens)} prompt tokens"
    )
    yield f"Trace: {info.name}, {format_and_unit(info.format, info.timestamp_unit)}"
    source = info.trace_block_size_source
    if curve.block_size != info.trace_block_size:
        source = "given"
        if info.trace_block_size is not None:
            source += f"; one hash id of the trace covers {info.trace_block_size}, {info.trace_block_size_source}"
    yield (
        f"Blocks of {curve.block_size} tokens ({source}): {curve.num_block_events:,} lookups of "
        f"{curve.num_distinct_blocks:,} distinct blocks"
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
    rows.append(["unlimited", *_row(curve, bytes_per_block, infinite, [infinite] * len(others), has_lru)[1:]])
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
        "Hit rates in percent of all prompt blocks. 'by tokens' and 'vLLM rule': percent of all prompt tokens; under "
        "vLLM's rule only full blocks hit, and each prompt computes at least one token."
    )
    if not curve.info.claims_reuse:
        yield "The trace does not say which prompts share blocks, so the 0.00 here are not measured."
        return
    if not ceiling.hit_blocks:
        yield "No block occurs twice, so a prefix cache serves nothing."
        return
    enough = curve.lru.smallest_for(0.9)
    size = f"{millions(enough * curve.block_size)} tokens"
    if bytes_per_block is not None:
        size += f", {memory(enough * bytes_per_block)} of KV cache over all GPUs"
    yield (
        f"Unlimited cache: {percent(curve.block_hit_rate(ceiling))}. LRU serves 90 % of that with {enough:,} blocks "
        f"({size})."
    )
    yield from _optimum_beside_lru(curve)


def _optimum_beside_lru(curve: CapacityCurve) -> Iterator[str]:
    """Compare LRU with the optimum where they differ most: the most that a better policy can gain."""
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
        f"Best possible eviction at {num_blocks:,} blocks: {percent(curve.block_hit_rate(point))}. LRU there: "
        f"{percent(curve.block_hit_rate(curve.lru.at(num_blocks)))}."
    )


def _rate(share: float) -> str:
    """In percent, without the sign, which the line under the table explains."""
    return f"{share * 100:.2f}"


DEFINITIONS = (
    "Shares of all token slots. Tokens: slots that hold a token. Reserved: slots that a running request will fill. "
    "Internal: slots reserved but never filled. External: rounding, holes, and free slots that no waiting request "
    "could use."
)


def compare_table(allocators: Iterable[Document]):
    """The allocators of a comparison's document side by side; fits 80 columns."""
    columns = ("Allocator", "Tokens", "Reserved", "Internal", "External", "Batch", "Max", "Preempted")
    rows = [
        (
            row["name"],
            *(f"{row[share]:.1f} %" for share in ("token_pct", "reservation_pct", "internal_pct", "external_pct")),
            f"{row['mean_batch']:,.2f}",
            row["max_batch"],
            row["preemptions"],
        )
        for row in allocators
    ]
    return table("What fills the KV memory", columns, rows)


def print_compare(result: CompareResult) -> None:
    """Print the comparison of allocators: the table, the sentences, the assumptions."""
    usages, setup = result.usages, result.setup
    out = console()
    trace, window = setup["trace"], setup["window"]
    out.print(
        f"{trace['name']}: {window['num_requests']:,} requests on {setup['num_slots']:,} token slots "
        f"({setup['num_slots_source']}), max_model_len {setup['max_model_len']:,} ({setup['max_model_len_source']}), "
        f"blocks of {setup['block_size']}.",
        markup=False,
    )
    print_trace(out, trace)
    for warning in setup.get("model_warnings", ()):
        out.print(f"Warning: {warning}", markup=False)
    out.print()
    out.print(compare_table(usage.as_dict() for usage in usages))
    out.print(DEFINITIONS, style="dim")
    for sentence in compare_sentences(usages, setup):
        out.print(f"\n{sentence}", markup=False)
    out.print("\nAssumptions", style="bold")
    for assumption in assumptions(usages, setup):
        out.print(f"- {assumption}", markup=False)
