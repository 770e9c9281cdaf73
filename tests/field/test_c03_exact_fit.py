"""C03: a prefill takes exactly its blocks, and a pool of exactly that size admits it (blocks of 256)."""

import pytest
from kvledger.core import DoesNotFitError


def test_c03_a_prefill_of_4079_tokens_takes_16_blocks_and_the_18th_further_token_the_17th(ledger_of) -> None:
    ledger = ledger_of(num_usable_blocks=20, block_size=256)
    request = ledger.request("a", range(4079))
    ledger.admit(request)
    assert len(ledger.table("a")) == 16
    for _ in range(17):
        request.num_output_tokens += 1
        request.keys.append([7])
        assert ledger.allocator.allocate(request, 1) == ((),)
    request.num_output_tokens += 1
    request.keys.append([7])
    assert ledger.allocator.allocate(request, 1) == ((17,),)


def test_c03_a_pool_of_exactly_16_usable_blocks_admits_it_and_one_of_15_never_does(ledger_of) -> None:
    exact = ledger_of(num_usable_blocks=16, block_size=256)
    exact.admit(exact.request("a", range(4079)))
    assert exact.allocator.num_free_blocks == 0
    small = ledger_of(num_usable_blocks=15, block_size=256)
    request = small.request("a", range(4079))
    with pytest.raises(DoesNotFitError, match=r"needs 16 blocks at once, but the pool has 15"):
        small.allocator.allocate(request, 4079)
