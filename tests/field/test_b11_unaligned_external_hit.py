"""B11: content from elsewhere fills new blocks behind the local hit, and never a block that is found or shared."""

import pytest
from kvledger.core import InputError
from kvledger.core.events import TokensPlaced

PROMPT = list(range(600))


def with_288_cached(ledger_of):
    """Blocks of 16; another request holds the first 288 tokens. The external store has 512, in chunks of 256."""
    ledger = ledger_of(num_usable_blocks=100, block_size=16)
    ledger.admit(ledger.request("sharer", PROMPT[:288]))
    request = ledger.request("a", PROMPT)
    match = ledger.allocator.match_prefix(request)
    assert match.num_hit_tokens == 288
    return ledger, request, match


def test_b11_only_what_the_local_cache_lacks_gets_new_blocks(ledger_of) -> None:
    ledger, request, match = with_288_cached(ledger_of)
    free = ledger.allocator.num_free_blocks
    taken = ledger.allocator.allocate(request, 16, match, num_external_tokens=512 - 288)
    assert len(taken[0]) == 14 + 1
    assert ledger.allocator.num_free_blocks == free - 15
    assert ledger.allocator.num_placed_tokens("a") == 528


def test_b11_the_copy_writes_no_block_that_is_shared(ledger_of) -> None:
    ledger, request, match = with_288_cached(ledger_of)
    ledger.allocator.allocate(request, 16, match, num_external_tokens=512 - 288)
    shared, own = ledger.table("a")[:18], ledger.table("a")[18:]
    assert shared == ledger.table("sharer")
    assert [ledger.pool.ref_cnt(block) for block in shared] == [2] * 18
    assert [ledger.pool.ref_cnt(block) for block in own] == [1] * 15
    placed = [event for event in list(ledger.log)[-1].events if isinstance(event, TokensPlaced)]
    assert [(event.first_positions[0], event.counts[0]) for event in placed] == [(288, 224), (512, 16)]


def test_b11_an_external_hit_that_would_leave_nothing_to_compute_is_refused_before_any_change(ledger_of) -> None:
    ledger, request, match = with_288_cached(ledger_of)
    before = ledger.snapshot()
    with pytest.raises(InputError, match="must leave one to be computed"):
        ledger.allocator.allocate(request, 1, match, num_external_tokens=600 - 288)
    assert ledger.snapshot() == before
