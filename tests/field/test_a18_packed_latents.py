"""A18: sparse latents are stored as packed records or plain, and their indexer's keys always with a scale."""

import pytest
from kvledger.core import InputError
from kvledger.core.deployment.diagnosis import model_stacks
from kvledger.core.models.geometry import builtin_geometry, served_cache_dtype
from kvledger.sim import Scenario
from kvledger.sim.scenario.plan import PlanOptions, explain_log

V32 = builtin_geometry("deepseek-v3.2")


def planned(kv_cache_dtype: str, block_size: int = 16, **options):
    return Scenario(
        model="deepseek-v3.2",
        tensor_parallel_size=8,
        kv_cache_dtype=kv_cache_dtype,
        block_size=block_size,
        kv_cache_memory_bytes="43.67GiB",
        **{"gpu": "H200", **options},
    ).plan()


@pytest.mark.parametrize(
    "kv_cache_dtype, bytes_per_token",
    [
        ("fp8_ds_mla", 61 * (656 + 132)),
        ("fp8_e4m3", 61 * (576 + 132)),
        ("bfloat16", 61 * (1152 + 132)),
        ("nvfp4_ds_mla", 61 * (352 + 132)),
    ],
)
def test_a18_bytes_of_a_token(kv_cache_dtype: str, bytes_per_token: int) -> None:
    assert V32.sequence_bytes(1, kv_cache_dtype).total == bytes_per_token
    assert V32.sequence_bytes(1, kv_cache_dtype).indexer == 61 * 132
    assert planned(kv_cache_dtype).to_dict()["bytes_per_block"] == 16 * bytes_per_token


@pytest.mark.parametrize("block_size", [16, 64])
def test_a18_tokens_of_a_packed_pool(block_size: int) -> None:
    assert planned("fp8_ds_mla", block_size).to_dict()["kv_cache_tokens"] == 975_488


def test_a18_the_indexer_takes_a_sixth_of_the_pool() -> None:
    tokens, gib = 1_462_784, 1 << 30
    found = V32.sequence_bytes(tokens, "fp8_ds_mla")
    assert round(found.kv / gib, 2) == 54.51  # 54.52 in the thread, which rounds up
    assert round(found.total / gib, 2) == 65.48  # 65.49 in the thread


def test_a18_only_layers_with_an_indexer_pay_for_its_keys() -> None:
    glm = builtin_geometry("glm-5.2")
    found = glm.sequence_bytes(1, "fp8_ds_mla")
    own = sum(len(caches) == 2 for caches in glm.layers)
    assert 0 < own < glm.num_hidden_layers
    assert (found.kv, found.indexer) == (glm.num_hidden_layers * 656, own * 132)


@pytest.mark.parametrize(
    "gpu, given, served",
    [
        ("H200", "fp8", "fp8_ds_mla"),  # Hopper reads packed records
        ("B200", "fp8", "fp8_e4m3"),  # the preferred kernels of 10.x read plain rows
        ("RTX-PRO-6000", "fp8", "fp8_ds_mla"),
        ("RTX-PRO-6000", "auto", "fp8_ds_mla"),
        ("MI300X", "fp8", "fp8_e4m3"),
        ("H200", "fp8_e4m3", "fp8_e4m3"),
    ],
)
def test_a18_fp8_says_which_layout_it_took(gpu: str, given: str, served: str) -> None:
    document = planned(given, gpu=gpu).to_dict()
    assert document["bytes_per_block"] == 16 * V32.sequence_bytes(1, served).total
    (said,) = [sentence for sentence in document["assumptions"] if "stores latents as" in sentence]
    assert f"--kv-cache-dtype {given} stores latents as" in said
    assert ("packed records" in said) == (served == "fp8_ds_mla")
    assert ("656 B" in said) and (given == "auto" or "576 B" in said)


def test_a18_without_a_device_fp8_is_packed_and_a_model_without_sparse_latents_is_left_alone() -> None:
    assert served_cache_dtype(V32, "fp8") == "fp8_ds_mla"
    assert served_cache_dtype(builtin_geometry("deepseek-v3"), "fp8") == "fp8"
    with pytest.raises(InputError, match="which deepseek-v3 does not have; use fp8_e4m3"):
        builtin_geometry("deepseek-v3").cache_format("fp8_ds_mla")


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_ds_mla", "fp8"])
def test_a18_a_logged_pool_is_read_backwards(kv_cache_dtype: str) -> None:
    scenario = Scenario(model="deepseek-v3.2", tensor_parallel_size=8, kv_cache_dtype=kv_cache_dtype)
    found = explain_log(scenario, PlanOptions(logged_memory="43.67", logged_tokens="975,424"))
    (candidate,) = found.to_dict()["model_candidates"]
    assert candidate.startswith("61 latents of 656 B and 61 keys of 132 B a token (fp8_ds_mla): 48,068 B a token")
    assert found.to_dict()["is_whole_number_of_layers"] is True


def test_a18_a_dtype_that_does_not_give_the_pool_is_said() -> None:
    scenario = Scenario(model="deepseek-v3.2", kv_cache_dtype="fp8_e4m3")
    found = explain_log(scenario, PlanOptions(logged_memory="43.67", logged_tokens="975,424")).to_dict()
    assert found["model_candidates"] == [] and found["is_whole_number_of_layers"] is False
    assert any("do not: 61 latents of 576 B and 61 keys of 132 B" in sentence for sentence in found["sentences"])
    assert model_stacks(builtin_geometry("qwen3.5-9b"), 16, 1) == ()  # states are no bytes a token


def test_a18_the_records_of_v4_are_the_servers_own() -> None:
    document = Scenario(model="deepseek-v4-flash", gpu="B200", tensor_parallel_size=8).plan().to_dict()
    # Groups of 64, 64, 256, 4 and 8 tokens a block, 1,002,240 bytes each: vLLM 0.32 prints the same.
    assert document["bytes_per_block"] == 1_002_240
    assert sorted(group["block_size"] for group in document["groups"]) == [4, 8, 64, 64, 256]
    assert any("records (fp8_ds_mla) of 584 B" in sentence for sentence in document["assumptions"])
    assert builtin_geometry("deepseek-v4-flash").sequence_bytes(4096, "fp8_ds_mla").indexer == 21 * 1024 * 132


def test_a18_draft_layers_of_a_sparse_model_store_latents_and_keys() -> None:
    """Field report A20: 64 x 708 bytes a token, and not the whole model twice."""
    asked = planned("fp8_e4m3", num_speculative_tokens=3, num_draft_layers=3)
    assert asked.to_dict()["bytes_per_block"] == 16 * 64 * 708
