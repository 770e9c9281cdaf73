"""B10: resetting the prefix cache fails visibly while blocks are in use, and then forgets everything."""

import pytest
from kvledger.core import MisuseError
from kvledger.core.events import CacheReset


def test_b10_a_reset_with_a_running_request_names_the_blocks_in_use_and_changes_nothing(ledger_of) -> None:
    ledger = ledger_of(num_usable_blocks=8, block_size=16)
    ledger.admit(ledger.request("a", range(40)))
    before = ledger.snapshot()
    with pytest.raises(MisuseError, match="3 blocks in use"):
        ledger.allocator.reset_prefix_cache()
    assert ledger.snapshot() == before


def test_b10_a_reset_of_an_idle_pool_is_one_event_and_the_next_identical_prompt_hits_nothing(ledger_of) -> None:
    ledger = ledger_of(num_usable_blocks=8, block_size=16)
    ledger.serve("a", range(40))
    before = len(ledger.log)
    ledger.allocator.reset_prefix_cache()
    assert [event for commit in list(ledger.log)[before:] for event in commit.events] == [CacheReset()]
    assert ledger.serve("b", range(40)) == 0


def test_b10_the_null_block_is_not_in_use(ledger_of) -> None:
    ledger = ledger_of(num_usable_blocks=8, block_size=16)
    assert ledger.pool.num_held_blocks == 0
    ledger.allocator.reset_prefix_cache()
