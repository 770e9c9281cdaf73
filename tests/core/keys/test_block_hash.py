"""Block hashes: what a key binds, what it does not depend on, and what is refused."""

import hashlib
import re
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvledger.core.errors import InputError
from kvledger.core.keys.block_hash import (
    ALGORITHMS,
    block_hasher,
    encode_blocks,
    key_low64,
    token_array,
)
from kvledger.core.keys.extra_keys import ExtraKeys, LoraIdentity, MultimodalItem, encode_extra_keys

INT64 = st.integers(-(1 << 63), (1 << 63) - 1)
TOKENS = st.one_of(
    st.lists(st.integers(-(1 << 31), (1 << 31) - 1)), st.lists(st.one_of(st.integers(0, 200_000), INT64))
)
DOCUMENT = Path(__file__).parents[3] / "docs" / "block_hashes.md"
SHA256 = block_hasher()


def hex_keys(*args, **kwargs) -> list[str]:
    return [key.hex() for key in SHA256.chain(*args, **kwargs)]


def documented(pattern: str) -> list[str]:
    """The hex digests of the lines of docs/block_hashes.md that match."""
    lines = [line for line in DOCUMENT.read_text().splitlines() if re.search(pattern, line)]
    return [digest for line in lines for digest in re.findall(r"\b[0-9a-f]{32,64}\b", line)]


def test_the_documented_reference_vectors_are_what_the_code_computes() -> None:
    tokens = list(range(1, 33))
    extra = ExtraKeys("tenant-a", LoraIdentity("sql", "9f2c"), [MultimodalItem("img-1", 14, 4)])
    plain, bound = hex_keys(tokens, 16), hex_keys(tokens, 16, extra_keys=extra.for_blocks(0, 2, 16))
    assert documented(r"^\| root") == [SHA256.root.hex()]
    assert documented(r"^\| tokens 1 to 16") == [plain[0], bound[0]]
    assert documented(r"^\| tokens 17 to 32") == [plain[1], bound[1]]
    assert documented(r"^\| tokens (-1|5, 6)") == hex_keys([-1, 1 << 40, 3, 4, 5, 6, 7, 8], 4)
    xxh3 = [key.hex() for key in block_hasher("xxh3").chain(tokens, 16)]
    assert documented("With `xxh3` and blocks") + documented("^`[0-9a-f]{32}`") == xxh3


def test_a_key_is_the_digest_of_the_documented_bytes() -> None:
    narrow = struct.pack("<BI3i", 0x01, 3, 7, -8, 9)
    wide = struct.pack("<BI3q", 0x02, 3, 1, 1 << 31, 2)
    with_extra = struct.pack("<BI3i", 0x11, 3, 4, 5, 6) + encode_extra_keys((("cache_salt", "s"),))
    key, expected = hashlib.sha256(b"kvledger block hash v1").digest(), []
    for payload in (narrow, wide, with_extra):
        key = hashlib.sha256(key + payload).digest()
        expected.append(key)
    tokens = [7, -8, 9, 1, 1 << 31, 2, 4, 5, 6, 99]
    assert SHA256.chain(tokens, 3, extra_keys=[None, (), (("cache_salt", "s"),)]) == expected


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_chain_continues_from_its_parent(algorithm: str) -> None:
    hasher, tokens = block_hasher(algorithm), list(range(100, 164))
    whole = hasher.chain(tokens, 16)
    assert hasher.chain(tokens[:32], 16) + hasher.chain(tokens[32:], 16, parent=whole[1]) == whole
    assert hasher.chain(tokens, 16, parent=hasher.root) == whole


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_only_complete_blocks_have_keys(algorithm: str) -> None:
    hasher = block_hasher(algorithm)
    assert [len(hasher.chain(range(n), 4)) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_keeps_different_prompts_apart(algorithm: str) -> None:
    hasher = block_hasher(algorithm)
    prompts = [[5, 100, 7, 9], [36, 99, 7, 9], [-1, 1, 1, 1], [-2, 1, 1, 1], [1 << 40, 1, 1, 1]]
    keys = [hasher.chain(prompt, 4)[0] for prompt in prompts]
    assert len(set(keys)) == len(prompts)
    assert hasher.chain([1, 2, 3, 4], 4, extra_keys=[(("cache_salt", "s"),)]) != hasher.chain([1, 2, 3, 4], 4)


@given(tokens=TOKENS, block_size=st.integers(1, 5))
def test_the_container_of_the_tokens_does_not_change_a_key(tokens: list[int], block_size: int) -> None:
    expected = SHA256.chain(tokens, block_size)
    assert SHA256.chain(tuple(tokens), block_size) == expected
    assert SHA256.chain(np.array(tokens, np.int64), block_size) == expected
    assert SHA256.chain(np.array(tokens, ">i8"), block_size) == expected
    assert SHA256.chain(np.repeat(np.array(tokens, np.int64), 2)[::2], block_size) == expected


@given(tokens=TOKENS, block_size=st.integers(1, 5))
def test_a_key_depends_on_nothing_behind_its_block(tokens: list[int], block_size: int) -> None:
    whole = SHA256.chain(tokens, block_size)
    for blocks in range(len(whole)):
        assert SHA256.chain(tokens[: blocks * block_size], block_size) == whole[:blocks]


@given(first=TOKENS, second=TOKENS, sizes=st.tuples(st.integers(1, 4), st.integers(1, 4)))
def test_equal_payloads_mean_equal_blocks(first: list[int], second: list[int], sizes: tuple[int, int]) -> None:
    def blocks(tokens: list[int], size: int) -> list[list[int]]:
        return [tokens[i : i + size] for i in range(0, len(tokens) - size + 1, size)]

    left = list(zip(encode_blocks(first, sizes[0]), blocks(first, sizes[0]), strict=True))
    right = list(zip(encode_blocks(second, sizes[1]), blocks(second, sizes[1]), strict=True))
    for payload, tokens in left:
        for other_payload, other_tokens in right:
            assert (payload == other_payload) == (tokens == other_tokens)


@pytest.mark.parametrize("token_ids", [[1.0, 2], ["1", "2"], [1 << 63, 0], [-(1 << 63) - 1, 0], [None, 1]])
def test_a_token_that_is_no_64_bit_whole_number_is_refused(token_ids: list) -> None:
    with pytest.raises(InputError, match="64 bits"):
        SHA256.chain(token_ids, 2)


def test_an_array_of_anything_but_whole_numbers_in_one_dimension_is_refused() -> None:
    with pytest.raises(InputError, match="float64"):
        token_array(np.array([1.0, 2.0]))
    with pytest.raises(InputError, match=r"\(2, 2\)"):
        token_array(np.ones((2, 2), np.int32))
    with pytest.raises(InputError, match="9223372036854775807"):
        token_array(np.array([1 << 63], np.uint64))


def test_a_block_size_below_one_and_extra_keys_for_other_blocks_are_refused() -> None:
    with pytest.raises(InputError, match="block size is 0"):
        SHA256.chain([1, 2], 0)
    for algorithm in ALGORITHMS:
        with pytest.raises(InputError, match="3 extra keys for 2 complete blocks"):
            block_hasher(algorithm).chain([1, 2, 3, 4, 5], 2, extra_keys=[None] * 3)


def test_an_unknown_algorithm_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(InputError, match="sha256, sha256_cbor, sha256_pickle, xxh3"):
        block_hasher("md5")


@pytest.mark.parametrize(("algorithm", "package"), [("sha256_cbor", "cbor2"), ("xxh3", "xxhash")])
def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, algorithm: str, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(InputError, match=f"{algorithm}.*{package}.*not installed"):
        block_hasher(algorithm)


def test_optional_packages_are_imported_only_when_chosen() -> None:
    script = (
        "import sys; from kvledger.core.keys.block_hash import block_hasher; block_hasher('sha256').chain([1, 2], 2);"
        "print(sorted({'cbor2', 'xxhash'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_a_vllm_seed_moves_vllms_root_and_is_refused_where_it_would_be_ignored() -> None:
    assert block_hasher("sha256_cbor", vllm_seed="0").root != block_hasher("sha256_cbor").root
    with pytest.raises(InputError, match="no effect on 'sha256'"):
        block_hasher("sha256", vllm_seed="0")


def test_low64_is_the_end_of_the_key() -> None:
    assert key_low64(b"\xff" * 24 + b"\0" * 6 + b"\1\2") == 258
