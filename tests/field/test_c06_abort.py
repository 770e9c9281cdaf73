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
