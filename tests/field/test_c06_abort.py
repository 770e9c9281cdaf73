"""C06: an abort gives everything back, in every state of a request; a second one does nothing."""

import pytest
from kvledger.core import EventLog


def waiting(ledger, request) -> None:
    ledger.allocator.match_prefix(request)


def mid_chunked_prefill(ledger, request) -> None:
    match = ledger.allocator.match_prefix(request)
    ledger.allocator.allocate(request, 3, match)


def decoding(ledger, request) -> None:
    ledger.admit(request)
    for token in (7, 8, 9):
        request.num_output_tokens += 1
        request.keys.append([token])
        assert ledger.allocator.allocate(request, 1) is not None


def preempted(ledger, request) -> None:
    decoding(ledger, request)
    ledger.allocator.preempt(request.request_id)


def finished(ledger, request) -> None:
    ledger.admit(request)
    ledger.allocator.free(request.request_id)


@pytest.mark.parametrize("state", [waiting, mid_chunked_prefill, decoding, preempted, finished])
def test_c06_an_abort_returns_everything_and_a_second_one_is_a_no_op(ledger_of, state) -> None:
    ledger = ledger_of(num_usable_blocks=16, block_size=4)
    ledger.admit(ledger.request("sharer", range(10)))
    shared = ledger.table("sharer")[:2]
    request = ledger.request("a", range(20))
    state(ledger, request)
    held = ledger.allocator.holds("a")
    assert [ledger.pool.ref_cnt(block) for block in shared] == [1 + held, 1 + held]

    assert ledger.allocator.abort("a") is held
    assert [ledger.pool.ref_cnt(block) for block in shared] == [1, 1]
    assert ledger.pool.num_held_blocks == len(ledger.table("sharer"))
    assert EventLog(list(ledger.log)).conservation() is None
    before = ledger.snapshot()
    assert ledger.allocator.abort("a") is False
    assert ledger.snapshot() == before


@pytest.mark.parametrize("steps", [0, 1, 3, 30], ids=["waiting", "mid chunked prefill", "decoding", "finished"])
def test_c06_a_schedulers_abort_returns_everything_and_a_second_one_is_a_no_op(scheduler_of, steps) -> None:
    scheduler = scheduler_of(20, max_num_batched_tokens=32, max_num_seqs=8)
    scheduler.submit_new("a", 60, 10, ordinal=0)
    for _ in range(steps):
        if (step := scheduler.schedule()) is not None:
            scheduler.complete(step)
    was_there = scheduler.has_unfinished
    assert was_there is (steps < 30)
    assert scheduler.abort("a") is was_there
    assert (scheduler.abort("a"), scheduler.has_unfinished, scheduler.allocator.pool.usage) == (False, False, 0)


def test_c06_a_preempted_request_is_aborted_where_it_waits(scheduler_of) -> None:
    scheduler = scheduler_of(8)
    for name in ("a", "b"):
        scheduler.submit_new(name, 40, 60)
    while not scheduler.stats.num_preemptions:
        scheduler.complete(scheduler.schedule())
    victim = scheduler.waiting.head().request_id
    assert scheduler.abort(victim) is True
    assert (scheduler.abort(victim), scheduler.num_waiting) == (False, 0)
    scheduler.run_to_the_end()
    assert scheduler.stats.num_finished == scheduler.stats.num_aborted == 1
