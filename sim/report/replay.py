"""One replay on the terminal: what was asked, what happened, what it rests on."""

from typing import Any

from ..figures import percent, seconds, shown
from .console import console, table

LATENCIES = (
    ("ttft_s", "TTFT"),
    ("itl_s", "ITL"),
    ("tpot_s", "TPOT"),
    ("e2e_s", "E2E"),
)


def print_replay(report: dict[str, Any]) -> None:
    """The tables of one replay (`report` is the document of `--json`)."""
    print_outcome(report)
    print_assumptions(report)


def print_outcome(report: dict[str, Any]) -> None:
    """What happened."""
    from rich.markup import escape

    out = console()
    trace, requests, cache = report["trace"], report["requests"], report["prefix_cache"]
    usage, preemptions, throughput = report["kv_cache_usage"], report["preemptions"], report["throughput"]
    out.print(f"[bold]Replay of {trace['name']}[/bold]: {requests['total']:,} requests", soft_wrap=True)
    for note in trace["notes"]:
        out.print(f"Note: {escape(note)}", soft_wrap=True)
    reuse = percent(cache["hit_rate"]) if trace["claims_reuse"] else "0 (the trace has no block ids: no reuse claimed)"
    out.print(
        table(
            None,
            ("outcome", "value"),
            [
                ("finished", f"{requests['finished']:,}"),
                ("rejected (can never fit)", f"{requests['rejected']:,}"),
                ("aborted", f"{requests['aborted']:,}"),
                ("prefix-cache hit rate, tokens of first admissions", reuse),
                ("KV cache usage, mean / max", f"{percent(usage['mean'], 1)} / {percent(usage['max'], 1)}"),
                (
                    "preemptions, total / most of one request",
                    f"{preemptions['total']:,} / {preemptions['max_per_request']}",
                ),
                ("recompute tax (recomputed / computed tokens)", percent(preemptions["recompute_tax"])),
                ("output tokens a second", f"{throughput['output_tokens_per_s']:,.1f}"),
                ("requests a second", f"{throughput['requests_per_s']:,.3f}"),
                ("simulated time", f"{report['simulated_seconds']:,.1f} s in {report['steps']:,} engine steps"),
            ],
        )
    )
    out.print(table(None, ("latency", "mean", "p50", "p90", "p99", "max", "samples"), _latency_rows(report)))
    for reason in report["rejections"]:
        out.print(f"rejected: {reason}", soft_wrap=True)


def print_assumptions(report: dict[str, Any]) -> None:
    """What it rests on, and how long it took to find out."""
    out = console()
    assumptions = report["assumptions"]
    out.print("[bold]Assumptions[/bold] (change them with the options of the same names)")
    out.print(table(None, ("assumption", "value"), _assumption_rows(assumptions), left=(0, 1)))
    timing = report["timing"]
    out.print(f"[dim]took {timing['wall_seconds']:.1f} s, {timing['us_per_step']:.0f} us an engine step[/dim]")


def _latency_rows(report: dict[str, Any]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for key, name in LATENCIES:
        figures = report[key]
        cells = [seconds(figures[column]) for column in ("mean", "p50", "p90", "p99", "max")]
        rows.append((name, *cells, f"{figures['count']:,}"))
    return rows


def _assumption_rows(assumptions: dict[str, Any]) -> list[tuple[str, str]]:
    return [(name, shown(value)) for name, value in assumptions.items()]
