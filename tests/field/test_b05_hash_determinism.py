"""B05: every process, hash seed and Python version computes the same keys, so caches of several processes agree."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from kvledger.core.keys.block_hash import block_hasher
from kvledger.core.keys.extra_keys import ExtraKeys
from kvledger.core.keys.token_keys import TokenKeySource

TOKENS = list(range(1, 33))
REFERENCE = [  # docs/block_hashes.md
    "0e69c087d941e55624cf3afee7f630469696931dcd225fdb3c89c4e7c42e527b",
    "7b693a999a9653c37e270a4e85d5a73e0aa7124aa21600d117de40d589ad7877",
]

LIBRARY_SCRIPT = """
from kvledger.core.keys.block_hash import ALGORITHMS, block_hasher
from kvledger.core.keys.extra_keys import ExtraKeys, LoraIdentity, MultimodalItem
extra = ExtraKeys("salt", LoraIdentity("x", "v1"), [MultimodalItem("a", 3, 20), MultimodalItem("b", 25, 2)])
for algorithm in ALGORITHMS:
    for keys in (None, extra.for_blocks(0, 2, 16)):
        print(algorithm, [key.hex() for key in block_hasher(algorithm).chain(list(range(1, 33)), 16, extra_keys=keys)])
"""

# The documented encoding, written a second time with nothing but the standard library, for any Python there is.
STDLIB_SCRIPT = """
import hashlib, struct

def keys(tokens, block_size):
    key = hashlib.sha256(b"kvledger block hash v1").digest()
    for start in range(0, len(tokens) - block_size + 1, block_size):
        block = tokens[start:start + block_size]
        fits = all(-2**31 <= token < 2**31 for token in block)
        domain, kind = (1, "i") if fits else (2, "q")
        key = hashlib.sha256(key + struct.pack("<BI%d%s" % (block_size, kind), domain, block_size, *block)).digest()
        yield key.hex()

print(list(keys(list(range(1, 33)), 16)))
print(list(keys([-1, 2**40, 3, 4, 5, 6, 7, 8, 2**31 - 1, -2**31, 0, 1, 2**31, 0, 0, 0], 4)))
"""
WIDE_TOKENS = [-1, 2**40, 3, 4, 5, 6, 7, 8, 2**31 - 1, -(2**31), 0, 1, 2**31, 0, 0, 0]


def run(script: str, interpreter: str, hash_seed: str | None) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    if hash_seed is not None:
        environment["PYTHONHASHSEED"] = hash_seed
    command = [interpreter, "-c", script]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


def other_python_versions() -> list[str]:
    """Interpreters on PATH, and beside the one that runs, that work and whose version is another one."""
    beside = Path(sys.base_prefix).parent.glob("*/bin")  # how version managers keep them
    path = os.pathsep.join([*map(str, sorted(beside)), os.environ.get("PATH", "")])
    names = [f"python3.{minor}" for minor in range(8, 20) if minor != sys.version_info.minor]
    found = [interpreter for name in names if (interpreter := shutil.which(name, path=path))]
    return [
        interpreter for interpreter in found if subprocess.run([interpreter, "-c", ""], check=False).returncode == 0
    ]


def library_keys() -> str:
    chains = [block_hasher().chain(tokens, size) for tokens, size in ((TOKENS, 16), (WIDE_TOKENS, 4))]
    return "".join(f"{[key.hex() for key in chain]}\n" for chain in chains)


def test_b05_the_published_reference_vector_holds() -> None:
    assert [key.hex() for key in block_hasher().chain(TOKENS, 16)] == REFERENCE


def test_b05_three_processes_with_different_hash_seeds_agree() -> None:
    unset, zero, other = (run(LIBRARY_SCRIPT, sys.executable, seed) for seed in (None, "0", "12345"))
    assert unset == zero == other
    assert all(digest in unset for digest in REFERENCE)


def test_b05_the_documented_encoding_needs_only_the_standard_library() -> None:
    assert run(STDLIB_SCRIPT, sys.executable, None) == library_keys()


def test_b05_other_versions_of_python_agree() -> None:
    interpreters = other_python_versions()
    if not interpreters:
        pytest.skip(f"no Python other than 3.{sys.version_info.minor} on PATH")
    for interpreter in interpreters:
        assert run(STDLIB_SCRIPT, interpreter, "12345") == library_keys(), interpreter


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor", "sha256_pickle", "xxh3"])
def test_b05_none_an_empty_tuple_and_nothing_are_the_same_extra_keys(algorithm: str) -> None:
    hasher = block_hasher(algorithm)
    absent = hasher.chain(TOKENS, 16)
    assert hasher.chain(TOKENS, 16, extra_keys=None) == absent
    assert hasher.chain(TOKENS, 16, extra_keys=[None, ()]) == absent
    assert TokenKeySource(TOKENS, hasher, 16, ExtraKeys(None, None, ())).keys(0, 2) == absent
