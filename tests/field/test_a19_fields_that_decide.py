"""A19: a config's field that decides what layers store is read, or named; it is never passed over."""

import json
from pathlib import Path
from typing import Any

import pytest
from kvledger.core import InputError
from kvledger.core.models.architecture import Architecture, architectures
from kvledger.core.models.catalog import builtin_configs
from kvledger.core.models.geometry import ModelGeometry, builtin_geometry, geometry_from_config
from kvledger.core.models.layer_cache import CachePart, CompressedCache
from kvledger.sim import Scenario

SOURCES = Path(__file__).with_name("data") / "encoder_decoder_sources.json"
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "dtype": "bfloat16",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 100,
    "vocab_size": 500,
}


def named(architecture: str) -> ModelGeometry:
    config = json.loads(SOURCES.read_text())
    return geometry_from_config({**config, "architectures": [architecture]}, "sources")


def stored_per_token(geometry: ModelGeometry, part: CachePart) -> float:
    caches = [cache for cache in geometry.caches() if isinstance(cache, CompressedCache)]
    return sum(1 / cache.tokens_per_state for cache in caches if cache.part is part)


@pytest.mark.parametrize("architecture", ["DeepseekV41ForCausalLM", "DeepseekV4ForCausalLM"])
def test_a19_only_source_layers_store_latents_and_keys(architecture: str) -> None:
    geometry = named(architecture)
    assert stored_per_token(geometry, CachePart.KV) == 2.5
    assert stored_per_token(geometry, CachePart.INDEXER) == 2.5
    short, long = (geometry.sequence_bytes(tokens, "nvfp4_ds_mla").total for tokens in (4096, 8192))
    assert long - short == 4096 * 890
    windows = [cache for cache in geometry.caches() if getattr(cache, "sliding_window", None) == 128]
    assert len(windows) == 40
    assert geometry.warnings == ()


def test_a19_the_plan_holds_890_bytes_a_token() -> None:
    asked = Scenario(model=str(SOURCES), gpu="B200", kv_cache_dtype="nvfp4_ds_mla", weights_bytes="20GiB")
    document = asked.plan().to_dict()
    assert document["bytes_per_block"] == 256 * 890
    assert any("--kv-cache-layout BLNHC" in sentence for sentence in document["assumptions"])


@pytest.mark.parametrize(
    "change, message",
    [
        ({"kv_source_layer_ids": [5, 8], "compress_ratios": [1] * 43}, "no layer at or below 0"),
        ({"kv_source_layer_ids": [0, 8]}, "kv_source_layer_ids has layer 0, whose compress_ratios is 0"),
        ({"index_source_layer_ids": None}, "missing index_source_layer_ids"),
        ({"kv_source_layer_ids": None}, "missing kv_source_layer_ids"),
    ],
)
@pytest.mark.parametrize("architecture", ["DeepseekV41ForCausalLM", "DeepseekV4ForCausalLM"])
def test_a19_sources_that_cannot_be_are_refused(architecture: str, change: dict[str, Any], message: str) -> None:
    config = json.loads(SOURCES.read_text())
    text_config = {**config["text_config"], **change}
    with pytest.raises(InputError, match=message):
        geometry_from_config({**config, "architectures": [architecture], "text_config": text_config}, "x")


@pytest.mark.parametrize(
    "field, value",
    [
        ("kv_source_layer_ids", [0, 2]),
        ("index_source_layer_ids", [0]),
        ("sliding_window", 4096),
        ("sliding_window_pattern", 6),
        ("attention_chunk_size", 8192),
        ("num_kv_shared_layers", 2),
        ("use_cla", True),
        ("cla_share_factor", 2),
        ("cross_layer_attention_group_size", 2),
        ("hybrid_override_pattern", "M*M*"),
        ("hybrid_layer_pattern", [0, 1, 0, 1]),
        ("attn_layer_period", 8),
        ("layers_block_type", ["attention", "mamba", "attention", "mamba"]),
        ("block_configs", [{"attention": {}}]),
        ("num_key_value_heads_per_layer", [1, 2, 1, 2]),
        ("multi_query_group_num", 2),
        ("kv_lora_rank", 512),
        ("index_head_dim", 128),
        ("compress_ratios", [4, 4, 4, 4]),
        ("linear_num_key_heads", 16),
        ("linear_attn_config", {"num_heads": 4}),
        ("mamba_d_state", 16),
        ("ssm_state_size", 128),
        ("conv_L_cache", 3),
        ("global_head_dim", 512),
    ],
)
def test_a19_a_field_that_could_decide_and_is_not_known_is_named(field: str, value: Any, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA, field: value}))
    warnings = Scenario(model=str(path), gpu="L4", max_model_len=1024).plan().to_dict()["warnings"]
    assert any(
        field in warning and "the reader of LlamaForCausalLM does not know it" in warning for warning in warnings
    )
    assert any("docs/planning.md" in warning for warning in warnings)


@pytest.mark.parametrize("job", [("curve",), ("compare", "--kv-cache-tokens", "9000")])
def test_a19_jobs_that_count_a_models_bytes_name_such_a_field_too(
    job: tuple[str, ...], tmp_path: Path, kvledger
) -> None:
    config, trace = tmp_path / "config.json", tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 64, "output_length": 4, "hash_ids": [0]}\n')
    command = [job[0], str(trace), "--model", str(config), *job[1:]]
    for fields, count in (({}, 0), ({"kv_source_layer_ids": [0, 2]}, 1)):
        config.write_text(json.dumps({**LLAMA, "max_position_embeddings": 4096, **fields}))
        code, out, _ = kvledger(*command)
        assert (code, out.count("Warning: ")) == (0, count)
        warnings = json.loads(kvledger(*command, "--json")[1]).get("model_warnings", [])
        assert [("kv_source_layer_ids [0, 2]" in warning) for warning in warnings] == [True] * count


@pytest.mark.parametrize(
    "fields",
    [
        {"sliding_window": None},
        {"sliding_window": 32768, "use_sliding_window": False, "max_window_layers": 28},
        {"layer_types": ["full_attention"] * 4},
        {"attn_type_list": [1, 1, 1, 1]},
        {"num_kv_shared_layers": 0, "use_cla": False, "compress_ratios": []},
        {"rope_scaling": {"factor": 8.0}, "attention_dropout": 0.0, "attention_bias": False, "use_cache": True},
        {"num_nextn_predict_layers": 1, "initializer_range": 0.02, "cache_implementation": "hybrid"},
    ],
)
def test_a19_fields_that_say_nothing_special_are_not_named(fields: dict[str, Any]) -> None:
    assert geometry_from_config({**LLAMA, **fields}, "x").warnings == ()


def test_a19_listed_layers_of_a_plain_architecture_slide() -> None:
    types = ["sliding_attention", "full_attention"] * 2
    geometry = geometry_from_config({**LLAMA, "layer_types": types, "sliding_window": 16}, "x")
    assert [cache.sliding_window for (cache,) in geometry.layers] == [16, None, 16, None]  # type: ignore[attr-defined]
    assert geometry.warnings == ()
    with pytest.raises(InputError, match=r"layer_types\[0\] is 'mamba'"):
        geometry_from_config({**LLAMA, "layer_types": ["mamba"] * 4}, "x")


def test_a19_a_field_beside_the_decoders_section_counts_too() -> None:
    text_config = {key: value for key, value in LLAMA.items() if key != "architectures"}
    config = {"architectures": ["LlamaForCausalLM"], "text_config": text_config, "kv_source_layer_ids": [1]}
    (warning,) = geometry_from_config(config, "x").warnings
    assert "kv_source_layer_ids [1]" in warning


def test_a19_no_built_in_model_has_a_field_that_its_reader_does_not_know() -> None:
    assert {
        name: builtin_geometry(name).warnings for name in builtin_configs() if builtin_geometry(name).warnings
    } == {}


def test_a19_a_reader_from_outside_may_say_what_it_understands() -> None:
    class Okapi(Architecture):
        """Knows that its windows are those of training alone."""

        understands = frozenset({"attn_window"})

    architectures.register("OkapiForCausalLM")(Okapi)
    config = {**LLAMA, "architectures": ["OkapiForCausalLM"], "attn_window": 64}
    assert geometry_from_config(config, "x").warnings == ()
    assert len(geometry_from_config({**config, "swa_head_dim": 64}, "x").warnings) == 1


def test_a19_a_lightning_layer_is_refused_and_a_half_precision_state_is_read() -> None:
    minimax = {**builtin_configs()["minimax-m2"], "attn_type_list": [1, 0] * 31}
    with pytest.raises(InputError, match=r"attn_type_list\[1\] is 0"):
        geometry_from_config(minimax, "x")
    qwen = builtin_configs()["qwen3.5-9b"]
    full, half = (
        geometry_from_config({**qwen, "mamba_ssm_dtype": dtype}, "x").sequence_bytes(1, "auto").state
        for dtype in ("float32", "bfloat16")
    )
    assert full > half
    assert full == builtin_geometry("qwen3.5-9b").sequence_bytes(1, "auto").state


@pytest.mark.parametrize(
    "quantization, served",
    [
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}, "fp8"),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}, "fp8"),
        ({"quant_method": "modelopt", "quantization": {"kv_cache_quant_algo": "NVFP4"}}, "nvfp4"),
        ({"quant_method": "fp8"}, "auto"),
    ],
)
def test_a19_a_checkpoint_may_ask_for_the_dtype_of_its_cache(
    quantization: dict[str, Any], served: str, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA, "quantization_config": quantization}))
    asked = Scenario(model=str(path), gpu="L4", max_model_len=1024, quantization="none")
    document = asked.plan().to_dict()
    assert document["bytes_per_block"] == 16 * geometry_from_config(LLAMA, "x").sequence_bytes(1, served).total
    said = [text for text in document["assumptions"] if f"--kv-cache-dtype {served}, from the checkpoint" in text]
    assert len(said) == (served != "auto")
    plain = asked.evolve(kv_cache_dtype="bfloat16").plan().to_dict()
    assert plain["bytes_per_block"] == 16 * geometry_from_config(LLAMA, "x").sequence_bytes(1, "auto").total


def test_a19_a_cache_that_a_checkpoint_asks_for_and_nobody_knows_is_refused() -> None:
    config = {**LLAMA, "quantization_config": {"kv_cache_scheme": {"num_bits": 2, "type": "int"}}}
    with pytest.raises(InputError, match=r"asks for a cache of .* which is not known here"):
        assert geometry_from_config(config, "x").checkpoint_cache_dtype


def test_a19_a_replay_names_the_field_as_well(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA, "kv_source_layer_ids": [0]}))
    run = Scenario(workload="conversation", limit=3, model=str(path), gpu="L4", max_model_len=8192, latency="linear")
    assert "kv_source_layer_ids" in str(run.replay().report.assumptions["model_warnings"])
