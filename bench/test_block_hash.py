"""Block hash chains: nanoseconds a token, beside a bare hashlib loop that is timed between the rounds of the same run.

    python -m pytest bench/test_block_hash.py --benchmark-enable --benchmark-columns=median,ops

The bare loop hashes parent + tokens and nothing else: what any chain of SHA-256 over these blocks has to spend.
`extra_info` (--benchmark-json) holds ns_per_token, and ratio_to_bare_loop for the default algorithm.
"""

import hashlib
import statistics
import struct
import time

import numpy as np
import pytest
from kvledger.core.keys.block_hash import ALGORITHMS, block_hasher
from kvledger.core.keys.token_keys import TokenKeySource

NUM_TOKENS = 1 << 16
ROUNDS = 15
LARGEST_RATIO = 1.15
BLOCK_SIZES = (16, 64, 512)
SHA256 = block_hasher()


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 150_000, NUM_TOKENS).astype(np.int32)


def bare_hashlib_loop(buffer: bytes, block_bytes: int) -> list[bytes]:
    parent, keys = bytes(32), []
    for start in range(0, len(buffer), block_bytes):
        parent = hashlib.sha256(parent + buffer[start : start + block_bytes]).digest()
        keys.append(parent)
    return keys


def documented_chain(tokens: np.ndarray, block_size: int) -> list[bytes]:
    """The encoding of docs/block_hashes.md, spelled out."""
    key, keys, header = SHA256.root, [], struct.pack("<BI", 1, block_size)
    for block in tokens.reshape(-1, block_size):
        key = hashlib.sha256(key + header + block.astype("<i4").tobytes()).digest()
        keys.append(key)
    return keys


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_sha256_chain_against_a_bare_hashlib_loop(benchmark, tokens: np.ndarray, block_size: int) -> None:
    buffer, bare_seconds = tokens.tobytes(), []

    def time_the_bare_loop() -> None:
        start = time.perf_counter()
        bare_hashlib_loop(buffer, 4 * block_size)
        bare_seconds.append(time.perf_counter() - start)

    keys = benchmark.pedantic(
        SHA256.chain, args=(tokens, block_size), setup=time_the_bare_loop, rounds=ROUNDS, warmup_rounds=1
    )
    assert keys == documented_chain(tokens, block_size)
    if benchmark.enabled:
        seconds, bare = benchmark.stats.stats.median, statistics.median(bare_seconds)
        benchmark.extra_info["ns_per_token"] = round(seconds / NUM_TOKENS * 1e9, 2)
        benchmark.extra_info["bare_loop_ns_per_token"] = round(bare / NUM_TOKENS * 1e9, 2)
        benchmark.extra_info["ratio_to_bare_loop"] = round(seconds / bare, 3)
        assert seconds / bare <= LARGEST_RATIO, benchmark.extra_info


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_chain(benchmark, tokens: np.ndarray, algorithm: str, block_size: int) -> None:
    benchmark.group = f"chain, blocks of {block_size}"
    hasher = block_hasher(algorithm)
    keys = benchmark(hasher.chain, tokens, block_size)
    assert len(set(keys)) == NUM_TOKENS // block_size
    assert keys[-1:] == hasher.chain(tokens[-block_size:], block_size, parent=keys[-2])
    if benchmark.enabled:
        benchmark.extra_info["ns_per_token"] = round(benchmark.stats.stats.median / NUM_TOKENS * 1e9, 2)


def test_chain_of_a_list_of_ints(benchmark, tokens: np.ndarray) -> None:
    assert benchmark(SHA256.chain, tokens.tolist(), 16) == documented_chain(tokens, 16)


def test_decoding_a_thousand_tokens(benchmark, tokens: np.ndarray) -> None:
    prompt, outputs = tokens[:1024], tokens[1024:2048].tolist()

    def decode() -> list[bytes]:
        source = TokenKeySource(prompt, SHA256, 16)
        keys = source.keys(0, source.num_blocks)
        for token in outputs:
            source.append((token,))
            if source.num_blocks > len(keys):
                keys += source.keys(len(keys), source.num_blocks)
        return keys

    assert benchmark(decode) == documented_chain(tokens[:2048], 16)
