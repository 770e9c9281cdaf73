"""D08: EAGLE and MTP give the last block of a hit back; n-grams do not. The report says what that costs."""

import json

import pytest
from kvledger.sim import Scenario


@pytest.fixture
def repeated(tmp_path):
    """Two equal requests of 11,292 tokens, a minute apart, in blocks of 16."""
    rows = [
        {"timestamp": at, "input_length": 11_292, "output_length": 1, "hash_ids": list(range(706))}
        for at in (0, 60_000)
    ]
    path = tmp_path / "repeat_11292.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


@pytest.mark.parametrize(
    "method, hit_tokens, dropped_tokens",
    [(None, 8576, 2144), ("mtp", 8576, 2144), ("eagle", 8576, 2144), ("ngram", 10_720, 0), ("none", 10_480, 0)],
)
def test_d08_the_block_that_drafts_give_back(repeated, method, hit_tokens: int, dropped_tokens: int) -> None:
    drafts = {"num_speculative_tokens": 3, "draft_acceptance_rate": 0.7, "speculative_method": method}
    scenario = Scenario(
        trace=(repeated,),
        trace_block_size=16,
        model="qwen3.6-35b-a3b",
        gpu="H200",
        kv_cache_dtype="fp8",
        **({} if method == "none" else drafts),
    )
    report = scenario.replay().to_dict()
    assert report["prefix_cache"]["hits_tokens"] == hit_tokens
    assert report["prefix_cache"]["dropped_for_drafts_tokens"] == dropped_tokens
    assert ("drafts" in report["assumptions"]) == (method != "none")


@pytest.mark.parametrize(("method", "hit_tokens"), [("eagle", 10_720), ("mtp", 10_720), ("ngram", 10_720)])
def test_d08_from_vllm_0_33_on_keys_look_ahead_and_no_block_is_given_back(repeated, method, hit_tokens: int) -> None:
    scenario = Scenario(
        trace=(repeated,),
        trace_block_size=16,
        model="qwen3.6-35b-a3b",
        gpu="H200",
        kv_cache_dtype="fp8",
        num_speculative_tokens=3,
        draft_acceptance_rate=0.7,
        speculative_method=method,
        engine_version="0.33",
    )
    report = scenario.replay().to_dict()
    assert report["prefix_cache"]["hits_tokens"] == hit_tokens
    assert report["prefix_cache"]["dropped_for_drafts_tokens"] == 0
    assert report["assumptions"]["rules_of"] == "vLLM 0.33"


def test_d08_without_a_model_the_method_counts_too(repeated) -> None:
    hits = {}
    for method in ("eagle", "ngram"):
        scenario = Scenario(
            trace=(repeated,),
            trace_block_size=16,
            num_gpu_blocks_override=2000,
            num_speculative_tokens=3,
            draft_acceptance_rate=0.7,
            speculative_method=method,
        )
        hits[method] = scenario.replay().to_dict()["prefix_cache"]["hits_tokens"]
    assert hits == {"eagle": 11_280 - 16, "ngram": 11_280}
