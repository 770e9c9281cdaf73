"""B06: what differs has different keys, in particular the inputs at which weaker schemes were seen to collide."""

import pytest
from kvledger.core.keys.block_hash import ALGORITHMS, block_hasher

DISTINCT = {
    "a +31/-1 step between neighbours": ([5, 100, 7, 9], [36, 99, 7, 9]),
    "digits joined across tokens": ([1, 23], [12, 3]),
    "Python's hash(-1) == hash(-2)": ([-1], [-2]),
    "Python's hash modulus": ([17], [17 + 2**61 - 1]),
    "the low 32 bits": ([1, 2], [1 + 2**32, 2]),
    "two int32 in one int64": ([1, 0], [1]),
}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("name", DISTINCT)
def test_b06_known_collisions_of_weaker_schemes_are_distinct(algorithm: str, name: str) -> None:
    hasher = block_hasher(algorithm)
    first, second = DISTINCT[name]
    assert hasher.chain(first, len(first)) != hasher.chain(second, len(second))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_b06_the_same_tokens_under_different_parents_are_distinct(algorithm: str) -> None:
    hasher = block_hasher(algorithm)
    block = [1, 2, 3, 4]
    parents = [None, *hasher.chain([9, 9, 9, 9, 8, 8, 8, 8], 4)]
    assert len({hasher.chain(block, 4, parent=parent)[0] for parent in parents}) == 3


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_b06_the_same_32_tokens_in_blocks_of_16_and_32_are_distinct(algorithm: str) -> None:
    hasher, tokens = block_hasher(algorithm), list(range(32))
    assert hasher.chain(tokens, 16)[-1] != hasher.chain(tokens, 32)[-1]


def test_b06_the_default_is_cryptographic() -> None:
    assert block_hasher().name == "sha256"
    assert len(block_hasher().chain([1], 1)[0]) == 32
