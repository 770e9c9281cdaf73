"""A fleet's replay on the terminal: the figures over all engines, and a row for each."""

from typing import Any

from ..figures import percent, seconds
from ..fleet.fleet import EngineName
from .console import console, table
from .replay import print_assumptions, print_outcome


def print_fleet(document: dict[str, Any]) -> None:
    """The tables of one fleet (`document` is that of `--json`)."""
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
        console().print(
            "Hit rate of a decode engine: tokens that it found instead of having them copied.", soft_wrap=True
        )
    if "hit_rate_with_tiers" in document["prefix_cache"]:
        _print_tiers(document)
    print_assumptions(document)


def _name(one: dict[str, Any]) -> str:
    return str(EngineName(one["replica"], one["data_parallel_rank"], one.get("pool", "")))


def _print_transfers(document: dict[str, Any]) -> None:
    moved = document["kv_transfer"]
    times, waits = moved["transfer_s"], moved["wait_for_blocks_s"]
    rows = [
        ("requests handed over from prefill to decode", f"{moved['handed_over']:,}"),
        ("tokens copied / found on decode instead", f"{moved['transferred_tokens']:,} / {moved['found_tokens']:,}"),
        ("bytes copied, of each GPU", f"{moved['transferred_bytes'] / 1e9:,.1f} GB"),
        ("wait for blocks on decode, mean / p99", f"{seconds(waits['mean'])} / {seconds(waits['p99'])}"),
        ("transfer, mean / p99", f"{seconds(times['mean'])} / {seconds(times['p99'])}"),
    ]
    console().print(table("Transfer of keys and values", ("what", "value"), rows))


def _print_tiers(document: dict[str, Any]) -> None:
    out = console()
    out.print(f"Hit rate with tiers: {percent(document['prefix_cache']['hit_rate_with_tiers'])}", soft_wrap=True)
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
