"""B03: requests of different tenants or adapters share no key (the hashing part; 48 tokens, blocks of 16)."""

import pytest
from kvledger.core.errors import InputError
from kvledger.core.keys.block_hash import ALGORITHMS, block_hasher
from kvledger.core.keys.extra_keys import ExtraKeys, LoraIdentity
from kvledger.core.keys.token_keys import TokenKeySource


def keys_of(extra_keys: ExtraKeys, algorithm: str) -> list[bytes]:
    source = TokenKeySource(range(48), block_hasher(algorithm), 16, extra_keys)
    return source.keys(0, 3)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_b03_only_equal_salts_share_keys_and_the_chain_carries_the_salt(algorithm: str) -> None:
    tenant_a, tenant_b = keys_of(ExtraKeys("a"), algorithm), keys_of(ExtraKeys("b"), algorithm)
    nobody = keys_of(ExtraKeys(), algorithm)
    assert tenant_a == keys_of(ExtraKeys("a"), algorithm)
    assert nobody == keys_of(ExtraKeys(None), algorithm)
    assert len({*tenant_a, *tenant_b, *nobody}) == 9


def test_b03_an_empty_salt_is_refused() -> None:
    with pytest.raises(InputError, match="cache_salt"):
        ExtraKeys("")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_b03_an_adapter_reloaded_under_its_old_name_shares_no_key(algorithm: str) -> None:
    first = keys_of(ExtraKeys(lora=LoraIdentity("x", "weights-v1")), algorithm)
    reloaded = keys_of(ExtraKeys(lora=LoraIdentity("x", "weights-v2")), algorithm)
    assert first == keys_of(ExtraKeys(lora=LoraIdentity("x", "weights-v1")), algorithm)
    assert not set(first) & set(reloaded)
    assert not set(first) & set(keys_of(ExtraKeys(), algorithm))


def test_b03_an_adapter_without_a_fingerprint_is_not_cached() -> None:
    source = TokenKeySource(range(48), block_hasher(), 16, ExtraKeys(lora=LoraIdentity("x", "")))
    assert source.keys(0, 3) == []
    assert source.reason is not None
