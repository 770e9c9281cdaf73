"""Tokens that are kept outside the pool and copied in at an admission (field report B11's other half)."""

import pytest
from kvledger.core import AllocatorConfig, EventLog, FullAttention, InputError, KVCacheAllocator, Request
from kvledger.core.events import TokensPlaced, as_ints
from kvledger.core.scheduler.config import SchedulerConfig
from kvledger.core.scheduler.scheduler import Scheduler


class Ids:
    def __init__(self, *ids: int) -> None:
        self.ids = ids

    def keys(self, start: int, stop: int) -> tuple[int, ...]:
        return self.ids[start:stop]


class Elsewhere:
    """Has so many blocks of 16 of every prompt."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.asked: list[tuple[str, int]] = []

    def num_tokens_after(self, request: Request, num_hit_tokens: int) -> int:
        self.asked.append((request.request_id, num_hit_tokens))
        return max(min(self.num_blocks * 16, (request.num_tokens - 1) // 16 * 16) - num_hit_tokens, 0)


def scheduler(external: Elsewhere, log: EventLog | None = None, **limits) -> Scheduler:
    config = AllocatorConfig(num_blocks=40, groups=[FullAttention(16)], max_model_len=512, max_num_reqs=4)
    allocator = KVCacheAllocator(config, sinks=[] if log is None else [log])
    return Scheduler(SchedulerConfig(max_num_seqs=4, **limits), allocator, external)


def test_what_is_kept_elsewhere_is_not_computed() -> None:
    log = EventLog()
    batch = scheduler(Elsewhere(3), log)
    request = Request("a", 70, keys=Ids(1, 2, 3, 4))
    batch.submit(request)
    step = batch.schedule()
    assert step is not None
    assert step.batch.first_positions.tolist() == [48]
    assert step.batch.counts.tolist() == [22]
    assert batch.stats.external_hits_tokens == request.num_cached_tokens == 48
    assert batch.stats.prefix_hits_tokens == 0
    placed = [
        (as_ints(event.first_positions), as_ints(event.counts))
        for commit in log
        for event in commit.events
        if isinstance(event, TokensPlaced)
    ]
    assert placed == [((0,), (48,)), ((48,), (22,))]


def test_copied_blocks_are_found_by_the_next_request() -> None:
    external = Elsewhere(3)
    batch = scheduler(external)
    for name in ("a", "b"):
        batch.submit(Request(name, 70, keys=Ids(1, 2, 3, 4)))
        step = batch.schedule()
        assert step is not None
        batch.complete(step)
    assert external.asked == [("a", 0), ("b", 64)]
    assert (batch.stats.external_hits_tokens, batch.stats.prefix_hits_tokens) == (48, 64)


def test_swapping_and_an_external_cache_exclude_each_other() -> None:
    with pytest.raises(InputError, match="swap_space_blocks 8 and an external cache exclude each other"):
        scheduler(Elsewhere(1), preemption_mode="swap", swap_space_blocks=8)
