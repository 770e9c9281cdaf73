"""Kernels that Vidur or Frontier profiled, in files of their own."""

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path

import pytest
from kvledger.core.errors import InputError
from kvledger.sim.latency.kernel_profile import KernelProfile

NUM_LAYERS = 2
STATS = "time_stats.{}.median"


def write_csv(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [",".join(str(row.get(name, "")) for name in names) for row in rows]
    path.write_text("\n".join([",".join(names), *lines]) + "\n")


def compute_row(tokens: int, ranks: int, **millis: float) -> dict[str, object]:
    kernels = {STATS.format(kernel): value for kernel, value in millis.items()}
    return {"num_tokens": tokens, "num_tensor_parallel_workers": ranks, "n_embd": 4096, **kernels}


def attention_row(ranks: int, batch: int, chunk: int, cached: int, millis: float) -> dict[str, object]:
    is_prefill = chunk > 0
    return {
        "num_tensor_parallel_workers": ranks, "batch_size": batch, "prefill_chunk_size": chunk, "kv_cache_size": cached,
        "is_prefill": is_prefill, STATS.format("attn_prefill"): millis if is_prefill else 99,
        STATS.format("attn_decode"): 99 if is_prefill else millis, STATS.format("attn_kv_cache_save"): 0.5,
    }  # fmt: skip


def chunk_ms(chunk: int, before: int) -> float:
    return 1 + chunk * chunk / 1e3 + chunk * before / 1e3


@pytest.fixture
def vidur(tmp_path: Path) -> Path:
    """A folder as Vidur writes it: one layer on one and on two ranks, norms on one only."""
    rows = [
        compute_row(1, 1, attn_pre_proj=4, mlp_up_proj=6, mlp_act=1, input_layernorm=2, add=3, emb=7),
        compute_row(1, 2, attn_pre_proj=2, mlp_up_proj=3, mlp_act=0.5),
        compute_row(101, 2, attn_pre_proj=12, mlp_up_proj=3, mlp_act=0.5),
        compute_row(101, 2, attn_pre_proj=14, mlp_up_proj=3, mlp_act=0.5),
        compute_row(101, 2, attn_pre_proj=90, mlp_up_proj=3, mlp_act=0.5),
    ]
    write_csv(tmp_path / "mlp.csv", rows)
    prompts = [
        attention_row(ranks, 1, chunk, before, chunk_ms(chunk, before) / ranks)
        for ranks, chunk, before in product((1, 2), (32, 64, 128), (0, 64, 128))
        if chunk + before <= 192  # what the longest context allows
    ]
    decodes = [
        attention_row(ranks, batch, 0, cached, batch * cached / 1e3 / ranks)
        for ranks, batch, cached in product((1, 2), (1, 8), (64, 128))
    ]
    mixed = {**attention_row(1, 8, 32, 0, 77), "is_mixed_batch": True}
    write_csv(tmp_path / "attention.csv", [*prompts, *decodes, mixed])
    reduces = [
        {"num_workers": 2, "size": size, "collective": collective, STATS.format("all_reduce"): millis}
        for size, collective, millis in ((8192, "all_reduce", 1), (81920, "all_reduce", 10), (8192, "send_recv", 50))
    ]
    write_csv(tmp_path / "all_reduce.csv", reduces)
    return tmp_path


def test_a_folder_of_vidur_is_known_by_its_files(vidur: Path) -> None:
    profile = KernelProfile.read(str(vidur), NUM_LAYERS)
    by_tokens = {name: curve.at(1) * 1e3 for name, curve in profile.by_tokens.items()}
    assert by_tokens == pytest.approx({"gemm": 10 * NUM_LAYERS, "elementwise": (1 + 2 + 3) * NUM_LAYERS + 7})
    assert profile.by_sampled is None
    assert profile.seconds([], 8, 96)[0] * 1e3 == pytest.approx((0.5 + 8 * 96 / 1e3) * NUM_LAYERS)
    decode_s, prefill_s = profile.seconds([(64, 128)], 8, 96)
    assert decode_s == profile.seconds([], 8, 96)[0]  # no steps of both were profiled: they are the sum
    assert prefill_s * 1e3 == pytest.approx((0.5 + chunk_ms(64, 128)) * NUM_LAYERS)


def test_rows_of_the_deployments_ranks_are_read_and_kernels_that_are_not_divided_from_one_rank(vidur: Path) -> None:
    profile = KernelProfile.read(str(vidur), NUM_LAYERS, 2)
    gemm, elementwise = (profile.by_tokens[name].at(101) * 1e3 for name in ("gemm", "elementwise"))
    assert gemm == pytest.approx((14 + 3) * NUM_LAYERS)  # the median of three rows
    assert elementwise == pytest.approx((0.5 + 2 + 3) * NUM_LAYERS + 7)
    assert profile.by_tokens["collectives"].at(10) * 1e3 == pytest.approx(2 * NUM_LAYERS * 10)
    assert profile.seconds([], 8, 96)[0] * 1e3 == pytest.approx((0.5 + 8 * 96 / 2e3) * NUM_LAYERS)


def test_a_chunk_behind_more_tokens_than_were_profiled_extends_the_nearest_times(vidur: Path) -> None:
    profile = KernelProfile.read(str(vidur), NUM_LAYERS)
    steepest = (chunk_ms(64, 128) - chunk_ms(32, 128)) / 32
    expected = 0.5 + chunk_ms(64, 128) + 64 * steepest
    assert profile.seconds([(128, 128)], 0, 0)[1] * 1e3 == pytest.approx(expected * NUM_LAYERS)


def test_a_folder_of_frontier_has_experts_and_an_output_matrix(vidur: Path) -> None:
    (vidur / "mlp.csv").unlink()
    write_csv(vidur / "linear_op.csv", [compute_row(1, 1, attn_pre_proj=4, lm_head_linear=9)])
    experts = [
        {**compute_row(1, 1, moe_grouped_gemm=ms, moe_gating_linear=1, moe_shuffling=2), "expert_parallel_size": ranks}
        for ranks, ms in ((1, 20), (8, 99))
    ]
    write_csv(vidur / "moe.csv", experts)
    profile = KernelProfile.read(str(vidur), NUM_LAYERS)
    by_tokens = {name: curve.at(1) * 1e3 / NUM_LAYERS for name, curve in profile.by_tokens.items()}
    assert by_tokens == pytest.approx({"gemm": 5, "experts": 20, "elementwise": 2})
    assert profile.by_sampled is not None
    assert profile.by_sampled.at(1) * 1e3 == pytest.approx(9)


def test_ranks_that_were_not_profiled_and_missing_files_are_named(vidur: Path) -> None:
    with pytest.raises(InputError, match=r"mlp.csv: no times of attn_pre_proj with num_tensor_parallel_workers 4"):
        KernelProfile.read(str(vidur), NUM_LAYERS, 4)
    (vidur / "all_reduce.csv").unlink()
    with pytest.raises(InputError, match=r"all_reduce.csv: No such file"):
        KernelProfile.read(str(vidur), NUM_LAYERS, 2)
    write_csv(vidur / "mlp.csv", [compute_row(1, 1, attn_pre_proj=4, input_layernorm=2)])
    with pytest.raises(InputError, match=r"no times of mlp_up_proj or moe_grouped_gemm"):
        KernelProfile.read(str(vidur), NUM_LAYERS)
    (vidur / "mlp.csv").write_text("num_tokens,n_embd\n1,4096\n")
    with pytest.raises(InputError, match=r"mlp.csv:1: the header lacks num_tensor_parallel_workers"):
        KernelProfile.read(str(vidur), NUM_LAYERS)
