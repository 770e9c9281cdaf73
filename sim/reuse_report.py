"""Reuse on a terminal: by block size, by distance and time, and how much is in use at once."""

from collections.abc import Iterator

from .capacity_curve import CapacityCurve
from .console import GIB, console, table
from .reuse_statistics import reuse_distances, reuse_times, working_sets

TIB = GIB << 10
MINUTE_S = 60
HOUR_S = 3_600


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


def duration(seconds: float) -> str:
    """`90.0` -> `1.5 min`."""
    if seconds >= HOUR_S:
        return f"{seconds / HOUR_S:,.1f} h"
    return f"{seconds / MINUTE_S:,.1f} min" if seconds >= MINUTE_S else f"{seconds:,.1f} s"


def memory(num_bytes: int) -> str:
    """`67108864000` -> `62.5 GiB`; one decimal, so that a column of them stays narrow."""
    return f"{num_bytes / TIB:,.1f} TiB" if num_bytes >= 1_000 * GIB else f"{num_bytes / GIB:,.1f} GiB"


def millions(count: int) -> str:
    """`144793823` -> `144.8 M`."""
    if count >= 1_000_000_000:
        return f"{count / 1e9:,.1f} G"
    return f"{count / 1e6:,.1f} M" if count >= 1_000_000 else f"{count:,}"
