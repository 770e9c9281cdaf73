"""The state of a ledger for people and programs: occupancy, who holds what, what comes next."""

from typing import Any

from ...core.ledger.state import LedgerState
from ..figures import percent

NEXT_SHOWN = 16


def occupancy(state: LedgerState) -> dict[str, Any]:
    """Where the blocks are, in blocks, and how full the pool is (0..1)."""
    pool = state.pool
    evictable = pool.num_evictable_blocks()
    return {
        "num_blocks": pool.num_blocks,
        "held": pool.num_held_blocks,
        "evictable": evictable,
        "clean": pool.num_free_blocks - evictable,
        "null": 1,
        "kv_cache_usage": pool.usage,
        "keys": [len(pool.index(group)) for group in range(len(state.tables))],
    }


def state_as_dict(state: LedgerState) -> dict[str, Any]:
    """The whole state as JSON values, block tables and the order of the free queue included."""
    pool = state.pool
    requests = {
        request_id: {
            "row": row,
            "num_placed_tokens": state.placed[row],
            "tables": [table.blocks(row) for table in state.tables],
        }
        for request_id, row in sorted(state.row_of.items(), key=lambda item: item[1])
    }
    return {
        "next_commit": state.next_sequence,
        **occupancy(state),
        "requests": requests,
        "free_queue": pool.free_queue.order(),
    }


def print_state(commit: int, state: dict[str, Any]) -> None:
    """The tables of `kvledger log at` (`state` is what `state_as_dict` returned)."""
    from ..report.console import console, table

    out = console()
    usage = percent(state["kv_cache_usage"])
    parts = ", ".join(f"{name} {state[name]:,}" for name in ("held", "evictable", "clean", "null"))
    out.print(f"after commit {commit:,}: {state['num_blocks']:,} blocks ({parts}), usage {usage}", soft_wrap=True)
    rows = [
        (name, each["row"], each["num_placed_tokens"], ", ".join(str(len(blocks)) for blocks in each["tables"]))
        for name, each in state["requests"].items()
    ]
    out.print(table(None, ("request", "row", "placed tokens", "blocks by group"), rows))
    queue = state["free_queue"]
    more = f", ... {len(queue):,} in all" if len(queue) > NEXT_SHOWN else ""
    out.print(
        f"free queue, the next to be taken first: {', '.join(map(str, queue[:NEXT_SHOWN]))}{more}", soft_wrap=True
    )
