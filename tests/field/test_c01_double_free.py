"""C01: a block freed more often than it is held is refused before any change, as is freeing the null block."""

import pytest
from kvledger.core import NULL_BLOCK, BlockPool, FreeReason, MisuseError


def state_of(pool: BlockPool) -> tuple:
    return pool.free_queue.order(), list(pool.ref_cnts()), list(pool.keyed_blocks())


def pool_with_one_held_block() -> tuple[BlockPool, int]:
    pool = BlockPool(num_blocks=6)
    (block,) = pool.free_queue.peek(1)
    pool.take((block,))
    return pool, block


@pytest.mark.parametrize("times", [2, 3])
def test_c01_a_block_twice_in_one_free_is_refused_before_any_change(times) -> None:
    pool, block = pool_with_one_held_block()
    before = state_of(pool)
    with pytest.raises(MisuseError, match=f"double free: block {block} is released"):
        pool.release([block] * times)
    assert state_of(pool) == before
    queue = pool.free_queue.order()
    assert len(queue) == len(set(queue)) == len(pool.free_queue) == pool.num_free_blocks == 4


def test_c01_blocks_released_before_the_duplicate_in_the_same_call_are_held_as_before() -> None:
    pool, block = pool_with_one_held_block()
    (other,) = pool.free_queue.peek(1)
    pool.take((other,))
    before = state_of(pool)
    with pytest.raises(MisuseError, match="double free"):
        pool.release([other, block, other])
    assert state_of(pool) == before


def test_c01_freeing_an_unreferenced_block_is_refused() -> None:
    pool = BlockPool(num_blocks=6)
    before = state_of(pool)
    with pytest.raises(MisuseError, match="double free"):
        pool.release([3])
    assert state_of(pool) == before


@pytest.mark.parametrize("block", [NULL_BLOCK, -1, 6])
def test_c01_freeing_the_null_block_or_no_block_at_all_is_refused(block) -> None:
    pool, held = pool_with_one_held_block()
    before = state_of(pool)
    with pytest.raises(MisuseError, match=rf"cannot release block {block}"):
        pool.release([held, block])
    assert state_of(pool) == before


@pytest.mark.parametrize("reason", [FreeReason.FINISHED, FreeReason.PREEMPTED])
def test_c01_freeing_a_request_twice_is_refused_before_any_change(ledger_of, reason) -> None:
    ledger = ledger_of(num_usable_blocks=8, block_size=4)
    ledger.serve("a", range(12))
    before = ledger.snapshot()
    with pytest.raises(MisuseError, match="holds no blocks"):
        ledger.allocator.free("a", reason)
    assert ledger.snapshot() == before
