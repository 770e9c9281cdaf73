"""A fleet's replay on the terminal: the figures over all engines, and a row for each."""

from typing import Any

from .console import console, percent, table
from .replay_report import print_replay, seconds


def print_fleet(document: dict[str, Any]) -> None:
    """The tables of one fleet (`document` is that of `--json`)."""
    print_replay(document)
    rows = [
        (
            f"{one['replica']}" if one["data_parallel_rank"] == 0 else f"{one['replica']}.{one['data_parallel_rank']}",
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
    console().print(table("Engines", columns, rows))
    if "hit_rate_with_tiers" in document["prefix_cache"]:
        _print_tiers(document)


def _print_tiers(document: dict[str, Any]) -> None:
    out = console()
    out.print(f"Hit rate with tiers: {percent(document['prefix_cache']['hit_rate_with_tiers'])}", soft_wrap=True)
    rows = [
        (
            f"{one['replica']}.{one['data_parallel_rank']} {tier['tier']}",
            *(tier[name] for name in ("num_blocks", "came_in", "promoted", "superseded", "moved_on", "held")),
        )
        for one in document["replicas"]
        for tier in one["tiers"]
    ]
    out.print(
        table("Tiers, in blocks", ("tier", "size", "came in", "promoted", "superseded", "moved on", "held"), rows)
    )
