"""The state of a ledger as plain data, and back: where a replay may start instead of at the first commit."""

from typing import Any

from .block_pool import BlockPool
from .errors import CorruptLedgerError, KVLedgerError, MisuseError
from .events import Key, PoolCreated
from .free_queue import FreeQueue
from .ledger_state import LedgerState


def can_be_restored(created: PoolCreated) -> bool:
    """Whether a snapshot says everything: an order that remembers more than its queue shows (lfu, sieve) must be
    replayed from the first commit.
    """
    return created.eviction == FreeQueue.name


def take_snapshot(state: LedgerState) -> dict[str, Any]:
    """Everything that a fold has become, in dicts, lists, ints, strings and keys. O(blocks + table entries).

    Raises:
        MisuseError: the eviction order cannot be restored (see `can_be_restored`).
    """
    _check(state.created)
    pool, rows = state.pool, sorted((row, request_id) for request_id, row in state.row_of.items())
    groups = range(len(state.tables))
    return {
        "next_sequence": state.next_sequence,
        "free_queue": pool.free_queue.order(),
        "referenced": [[block, count] for block, count in enumerate(pool.ref_cnts()) if count],
        "copies": [[[key, list(pool.copies(key, group))] for key in pool.index(group)] for group in groups],
        "rows": [[row, request_id, state.placed[row]] for row, request_id in rows],
        "free_rows": list(state.free_rows),
        "tables": [[table.blocks(row) for row, _ in rows] for table in state.tables],
        "considered": [[considered[row] for row, _ in rows] for considered in state.considered],
        "skipped": [[skipped[row] for row, _ in rows] for skipped in state.skipped],
        "guarded": sorted(state.guarded),
    }


def restore_snapshot(created: PoolCreated, snapshot: dict[str, Any]) -> LedgerState:
    """The state that `take_snapshot` described.

    Raises:
        CorruptLedgerError: the snapshot contradicts itself or the pool.
        MisuseError: the eviction order cannot be restored (see `can_be_restored`).
    """
    _check(created)
    state = LedgerState(created)
    try:
        if not len(snapshot["copies"]) == len(snapshot["tables"]) == len(created.groups):
            raise CorruptLedgerError(f"it is of another pool than one of {len(created.groups)} groups")
        _restore_pool(state.pool, snapshot)
        _restore_rows(state, snapshot)
        state.next_sequence = snapshot["next_sequence"]
    except (KVLedgerError, LookupError, ValueError, TypeError) as error:
        raise CorruptLedgerError(
            f"the snapshot before commit {snapshot.get('next_sequence')} is wrong: {error}"
        ) from error
    return state


def _check(created: PoolCreated) -> None:
    if not can_be_restored(created):
        raise MisuseError(
            f"eviction order {created.eviction!r} remembers more than a snapshot shows; replay from the first commit"
        )


def _restore_pool(pool: BlockPool, snapshot: dict[str, Any]) -> None:
    referenced: dict[int, int] = {block: count for block, count in snapshot["referenced"] if block}
    copies: list[list[tuple[Key, list[int]]]] = snapshot["copies"]
    keyed = [block for of_group in copies for _, blocks in of_group for block in blocks]
    taken = list(dict.fromkeys([*keyed, *referenced]))
    pool.take(tuple(taken))
    for group, of_group in enumerate(copies):
        flat = [(block, key) for key, blocks in of_group for block in blocks]
        pool.cache(group, [block for block, _ in flat], [key for _, key in flat], [0] * len(flat))
    most = max(referenced.values(), default=0)
    for count in range(2, most + 1):
        pool.adopt([block for block, wanted in referenced.items() if wanted >= count])
    pool.release([block for block in taken if block not in referenced])
    queue: list[int] = snapshot["free_queue"]
    if sorted(queue) != sorted(pool.free_queue.order()):
        raise CorruptLedgerError("its free queue does not hold the blocks that nothing references")
    pool.free_queue.remove(queue)
    pool.free_queue.append(queue)


def _restore_rows(state: LedgerState, snapshot: dict[str, Any]) -> None:
    for place, (row, request_id, placed) in enumerate(snapshot["rows"]):
        state.row_of[request_id] = row
        state.request_of[row] = request_id
        state.row_is_held[row] = True
        state.placed[row] = placed
        for group, table in enumerate(state.tables):
            table.extend(row, snapshot["tables"][group][place])
            state.considered[group][row] = snapshot["considered"][group][place]
            state.skipped[group][row] = snapshot["skipped"][group][place]
    state.free_rows = list(snapshot["free_rows"])
    if sorted([*state.free_rows, *state.row_of.values()]) != list(range(state.created.max_num_reqs)):
        raise CorruptLedgerError("its rows are not each held once or free")
    state.guarded = set(snapshot["guarded"])
