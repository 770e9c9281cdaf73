"""B04: images behind equal placeholder tokens do not meet; what is malformed is not cached at all (blocks of 4)."""

from typing import Any

import pytest
from kvledger.core.keys.block_hash import ALGORITHMS, block_hasher
from kvledger.core.keys.extra_keys import ExtraKeys, MultimodalItem
from kvledger.core.keys.token_keys import TokenKeySource

IMG = 32_000


def hit_tokens(tokens: list[int], first: ExtraKeys, second: ExtraKeys, algorithm: str = "sha256") -> int:
    """Tokens of the second request that the first one's keys cover; at least one token is always computed (B01)."""
    sources = [TokenKeySource(tokens, block_hasher(algorithm), 4, extra) for extra in (first, second)]
    known = set(sources[0].keys(0, sources[0].num_blocks))
    hit = 0
    for key in sources[1].keys(0, (len(tokens) - 1) // 4):
        if key not in known:
            break
        hit += 4
    return hit


def image(content_id: Any, offset: int, num_tokens: int) -> ExtraKeys:
    return ExtraKeys(multimodal=[MultimodalItem(content_id, offset, num_tokens)])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_b04_another_image_in_the_first_block_hits_nothing(algorithm: str) -> None:
    tokens = [101, IMG, IMG, 102, 103]
    assert hit_tokens(tokens, image("A", 1, 2), image("B", 1, 2), algorithm) == 0
    assert hit_tokens(tokens, image("A", 1, 2), image("A", 1, 2), algorithm) == 4


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_b04_blocks_before_the_image_are_shared(algorithm: str) -> None:
    tokens = [*range(8), *[IMG] * 4, *range(8, 12), 99]
    assert hit_tokens(tokens, image("A", 8, 4), image("B", 8, 4), algorithm) == 8
    assert hit_tokens(tokens, image("A", 8, 4), image("A", 8, 4), algorithm) == 16


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_b04_ids_that_differ_only_before_their_last_16_bits_are_different(algorithm: str) -> None:
    tokens = [101, IMG, IMG, 102, 103]
    for first, second in [
        (0x1_ABCD, 0x2_ABCD),
        ("f" * 60 + "abcd", "e" + "f" * 59 + "abcd"),
        (b"\1" * 30 + b"\xab\xcd", b"\2" * 30 + b"\xab\xcd"),
    ]:
        assert hit_tokens(tokens, image(first, 1, 2), image(second, 1, 2), algorithm) == 0


def test_b04_the_same_image_at_another_place_is_another_block() -> None:
    tokens = [IMG, IMG, IMG, IMG, 1]
    assert hit_tokens(tokens, image("A", 0, 3), image("A", 1, 3)) == 0
    assert hit_tokens(tokens, image("A", 0, 4), image("A", 0, 5)) == 4  # the first four tokens of the same image


@pytest.mark.parametrize(
    "malformed",
    [
        image(None, 1, 2),
        image("", 1, 2),
        image("A", None, 2),
        image("A", 1, 0),
        image("A", 4, 2),
        ExtraKeys(multimodal=[{"content_id": "A"}]),  # type: ignore[list-item]
        ExtraKeys(multimodal=[], placeholder_token_ids=[IMG]),
    ],
)
def test_b04_malformed_image_metadata_closes_the_cache_to_the_request(malformed: ExtraKeys) -> None:
    tokens = [101, IMG, IMG, 102, 103]
    source = TokenKeySource(tokens, block_hasher(), 4, malformed)
    assert source.keys(0, 1) == []
    assert source.reason is not None
    assert hit_tokens(tokens, malformed, malformed) == 0
    assert hit_tokens(tokens, ExtraKeys(), malformed) == 0
