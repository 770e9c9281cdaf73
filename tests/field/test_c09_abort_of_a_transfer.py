"""C09: an abort while a copy is under way gives the blocks back only when the copy has ended."""


def test_c09_blocks_stay_held_after_an_abort_and_hold_nothing_that_can_be_found(copying) -> None:
    ledger, scheduler = copying
    assert scheduler.abort("d")
    assert ledger.pool.num_held_blocks == 4
    assert ledger.allocator.match_prefix(ledger.request("x", range(17))).num_hit_tokens == 0
    scheduler.received("d")
    assert ledger.pool.num_held_blocks == 0
    assert ledger.allocator.match_prefix(ledger.request("y", range(17))).num_hit_tokens == 0
