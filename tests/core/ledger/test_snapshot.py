"""A restored snapshot is the state it was taken of, now and after everything that follows."""

import random

import attrs
import numpy as np
import pytest
from kvledger.core import AllocatorConfig, EventLog, FullAttention, KVCacheAllocator, Request
from kvledger.core.cache_kinds import SlidingWindow
from kvledger.core.errors import CorruptLedgerError, MisuseError
from kvledger.core.ledger.event_log import can_be_restored, restore_snapshot, take_snapshot
from kvledger.core.ledger.replay_checks import CheckedReplay


class OneChain:
    """Keys of a few prompts that share their beginnings."""

    def __init__(self, prompt: int) -> None:
        self.prompt = prompt

    def keys(self, start: int, stop: int) -> list[tuple[int, int]]:
        return [(0 if i < 2 else self.prompt, i) for i in range(start, stop)]


@pytest.fixture(scope="module")
def log() -> EventLog:
    log, chance = EventLog(), random.Random(5)
    groups = [FullAttention(8), SlidingWindow(4, 12)]
    config = AllocatorConfig(num_blocks=40, groups=groups, max_model_len=96, max_num_reqs=5, retention_interval=None)
    allocator = KVCacheAllocator(config, [log])
    live: list[str] = []
    for i in range(150):
        request = Request(str(i), chance.randrange(8, 40), 90, OneChain(chance.randrange(4)))
        match = allocator.match_prefix(request)
        if len(live) < 5 and allocator.allocate(request, request.num_tokens - match.num_hit_tokens, match):
            live.append(str(i))
        rows = np.array([allocator.row_of(each) for each in live])
        allocator.release_out_of_window_among(rows)
        if not allocator.append(rows) or chance.random() < 0.3:
            allocator.free(live.pop(chance.randrange(len(live))))
        allocator.evict([chance.randrange(1, 40)])
        if chance.random() < 0.2 and live and allocator.num_placed_tokens(live[0]) > 24:
            allocator.truncate(live[0], allocator.num_placed_tokens(live[0]) - 1)
    return log


def test_every_state_of_a_history_is_restored(log: EventLog) -> None:
    state = log.replay(1)
    replay = CheckedReplay(state)
    for commit in list(log)[1:]:
        restored = restore_snapshot(state.created, take_snapshot(state))
        assert restored.snapshot() == state.snapshot()
        replay.apply(commit)


def test_a_restored_state_goes_on_as_the_original_does(log: EventLog) -> None:
    for stop in range(1, len(log), 37):
        original = log.replay(stop)
        restored = restore_snapshot(original.created, take_snapshot(original))
        replay = CheckedReplay(restored)
        for commit in list(log)[stop:]:
            replay.apply(commit)
        assert restored.snapshot() == log.replay().snapshot()


@pytest.mark.parametrize("field", ["free_queue", "referenced", "copies", "rows", "free_rows", "tables"])
def test_a_snapshot_that_contradicts_itself_is_refused(log: EventLog, field: str) -> None:
    snapshot = take_snapshot(log.replay())
    with pytest.raises(CorruptLedgerError, match=f"the snapshot before commit {len(log)} is wrong"):
        restore_snapshot(log.created, snapshot | {field: snapshot[field][:-1]})


def test_a_snapshot_that_lacks_something_is_refused(log: EventLog) -> None:
    snapshot = take_snapshot(log.replay())
    for field in snapshot.keys() - {"outdated"}:  # older logs have no such rows
        with pytest.raises(CorruptLedgerError, match=field):
            restore_snapshot(log.created, {name: value for name, value in snapshot.items() if name != field})


def test_an_order_that_remembers_more_than_its_queue_is_refused(log: EventLog) -> None:
    created = attrs.evolve(log.created, eviction="belady")
    assert not can_be_restored(created)
    with pytest.raises(MisuseError, match="replay from the first commit"):
        restore_snapshot(created, {})
