"""Several outputs of one prompt: the children share what the parent has computed, or wait for blocks of their own."""

import numpy as np
import pytest
from kvledger.core import (
    AllocatorConfig,
    DoesNotFitError,
    EventLog,
    FullAttention,
    KVCacheAllocator,
    MisuseError,
    Request,
)
from kvledger.core.events import BlockCopied, BlocksShared
from kvledger.core.scheduler.config import SchedulerConfig
from kvledger.core.scheduler.scheduler import Scheduler


def make(num_blocks=20, max_num_seqs=4):
    log = EventLog()
    config = AllocatorConfig(
        num_blocks=num_blocks,
        groups=[FullAttention(4)],
        max_model_len=40,
        max_num_reqs=max_num_seqs,
        retention_interval=None,
    )
    limits = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=16)
    return Scheduler(limits, KVCacheAllocator(config, sinks=[log])), log


def child(name, num_prompt_tokens=10, max_tokens=5):
    request = Request(name, num_prompt_tokens, max_tokens)
    request.num_output_tokens = 1
    return request


def step(scheduler):
    scheduled = scheduler.schedule()
    names = [scheduler.request_in(row).request_id for row in scheduled.batch.rows.tolist()]
    counts = dict(zip(names, scheduled.batch.counts.tolist(), strict=True))
    scheduler.complete(scheduled)
    return counts


def events(log, kind):
    return [event for commit in log for event in commit.events if isinstance(event, kind)]


def with_prompt(max_tokens=5, **settings):
    scheduler, log = make(**settings)
    scheduler.submit(Request("a", 10, max_tokens))
    step(scheduler)
    return scheduler, log


def test_children_share_the_prompt_and_decode_from_the_next_step_on() -> None:
    scheduler, log = with_prompt()
    for name in ("b", "c"):
        scheduler.fork("a", child(name))
    assert len(events(log, BlocksShared)) == 2
    assert scheduler.allocator.pool.num_held_blocks == 3
    assert step(scheduler) == {"a": 1, "b": 1, "c": 1}
    # Each writes into the third block, the last of them into the one that is left.
    assert len(events(log, BlockCopied)) == 2
    assert scheduler.stats.computed_tokens == 10 + 3
    while scheduler.has_unfinished:
        step(scheduler)
    assert scheduler.stats.num_finished == 3 and scheduler.allocator.pool.num_held_blocks == 0
    assert scheduler.stats.computed_tokens == 10 + 3 * 4


def test_a_child_without_a_place_waits_ahead_of_those_that_never_started() -> None:
    scheduler, log = with_prompt(max_num_seqs=2)
    scheduler.submit(Request("new", 3, 2))
    scheduler.fork("a", child("b"))
    scheduler.fork("a", child("c"))
    assert [request.request_id for request in scheduler.waiting] == ["c", "new"]
    assert len(events(log, BlocksShared)) == 1
    while scheduler.has_unfinished:
        step(scheduler)
    assert scheduler.stats.num_finished == 4
    # Nothing is cached, so it has computed its prompt by itself, with its first output behind it.
    assert scheduler.stats.computed_tokens == 10 + 2 * 4 + (11 + 3) + (3 + 1)


def test_a_child_of_a_parent_that_has_ended_waits_too() -> None:
    scheduler, log = with_prompt(max_tokens=1)
    assert scheduler.stats.num_finished == 1
    scheduler.fork("a", child("b"))
    assert not events(log, BlocksShared)
    assert step(scheduler) == {"b": 11}


def test_a_child_whose_first_token_was_its_last_is_only_counted() -> None:
    scheduler, _ = with_prompt()
    scheduler.fork("a", child("b", max_tokens=1), has_ended=True)
    assert (scheduler.stats.num_submitted, scheduler.stats.num_finished, scheduler.num_running) == (2, 1, 1)
    assert not scheduler.abort("b")


def test_a_fork_at_another_time_is_refused_and_changes_nothing() -> None:
    scheduler, log = with_prompt()
    step(scheduler)
    before = len(list(log))
    with pytest.raises(MisuseError, match="'b' cannot fork from 'a', which has computed other tokens than the 10"):
        scheduler.fork("a", child("b"))
    with pytest.raises(MisuseError, match="'a' is still being served"):
        scheduler.fork("z", child("a"))
    with pytest.raises(DoesNotFitError, match="50 tokens"):
        scheduler.fork("z", child("b", max_tokens=41))
    assert scheduler.stats.num_submitted == 1 and len(list(log)) == before and not len(scheduler.waiting)


@pytest.mark.parametrize("num_blocks", [8, 10, 14])
def test_a_tight_pool_preempts_children_and_serves_all(num_blocks) -> None:
    scheduler, log = make(num_blocks=num_blocks, max_num_seqs=5)
    random = np.random.default_rng(num_blocks)
    for family in range(8):
        scheduler.submit(Request(f"{family}", 9, 12))
    forked = set()
    for _ in range(2000):
        if not scheduler.has_unfinished:
            break
        scheduled = scheduler.schedule()
        rows = scheduled.batch.rows.tolist()
        ends = scheduled.batch.first_positions + scheduled.batch.counts
        firsts = [scheduler.request_in(row).request_id for row, end in zip(rows, ends, strict=True) if end == 9]
        scheduler.complete(scheduled)
        for name in firsts:
            if name not in forked and name.isdecimal():
                forked.add(name)
                for place in range(random.integers(1, 4)):
                    scheduler.fork(name, child(f"{name}-{place}", 9, 12))
    assert not scheduler.has_unfinished and scheduler.stats.num_finished == scheduler.stats.num_submitted > 16
    assert scheduler.stats.num_preemptions > 0 and events(log, BlocksShared)
    assert scheduler.allocator.pool.num_held_blocks == 0
    assert log.replay().snapshot() == scheduler.allocator.state.snapshot()


def test_a_child_comes_with_the_token_that_the_prompts_end_gave() -> None:
    scheduler, log = with_prompt()
    before = len(log)
    with pytest.raises(MisuseError, match="'b' forks from 'a' with 0 output tokens"):
        scheduler.fork("a", Request("b", 10, 5))
    assert len(log) == before
    scheduler.fork("a", child("b"))
