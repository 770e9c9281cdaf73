"""Prints the tables of `kvledger log` and the lines of `kvledger follow`."""

from collections.abc import Mapping

from ..figures import Document, percent
from ..logs.live_report import LiveReport
from .console import console, table

NEXT_SHOWN = 16


def print_state(state: Document) -> None:
    """Print `kvledger log at`."""
    out = console()
    usage = percent(state["kv_cache_usage"])
    parts = ", ".join(f"{name} {state[name]:,}" for name in ("held", "evictable", "clean", "null"))
    out.print(
        f"after commit {state['commit']:,}: {state['num_blocks']:,} blocks ({parts}), usage {usage}", soft_wrap=True
    )
    rows = [
        (name, each["row"], each["num_placed_tokens"], ", ".join(str(len(blocks)) for blocks in each["tables"]))
        for name, each in state["requests"].items()
    ]
    out.print(table(None, ("request", "row", "placed tokens", "blocks by group"), rows))
    queue = state["free_queue"]
    more = f", ... ({len(queue):,} in total)" if len(queue) > NEXT_SHOWN else ""
    out.print(f"free queue, in eviction order: {', '.join(map(str, queue[:NEXT_SHOWN]))}{more}", soft_wrap=True)


def print_stats(stats: Document) -> None:
    """Print `kvledger log stats`."""
    out = console()
    out.print(
        f"{stats['commits']:,} commits, {stats['events']:,} events, {stats['notes']:,} notes in "
        f"{stats['segment_bytes']:,} bytes",
        soft_wrap=True,
    )
    if stats["bytes_per_event"] is not None:
        out.print(f"{stats['bytes_per_event']:.1f} bytes per event")
    if stats["first_time_ns"] is not None:
        first, last = stats["first_time_ns"] / 1e9, stats["last_time_ns"] / 1e9
        out.print(f"from {first:,.3f} s to {last:,.3f} s ({stats['clock']})")
    rows = [(each["event"], each["count"], each["blocks"], each["keys"]) for each in stats["by_event"]]
    out.print(table(None, ("event", "count", "blocks", "keys"), rows))
    if stats["torn"]:
        out.print(stats["torn"], soft_wrap=True)
    if stats["header"].get("command"):
        out.print(f"recorded by kvledger {stats['header']['command']}")


def print_live_report(report: LiveReport) -> None:
    """Print `kvledger log steps`."""
    out = console()
    steps, best = report.steps, report.best
    out.print(f"{len(steps):,} steps, {steps.seconds.sum():,.3f} s measured", soft_wrap=True)
    rows = [
        (
            row["kind"],
            row["steps"],
            f"{row['measured_ms']:.3f}",
            "-" if row["predicted_before_ms"] is None else f"{row['predicted_before_ms']:.3f}",
            f"{row['predicted_ms']:.3f}",
            f"{row['error_pct']:+.1f} %",
            f"{row['step_error_pct']:.1f} %",
        )
        for row in report.rows()
    ]
    title = f"Step times, measured and predicted ({best.name})"
    columns = ("kind of step", "steps", "measured ms", "before ms", "calibrated ms", "error", "per step")
    out.print(table(title, columns, rows))
    models = [
        (
            model.name,
            "-" if model.error_before is None else f"{model.error_before:.1%}",
            f"{model.error_after:.1%}",
            f"{model.error_unseen:.1%}",
            f"{model.total_error:+.1%}",
        )
        for model in report.models
    ]
    columns = ("model", "before", "calibrated", "unseen steps", "total time")
    out.print(table("Mean absolute error per step", columns, models))
    for name, value in best.after.assumptions().items():
        shown = f"{value:.6g}" if isinstance(value, float) else value
        out.print(f"  {name}: {shown}", markup=False, soft_wrap=True)
    out.print(f"kvledger replay ... {report.replay_options}", markup=False, soft_wrap=True)


LINE_HEADER = (
    f"{'time':>14}  {'blocks':>9}  {'filled':>7}  {'stored/s':>9}  {'removed/s':>9}  {'requests':>9}  {'hits':>7}  "
    f"{'at 2x':>7}  gaps"
)


def line_of(report: Document) -> str:
    """Format one report of `kvledger follow` as a line under `LINE_HEADER`."""
    twice = report["twice_memory"]["prefix_hit_rate"]
    stream = report["stream"] or {}
    return (
        f"{_number(report['ts'], '14.3f'):>14}  {report['num_blocks']:>9,}  {_share(report['occupancy']):>7}  "
        f"{_number(report['stored_per_s'], ',.1f'):>9}  {_number(report['removed_per_s'], ',.1f'):>9}  "
        f"{report['requests']:>9,}  {_share(report['prefix_hit_rate']):>7}  {_share(twice):>7}  {stream.get('gaps', 0)}"
    )


def describe_report(report: Document, assumptions: Mapping[str, str]) -> list[str]:
    """Describe the last report of `kvledger follow`, with its assumptions."""
    twice, stream = report["twice_memory"], report["stream"]
    lines = [
        f"{report['requests']:,} requests seen; the cache served {_share(report['prefix_hit_rate'])} of their blocks",
        f"with twice the memory: {_share(twice['prefix_hit_rate'])}; saves computing "
        f"{twice['blocks_not_computed_again']:,} blocks ({_share(twice['share_of_stored'])} of the stored ones) again",
        f"{report['num_blocks']:,} blocks cached now, {report['orphans']:,} orphans, "
        f"{report['unknown_removals']:,} removals of unknown blocks",
    ]
    if stream is not None:
        lines.append(", ".join(f"{name} {count:,}" for name, count in stream.items()))
    return [*lines, *(f"{name}: {text}" for name, text in assumptions.items())]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _share(value: float | None) -> str:
    return "-" if value is None else percent(value, 1)
