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
