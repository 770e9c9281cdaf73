"""Configs whose architecture is not known by name: read by their fields where those say everything, else refused."""

from typing import Any

import pytest
from kvledger.core.errors import InputError
from kvledger.core.models.geometry import geometry_from_config
from kvledger.core.models.weights import WeightKind, scheme_from_config

PLAIN: dict[str, Any] = {
    "dtype": "bfloat16",
    "num_hidden_layers": 4,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "intermediate_size": 4096,
    "vocab_size": 32_000,
}
OLD = {name: value for name, value in PLAIN.items() if name not in ("num_hidden_layers", "num_key_value_heads")}
FULL, WINDOW = "4 heads x (64 + 64) x 2 B (bf16)", ", at most 128 tokens"


def stored(architecture: str, **config: Any) -> tuple[str, ...]:
    geometry = geometry_from_config({**config, "architectures": [architecture]}, "x")
    assert architecture in " ".join(geometry.warnings)
    return geometry.bytes_per_token_formula("auto")


@pytest.mark.parametrize(
    ("architecture", "config", "expected"),
    [
        ("Olmo2ForCausalLM", PLAIN, f"4 layers x {FULL}"),
        ("GraniteForCausalLM", {**PLAIN, "sliding_window": None}, f"4 layers x {FULL}"),
        ("ExaoneForCausalLM", {**OLD, "num_layers": 4, "num_key_value_heads": 4}, f"4 layers x {FULL}"),
        (
            "Exaone4ForCausalLM",
            {**PLAIN, "sliding_window": 128, "sliding_window_pattern": "LLLG"},
            f"3 layers x {FULL}{WINDOW}; 1 layers x {FULL}",
        ),
        (
            "AfmoeForCausalLM",
            {**PLAIN, "sliding_window": 128, "global_attn_every_n_layers": 2},
            f"2 layers x {FULL}{WINDOW}; 2 layers x {FULL}",
        ),
        (
            "AfmoeForCausalLM",
            {
                **PLAIN,
                "sliding_window": 128,
                "global_attn_every_n_layers": 4,
                "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
            },
            f"3 layers x {FULL}{WINDOW}; 1 layers x {FULL}",
        ),
        ("SeedOssForCausalLM", {**PLAIN, "head_dim": 128}, "4 layers x 4 heads x (128 + 128) x 2 B (bf16)"),
        (
            "ChatGLMModel",
            {**OLD, "num_layers": 4, "multi_query_attention": True, "multi_query_group_num": 2, "kv_channels": 128},
            "4 layers x 2 heads x (128 + 128) x 2 B (bf16)",
        ),
        (
            "FalconForCausalLM",
            {**OLD, "n_layer": 4, "multi_query": True, "num_kv_heads": 16, "new_decoder_architecture": False},
            "4 layers x 1 heads x (64 + 64) x 2 B (bf16)",
        ),
        (
            "FalconForCausalLM",
            {**OLD, "n_layer": 4, "multi_query": True, "num_kv_heads": 8, "new_decoder_architecture": True},
            "4 layers x 8 heads x (64 + 64) x 2 B (bf16)",
        ),
        (
            "DbrxForCausalLM",
            {"dtype": "bfloat16", "n_layers": 4, "d_model": 1024, "n_heads": 16, "attn_config": {"kv_n_heads": 4}},
            f"4 layers x {FULL}",
        ),
        ("HunYuanDenseV1ForCausalLM", {**PLAIN, "use_cla": False, "cla_share_factor": 2}, f"4 layers x {FULL}"),
        ("BloomForCausalLM", {**OLD, "n_layer": 4}, "4 layers x 16 heads x (64 + 64) x 2 B (bf16)"),
        (
            "Glm4MoeLiteForCausalLM",
            {**PLAIN, "kv_lora_rank": 512, "qk_rope_head_dim": 64},
            "4 layers x 1 x 576 x 2 B (bf16)",
        ),
    ],
)
def test_ordinary_keys_and_values_are_read_by_their_fields(architecture: str, config: dict[str, Any], expected: str):
    assert "; ".join(stored(architecture, **config)) == expected


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"mamba_d_state": 16}, "mamba_d_state 16"),
        ({"linear_attn_config": {"a": 1}, "linear_num_key_heads": 4}, "linear_num_key_heads 4"),
        ({"num_kv_shared_layers": 2}, "num_kv_shared_layers 2"),
        ({"layer_types": ["full_attention", "mamba", "full_attention", "mamba"]}, r"layer_types\[1\] is 'mamba'"),
        ({"layer_types": ["sliding_attention"] * 4}, "missing sliding_window"),
        ({"num_kv_heads": 8}, "contradict each other"),
        ({"attention_other_setting": {"head_dim": 128}}, "attention_other_setting {...}"),
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64, "layer_group_size": 8}, "layer_group_size 8"),
        ({"num_attention_heads": 7}, "no multiple of 7 heads"),
    ],
)
def test_what_the_fields_do_not_say_is_refused_by_name(config: dict[str, Any], named: str):
    with pytest.raises(InputError, match=rf"'QuaggaForCausalLM' is not known by name.*{named}.*by hand"):
        geometry_from_config({**PLAIN, **config, "architectures": ["QuaggaForCausalLM"]}, "x")


@pytest.mark.parametrize(
    ("section", "decoder", "reader"),
    [
        ("llm_config", {**PLAIN, "architectures": ["Qwen3ForCausalLM"]}, "Qwen3"),
        ("text_config", {**PLAIN, "model_type": "mistral"}, "Mistral"),
        ("text_config", {**PLAIN, "model_type": "qwen3_moe_text"}, "Qwen3Moe"),
        ("language_config", {**PLAIN, "model_type": "quagga"}, "ByFields"),
    ],
)
def test_a_decoder_beside_encoders_is_found_by_its_own_name(section: str, decoder: dict[str, Any], reader: str):
    config = {"architectures": ["InternVLChatModel"], section: decoder, "vision_config": {}}
    geometry = geometry_from_config(config, "x")
    assert geometry.reader.__name__ == reader
    assert geometry.left_out == ("vision encoder and projector",)


def test_experts_are_counted_under_the_names_that_are_in_use():
    dense = geometry_from_config({**PLAIN, "architectures": ["QuaggaForCausalLM"]}, "x").parameters
    sparse = {"n_routed_experts": 8, "moe_intermediate_size": 512, "num_experts_per_tok": 2, "n_shared_experts": 1}
    config = {**PLAIN, **sparse, "first_k_dense_replace": 1, "architectures": ["Glm4MoeForCausalLM"]}
    matrix = 1024 * 512
    per_layer = 8 * 3 * matrix + 1024 * 8 + 3 * matrix - 3 * 1024 * 4096
    assert geometry_from_config(config, "x").parameters == dense + 3 * per_layer


def test_layers_of_step_3_have_heads_of_their_own():
    config = {**PLAIN, "num_attention_groups": 8, "sliding_window": 128, "layer_types": ["full_attention"] * 2}
    del config["num_key_value_heads"]
    config["layer_types"] += ["sliding_attention"] * 2
    config["attention_other_setting"] = {
        "attention_type": "sliding_attention",
        "num_attention_heads": 24,
        "num_attention_groups": 4,
        "head_dim": 128,
    }
    geometry = geometry_from_config({"architectures": ["Step3p7ForConditionalGeneration"], "text_config": config}, "x")
    assert geometry.bytes_per_token_formula("auto") == (
        "2 layers x 8 heads x (64 + 64) x 2 B (bf16)",
        "2 layers x 4 heads x (128 + 128) x 2 B (bf16), at most 128 tokens",
    )


@pytest.mark.parametrize(
    ("algorithm", "bits"), [("FP8", 8), ("FP8_PB_WO", 8 + 32 / 128**2), ("NVFP4", 4.5), ("MXFP8", 8.25)]
)
def test_every_algorithm_of_modelopt_has_its_bits(algorithm: str, bits: float):
    for config in ({"quant_algo": algorithm}, {"quantization": {"quant_algo": algorithm}}):
        scheme = scheme_from_config({"quant_method": "modelopt", **config}, "here")
        assert float(scheme.bits + scheme.scale_bits) == bits


def test_mixed_precision_counts_experts_apart():
    layers = {
        f"model.layers.{index}.{part}": {"quant_algo": algorithm}
        for index in range(3)
        for part, algorithm in (("self_attn.q_proj", "FP8"), ("mlp.experts.0.up_proj", "NVFP4"))
    }
    config = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    scheme = scheme_from_config(config, "here")
    assert scheme.kinds == {WeightKind.ATTENTION, WeightKind.EXPERT}
    assert (scheme.bits, scheme.scale_bits) == (8, 0)
    assert scheme.expert_bits == 4
    assert scheme.expert_scale_bits == 0.5
    with pytest.raises(InputError, match="without quantized_layers"):
        scheme_from_config({**config, "quantized_layers": {}}, "here")
    with pytest.raises(InputError, match="quant_algo is 'INT3'"):
        scheme_from_config({"quant_method": "modelopt", "quant_algo": "INT3"}, "here")


MAMBA = {"mamba_n_heads": 32, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 128, "mamba_d_conv": 4}


@pytest.mark.parametrize(
    ("architecture", "config", "attention", "states"),
    [
        ("GraniteMoeHybridForCausalLM", {"layer_types": ["mamba", "mamba", "attention", "mamba"]}, 1, 3),
        ("FalconH1ForCausalLM", {}, 4, 4),
    ],
)
def test_mamba_2_keeps_a_state_instead_of_attention_or_beside_it(
    architecture: str, config: dict[str, Any], attention: int, states: int
):
    """Shapes of `mamba2_state_shape` of vLLM 0.32: 3 inputs of 2,048 + 2 x 128 channels, and 32 x 64 x 128, in bf16."""
    geometry = geometry_from_config({**PLAIN, **MAMBA, **config, "architectures": [architecture]}, "x")
    found = geometry.sequence_bytes(1, "auto")
    assert found.kv == attention * 4 * 128 * 2
    assert found.state == states * 2 * (3 * (2_048 + 256) + 32 * 64 * 128)
    assert geometry.warnings == ()
    assert geometry.parameters > 0


def test_a_granite_hybrid_with_a_count_of_no_experts_is_dense():
    dense = {"num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 4_096}
    config = {**PLAIN, **MAMBA, "architectures": ["GraniteMoeHybridForCausalLM"], "layer_types": ["mamba"] * 4}
    with_it, without = (geometry_from_config({**config, **more}, "x") for more in (dense, {"intermediate_size": 4_096}))
    assert with_it.parameters == without.parameters > 0


def test_jamba_has_mamba_1_in_all_layers_but_one_in_so_many():
    config = {**PLAIN, "attn_layer_period": 4, "attn_layer_offset": 2, "mamba_d_state": 16, "mamba_d_conv": 4}
    geometry = geometry_from_config({**config, "architectures": ["JambaForCausalLM"]}, "x")
    found = geometry.sequence_bytes(1, "auto")
    assert found.kv == 4 * 128 * 2
    assert found.state == 3 * 2 * 2_048 * (3 + 16)  # `mamba1_state_shape` of vLLM 0.32
    assert geometry.parameters > 0


def test_longcat_has_two_latents_in_every_layer():
    config = {**PLAIN, "num_layers": 4, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    geometry = geometry_from_config({**config, "architectures": ["LongcatFlashForCausalLM"]}, "x")
    assert geometry.sequence_bytes(1, "auto").kv == 4 * 2 * 576 * 2
    assert len(geometry.layer_specs(16, "auto")) == 8


def test_the_last_layers_of_gemma_3n_read_an_earlier_cache():
    types = ["sliding_attention", "full_attention"] * 2
    config = {**PLAIN, "layer_types": types, "sliding_window": 128, "num_kv_shared_layers": 2, "head_dim": 64}
    geometry = geometry_from_config({**config, "architectures": ["Gemma3nForCausalLM"]}, "x")
    assert geometry.bytes_per_token_formula("auto") == (f"1 layers x {FULL}{WINDOW}", f"1 layers x {FULL}")
    with pytest.raises(InputError, match=r"parameters of Gemma 3n are not known here.*weights_bytes"):
        _ = geometry.parameters


def test_a_model_without_a_gate_has_two_matrices_in_its_mlp():
    gated, plain = (
        geometry_from_config({**PLAIN, "hidden_act": act, "architectures": ["NemotronForCausalLM"]}, "x").parameters
        for act in ("silu", "relu2")
    )
    assert gated - plain == 4 * (1024 * 4096 - (1024 + 4096))


def test_numbers_of_experts_may_be_listed_layer_by_layer():
    single = {"num_experts": 8, "moe_intermediate_size": 512, "moe_topk": 2, "num_shared_expert": 1}
    listed = {name: [value] * 4 for name, value in single.items() if name != "num_experts"}
    counts = [
        geometry_from_config({**PLAIN, **config, "architectures": ["HunYuanMoEV1ForCausalLM"]}, "x").parameters
        for config in (single, {**single, **listed})
    ]
    assert counts[0] == counts[1]


def test_a_model_with_latents_and_no_experts_has_dense_layers():
    latents = {"kv_lora_rank": 256, "q_lora_rank": 768, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32}
    config = {**PLAIN, **latents, "v_head_dim": 64, "architectures": ["MiniCPM3ForCausalLM"]}
    geometry = geometry_from_config(config, "x")
    groups = [group for layer in geometry.weights.layers for group in layer if group.name == "down_proj"]
    assert [group.parameters for group in groups] == [1024 * 4096] * 4


@pytest.mark.parametrize(
    ("architecture", "config", "state"),
    [
        ("MambaForCausalLM", {"intermediate_size": 2048, "state_size": 16, "time_step_rank": 64}, 2_048 * (3 + 16)),
        (
            "Mamba2ForCausalLM",
            {"num_heads": 32, "head_dim": 64, "n_groups": 1, "state_size": 128},
            3 * (2_048 + 256) + 32 * 64 * 128,
        ),
    ],
)
def test_models_of_states_alone_are_planned(architecture: str, config: dict[str, Any], state: int):
    sizes = {name: PLAIN[name] for name in ("dtype", "num_hidden_layers", "hidden_size", "vocab_size")}
    geometry = geometry_from_config({**sizes, **config, "conv_kernel": 4, "architectures": [architecture]}, "x")
    found = geometry.sequence_bytes(1_000, "auto")
    assert (found.kv, found.state) == (0, 4 * 2 * state)
    assert geometry.parameters > 0
