"""The kernels of one model on one rank: which are measured, which the roofline times, and what is fused."""

import pytest
from kvledger.core.models.geometry import load_geometry
from kvledger.sim.latency.devices import find_device
from kvledger.sim.latency.kernel_parts import AttentionOfLayers, KernelParts, LayerAttention, kernel_parts
from kvledger.sim.latency.kernel_tables import Curve, Surface
from kvledger.sim.latency.roofline import RooflineLatency

from tests.sim.kernel_database import all_reduce_ms, experts_ms, gemm_ms, generation_ms

pytestmark = pytest.mark.usefixtures("kernel_database")


def parts(model: str, ranks: tuple[int, int, int] = (1, 1, 1), weights_dtype: str = "auto") -> KernelParts:
    geometry, device = load_geometry(model), find_device("H200")
    roofline = RooflineLatency.for_model(
        geometry,
        device,
        max_num_seqs=1,
        tensor_parallel_size=ranks[0],
        weights_dtype=weights_dtype,
        kv_cache_dtype="auto",
    )
    return kernel_parts(geometry, device, ranks, roofline, weights_dtype, "auto")


def test_a_dense_layer_is_four_products_with_the_projections_of_attention_fused() -> None:
    tokens = 1024
    shapes = [(4096 + 2 * 1024, 4096), (4096, 4096), (2 * 14336, 4096), (4096, 14336)]
    found = parts("llama-3.1-8b")
    curve = found.by_tokens()["gemm"]
    exact = sum(gemm_ms(tokens, *shape) for shape in shapes)
    assert curve.at(tokens) == pytest.approx(32 * exact / 1e3)  # the formula is linear between the shapes of the table
    assert found.sources["gemm"] == "measured (bfloat16)"
    assert found.dtypes == "bf16"


def test_ranks_divide_the_columns_of_a_product_or_the_inner_axis_of_those_after_it() -> None:
    tokens = 1024
    shapes = [((4096 + 2 * 1024) // 2, 4096), (4096, 2048), (14336, 4096), (4096, 7168)]
    found = parts("llama-3.1-8b", (2, 1, 1))
    assert found.by_tokens()["gemm"].at(tokens) == pytest.approx(32 * sum(gemm_ms(tokens, *s) for s in shapes) / 1e3)
    assert found.by_sampled().at(64) == pytest.approx(gemm_ms(64, 128256 // 2, 4096) / 1e3)


def test_two_all_reduces_a_layer_carry_the_hidden_vectors_of_all_tokens() -> None:
    found = parts("llama-3.1-8b", (2, 1, 1))
    assert found.by_tokens()["collectives"].at(128) == pytest.approx(64 * all_reduce_ms(128 * 4096 * 2) / 1e3)
    assert found.sources["collectives"] == "measured"
    assert "collectives" not in parts("llama-3.1-8b").by_tokens()


def test_what_no_table_has_is_timed_by_the_roofline_and_named() -> None:
    found = parts("llama-3.1-8b", (4, 1, 1), "int4")
    assert min(curve.at(64) for curve in found.by_tokens().values()) > 0
    found.attention()
    assert found.sources["gemm"] == "roofline: no times of int4 products"
    assert found.sources["collectives"] == "roofline: no times of all-reduces of 4 ranks"
    assert found.sources["attention"] == "roofline: no times of AttentionCache with 8 heads a rank"


def test_roofline_products_take_longer_with_more_bytes_a_weight() -> None:
    wide, narrow = (parts("llama-3.1-8b", weights_dtype=dtype).by_tokens()["gemm"].at(1) for dtype in ("none", "int4"))
    assert narrow < wide / 2


def test_attention_with_measured_heads_is_measured_kind_by_kind() -> None:
    found = parts("gpt-oss-20b")
    attention = found.attention()
    assert sorted((layer.num_layers, layer.window) for layer in attention.layers) == [(12, 0), (12, 128)]
    assert found.sources["attention"] == "measured (cache of bfloat16)"
    decode_s, prefill_s = attention.seconds([], 64, 1024)
    assert decode_s == pytest.approx(24 * generation_ms(64, 1024) / 1e3)
    assert prefill_s == 0


def test_experts_that_were_measured_on_other_ranks_are_scaled_and_it_is_said() -> None:
    exact, scaled = parts("gpt-oss-20b", (2, 1, 2)), parts("gpt-oss-20b", (4, 1, 1))
    assert exact.by_tokens()["experts"].at(1024) == pytest.approx(24 * experts_ms(1024) / 2e3)
    assert exact.sources["experts"] == "measured (w4a16_mxfp4)"
    assert exact.dtypes == "bf16+mxfp4"
    expected = 24 * experts_ms(1024) / 2e3 * (2 / 4) ** 0.5
    assert scaled.by_tokens()["experts"].at(1024) == pytest.approx(expected)
    assert scaled.sources["experts"] == "measured (w4a16_mxfp4) on 1 x 2 ranks, scaled to 4 x 1"


def test_experts_without_times_come_from_the_roofline() -> None:
    found = parts("gpt-oss-20b", weights_dtype="none")
    assert found.by_tokens()["experts"].at(64) > 0
    assert found.sources["experts"] == "roofline: no times of 32 bf16 experts of 2880 x 2880"


def test_data_parallel_ranks_run_whole_products_and_reduce_over_all_ranks() -> None:
    alone, together = parts("llama-3.1-8b"), parts("llama-3.1-8b", (1, 2, 1))
    assert together.by_tokens()["gemm"].at(256) == alone.by_tokens()["gemm"].at(256)
    assert together.by_tokens()["collectives"].at(128) == pytest.approx(64 * all_reduce_ms(128 * 4096 * 2) / 1e3)


def test_latent_attention_takes_no_longer_than_its_products_its_latents_and_its_launches() -> None:
    found = parts("deepseek-v3", (8, 1, 1), "none")
    (layer,) = found.attention().layers
    assert found.sources["attention"] == "measured (cache of bfloat16)"
    assert layer.num_layers == 61
    per_rank = 16384 // 8  # latents are projected to and from 16 of 128 heads
    read_s = 64 * 1024 * 576 * 2 / (4.8e12 * 0.8)
    least_s = gemm_ms(64, per_rank, 7168) / 1e3 + read_s
    assert least_s < layer.decode.at(64, 1024) < least_s + 1e-4  # the table says 1 ms, which is the host's
    assert layer.decode.at(64, 65536) == 1e-3  # longer contexts do take as long


def _layer(window: int) -> LayerAttention:
    return LayerAttention(
        num_layers=2,
        window=window,
        decode=Surface.of({(1, 0): 1.0, (1, 10): 2.0}),
        prefill=Curve.of({0: 0.0, 10: 1.0, 20: 4.0, 40: 16.0}),
    )


def test_a_chunk_takes_the_time_of_the_whole_prompt_less_that_of_the_tokens_before_it() -> None:
    layer = _layer(window=0)
    assert layer.prefill_s(10, 0) == 2 * 1.0
    assert layer.prefill_s(10, 10) == 2 * (4.0 - 1.0)
    assert layer.prefill_s(20, 20) == 2 * (16.0 - 4.0)


def test_tokens_before_a_chunk_cost_nothing_more_once_they_fill_the_window() -> None:
    layer = _layer(window=20)
    assert layer.prefill_s(10, 10) == 2 * (4.0 - 1.0)
    assert layer.prefill_s(10, 20) == layer.prefill_s(10, 4096) == 2 * 1.0


def test_chunks_of_several_prompts_add_and_no_sequence_takes_no_time() -> None:
    attention = AttentionOfLayers((_layer(window=0), _layer(window=20)))
    assert attention.seconds([(10, 0), (10, 10)], 0, 0) == (0, 2 * (1 + 3) * 2)
    assert attention.seconds([], 1, 10)[0] == 2 * 2 * 2
