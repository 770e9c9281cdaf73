"""What `kvledger follow` prints for people: a line an interval, and the sum at the end."""

from collections.abc import Mapping
from typing import Any

from ..figures import percent

LINE_HEADER = (
    f"{'time':>14}  {'blocks':>9}  {'filled':>7}  {'stored/s':>9}  {'removed/s':>9}  {'requests':>9}  {'hits':>7}  "
    f"{'at 2x':>7}  gaps"
)


def line_of(report: dict[str, Any]) -> str:
    """One report as a line under `LINE_HEADER`."""
    twice = report["twice_memory"]["prefix_hit_rate"]
    stream = report["stream"] or {}
    return (
        f"{_number(report['ts'], '14.3f'):>14}  {report['num_blocks']:>9,}  {_share(report['occupancy']):>7}  "
        f"{_number(report['stored_per_s'], ',.1f'):>9}  {_number(report['removed_per_s'], ',.1f'):>9}  "
        f"{report['requests']:>9,}  {_share(report['prefix_hit_rate']):>7}  {_share(twice):>7}  {stream.get('gaps', 0)}"
    )


def describe_report(report: dict[str, Any], assumptions: Mapping[str, str]) -> list[str]:
    """The last report, and what it rests on."""
    twice, stream = report["twice_memory"], report["stream"]
    lines = [
        f"{report['requests']:,} requests seen, {_share(report['prefix_hit_rate'])} of their blocks found in the cache",
        f"twice the memory: {_share(twice['prefix_hit_rate'])}, {twice['blocks_not_computed_again']:,} blocks "
        f"({_share(twice['share_of_stored'])} of those stored) not computed again",
        f"{report['num_blocks']:,} blocks findable now, {report['orphans']:,} orphans, "
        f"{report['unknown_removals']:,} removals of unknown blocks",
    ]
    if stream is not None:
        lines.append(", ".join(f"{name} {count:,}" for name, count in stream.items()))
    return [*lines, *(f"{name}: {text}" for name, text in assumptions.items())]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _share(value: float | None) -> str:
    return "-" if value is None else percent(value, 1)
