"""A23: every cache dtype of today's servers has its bytes, and an unknown one is refused with the known ones."""

import pytest
from kvledger.core import InputError
from kvledger.core.models.geometry import builtin_geometry, geometry_from_config
from kvledger.core.planner.cache_dtype import known_cache_dtypes
from kvledger.sim import Scenario

QWEN = builtin_geometry("qwen3-8b")  # 36 layers, 8 KV heads x 128
BYTES_PER_HEAD = {
    "auto": 512,
    "float16": 512,
    "bfloat16": 512,
    "fp8": 256,
    "fp8_e4m3": 256,
    "fp8_e5m2": 256,
    "fp8_inc": 256,
    "int8_per_token_head": 264,
    "fp8_per_token_head": 264,
    "int4_per_token_head": 136,
    "nvfp4": 144,
    "nvfp4_4over6": 144,
    "ultraquant_4bit": 136,
    "turboquant_k8v4": 196,
    "turboquant_4bit_nc": 134,
    "turboquant_k3v4_nc": 118,
    "turboquant_3bit_nc": 102,
}


@pytest.mark.parametrize("kv_cache_dtype", BYTES_PER_HEAD)
def test_a23_bytes_of_a_token(kv_cache_dtype: str) -> None:
    expected = 36 * 8 * BYTES_PER_HEAD[kv_cache_dtype]
    assert QWEN.sequence_bytes(1, kv_cache_dtype).total == expected
    document = Scenario(model="qwen3-8b", gpu="H100", kv_cache_dtype=kv_cache_dtype).plan().to_dict()
    assert document["bytes_per_block"] == 16 * expected


def test_a23_the_values_of_the_report() -> None:
    found = {name: QWEN.sequence_bytes(1, name).total for name in BYTES_PER_HEAD}
    assert found["nvfp4"] == 41_472
    assert found["int8_per_token_head"] == 76_032
    turboquant = [found[f"turboquant_{name}"] for name in ("k8v4", "4bit_nc", "k3v4_nc", "3bit_nc")]
    assert turboquant == [56_448, 38_592, 33_984, 29_376]


def test_a23_every_name_of_the_server_is_known() -> None:
    assert {*BYTES_PER_HEAD, "fp8_ds_mla", "nvfp4_ds_mla"} <= set(known_cache_dtypes())


def test_a23_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InputError, match=r"'fp7' is not a KV-cache dtype; known are auto.*turboquant_3bit_nc.*int8"):
        Scenario(model="qwen3-8b", gpu="H100", kv_cache_dtype="fp7").plan()


def test_a23_a_slot_of_packed_keys_and_values_has_an_even_size() -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "dtype": "bfloat16",
        "num_hidden_layers": 1,
        "hidden_size": 72,
        "num_attention_heads": 1,
        "intermediate_size": 8,
        "vocab_size": 8,
        "head_dim": 72,
    }
    # 27 + 2 for the key and 36 + 4 for the value, and one to an even number
    assert geometry_from_config(config, "x").sequence_bytes(1, "turboquant_k3v4_nc").total == 70


def test_a23_layers_that_the_server_does_not_pack_are_said() -> None:
    def warnings(model: str, dtype: str) -> list[str]:
        return list(Scenario(model=model, gpu="H100", kv_cache_dtype=dtype).plan().warnings)

    (said,) = [text for text in warnings("qwen3-8b", "turboquant_k8v4") if "in all 36 layers" in text]
    assert "layers 0, 1, 34, 35 in bf16, which are 10,112 B a token more" in said  # 4 x 8 x (512 - 196)
    assert not any("in all" in text for text in warnings("qwen3-8b", "nvfp4"))
    assert not any("in all" in text for text in warnings("qwen3.5-9b", "turboquant_k8v4"))


def test_a23_a_format_of_heads_is_no_format_of_latents() -> None:
    with pytest.raises(InputError, match="packs the keys and values of heads, and deepseek-v3 stores latents"):
        builtin_geometry("deepseek-v3").sequence_bytes(1, "turboquant_k8v4")
