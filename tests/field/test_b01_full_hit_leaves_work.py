"""B01: a fully cached prompt still computes at least one token, and so, block by block, its whole last block."""

import pytest


@pytest.mark.parametrize(
    ("num_tokens", "hit"), [(15, 0), (16, 0), (17, 16), (32, 16), (33, 32), (48, 32), (49, 48)], ids=str
)
def test_b01_the_second_run_of_a_prompt_leaves_at_least_one_token_to_compute(ledger_of, num_tokens, hit) -> None:
    ledger = ledger_of(num_usable_blocks=16, block_size=16)
    assert ledger.serve("first", range(num_tokens)) == 0
    assert ledger.serve("second", range(num_tokens)) == hit


def test_b01_the_recomputed_block_does_not_break_the_chain(ledger_of) -> None:
    ledger = ledger_of(num_usable_blocks=16, block_size=16)
    ledger.serve("first", range(32))
    ledger.serve("second", range(32))
    assert ledger.serve("extended", range(64)) == 32
