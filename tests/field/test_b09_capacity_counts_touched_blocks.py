"""B09: a cached block that a request is about to adopt is not also free space for it (4 usable blocks of 4)."""

import pytest
from kvledger.core import DoesNotFitError


def cached_prefix(ledger_of):
    ledger = ledger_of(num_usable_blocks=4, block_size=4)
    ledger.serve("prefix", range(12))
    return ledger


def test_b09_a_hit_of_three_and_two_new_blocks_do_not_fit_into_four_and_nothing_changes(ledger_of) -> None:
    ledger = cached_prefix(ledger_of)
    request = ledger.request("b", range(20))
    match = ledger.allocator.match_prefix(request)
    assert match.num_hit_tokens == 12
    before = ledger.snapshot()
    with pytest.raises(DoesNotFitError, match=r"needs 5 blocks .* 4 usable"):
        ledger.allocator.allocate(request, 8, match)
    assert ledger.snapshot() == before


def test_b09_the_same_refusal_is_a_wait_where_another_request_holds_the_fifth_block(ledger_of) -> None:
    ledger = ledger_of(num_usable_blocks=5, block_size=4)
    ledger.serve("prefix", range(12))
    ledger.admit(ledger.request("other", range(90, 93)))
    request = ledger.request("b", range(20))
    match = ledger.allocator.match_prefix(request)
    before = ledger.snapshot()
    assert ledger.allocator.allocate(request, 8, match) is None
    assert ledger.snapshot() == before


def test_b09_a_hit_of_three_and_one_new_block_fit_into_four(ledger_of) -> None:
    ledger = cached_prefix(ledger_of)
    request = ledger.request("b", range(16))
    assert ledger.admit(request).num_hit_tokens == 12
    assert ledger.table("b") == [1, 2, 3, 4]
