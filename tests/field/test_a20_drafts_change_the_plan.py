"""A20: drafts change the pool and the block size, and the answer says how they are made."""

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
