"""A config gives layers, heads and parameters; anything unknown is an error and never a guess."""

import json
from pathlib import Path
from typing import Any

import pytest
from kvledger.core.errors import InputError
from kvledger.core.models.architecture import Architecture, architectures
from kvledger.core.models.catalog import builtin_configs, catalogue_name
from kvledger.core.models.geometry import (
    builtin_geometry,
    geometry_from_config,
    geometry_from_description,
    load_geometry,
)
from kvledger.core.models.layer_cache import AttentionCache, CachePart, LatentCache, StateCache, WindowBufferCache
from kvledger.core.planner.cache_dtype import ScaleStorage

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "dtype": "bfloat16",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 100,
    "vocab_size": 500,
    "max_position_embeddings": 2048,
}


def _counted() -> list[Any]:
    """Small configs with the parameters that their own model classes have (counted with transformers 5.24)."""
    lines = Path(__file__).with_name("counted_parameters.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [pytest.param(row, id=f"{index}-{row['config']['architectures'][0]}") for index, row in enumerate(rows)]


@pytest.mark.parametrize("row", _counted())
def test_parameters_are_those_of_the_architecture_itself(row: dict[str, Any]) -> None:
    assert geometry_from_config(row["config"], "small").parameters == row["parameters"]


def test_every_builtin_model_can_be_read_and_all_but_k3_counted() -> None:
    uncounted = []
    for name in builtin_configs():
        geometry = builtin_geometry(name)
        assert geometry.num_hidden_layers > 0
        assert geometry.max_position_embeddings
        try:
            assert geometry.parameters > 10**8
        except InputError as error:
            assert "(weights_bytes)" in str(error)
            uncounted.append(name)
    assert uncounted == ["kimi-k3"]


def test_an_explicit_head_dim_wins_over_hidden_size() -> None:
    assert geometry_from_config(LLAMA, "a").layers[0][0] == AttentionCache(num_kv_heads=2, head_size=16)
    explicit = geometry_from_config({**LLAMA, "head_dim": 128}, "b")
    assert explicit.layers[0][0] == AttentionCache(num_kv_heads=2, head_size=128)


def test_without_kv_heads_every_query_head_has_its_own() -> None:
    config = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    assert geometry_from_config(config, "mha").layers[0][0] == AttentionCache(num_kv_heads=4, head_size=16)


def test_tied_embeddings_are_counted_once() -> None:
    untied, tied = (geometry_from_config({**LLAMA, "tie_word_embeddings": tie}, "x") for tie in (False, True))
    assert untied.parameters - tied.parameters == 500 * 64


def test_an_unknown_architecture_whose_fields_do_not_say_what_it_stores_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(InputError, match=r"'WhoKnowsForCausalLM' is not known by name.*mamba_d_state 16") as refused:
        geometry_from_config({**LLAMA, "architectures": ["WhoKnowsForCausalLM"], "mamba_d_state": 16}, "x")
    assert "LlamaForCausalLM" in str(refused.value)


def test_a_registered_architecture_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(architectures, "_entries", dict(architectures._entries))

    @architectures.register("MineForCausalLM")
    class Mine(Architecture):
        def layer_types(self) -> tuple[str, ...]:
            return self.every_nth_full("sliding_window_pattern", 2)

    config = {**LLAMA, "architectures": ["MineForCausalLM"], "sliding_window": 8}
    mine = geometry_from_config(config, "mine")
    assert [cache.sliding_window for (cache,) in mine.layers] == [8, None]
    assert mine.parameters == geometry_from_config(LLAMA, "llama").parameters
    with pytest.raises(InputError, match="'MineForCausalLM' is registered twice"):
        architectures.register("MineForCausalLM")(Architecture)


def test_a_plug_in_file_adds_an_architecture(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(architectures, "_entries", dict(architectures._entries))
    plugin = tmp_path / "other.py"
    plugin.write_text(
        "from kvledger.core.models.architecture import Architecture, architectures\n"
        "@architectures.register('OtherForCausalLM')\n"
        "class Other(Architecture):\n"
        "    norms_per_layer = 4\n"
    )
    config = {**LLAMA, "architectures": ["OtherForCausalLM"]}
    assert "OtherForCausalLM is not known by name" in geometry_from_config(config, "other").warnings[0]
    monkeypatch.setenv("KVLEDGER_PLUGINS", str(plugin))
    more = geometry_from_config(config, "other").parameters - geometry_from_config(LLAMA, "llama").parameters
    assert more == 2 * 2 * 64  # two more norms in two layers of hidden size 64


@pytest.mark.parametrize("field", ["num_hidden_layers", "num_attention_heads", "hidden_size"])
def test_a_field_that_decides_the_cache_is_named_when_it_is_missing(field: str) -> None:
    config = {key: value for key, value in LLAMA.items() if key != field}
    with pytest.raises(InputError, match=rf"config.json: missing .*{field}"):
        geometry_from_config(config, "x")


def test_only_the_weights_need_a_field_that_only_decides_the_weights() -> None:
    config = {key: value for key, value in LLAMA.items() if key != "intermediate_size"}
    geometry = geometry_from_config(config, "x")
    assert geometry.sequence_bytes(1, "bf16").total == 2 * 2 * 2 * 16 * 2
    with pytest.raises(InputError, match=r"missing intermediate_size.*weights_bytes"):
        _ = geometry.parameters


@pytest.mark.parametrize(
    ("field", "value"), [("num_hidden_layers", 0), ("num_hidden_layers", "2"), ("num_key_value_heads", True)]
)
def test_a_field_of_the_wrong_kind_is_refused_with_its_value(field: str, value: Any) -> None:
    with pytest.raises(InputError, match=f"{field} is {value!r}"):
        geometry_from_config({**LLAMA, field: value}, "x")


def test_hidden_size_that_heads_do_not_divide_needs_head_dim() -> None:
    with pytest.raises(InputError, match="give head_dim"):
        geometry_from_config({**LLAMA, "hidden_size": 66}, "x")


def test_the_decoder_of_a_multimodal_config_is_its_text_config() -> None:
    text = {key: value for key, value in LLAMA.items() if key != "architectures"}
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": {**text, "sliding_window": 8, "sliding_window_pattern": 2},
        "vision_config": {"hidden_size": 1},
    }
    geometry = geometry_from_config(config, "x")
    assert [cache.sliding_window for (cache,) in geometry.layers] == [8, None]
    assert geometry.left_out == ("vision encoder and projector",)


def test_layer_types_of_the_config_win_over_the_pattern() -> None:
    config = {
        **LLAMA,
        "architectures": ["Gemma2ForCausalLM"],
        "sliding_window": 8,
        "layer_types": ["full_attention", "full_attention", "sliding_attention"],
    }
    # The third entry describes a draft layer.
    assert [cache.sliding_window for (cache,) in geometry_from_config(config, "x").layers] == [None, None]
    with pytest.raises(InputError, match="has 1 entries for 2 layers"):
        geometry_from_config({**config, "layer_types": ["full_attention"]}, "x")


def test_a_layer_type_of_another_architecture_is_refused() -> None:
    config = {**LLAMA, "architectures": ["Gemma2ForCausalLM"], "layer_types": ["full_attention", "mamba"]}
    with pytest.raises(InputError, match=r"layer_types\[1\] is 'mamba'"):
        geometry_from_config(config, "x")


def test_layers_that_reuse_another_layers_cache_store_nothing() -> None:
    layers = builtin_geometry("gemma-4-e2b").layers
    assert sum(1 for layer in layers if layer) == 15
    assert layers[15:] == ((),) * 20


def test_indexers_and_states_are_separate_parts() -> None:
    latent, indexer = builtin_geometry("deepseek-v3.2").layers[0]
    assert (latent, indexer) == (
        LatentCache(head_size=576),
        LatentCache(part=CachePart.INDEXER, head_size=128, fixed_dtype="fp8_e4m3", fixed_scales=ScaleStorage(4, 128)),
    )
    (state,) = builtin_geometry("qwen3.5-27b").layers[0]
    assert isinstance(state, StateCache)
    assert builtin_geometry("qwen3.5-27b").has_states
    window, compressed, compressor, own_indexer, _ = builtin_geometry("deepseek-v4-flash").layers[2]
    assert compressor.part is CachePart.STATE
    assert isinstance(window, WindowBufferCache)
    assert (compressed.head_size, compressed.tokens_per_state) == (512, 4)
    assert own_indexer.fixed_dtype == "fp8_e4m3"


def test_quantised_weights_never_change_the_cache() -> None:
    plain, quantised = (
        geometry_from_config({**LLAMA, "quantization_config": config}, "x")
        for config in (None, {"quant_method": "gptq", "bits": 4, "group_size": 128})
    )
    assert plain.sequence_bytes(1000, "auto") == quantised.sequence_bytes(1000, "auto")


def test_a_config_that_names_no_dtype_is_served_in_16_bits() -> None:
    """gpt-oss and MiniMax M2.5 publish no dtype."""
    config = {key: value for key, value in LLAMA.items() if key != "dtype"}
    geometry = geometry_from_config(config, "x")
    assert (geometry.dtype, geometry.from_class) == ("bf16", ("dtype bf16",))
    assert geometry.sequence_bytes(1, "auto") == geometry_from_config(LLAMA, "x").sequence_bytes(1, "bf16")


def test_a_checkpoint_in_32_bits_is_served_in_16_bits_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "dtype": "float32"}))
    geometry = load_geometry(str(tmp_path))
    assert geometry.dtype == "bf16"
    assert "give --dtype float32" in geometry.warnings[0]
    assert geometry_from_config({**LLAMA, "dtype": "float32"}, "as a live model has it").dtype == "fp32"


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("llama-3.1-8b", "llama-3.1-8b"),
        ("meta-llama/Llama-3.1-70B-Instruct", "llama-3.1-70b"),
        ("meta-llama/Meta-Llama-3-8B-Instruct", "llama-3-8b"),
        ("meta-llama/Llama-2-7b-hf", "llama-2-7b"),
        ("mistralai/Mistral-Nemo-Instruct-2407", "mistral-nemo-12b"),
        ("01-ai/Yi-34B", "yi-34b"),
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"),
        ("openai/gpt-oss-20b", "gpt-oss-20b"),
    ],
)
def test_hub_ids_find_the_builtin_model(name: str, short: str) -> None:
    assert catalogue_name(name) == short


@pytest.mark.parametrize("name", ["meta-llama/Llama-3.1-8B-Instruct-FP8", "llama-3.1-9b", "", "Llama-4-Scout"])
def test_a_name_that_may_be_another_model_is_refused(name: str) -> None:
    assert catalogue_name(name) is None
    with pytest.raises(InputError, match="no built-in model is called"):
        builtin_geometry(name)


def test_a_config_is_read_from_a_file_or_from_its_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    by_file, by_folder = load_geometry(str(tmp_path / "config.json")), load_geometry(str(tmp_path))
    assert by_file.name == by_folder.name == tmp_path.name
    assert by_file.parameters == by_folder.parameters


@pytest.mark.parametrize(("text", "message"), [("{", "not a JSON document"), ("[]", "expected a JSON object")])
def test_a_broken_config_names_the_file(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(InputError, match=message) as refused:
        load_geometry(str(path))
    assert str(path) in str(refused.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        load_geometry(str(tmp_path / "absent.json"))


def test_a_description_by_kind_gives_caches_but_no_parameters(tmp_path: Path) -> None:
    document = {
        "kind": "standard_gqa",
        "dtype": "bfloat16",
        "max_position_embeddings": 4096,
        "fields": {"num_hidden_layers": 3, "num_key_value_heads": 2, "head_dim": 64},
    }
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(document))
    geometry = load_geometry(str(path))
    assert geometry.name == "mine"
    assert geometry.max_position_embeddings == 4096
    assert geometry.sequence_bytes(10, "auto").total == 10 * 3 * 2 * 2 * 64 * 2
    with pytest.raises(InputError, match=r"says nothing about parameters.*weights_bytes"):
        _ = geometry.parameters


def test_a_description_that_does_not_add_up_is_refused() -> None:
    fields = {
        "num_hidden_layers": 4,
        "full_attention_layers": 1,
        "sliding_attention_layers": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "sliding_window": 8,
    }
    with pytest.raises(InputError, match=r"1 \+ 2 layers are described, 4 store a cache"):
        geometry_from_description({"kind": "mixed_full_sliding_gqa", "fields": fields}, "x", "here")
    with pytest.raises(InputError, match="unknown kind 'other'"):
        geometry_from_description({"kind": "other", "fields": fields}, "x", "here")


def test_current_architectures_are_known() -> None:
    assert {
        "LlamaForCausalLM",
        "Qwen3_5ForConditionalGeneration",
        "DeepseekV4ForCausalLM",
        "KimiK3ForConditionalGeneration",
        "GlmMoeDsaForCausalLM",
        "Llama4ForConditionalGeneration",
        "Cohere2ForCausalLM",
    } <= set(architectures.names())


def test_fields_that_a_config_leaves_out_have_the_default_of_their_class_and_are_named() -> None:
    # The published config of this model holds these four sizes of its decoder and nothing else.
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "torch_dtype": "bfloat16", "text_config": text}
    geometry = geometry_from_config(config, "gemma-3-4b-it")
    assert geometry.parameters == builtin_geometry("gemma-3-4b").parameters
    assert geometry.layers == builtin_geometry("gemma-3-4b").layers
    assert "head_dim 256" in geometry.from_class
    assert builtin_geometry("gemma-3-4b").from_class == ()


@pytest.mark.parametrize(
    ("config", "longest", "default"),
    [
        ({}, 2_048, 2_048),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 8_192, 8_192),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2}}, 4_096, 4_096),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 2_048, 2_048),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, 2_048, 2_048),
        ({"rope_scaling": {"rope_type": "default"}, "model_max_length": 1_024}, 1_024, 1_024),
        ({"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 512}, 2_048, 512),
    ],
)
def test_the_longest_request_follows_the_scaling_of_positions(config: dict, longest: int, default: int) -> None:
    """`_get_and_verify_max_len` of vLLM 0.32."""
    geometry = geometry_from_config({**LLAMA, **config}, "x")
    assert (geometry.longest_request, geometry.default_max_model_len) == (longest, default)
