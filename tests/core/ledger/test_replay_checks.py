"""A log is believed only where each of its events could have followed what came before."""

from collections.abc import Callable
from functools import partial
from typing import Any

import attrs
import numpy as np
import pytest
from kvledger.core import (
    AllocatorConfig,
    CorruptLedgerError,
    EventLog,
    FullAttention,
    KVCacheAllocator,
    MisuseError,
    Request,
)
from kvledger.core.cache_kinds import SlidingWindow
from kvledger.core.events import (
    BlockCopied,
    BlocksAllocated,
    BlocksCached,
    BlocksFreed,
    BlocksShared,
    BlocksUncached,
    CacheReset,
    Event,
    FreeReason,
    PrefixAdopted,
    RowsAssigned,
    RowsReleased,
    TokensPlaced,
)

BLOCK_SIZE = 4


class GivenKeys:
    def keys(self, start: int, stop: int) -> list[str]:
        return [f"key {index}" for index in range(start, stop)]


def request(request_id: str) -> Request:
    return Request(request_id, 13, max_tokens=20, keys=GivenKeys())


@pytest.fixture(scope="module")
def log() -> EventLog:
    """Two groups; prefix hits, decodes, a fork, copies, a window, a crop, evictions, and everything given back."""
    log = EventLog()
    config = AllocatorConfig(
        num_blocks=24,
        groups=[FullAttention(BLOCK_SIZE), SlidingWindow(BLOCK_SIZE, window=6)],
        max_num_reqs=3,
        max_model_len=40,
        retention_interval=BLOCK_SIZE,
    )
    allocator = KVCacheAllocator(config, sinks=[log])
    for request_id in ("first", "second"):
        new = request(request_id)
        match = allocator.match_prefix(new)
        allocator.allocate(new, 13 - match.num_hit_tokens, match)
    allocator.truncate("first", 12)
    allocator.fork("second", request("child"))
    for _ in range(5):
        rows = np.array([allocator.row_of(name) for name in ("first", "second", "child")])
        allocator.release_out_of_window_among(rows)
        assert allocator.append(rows)
    allocator.free("first")
    allocator.evict([2])
    allocator.free("second")
    allocator.free("child")
    for number in range(5):  # until blocks are taken that carry keys
        assert allocator.allocate(Request(f"cold {number}", 30), 30) is not None
        allocator.free(f"cold {number}")
    allocator.reset_prefix_cache()
    return log


def forged(log: EventLog, cls: type[Event], change: Callable[[Any], dict[str, Any] | None]) -> EventLog:
    """The log with one event of a class changed: the first one for which `change` gives other columns."""
    commits = list(log)
    for number, commit in enumerate(commits):
        for place, event in enumerate(commit.events):
            columns = change(event) if isinstance(event, cls) else None
            if columns is not None:
                other = event._replace(**columns) if isinstance(event, tuple) else attrs.evolve(event, **columns)
                events = (*commit.events[:place], other, *commit.events[place + 1 :])
                commits[number] = commit._replace(events=events)
                return EventLog(commits)
    raise LookupError(f"no such {cls.__name__} in the log")


def test_what_the_allocator_wrote_is_believed(log: EventLog) -> None:
    assert log.verify().snapshot() == log.replay().snapshot()
    kinds = {type(event) for commit in log for event in commit.events}
    assert {BlockCopied, BlocksUncached, BlocksShared, CacheReset, PrefixAdopted} <= kinds


def first_of(column: str, number: int) -> Callable[[Any], dict[str, Any]]:
    def change(event: Any) -> dict[str, Any]:
        return {column: (number, *tuple(getattr(event, column))[1:])}

    return change


def to_position_14(event: TokensPlaced) -> dict[str, Any] | None:
    """The first request of a batch goes on behind its 12 or 13 tokens."""
    return first_of("first_positions", 14)(event) if len(event.rows) > 1 else None


def said_to_be(reason: FreeReason, event: BlocksFreed) -> dict[str, Any] | None:
    """A part that is given back at one end of a table, as if it were at the other."""
    is_part = event.reason in (FreeReason.OUT_OF_WINDOW, FreeReason.TRUNCATED)
    return {"reason": reason} if is_part and event.reason is not reason else None


FORGERIES: list[tuple[str, type[Event], Callable[[Any], dict[str, Any] | None]]] = [
    ("row -1 is assigned to request", RowsAssigned, first_of("rows", -1)),
    ("row 3 is assigned to request", RowsAssigned, first_of("rows", 3)),
    ("columns of an event differ in length", RowsAssigned, lambda event: {"requests": (*event.requests, "other")}),
    ("request 'first' is assigned row", RowsAssigned, lambda e: {"requests": ("first",)} if e.rows[0] == 1 else None),
    ("releases row 1, which it does not hold", RowsReleased, first_of("rows", 1)),
    ("row 7 is held by no request", RowsReleased, first_of("rows", 7)),
    ("no group -1", PrefixAdopted, lambda event: {"group": -1}),
    ("no group 2", BlocksAllocated, lambda event: {"group": 2}),
    ("row -1 is held by no request", PrefixAdopted, lambda event: {"row": -1}),
    ("holds blocks already", PrefixAdopted, lambda event: {"row": 0}),
    ("differ in length", BlocksAllocated, lambda event: {"counts": (*event.counts, 0)}),
    ("do not add up", BlocksAllocated, lambda event: {"counts": (event.counts[0] + 1, *event.counts[1:])}),
    (
        "loses a key of another group",
        BlocksAllocated,
        lambda event: {"lost_groups": tuple([1 - group for group in event.lost_groups])} if event.lost_groups else None,
    ),
    ("lose 0 keys of the groups", BlocksAllocated, lambda event: {"lost_groups": (0,)}),
    ("registers blocks", BlocksCached, first_of("stops", 99)),
    ("registers blocks -1 to", BlocksCached, first_of("starts", -1)),
    ("does not hold block", BlocksCached, first_of("indices", 1)),
    ("do not add up", BlocksCached, lambda event: {"keys": event.keys[1:]}),
    ("places -1 tokens", TokensPlaced, first_of("counts", -1)),
    ("it has 16 slots", TokensPlaced, first_of("counts", 99)),
    ("at position -1", TokensPlaced, first_of("first_positions", -1)),
    ("at position 14, behind 1", TokensPlaced, to_position_14),
    ("at position 1180591620717411303424", TokensPlaced, first_of("first_positions", 2**70)),
    (
        "does not fit in 64 bits",
        TokensPlaced,
        lambda e: {"first_positions": (2**70, *e.first_positions[1:])} if len(e.rows) > 1 else None,
    ),
    ("row 2 is held by no request", TokensPlaced, first_of("rows", 2)),
    ("rows .* one is named twice", TokensPlaced, lambda e: {"rows": e.rows * 0} if len(e.rows) > 1 else None),
    ("does not begin with them", BlocksShared, lambda event: {"blocks": event.blocks[::-1]}),
    ("holds blocks already", BlocksShared, lambda event: {"child_row": event.parent_row}),
    ("does not hold block", BlockCopied, lambda event: {"index": event.index - 1}),
    ("is taken while", BlockCopied, lambda event: {"target": event.source}),
    (
        "are freed: one is named twice",
        BlocksFreed,
        lambda e: {"groups": e.groups * 2, "rows": e.rows * 2, "counts": (*e.counts, 0)},
    ),
    ("differ in length", BlocksFreed, lambda event: {"groups": ()}),
    ("no group 2", BlocksFreed, first_of("groups", 2)),
    ("row -2 is held by no request", BlocksFreed, first_of("rows", -2)),
    ("where they go out_of_window", BlocksFreed, partial(said_to_be, FreeReason.OUT_OF_WINDOW)),
    ("where they go truncated", BlocksFreed, partial(said_to_be, FreeReason.TRUNCATED)),
    (
        "does not hold blocks .* at",
        BlocksFreed,
        lambda e: {"indices": (0,) * len(e.indices)} if len(e.indices) else None,
    ),
    ("do not add up", BlocksFreed, lambda e: {"indices": ()} if len(e.indices) else None),
    ("loses the key 'other' of group", BlocksUncached, lambda event: {"keys": ("other", *event.keys[1:])}),
    ("loses the key .* of group 1", BlocksUncached, lambda event: {"groups": (1,) * len(event.blocks)}),
]


@pytest.mark.parametrize(("message", "cls", "change"), FORGERIES, ids=lambda value: getattr(value, "__name__", None))
def test_an_event_that_could_not_follow_is_refused(
    log: EventLog, message: str, cls: type[Event], change: Callable[[Any], dict[str, Any] | None]
) -> None:
    forgery = forged(log, cls, change)
    with pytest.raises((CorruptLedgerError, MisuseError), match=message):
        forgery.replay()
    with pytest.raises(CorruptLedgerError, match="commit"):
        forgery.verify()


def test_a_row_that_was_held_during_a_reset_registers_nothing(log: EventLog) -> None:
    commits = list(log)
    commits[1] = commits[1]._replace(events=(*commits[1].events, CacheReset()))
    with pytest.raises(CorruptLedgerError, match="register blocks; one was held when every key was dropped"):
        EventLog(commits).verify()
