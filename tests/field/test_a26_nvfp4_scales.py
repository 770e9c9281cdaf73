"""A26: nvfp4 stores head / 2 bytes of elements and one scale for every 16 of them, rounded up, and says so."""

from typing import Any

import pytest
from kvledger.core.models.geometry import builtin_geometry, cache_notes, geometry_from_config
from kvledger.sim import Scenario


def with_heads(head_size: int) -> Any:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "dtype": "bfloat16",
        "num_hidden_layers": 2,
        "hidden_size": 4 * head_size,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "vocab_size": 100,
    }
    return geometry_from_config(config, "x")


def test_a26_72_bytes_a_head_and_side() -> None:
    assert builtin_geometry("qwen3-8b").sequence_bytes(1, "nvfp4").total == 36 * 8 * 2 * 72 == 41_472


@pytest.mark.parametrize("kv_cache_dtype", ["nvfp4", "nvfp4_4over6"])
def test_a26_an_odd_16th_is_rounded_up_and_said(kv_cache_dtype: str) -> None:
    geometry = with_heads(120)
    assert geometry.sequence_bytes(1, kv_cache_dtype).total == 2 * 2 * 2 * (60 + 8)
    (note,) = cache_notes(geometry, kv_cache_dtype, kv_cache_dtype)
    assert "120 elements are 7.5 groups of 16, so 8 scales are counted" in note


def test_a26_a_head_of_whole_16ths_needs_no_note() -> None:
    assert cache_notes(with_heads(128), "nvfp4", "nvfp4") == ()


def test_a26_the_plan_says_it(tmp_path: Any) -> None:
    import json

    config = dict(with_heads(120).fields.values)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**config, "architectures": ["LlamaForCausalLM"]}))
    asked = Scenario(model=str(path), gpu="L4", kv_cache_dtype="nvfp4", max_model_len=1024)
    assert any("7.5 groups of 16" in sentence for sentence in asked.plan().to_dict()["assumptions"])
