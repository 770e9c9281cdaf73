"""C04: usage is referenced blocks over usable ones; content that is only kept for reuse is reported apart."""


def test_c04_usage_counts_referenced_blocks_and_evictable_ones_stand_apart(ledger_of) -> None:
    ledger = ledger_of(num_usable_blocks=100, block_size=4)
    ledger.serve("cached", range(200))
    ledger.admit(ledger.request("running", range(1000, 1120)))
    pool = ledger.pool
    assert (pool.num_held_blocks, pool.num_evictable_blocks(), pool.num_free_blocks) == (30, 50, 70)
    assert pool.usage == 0.30

    ledger.allocator.free("running")
    assert pool.usage == 0.0
    assert pool.num_evictable_blocks() == 80


def test_c04_usage_of_a_full_pool_is_one(ledger_of) -> None:
    ledger = ledger_of(num_usable_blocks=100, block_size=4)
    ledger.admit(ledger.request("all", range(400)))
    assert ledger.pool.usage == 1.0
