"""Requests that wait for another engine's keys and values, and finished ones whose blocks another engine reads."""

import pytest
from kvledger.core import AllocatorConfig, EventLog, FullAttention, InputError, KVCacheAllocator, MisuseError, Request
from kvledger.core.events import BlocksCached, RowsReleased
from kvledger.core.scheduler.config import SchedulerConfig
from kvledger.core.scheduler.scheduler import Scheduler


class Ids:
    def __init__(self, *ids: int) -> None:
        self.ids = ids

    def keys(self, start: int, stop: int) -> tuple[int, ...]:
        return self.ids[start:stop]


class OtherEngine:
    """Holds every prompt whole."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, int]] = []
        self.found: list[str] = []

    def num_tokens_after(self, request: Request, num_hit_tokens: int) -> int:
        return max(request.num_prompt_tokens - num_hit_tokens, 0)

    def admitted(self, request: Request, num_tokens: int) -> None:
        if num_tokens:
            self.begun.append((request.request_id, num_tokens))
        else:
            self.found.append(request.request_id)


def decoder(other: OtherEngine, *, num_blocks: int = 40, rows: int = 6, log: EventLog | None = None, **limits):
    config = AllocatorConfig(num_blocks=num_blocks, groups=[FullAttention(16)], max_model_len=512, max_num_reqs=rows)
    allocator = KVCacheAllocator(config, sinks=[] if log is None else [log])
    return Scheduler(SchedulerConfig(**{"max_num_seqs": 4, **limits}), allocator, remote=other)


def handed_over(name: str, prompt: int = 64, max_tokens: int = 3, keys: Ids | None = None) -> Request:
    """A request whose first token the other engine has produced."""
    return Request(name, prompt, max_tokens, keys, num_output_tokens=1)


def finish_all(batch: Scheduler) -> list[str]:
    done: list[str] = []
    while (step := batch.schedule()) is not None:
        done += [request.request_id for request in batch.complete(step).finished_requests]
    return done


def test_a_request_holds_its_blocks_and_computes_nothing_until_the_copy_is_there() -> None:
    other = OtherEngine()
    batch = decoder(other)
    batch.submit(handed_over("a"))
    assert batch.schedule() is None
    assert other.begun == [("a", 64)]
    assert batch.allocator.pool.num_held_blocks == 4
    assert (batch.num_running, batch.num_waiting, batch.has_unfinished) == (0, 0, True)
    batch.received("a")
    step = batch.schedule()
    assert step is not None
    assert step.batch.first_positions.tolist() == [64]
    assert step.batch.counts.tolist() == [1]
    batch.complete(step)
    assert finish_all(batch) == ["a"]
    # The first token came from elsewhere; of the other two only the first is computed, the last one never is.
    assert batch.stats.computed_tokens == 2
    assert batch.stats.external_hits_tokens == 64
    assert not batch.has_unfinished


def test_what_is_on_its_way_is_not_found_and_what_is_there_is() -> None:
    other, log = OtherEngine(), EventLog()
    batch = decoder(other, log=log)
    for name in ("a", "b"):
        batch.submit(handed_over(name, keys=Ids(1, 2, 3, 4)))
    assert batch.schedule() is None
    assert other.begun == [("a", 64), ("b", 64)]
    assert not [event for commit in log for event in commit.events if isinstance(event, BlocksCached)]
    for name in ("a", "b"):
        batch.received(name)
    assert sorted(finish_all(batch)) == ["a", "b"]
    batch.submit(handed_over("c", keys=Ids(1, 2, 3, 4)))
    assert finish_all(batch) == ["c"]
    assert len(other.begun) == 2
    assert other.found == ["c"]
    assert log.replay().snapshot() == batch.allocator.state.snapshot()


def test_only_what_the_engine_does_not_find_is_copied() -> None:
    other = OtherEngine()
    batch = decoder(other)
    batch.submit(handed_over("a", keys=Ids(1, 2, 3, 4)))
    batch.schedule()
    batch.received("a")
    finish_all(batch)
    batch.submit(handed_over("b", 100, keys=Ids(1, 2, 3, 9, 10, 11)))
    batch.schedule()
    assert other.begun[-1] == ("b", 100 - 48)


def test_what_is_there_waits_for_a_place() -> None:
    batch = decoder(OtherEngine(), max_num_seqs=1)
    for name in ("a", "b"):
        batch.submit(handed_over(name))
    assert batch.schedule() is None
    batch.received("b")
    batch.received("a")
    assert batch.schedule() is not None
    assert [batch.request_in(row).request_id for row in batch._running.rows.tolist()] == ["b"]
    assert batch.allocator.pool.num_held_blocks == 4 + 5


def test_without_a_row_a_request_waits() -> None:
    batch = decoder(OtherEngine(), rows=4)
    for index in range(5):
        batch.submit(handed_over(str(index)))
    assert batch.schedule() is None
    assert batch.num_waiting == 1
    for index in range(4):
        batch.received(str(index))
    finish_all(batch)
    batch.received("4")
    assert finish_all(batch) == ["4"]


@pytest.mark.parametrize("is_there", [False, True])
def test_an_abort_gives_blocks_back_only_when_nothing_writes_into_them_any_more(is_there: bool) -> None:
    batch = decoder(OtherEngine())
    batch.submit(handed_over("a"))
    batch.schedule()
    if is_there:
        batch.received("a")
    assert batch.abort("a")
    assert not batch.abort("a")
    assert batch.allocator.pool.num_held_blocks == (0 if is_there else 4)
    if not is_there:
        with pytest.raises(MisuseError, match="still being served"):
            batch.submit(handed_over("a"))
        batch.received("a")
    assert batch.allocator.pool.num_held_blocks == 0
    assert batch.schedule() is None
    assert not batch.has_unfinished
    assert batch.stats.num_aborted == 1


def test_a_preempted_request_computes_its_tokens_anew() -> None:
    """The other engine has given its blocks back by then."""
    other = OtherEngine()
    batch = decoder(other, num_blocks=9)
    for name in ("a", "b"):
        batch.submit(handed_over(name, 60, 30))
    batch.schedule()
    for name in ("a", "b"):
        batch.received(name)
    assert sorted(finish_all(batch)) == ["a", "b"]
    assert len(other.begun) == 2
    assert batch.stats.num_preemptions >= 1
    assert batch.stats.recomputed_tokens >= 60
    assert other.found == []


def test_a_finished_request_keeps_its_blocks_until_they_are_sent() -> None:
    log = EventLog()
    config = AllocatorConfig(num_blocks=9, groups=[FullAttention(16)], max_model_len=128, max_num_reqs=4)
    allocator = KVCacheAllocator(config, sinks=[log])
    batch = Scheduler(SchedulerConfig(max_num_seqs=4), allocator, keeps_blocks_of=lambda request: request.priority == 1)
    batch.submit(Request("kept", 64, priority=1))
    batch.submit(Request("other", 16))
    assert finish_all(batch) == ["kept", "other"]
    assert allocator.pool.num_held_blocks == 4
    assert batch.has_unfinished
    batch.submit(Request("next", 80))
    assert batch.schedule() is None  # 4 of 8 blocks are free, it needs 5
    batch.sent("kept")
    assert finish_all(batch) == ["next"]
    assert allocator.pool.num_held_blocks == 0
    released = [event for commit in log for event in commit.events if isinstance(event, RowsReleased)]
    assert [event.requests for event in released] == [("other",), ("kept",), ("next",)]
    with pytest.raises(MisuseError, match="no copy of request 'kept' is under way"):
        batch.sent("kept")


def test_external_tokens_alone_are_allocated_and_others_are_not() -> None:
    config = AllocatorConfig(num_blocks=9, groups=[FullAttention(16)], max_model_len=128)
    allocator = KVCacheAllocator(config)
    before = allocator.state.snapshot()
    for external in (0, -1):
        with pytest.raises(InputError):
            allocator.allocate(Request("a", 64), 0, num_external_tokens=external)
    assert allocator.state.snapshot() == before
    assert len(allocator.allocate(Request("a", 64), 0, num_external_tokens=63)[0]) == 4
    assert allocator.num_placed_tokens("a") == 63


def test_two_sources_of_tokens_exclude_each_other() -> None:
    config = AllocatorConfig(num_blocks=9, groups=[FullAttention(16)], max_model_len=128, max_num_reqs=4)
    other = OtherEngine()
    with pytest.raises(InputError, match="not both"):
        Scheduler(SchedulerConfig(max_num_seqs=4), KVCacheAllocator(config), other, other)
