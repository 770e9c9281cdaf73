"""B07: a finished request loses its last block first, and a lookup stops at the first missing block."""


def test_b07_an_unrelated_block_evicts_the_tail_a_hundred_times_out_of_a_hundred(ledger_of) -> None:
    for attempt in range(100):
        ledger = ledger_of(num_usable_blocks=3, block_size=4)
        ledger.admit(ledger.request("a", range(12)))
        assert ledger.table("a") == [1, 2, 3]
        ledger.allocator.free("a")
        ledger.admit(ledger.request("b", range(100 + attempt, 104 + attempt)))
        assert ledger.table("b") == [3]
        assert ledger.allocator.match_prefix(ledger.request("c", range(13))).num_hit_tokens == 8


def test_b07_nothing_behind_an_evicted_block_is_found(ledger_of) -> None:
    ledger = ledger_of(num_usable_blocks=3, block_size=4)
    ledger.serve("a", range(12))
    assert ledger.allocator.evict([1]) == 1
    assert ledger.allocator.match_prefix(ledger.request("b", range(12))).num_hit_tokens == 0
