"""B03: what is cached for one tenant or adapter is found by that one alone (48 tokens, blocks of 16)."""

import pytest
from kvledger.core.keys.extra_keys import ExtraKeys, LoraIdentity

V1, V2 = ExtraKeys(lora=LoraIdentity("x", "weights-v1")), ExtraKeys(lora=LoraIdentity("x", "weights-v2"))


@pytest.mark.parametrize(
    ("first", "second", "hit"),
    [
        pytest.param(ExtraKeys("a"), ExtraKeys("a"), 32, id="the same salt"),
        pytest.param(ExtraKeys("a"), ExtraKeys("b"), 0, id="another salt"),
        pytest.param(ExtraKeys("a"), ExtraKeys(), 0, id="salt, then none"),
        pytest.param(ExtraKeys(), ExtraKeys(), 32, id="no salt at all"),
        pytest.param(V1, V1, 32, id="the same adapter"),
        pytest.param(V1, V2, 0, id="the adapter reloaded with other weights"),
    ],
)
def test_b03_hit_tokens_of_a_second_request(ledger_of, first, second, hit) -> None:
    ledger = ledger_of(num_usable_blocks=16, block_size=16)
    assert ledger.serve("first", range(48), first) == 0
    assert ledger.serve("second", range(48), second) == hit


def test_b03_a_request_that_must_not_be_cached_is_served_without_a_key(ledger_of) -> None:
    ledger = ledger_of(num_usable_blocks=16, block_size=16)
    nameless = ExtraKeys(lora=LoraIdentity("x", ""))
    ledger.serve("first", range(48), nameless)
    assert ledger.serve("second", range(48), nameless) == 0
    assert list(ledger.pool.keyed_blocks()) == []
