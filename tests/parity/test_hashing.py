"""vLLM's block hash chains, digest for digest: one test per line of hashing.jsonl."""

import json
from typing import Any

import pytest
from kvledger.core.keys.block_hash import block_hasher, key_low64

from tests.parity.golden import golden_dir

# vLLM calls its pickle chain sha256; here that name belongs to the portable default.
OUR_NAME = {"sha256": "sha256_pickle", "sha256_cbor": "sha256_cbor"}


def _cases() -> list[dict[str, Any]]:
    """The lines of the file; each chain learns the seed of the none_hash line above it."""
    path = golden_dir() / "hashing.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    cases, seed = [], None
    for line in lines:
        case = json.loads(line)
        seed = case.setdefault("seed", seed)
        cases.append(case)
    return cases


def _as_tuples(value: Any) -> Any:
    return tuple(_as_tuples(item) for item in value) if isinstance(value, list) else value


def _name(case: dict[str, Any]) -> str:
    return f"{case['algo']}-{case['what']}-{case.get('block_size', '')}-{len(case.get('tokens', ()))}"


NONE_HASHES = [case for case in _cases() if case["what"] == "none_hash"]
CHAINS = [case for case in _cases() if case["what"] == "chain"]


@pytest.mark.parametrize("case", NONE_HASHES, ids=_name)
def test_hashing_root_is_vllms_none_hash(case: dict[str, Any]) -> None:
    assert block_hasher(OUR_NAME[case["algo"]], vllm_seed=case["seed"]).root.hex() == case["hex"]


@pytest.mark.parametrize("case", CHAINS, ids=_name)
def test_hashing_chain_is_vllms(case: dict[str, Any]) -> None:
    hasher = block_hasher(OUR_NAME[case["algo"]], vllm_seed=case["seed"])
    keys = hasher.chain(case["tokens"], case["block_size"], extra_keys=_as_tuples(case["extra_keys"]))
    assert [key.hex() for key in keys] == case["hex"]
    assert [key_low64(key) for key in keys] == case["low64"]
    assert (keys[0] + (1).to_bytes(4, "big")).hex() == case["with_group_1_hex"]
