"""A22: models whose layers differ, and what to do where an architecture is not known."""

import json
from pathlib import Path
from typing import Any

import pytest
from kvledger.core import InputError
from kvledger.core.models.catalog import builtin_configs
from kvledger.core.models.geometry import ModelGeometry, builtin_geometry, geometry_from_config, load_geometry
from kvledger.core.models.layer_cache import AttentionCache, Mamba2Cache, ShortConvCache
from kvledger.sim import Scenario

DATA = Path(__file__).with_name("data")
CONV, PATTERN = DATA / "short_convolutions.json", DATA / "pattern_hybrid.json"
GROUP = {"ffn": {"ffn_mult": 1.0}}


def changed(path: Path, **fields: Any) -> ModelGeometry:
    return geometry_from_config({**json.loads(path.read_text()), **fields}, "x")


def test_a22_short_convolutions_keep_a_fixed_state() -> None:
    geometry = load_geometry(str(CONV))
    found = geometry.sequence_bytes(32_768, "auto")
    assert found.total == 32_768 * 12_288 == 402_653_184
    assert found.state == 10 * 2 * 2048 * 2  # two inputs of 2,048 channels in 16 bits
    assert geometry.layers[0] == (ShortConvCache(conv_kernel_size=3, channels=2048),)
    assert geometry.warnings == ()


def test_a22_the_parameters_of_published_checkpoints() -> None:
    """LFM2-350M has 354,483,968 parameters; Nemotron-H-8B has 8.1 billion."""
    lfm2 = changed(
        CONV,
        hidden_size=1024,
        num_attention_heads=16,
        intermediate_size=6656,
        block_auto_adjust_ff_dim=True,
        block_multiple_of=256,
        conv_dim=1024,
        conv_dim_out=1024,
        layer_types=["conv", "conv", "full_attention"] * 3
        + ["conv", "full_attention", "conv", "full_attention", "conv", "full_attention", "conv"],
    )
    assert lfm2.parameters == 354_483_968
    assert lfm2.warnings == ()
    nemotron = changed(
        PATTERN,
        num_hidden_layers=52,
        hybrid_override_pattern="M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
        num_key_value_heads=8,
        intermediate_size=21504,
        chunk_size=128,
        mamba_hidden_act="silu",
    )
    assert round(nemotron.parameters / 1e9, 1) == 8.1
    assert nemotron.warnings == ()


def test_a22_a_plan_of_short_convolutions() -> None:
    document = Scenario(model=str(CONV), gpu="H100").plan().to_dict()
    assert document["fits"]
    assert document["bytes_per_block"] == 16 * 12_288  # the convolutions overlay the full layers' pages


def test_a22_a_pattern_of_letters_says_which_layers_store() -> None:
    geometry = load_geometry(str(PATTERN))
    found = geometry.sequence_bytes(1000, "auto")
    assert found.total == 1000 * 8192
    assert found.state == 40 * (3 * 10_240 * 2 + 128 * 64 * 128 * 4)
    kinds = [type(caches[0]) if caches else None for caches in geometry.layers]
    assert (kinds.count(AttentionCache), kinds.count(Mamba2Cache), kinds.count(None)) == (8, 40, 40)
    assert geometry.warnings == ()


def test_a22_a_plan_of_a_pattern_needs_the_weights_that_its_config_does_not_give() -> None:
    asked = {"model": str(PATTERN), "gpu": "H100", "max_model_len": 32768}
    with pytest.raises(InputError, match="give the weights' bytes per GPU"):
        Scenario(**asked).plan()
    document = Scenario(**asked, weights_bytes="20GiB").plan().to_dict()
    assert document["fits"]
    (activation,) = [row for row in document["ledger"] if row["name"] == "peak activation"]
    assert activation["bytes"] > 0


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a22_ranks_divide_the_states(ranks: int) -> None:
    spec = load_geometry(str(PATTERN)).layers[0][0].spec(16, load_geometry(str(PATTERN)).cache_format("auto"))
    from kvledger.core.planner.parallel import tensor_parallel_spec

    assert tensor_parallel_spec(spec, ranks).page_size_bytes * ranks == spec.page_size_bytes


@pytest.mark.parametrize(
    "path, fields, message",
    [
        (CONV, {"layer_types": ["conv"] * 15 + ["mamba"]}, "'mamba'; known are conv and full_attention"),
        (CONV, {"conv_L_cache": None}, "missing conv_L_cache"),
        (PATTERN, {"hybrid_override_pattern": "M" * 87}, "has 87 letters for 88 layers"),
        (PATTERN, {"hybrid_override_pattern": "X" * 88}, "has 'X'; known are M"),
        (PATTERN, {"hybrid_override_pattern": None}, "missing hybrid_override_pattern"),
    ],
)
def test_a22_what_decides_is_required(path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        changed(path, **fields)


def test_a22_drafts_lengthen_the_convolutions() -> None:
    plain, drafted = (
        Scenario(model=str(PATTERN), gpu="H200", weights_bytes="20GiB", max_model_len=8192, **drafts).plan().to_dict()
        for drafts in ({}, {"num_speculative_tokens": 3})
    )
    assert drafted["scheduler_block_size"] >= plain["scheduler_block_size"]


def test_a22_layers_that_were_searched_one_by_one() -> None:
    config = {
        "architectures": ["DeciLMForCausalLM"],
        "dtype": "bfloat16",
        "num_hidden_layers": 3,
        "hidden_size": 64,
        "num_attention_heads": 8,
        "vocab_size": 100,
        "block_configs": [
            {"attention": {"n_heads_in_group": 4}, **GROUP},
            {"attention": {"no_op": True}, **GROUP},
            {"attention": {"replace_with_linear": True}, **GROUP},
        ],
    }
    geometry = geometry_from_config(config, "x")
    assert geometry.layers == ((AttentionCache(num_kv_heads=2, head_size=8),), (), ())
    assert geometry.parameters > 0
    windowed = {**config["block_configs"][0], "attention": {"n_heads_in_group": 4, "window_length": 512}}  # type: ignore[index]
    with pytest.raises(InputError, match="window_length 512: what it keeps is not known"):
        geometry_from_config({**config, "block_configs": [windowed] * 3}, "x")


@pytest.mark.parametrize("name, base", [("Qwen3VLForConditionalGeneration", "qwen3-8b")])
def test_a22_a_model_with_vision_is_its_decoder(name: str, base: str) -> None:
    text = builtin_configs()[base]
    config = {"architectures": [name], "text_config": {**text, "architectures": None}, "vision_config": {}}
    geometry = geometry_from_config(config, "x")
    assert geometry.layers == builtin_geometry(base).layers
    assert geometry.left_out == ("vision encoder and projector",)


def test_a22_models_of_2026_by_name() -> None:
    assert builtin_geometry("MiniMaxAI/MiniMax-M2.7").max_position_embeddings == 204_800
    assert builtin_geometry("deepseek-ai/DeepSeek-V3.1").layers == builtin_geometry("deepseek-v3").layers


def test_a22_kimi_k2_5_ships_its_experts_in_4_bits() -> None:
    document = Scenario(model="moonshotai/Kimi-K2.5", gpu="B200", tensor_parallel_size=8).plan().to_dict()
    weights = document["ledger"][0]["bytes"] * 8
    assert 550e9 < weights < 620e9  # 1.03 T parameters, nearly all of them in 4.5 bits
    assert "not known" not in document["ledger"][0]["formula"]


def test_a22_an_unknown_architecture_names_the_way_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(CONV.read_text()), "architectures": ["QuaggaForCausalLM"]}))
    with pytest.raises(InputError, match=r"describe the caches by hand, by kind and fields \(docs/planning.md\)"):
        Scenario(model=str(path), gpu="H100").plan()


def described(tmp_path: Path, kind: str, fields: dict[str, Any]) -> str:
    path = tmp_path / "quagga.json"
    sizes = {"hidden_size": 2048, "vocab_size": 65536}
    document = {"kind": kind, "dtype": "bfloat16", "max_position_embeddings": 32768, "fields": {**sizes, **fields}}
    path.write_text(json.dumps(document))
    return str(path)


def test_a22_a_description_by_hand_can_be_planned(tmp_path: Path) -> None:
    fields = {"num_hidden_layers": 16, "stored_layers": 6, "num_key_value_heads": 8, "head_dim": 64}
    model = described(tmp_path, "standard_gqa", fields)
    document = Scenario(model=model, gpu="H100", weights_bytes="2.2GiB").plan().to_dict()
    assert document["fits"] and document["bytes_per_block"] == 16 * 12_288


def test_a22_layers_are_described_one_kind_after_the_other(tmp_path: Path) -> None:
    layers = [
        {"count": 10, "state_bytes": 8192},
        {"count": 6, "num_key_value_heads": 8, "head_dim": 64},
        {"count": 2, "latent_size": 576, "indexer_key_size": 128},
        {"count": 2, "bytes_per_token": 656},
        {"count": 1, "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 100},
        {"count": 3},
    ]
    geometry = load_geometry(described(tmp_path, "layers", {"layers": layers}))
    assert geometry.num_hidden_layers == 24
    found = geometry.sequence_bytes(1000, "auto")
    assert found.kv == 1000 * (12_288 + 2 * 1152 + 2 * 656) + 100 * 2048
    assert (found.indexer, found.state) == (1000 * 2 * 132, 81_920)


def test_a22_a_description_of_short_convolutions_gives_the_plan_of_the_config(tmp_path: Path) -> None:
    layers = [{"count": 10, "state_bytes": 8192}, {"count": 6, "num_key_value_heads": 8, "head_dim": 64}]
    model = described(tmp_path, "layers", {"layers": layers})
    by_hand, by_config = (
        Scenario(model=name, gpu="H100", weights_bytes="2.2GiB", max_model_len=32768).plan().to_dict()
        for name in (model, str(CONV))
    )
    assert by_hand["bytes_per_block"] == by_config["bytes_per_block"] == 16 * 12_288


@pytest.mark.parametrize(
    "entry, message",
    [
        ({"count": 2, "window": 5}, r"layers\[0\]: layer: unknown field window; known are attention_chunk_size"),
        ({"count": 2, "head_dim": 64}, "missing num_key_value_heads"),
        ({"count": 0}, "count is 0"),
    ],
)
def test_a22_a_description_that_says_too_little_or_too_much_is_refused(
    tmp_path: Path, entry: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        load_geometry(described(tmp_path, "layers", {"layers": [entry]}))


@pytest.mark.parametrize(
    "model, bytes_per_token", [("Qwen/Qwen3.8-27B", 65_536), ("zai-org/GLM-5.3", 78 * 1_152 + 21 * 132)]
)
def test_a22_models_that_kept_the_sizes_of_their_predecessors_are_built_in(model: str, bytes_per_token: int) -> None:
    one, two = (load_geometry(model).sequence_bytes(tokens, "bfloat16").total for tokens in (1, 2))
    assert two - one == bytes_per_token


@pytest.mark.parametrize(
    "model",
    ["Qwen3.8-2.4T-A95B", "GLM-5.3-Flash", "DeepSeek-V4.1", "LFM2-1.2B", "Nemotron-H-8B", "DeciLM-7B", "Qwen3-VL-8B"],
)
def test_a22_a_model_that_is_not_built_in_is_refused_in_one_line_that_names_the_description_by_hand(
    model: str, kvledger
) -> None:
    code, _, err = kvledger("plan", "--model", model, "--gpu", "H100")
    (line,) = err.splitlines()
    assert code == 2
    assert f"no built-in model is called '{model}'" in line
    assert "a description by hand (docs/planning.md)" in line
