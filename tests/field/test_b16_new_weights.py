"""B16: new weights while requests run: nothing that was computed on old content is ever found again (blocks of 4)."""

import pytest
from kvledger.core import FullAttention, Request, SlidingWindow
from kvledger.core.events import CacheReset
from kvledger.core.scheduler.config import SchedulerConfig
from kvledger.core.scheduler.scheduler import Scheduler

PROMPT, ANSWER = list(range(16)), list(range(100, 112))


def reset(allocator) -> None:
    allocator.reset_prefix_cache(while_running=True)


def evict_all(allocator) -> None:
    assert allocator.evict(list(range(1, 60)))


@pytest.mark.parametrize("orphans", ["keep", "drop"])
@pytest.mark.parametrize("drop_every_key", [reset, evict_all])
@pytest.mark.parametrize("fresh_runs_first", [True, False])
@pytest.mark.parametrize("groups", [[FullAttention(4)], [FullAttention(4), SlidingWindow(4, 9)]])
def test_b16_the_next_turn_finds_only_new_content(ledger_of, orphans, drop_every_key, fresh_runs_first, groups) -> None:
    ledger = ledger_of(60, groups=groups, retention_interval=None, orphans=orphans)
    allocator = ledger.allocator
    running = ledger.request("running", PROMPT)
    allocator.allocate(running, 16)
    drop_every_key(allocator)
    if fresh_runs_first:
        ledger.serve("fresh", [*PROMPT, 1])
    for token in ANSWER:
        running.keys.append([token])
        running.num_output_tokens += 1
        allocator.allocate(running, 1)
    allocator.free("running")
    if not fresh_runs_first:
        assert allocator.pool.num_keyed_blocks == 0
        ledger.serve("fresh", [*PROMPT, 1])
    turn = ledger.request("turn", [*PROMPT, *ANSWER, 5])
    assert allocator.match_prefix(turn).num_hit_tokens == 16
    assert ledger.log.replay().snapshot() == allocator.state.snapshot()


def test_b16_forks_and_batches_of_old_content_register_nothing(ledger_of) -> None:
    ledger = ledger_of(60, block_size=4)
    allocator = ledger.allocator
    allocator.allocate(ledger.request("parent", PROMPT), 16)
    reset(allocator)
    assert ledger.log[-1].events == (CacheReset(),)
    allocator.fork("parent", ledger.request("child", PROMPT))
    rows = allocator.state.num_placed.nonzero()[0]
    for request_id in ("parent", "child"):
        allocator._request_in_row[allocator.row_of(request_id)].keys.append(ANSWER)
    for _ in ANSWER:
        assert allocator.append(rows)
    assert allocator.pool.num_keyed_blocks == 0
    # A request that comes after the reset registers again, in the same row too.
    for request_id in ("parent", "child"):
        allocator.free(request_id)
    assert (ledger.serve("new", [*PROMPT, 1]), ledger.serve("again", [*PROMPT, 1])) == (0, 16)


def test_b16_a_restored_log_knows_which_rows_are_outdated(ledger_of) -> None:
    ledger = ledger_of(60, block_size=4)
    ledger.admit(ledger.request("a", PROMPT))
    reset(ledger.allocator)
    state = ledger.log.replay()
    assert state.outdated == {ledger.allocator.row_of("a")} == set(ledger.allocator.state.outdated)


def test_b16_copies_of_preempted_requests_are_dropped_too(ledger_of) -> None:
    ledger = ledger_of(9, block_size=4)
    limits = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, preemption_mode="swap", swap_space_blocks=20)
    scheduler = Scheduler(limits, ledger.allocator)
    for name in ("a", "b"):
        request = Request(name, len(PROMPT), max_tokens=12)
        scheduler.submit(request)
    while not scheduler.stats.num_preemptions:
        step = scheduler.schedule()
        assert step is not None
        scheduler.complete(step)
    scheduler.reset_prefix_cache(while_running=True)
    while scheduler.has_unfinished:
        step = scheduler.schedule()
        assert step is not None
        scheduler.complete(step)
    assert scheduler.stats.swapped_out_tokens > 0
    assert scheduler.stats.swapped_in_tokens == 0
    assert scheduler.stats.recomputed_tokens > 0
