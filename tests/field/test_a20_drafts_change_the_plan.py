"""A20 and D08: drafts change the pool, the block size and the hit rate, and the answer says how they are made."""

import json

import pytest
from kvledger.core import InputError
from kvledger.core.models.drafts import drafts_for
from kvledger.core.models.geometry import builtin_geometry
from kvledger.sim import Scenario


def planned(model: str, **options):
    return Scenario(model=model, gpu="H200", kv_cache_dtype="fp8", **options).plan()


@pytest.mark.parametrize(
    "model, options, block_size",
    [
        ("qwen3.6-35b-a3b", {}, 2096),
        ("qwen3.6-35b-a3b", {"num_speculative_tokens": 3}, 2144),
        ("qwen3.6-35b-a3b", {"num_speculative_tokens": 3, "speculative_method": "ngram"}, 2144),
        ("qwen3.6-27b", {"tensor_parallel_size": 2}, 1568),
        ("qwen3.6-27b", {"tensor_parallel_size": 2, "num_speculative_tokens": 3}, 1600),
        ("qwen3.6-27b", {"tensor_parallel_size": 2, "num_speculative_tokens": 7}, 1648),
    ],
)
def test_a20_a_convolution_keeps_an_input_for_each_draft(model: str, options: dict, block_size: int) -> None:
    document = planned(model, **options).to_dict()
    assert document["scheduler_block_size"] == block_size
    said = [sentence for sentence in document["assumptions"] if "draft tokens a step" in sentence]
    assert len(said) == ("num_speculative_tokens" in options)


def test_a20_draft_layers_take_memory_and_their_weights_too() -> None:
    plain, drafted = planned("llama-3.1-8b").to_dict(), planned("llama-3.1-8b", num_speculative_tokens=3).to_dict()
    assert drafted["bytes_per_block"] * 32 == plain["bytes_per_block"] * 33
    assert drafted["num_gpu_blocks"] < plain["num_gpu_blocks"] * 32 / 33
    ngram = planned("llama-3.1-8b", num_speculative_tokens=3, speculative_method="ngram").to_dict()
    assert ngram["num_gpu_blocks"] == plain["num_gpu_blocks"]
    model = planned("llama-3.1-70b", tensor_parallel_size=4, num_speculative_tokens=3, draft_model="llama-3.1-8b")
    per_token = model.to_dict()["bytes_per_block"] / 16
    assert per_token == (80 * 2 + 32 * 2) * 2 * 128  # on each rank 2 heads of either model, K and V, one byte


@pytest.mark.parametrize(
    "num_tokens, how, message",
    [
        (0, {"method": "ngram"}, "give num_speculative_tokens too"),
        (3, {"method": "oracle"}, "must be one of mtp, eagle, draft_model, ngram"),
        (3, {"method": "draft_model"}, "go together"),
        (3, {"method": "ngram", "num_layers": 2}, "num_draft_layers 2 has no effect on speculative_method 'ngram'"),
    ],
)
def test_a20_contradictions_are_refused(num_tokens: int, how: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        drafts_for(builtin_geometry("llama-3.1-8b"), num_tokens, **how)


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
