"""Prints a replay, a fleet and a sampling run. Each takes the document of `--json` or the result."""

from ..figures import Document, percent, seconds
from ..fleet.fleet import EngineName
from ..scenario.sampling import SamplingResult
from .console import console, print_assumptions, print_trace, table

LATENCIES = (("ttft_s", "TTFT"), ("itl_s", "ITL"), ("tpot_s", "TPOT"), ("e2e_s", "E2E"))


def print_replay(report: Document) -> None:
    """Print a replay (`report` is the document of `--json`)."""
    print_outcome(report)
    _print_end(report)


def print_outcome(report: Document) -> None:
    """Print outcomes and latencies."""
    out = console()
    trace, requests, cache = report["trace"], report["requests"], report["prefix_cache"]
    usage, preemptions, throughput = report["kv_cache_usage"], report["preemptions"], report["throughput"]
    out.print(f"[bold]Replay of {trace['name']}[/bold]: {requests['total']:,} requests", soft_wrap=True)
    if longest := report["assumptions"].get("longest_request"):
        out.print(f"Longest request: {longest}.", soft_wrap=True)
    print_trace(out, trace)
    reuse = percent(cache["hit_rate"]) if trace["claims_reuse"] else "unknown (the trace has no block ids)"
    out.print(
        table(
            None,
            ("outcome", "value"),
            [
                ("finished", f"{requests['finished']:,}"),
                ("rejected (can never fit)", f"{requests['rejected']:,}"),
                ("aborted", f"{requests['aborted']:,}"),
                ("prefix-cache hit rate, tokens at first admission", reuse),
                ("KV cache usage, mean / max", f"{percent(usage['mean'], 1)} / {percent(usage['max'], 1)}"),
                (
                    "preemptions, total / max per request",
                    f"{preemptions['total']:,} / {preemptions['max_per_request']}",
                ),
                ("recompute tax (recomputed / computed tokens)", percent(preemptions["recompute_tax"])),
                ("output tokens per second", f"{throughput['output_tokens_per_s']:,.1f}"),
                ("requests per second", f"{throughput['requests_per_s']:,.3f}"),
                ("simulated time", f"{report['simulated_seconds']:,.1f} s in {report['steps']:,} engine steps"),
            ],
        )
    )
    refused = requests["rejected"]
    title = f"Latency of the {requests['finished']:,} finished requests, without {refused:,} that were rejected"
    out.print(latency_table(report, title if refused else None))
    for reason in report["rejections"]:
        out.print(f"rejected: {reason}", soft_wrap=True)


def _print_end(report: Document) -> None:
    """Print the assumptions, and how long the replay took."""
    print_assumptions(report["assumptions"])
    timing = report["timing"]
    console().print(f"[dim]took {timing['wall_seconds']:.1f} s, {timing['us_per_step']:.0f} us per engine step[/dim]")


def latency_table(report: Document, title: str | None = None):
    """Mean and percentiles of each latency of a replay's document."""
    columns = ("mean", "p50", "p90", "p99", "max")
    rows = [
        (name, *(seconds(report[key][column]) for column in columns), f"{report[key]['count']:,}")
        for key, name in LATENCIES
    ]
    return table(title, ("latency", *columns, "samples"), rows)


def print_fleet(document: Document) -> None:
    """Print a fleet (`document` is that of `--json`)."""
    print_outcome(document)
    if "kv_transfer" in document:
        _print_transfers(document)
    rows = [
        (
            _name(one),
            f"{one['requests']['finished']:,}",
            percent(one["prefix_cache_hit_rate"]),
            percent(one["busy_share"], 1),
            percent(one["kv_cache_usage"]["mean"], 1),
            seconds(one["ttft_s"]["mean"]),
            seconds(one["ttft_s"]["p99"]),
            seconds(one["tpot_s"]["p99"]),
        )
        for one in document["replicas"]
    ]
    columns = ("engine", "finished", "hit rate", "busy", "KV usage", "TTFT", "p99", "TPOT p99")
    out = console()
    out.print(table("Engines", columns, rows))
    if "kv_transfer" in document:
        out.print(
            "Hit rate of a decode engine: share of tokens found in its own cache, which were not copied.",
            soft_wrap=True,
        )
    if "hit_rate_with_tiers" in document["prefix_cache"]:
        _print_tiers(document)
    _print_end(document)


def _name(one: Document) -> str:
    return str(EngineName(one["replica"], one["data_parallel_rank"], one.get("pool", "")))


def _print_transfers(document: Document) -> None:
    moved = document["kv_transfer"]
    times, waits = moved["transfer_s"], moved["wait_for_blocks_s"]
    rows = [
        ("requests moved from prefill to decode", f"{moved['handed_over']:,}"),
        ("tokens copied / found on the decode engine", f"{moved['transferred_tokens']:,} / {moved['found_tokens']:,}"),
        ("bytes copied per GPU", f"{moved['transferred_bytes'] / 1e9:,.1f} GB"),
        ("wait for blocks on the decode engine, mean / p99", f"{seconds(waits['mean'])} / {seconds(waits['p99'])}"),
        ("transfer, mean / p99", f"{seconds(times['mean'])} / {seconds(times['p99'])}"),
    ]
    console().print(table("KV transfer", ("figure", "value"), rows))


def _print_tiers(document: Document) -> None:
    out = console()
    out.print(f"Hit rate including tiers: {percent(document['prefix_cache']['hit_rate_with_tiers'])}", soft_wrap=True)
    rows = [
        (
            f"{_name(one)} {tier['tier']}",
            *(tier[name] for name in ("num_blocks", "came_in", "promoted", "superseded", "moved_on", "held")),
        )
        for one in document["replicas"]
        for tier in one.get("tiers", ())
    ]
    out.print(
        table("Tiers, in blocks", ("tier", "size", "came in", "promoted", "superseded", "moved on", "held"), rows)
    )


def print_sampling(result: SamplingResult) -> None:
    """Print what sharing blocks between samples saved."""
    figures = result.report.as_dict()
    rows = [
        ("blocks saved by sharing, over all steps", percent(figures["memory_saving"])),
        ("blocks saved per request, mean", percent(figures["mean_memory_saving_per_request"])),
        ("forks", f"{figures['num_forks']:,}"),
        ("blocks copied on write", f"{figures['num_copied_blocks']:,}"),
        ("copied blocks per step", f"{figures['copied_blocks_per_step']:.3f}"),
        ("output tokens per step", f"{figures['output_tokens_per_step']:.3f}"),
        ("blocks of one request, max", f"{figures['max_held_blocks']:,}"),
    ]
    out = console()
    settings = ", ".join(f"{name} {value}" for name, value in result.kind.items() if name != "kind")
    out.print(
        f"[bold]{result.kind['kind']}[/bold] ({settings}) of {result.report.num_requests:,} requests of "
        f"{result.trace['name']}"
    )
    print_trace(out, result.trace)
    out.print(table(None, ("figure", "value"), rows))
    out.print(f"[dim]Each request runs alone; blocks of {result.block_size} tokens; prefix caching is off.[/dim]")
