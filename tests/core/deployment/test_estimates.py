"""Estimates without a GPU: one set of formulas, each overridable, each with its range and its numbers."""

import attrs
import pytest
from kvledger.core.deployment.deployment import Deployment
from kvledger.core.deployment.estimates import (
    EstimateConstants,
    activation_row,
    capture_sizes,
    encoder_row,
    graph_row,
    non_torch_row,
    profiling_tokens,
    reserves_graph_memory,
    weights_row,
)
from kvledger.core.errors import InputError
from kvledger.core.memory.ledger import LedgerRow, RowRole, RowSource
from kvledger.core.models.geometry import ModelGeometry, builtin_geometry
from kvledger.core.models.weights import quantization_schemes

GIB = 1 << 30
CONSTANTS = EstimateConstants()


def activation(
    geometry: ModelGeometry, num_layers: int = 32, constants: EstimateConstants = CONSTANTS, **changes: int
) -> LedgerRow:
    step = {"max_num_batched_tokens": 8192, "max_num_seqs": 256, "tensor_parallel_size": 1} | changes
    return activation_row(geometry, range(num_layers), dtype="bf16", constants=constants, **step)


def deployment(**changes: int) -> Deployment:
    memory = {"total_bytes": 80 * GIB, "free_bytes": 80 * GIB, "utilization": 0.9}
    step = {"max_num_batched_tokens": 8192, "max_num_seqs": 256} | changes
    return Deployment(geometry=builtin_geometry("llama-3.1-8b"), **memory, **step)


def test_a_full_sampling_step_is_the_peak_of_a_small_model_with_a_large_vocabulary() -> None:
    # 1.26 GiB were measured for this model with 256 requests (vllm PR#10511).
    row = activation(builtin_geometry("llama-3-8b"))
    assert row.formula.startswith("sampler: 256 requests x 128,256 vocabulary x 40 B")
    assert abs(row.num_bytes / GIB - 1.26) < 0.05
    assert row.num_bytes == 256 * 128_256 * 40 + 8192 * 2 * 4096


def test_the_sampler_of_the_first_rank_is_what_the_second_did_not_need() -> None:
    # Two ranks of one server: 7.465 and 8.69 GiB were left for the cache, and the second, which did not sample, had an
    # activation peak of 0.19 GiB (vllm#13061).
    measured = 8.69 * GIB - 8_015_314_944 + 0.19 * GIB
    row = activation(builtin_geometry("qwen2.5-14b"), 48, tensor_parallel_size=2)
    assert row.low_bytes < measured < row.high_bytes
    assert abs(row.num_bytes - measured) < 0.15 * GIB


def test_the_forward_pass_is_the_peak_of_a_wide_model_with_many_tokens() -> None:
    geometry = builtin_geometry("llama-3.1-70b")
    row = activation(geometry, 80, max_num_seqs=16)
    assert row.formula.startswith("forward pass")
    assert row.num_bytes == 8192 * 2 * (3 * 8192 + 3 * 28672)
    assert activation(geometry, 80, max_num_seqs=16, tensor_parallel_size=4).num_bytes < row.num_bytes


def test_a_stage_without_the_output_matrix_does_not_sample() -> None:
    geometry = builtin_geometry("llama-3-8b")
    assert activation(geometry, 16).formula.startswith("forward pass")


def test_activations_grow_with_the_tokens_of_a_step() -> None:
    geometry = builtin_geometry("llama-3.1-70b")
    sizes = [activation(geometry, 80, max_num_batched_tokens=tokens).num_bytes for tokens in (512, 2048, 8192, 32768)]
    assert sizes == sorted(sizes) and sizes[0] < sizes[-1]


def test_weights_are_exact_parameters_times_bytes_and_divided_over_ranks() -> None:
    geometry = builtin_geometry("llama-3.1-8b")

    def row(tensor_parallel_size: int) -> LedgerRow:
        groups = geometry.weights.on_stage(0, geometry.num_hidden_layers)
        return weights_row(
            groups, dtype="bf16", scheme=None, tensor_parallel_size=tensor_parallel_size, constants=CONSTANTS
        )

    assert row(1).num_bytes == 2 * geometry.parameters
    # Norms are held by every rank, so two halves are a little more than the whole.
    assert 0 < 2 * row(2).num_bytes - row(1).num_bytes < 1 << 20
    assert row(1).source is RowSource.ESTIMATE
    assert "8,030,261,248 parameters on this rank x 2 B (bf16)" in row(1).formula


def test_replicated_kv_heads_do_not_shrink_further() -> None:
    geometry = builtin_geometry("qwen3-30b-a3b")
    groups = geometry.weights.layers[0]
    keys = next(group for group in groups if group.name == "k_proj")
    assert keys.on_rank(4) == keys.parameters // 4 == keys.on_rank(8)


def test_stages_hold_their_layers_and_the_ends_their_embeddings() -> None:
    weights = builtin_geometry("llama-3.1-8b").weights
    first, last = weights.on_stage(0, 16), weights.on_stage(16, 16)
    assert sum(group.parameters for group in (*first, *last)) == weights.parameters
    assert first[0].name == "embed_tokens" and last[-1].name == "lm_head"
    tied = builtin_geometry("llama-3.2-1b").weights
    assert tied.on_stage(8, 8)[0].name == "embed_tokens"  # a copy for the output


def test_a_scheme_that_leaves_a_question_widens_the_range_and_says_what() -> None:
    geometry = builtin_geometry("llama-3.1-8b")
    groups = geometry.weights.on_stage(0, 32)
    row = weights_row(
        groups, dtype="bf16", scheme=quantization_schemes()["fp8"], tensor_parallel_size=1, constants=CONSTANTS
    )
    assert "whether attention is quantised" in row.formula
    attention = sum(group.parameters for group in groups if group.kind == "attention")
    assert row.high_bytes - row.num_bytes >= attention
    assert row.num_bytes < 2 * geometry.parameters


def test_collectives_cost_memory_only_where_ranks_talk() -> None:
    alone, two = non_torch_row(1, CONSTANTS), non_torch_row(2, CONSTANTS)
    assert alone.num_bytes == CONSTANTS.non_torch_bytes
    assert two.num_bytes == alone.num_bytes + CONSTANTS.collective_bytes
    assert non_torch_row(8, CONSTANTS).num_bytes == two.num_bytes


def test_graphs_are_captured_up_to_twice_the_requests() -> None:
    assert capture_sizes(4) == (1, 2, 4, 8)
    assert capture_sizes(256)[-1] == capture_sizes(10_000)[-1] == 512
    assert len(capture_sizes(256)) == 3 + 31 + 17
    row = graph_row(32, 4, CONSTANTS)
    assert row.role is RowRole.GRAPHS
    assert row.num_bytes == (4 + 3) * 32 * CONSTANTS.graph_bytes_per_layer
    eager = deployment(max_num_seqs=4, enforce_eager=True)
    assert "CUDA graphs" not in {row.name for row in eager.non_kv_rows(range(32))}
    captured = attrs.evolve(eager, enforce_eager=False)
    assert row in captured.non_kv_rows(range(32))


def test_every_constant_can_be_overridden() -> None:
    lean = attrs.evolve(CONSTANTS, sampler_bytes_per_logit=8, non_torch_bytes=1)
    assert non_torch_row(1, lean).num_bytes == 1
    geometry = builtin_geometry("llama-3-8b")
    row = activation(geometry, constants=lean)
    assert row.num_bytes < activation(geometry).num_bytes


def test_an_encoder_is_named_as_not_known() -> None:
    assert encoder_row((), CONSTANTS) is None
    row = encoder_row(("vision encoder",), CONSTANTS)
    assert row is not None
    assert row.low_bytes == 0 < row.num_bytes < row.high_bytes
    assert row.formula.startswith("not known: vision encoder")


@pytest.mark.parametrize(
    ("version", "reserves"), [("0.15.1", False), ("0.20.9", False), ("0.21.0", True), ("v0.32", True), ("1.0.0", True)]
)
def test_graph_memory_is_set_aside_since_0_21(version: str, reserves: bool) -> None:
    assert reserves_graph_memory(version) is reserves


@pytest.mark.parametrize("version", ["", "latest", "0"])
def test_a_version_that_is_no_number_is_refused(version: str) -> None:
    with pytest.raises(InputError, match="not a version number"):
        reserves_graph_memory(version)


@pytest.mark.parametrize("name", ["max_num_batched_tokens", "max_num_seqs", "tensor_parallel_size"])
def test_a_step_of_nothing_is_refused(name: str) -> None:
    with pytest.raises(InputError, match=f"{name} is 0"):
        deployment(**{name: 0})


def test_a_profiling_step_fills_as_many_requests_as_may_run() -> None:
    assert profiling_tokens(8192, 256) == (32,) * 256
    assert profiling_tokens(16, 6) == (2, 2, 2, 2, 2, 6)
    assert profiling_tokens(3, 256) == (1, 1, 1)
    with pytest.raises(InputError, match="at least 1"):
        profiling_tokens(0, 4)
