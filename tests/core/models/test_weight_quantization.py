"""Bytes of quantised weights, by the name of a scheme or by a checkpoint's own config."""

from typing import Any

import attrs
import pytest
from kvledger.core.errors import InputError
from kvledger.core.models.geometry import builtin_geometry
from kvledger.core.models.weights import (
    QuantizationScheme,
    WeightKind,
    quantization_schemes,
    scheme_by_name,
    scheme_from_config,
    weight_bytes,
)
from kvledger.sim.scenario.scenario import Scenario

GIB = 1 << 30


def size(name: str, scheme: QuantizationScheme | None, tensor_parallel_size: int = 1) -> int:
    geometry = builtin_geometry(name)
    groups = geometry.weights.on_stage(0, geometry.num_hidden_layers)
    return weight_bytes(groups, dtype="bf16", scheme=scheme, tensor_parallel_size=tensor_parallel_size).num_bytes


def test_embeddings_norms_and_the_output_matrix_are_never_quantised() -> None:
    geometry = builtin_geometry("llama-3.1-8b")
    kept = sum(
        group.parameters
        for group in geometry.weights.all_groups
        if group.kind in (WeightKind.EMBEDDING, WeightKind.LM_HEAD, WeightKind.OTHER)
    )
    assert size("llama-3.1-8b", scheme_by_name("int8")) == geometry.parameters + kept


def test_a_mixture_in_mxfp4_is_as_large_as_its_checkpoint() -> None:
    # Published checkpoint sizes of gpt-oss: 12.8 and 60.8 GiB.
    scheme = attrs.evolve(quantization_schemes()["mxfp4"], expert_tile=None)
    assert size("gpt-oss-20b", scheme) / GIB == pytest.approx(12.8, rel=0.01)
    assert size("gpt-oss-120b", scheme) / GIB == pytest.approx(60.8, rel=0.01)


def test_experts_in_mxfp4_are_padded_to_the_tiles_of_the_kernels() -> None:
    """Loading gpt-oss-120b took 65.97 GiB with Marlin (vLLM issue 23278) and 64.38 with Triton (33155), on one H100."""
    scheme = scheme_by_name("mxfp4")
    assert size("gpt-oss-120b", scheme) / GIB == pytest.approx(65.97, rel=0.002)
    row = Scenario(model="gpt-oss-120b", gpu="H100", max_model_len=-1).plan().to_dict()["ledger"][0]
    assert row["name"] == "weights"
    assert row["low_bytes"] / GIB < 64.38 < row["high_bytes"] / GIB
    # On two ranks 1,440 of 2,880 become 1,536; a scheme without tiles, and a dense model, have no padding.
    whole, half = (size("gpt-oss-120b", scheme, ranks) for ranks in (1, 2))
    assert half > whole / 2
    assert size("mixtral-8x7b", scheme) == size("mixtral-8x7b", attrs.evolve(scheme, expert_tile=None))


def test_four_bits_take_their_group_scales_with_them() -> None:
    scheme = quantization_schemes()["int4"]
    assert float(scheme.bits + scheme.scale_bits) == 4 + 20 / 128


def test_the_name_none_is_no_scheme_and_an_unknown_one_is_refused() -> None:
    assert scheme_by_name("none") is None
    with pytest.raises(InputError, match="known: none, fp8"):
        scheme_by_name("int3")


@pytest.mark.parametrize(
    ("config", "bits", "attention"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8, True),
        ({"quant_method": "fp8", "modules_to_not_convert": ["lm_head", "model.layers.0.self_attn"]}, 8, False),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 4, True),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, 8, True),
        ({"quant_method": "mxfp4"}, 4, False),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 4, True),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float", "group_size": None}}},
                "ignore": ["re:.*lm_head", "re:.*self_attn", "re:.*router", "re:vision_model.*"],
            },
            8,
            False,
        ),
    ],
)
def test_a_checkpoints_own_config_is_read(config: dict[str, Any], bits: int, attention: bool) -> None:
    scheme = scheme_from_config(config, "config.json")
    assert scheme is not None
    assert scheme.bits == bits
    assert (WeightKind.ATTENTION in scheme.kinds) is attention
    assert scheme.unknown == ()


def test_matrices_that_a_checkpoint_leaves_alone_by_name_stay_in_full_precision() -> None:
    scheme = scheme_from_config(
        {"quant_method": "fp8", "ignored_layers": ["model.layers.0.self_attn.o_proj", "model.decoder.x"]}, "here"
    )
    assert scheme is not None
    assert scheme.left_alone == {"o_proj"}
    assert any("'model.decoder.x'" in question for question in scheme.unknown)


def test_a_method_that_is_not_known_is_refused_with_the_way_out() -> None:
    with pytest.raises(InputError, match=r"'hqq', which is not known here.*weights_bytes"):
        scheme_from_config({"quant_method": "hqq"}, "config.json")
    with pytest.raises(InputError, match="how many bits"):
        scheme_from_config({"quant_method": "gptq"}, "config.json")


def test_the_published_fp8_checkpoint_of_scout_keeps_attention_in_16_bits() -> None:
    name = "RedHatAI/Llama-4-Scout-17B-16E-Instruct-FP8-dynamic"
    geometry = builtin_geometry(name)
    assert geometry.quantization_config is not None
    scheme = scheme_from_config(geometry.quantization_config, name)
    assert scheme.kinds == {WeightKind.MLP, WeightKind.EXPERT}
    assert size(name, scheme) > size("llama-4-scout-17b-16e", scheme_by_name("fp8"))
    # The measured server (golden/measured_serving.jsonl) had 8,253 blocks; its encoder is not known from the config.
    limits = {"max_num_seqs": 128, "max_num_batched_tokens": 2_048, "gpu_memory_utilization": 0.9}
    scenario = Scenario(model=name, gpu="H100", tensor_parallel_size=2, engine_version="0.15.1", **limits)
    low, high = scenario.evolve(max_model_len=-1).plan().to_dict()["num_gpu_blocks_range"]
    assert low < 8_253 < high
