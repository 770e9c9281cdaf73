"""B14: where many prompts part from a common prefix, the state at the junction is kept (blocks of 528)."""

import pytest
from kvledger.core import FullAttention, SequenceState

from tests.field.test_b12_eagle_and_retention import serve_one_by_one, tokens


@pytest.mark.parametrize("num_shared, hit_tokens", [(1600, 98_208), (1500, 65_472)])
def test_b14_the_junction_of_many_prompts_is_kept(ledger_of, num_shared: int, hit_tokens: int) -> None:
    ledger = ledger_of(4000, groups=[FullAttention(528), SequenceState(528)], retention_interval=0)
    shared = tokens(num_shared)
    prompts = [[*shared, *tokens(2200 - num_shared, seed=100 + number)] for number in range(64)]
    hits = serve_one_by_one(ledger, prompts)
    assert (sum(hit > 0 for hit in hits), sum(hits)) == (62, hit_tokens)
