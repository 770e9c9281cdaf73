"""D06: slots for K drafts to come are reserved with the step, never beyond the longest request (blocks of 16)."""

import pytest


def with_30_computed(ledger_of, max_model_len: int):
    ledger = ledger_of(num_usable_blocks=8, block_size=16, max_model_len=max_model_len)
    request = ledger.request("a", range(31))
    assert ledger.allocator.allocate(request, 30) is not None
    return ledger, request


def test_d06_one_token_after_30_with_3_lookahead_needs_3_blocks(ledger_of) -> None:
    ledger, request = with_30_computed(ledger_of, max_model_len=1024)
    assert ledger.allocator.allocate(request, 1, num_lookahead_tokens=3) == ((3,),)
    assert len(ledger.table("a")) == 3
    assert ledger.allocator.num_placed_tokens("a") == 31


def test_d06_lookahead_is_clamped_to_max_model_len(ledger_of) -> None:
    ledger, request = with_30_computed(ledger_of, max_model_len=32)
    assert ledger.allocator.allocate(request, 1, num_lookahead_tokens=3) == ((),)
    assert len(ledger.table("a")) == 2


@pytest.mark.parametrize(("max_model_len", "num_blocks"), [(1024, 3), (32, 2)])
def test_d06_a_batched_step_reserves_the_same(ledger_of, max_model_len, num_blocks) -> None:
    ledger, _ = with_30_computed(ledger_of, max_model_len)
    rows = ledger.allocator.state.num_placed.nonzero()[0]
    assert ledger.allocator.append(rows, 1, num_lookahead_tokens=3)
    assert len(ledger.table("a")) == num_blocks


def test_d06_occupancy_covers_every_draft_whether_it_is_accepted_or_not(ledger_of) -> None:
    ledger, request = with_30_computed(ledger_of, max_model_len=1024)
    for accepted in (0, 3, 1, 2):
        start = request.num_tokens - 1
        assert ledger.allocator.allocate(request, 4, num_computed_tokens=start) is not None
        assert len(ledger.table("a")) * 16 >= start + 4
        request.num_output_tokens += 1 + accepted
        request.keys.append([5] * (1 + accepted))
