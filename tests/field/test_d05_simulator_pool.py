"""D05: a pool's size counts activations, and no default stands in for what was not given."""

from fractions import Fraction
from typing import Any

import attrs
import pytest
from kvledger.core.deployment.deployment import Deployment, GivenMemory
from kvledger.core.deployment.diagnosis import one_request_does_not_fit
from kvledger.core.deployment.plan import DeploymentPlan, plan_deployment
from kvledger.core.errors import InputError
from kvledger.core.models.geometry import builtin_geometry, geometry_from_description
from kvledger.core.models.weights import quantization_schemes

MIB = 1 << 20
GIB = 1 << 30


def gib(figure: str) -> int:
    return int(Fraction(figure) * GIB)


def deployment(total: int, given: GivenMemory, **options: Any) -> Deployment:
    """A decoder whose blocks of 16 tokens are 2 MiB; rows are given and graphs are off, so nothing is estimated."""
    document = {
        "kind": "standard_gqa",
        "dtype": "bfloat16",
        "max_position_embeddings": 131072,
        "fields": {"num_hidden_layers": 32, "num_key_value_heads": 8, "head_dim": 128},
    }
    settings = {
        "free_bytes": total,
        "utilization": 0.9,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 8192,
        "max_model_len": 8192,
        "reserve_graph_memory": False,
        "enforce_eager": True,
    } | options
    geometry = geometry_from_description(document, "decoder", "here")
    return Deployment(geometry=geometry, total_bytes=total, given=given, **settings)


def d05(activation: str | None) -> DeploymentPlan:
    rest = GivenMemory(
        weights_bytes=gib("14.9585"),
        non_torch_bytes=0,
        activation_bytes=0 if activation is None else gib(activation),
    )
    return plan_deployment(deployment(24 * GIB, rest))


def test_d05_a_pool_without_the_activation_line_is_31_percent_too_large() -> None:
    assert d05(None).num_blocks == 3_400
    assert d05("1.586").num_blocks == 2_588
    assert d05("1.586").pool.kv_cache_size_tokens == 41_408
    assert round((3_400 / 2_588 - 1) * 100, 1) == 31.4


def test_d05_the_activation_line_is_estimated_and_shown_where_it_is_not_given() -> None:
    plan = plan_deployment(
        Deployment(
            geometry=builtin_geometry("llama-3.1-8b"),
            total_bytes=24 * GIB,
            free_bytes=24 * GIB,
            utilization=0.9,
            max_model_len=8192,
            max_num_seqs=256,
            max_num_batched_tokens=8192,
        )
    )
    row = plan.stages[0].ledger.row("peak activation")
    assert row.source.value == "estimate"
    assert row.low_bytes < row.num_bytes < row.high_bytes
    assert "256 requests x 128,256 vocabulary" in row.formula


@pytest.mark.parametrize(("block_size", "num_blocks"), [(16, 17_600), (64, 4_400)])
def test_d05_the_same_memory_is_fewer_blocks_of_more_tokens(block_size: int, num_blocks: int) -> None:
    given = GivenMemory(weights_bytes=15 * GIB, non_torch_bytes=0, activation_bytes=0)
    asked = deployment(80 * GIB, given, kv_cache_memory_bytes=17_600 * 2 * MIB, block_size=block_size)
    plan = plan_deployment(asked)
    assert (plan.num_blocks, plan.pool.kv_cache_size_tokens) == (num_blocks, 281_600)


def test_d05_nothing_given_is_an_error_and_no_million_blocks() -> None:
    with pytest.raises(InputError, match="weights_bytes"):
        plan_deployment(deployment(24 * GIB, GivenMemory()))


def test_d05_a_model_too_large_for_its_gpus_names_the_fewest_that_do() -> None:
    asked = Deployment(
        geometry=builtin_geometry("llama-3.1-405b"),
        total_bytes=gib("79.19"),
        free_bytes=gib("79.19"),
        utilization=0.9,
        tensor_parallel_size=8,
        max_model_len=8192,
        max_num_seqs=128,
        max_num_batched_tokens=8192,
    )
    diagnosis = one_request_does_not_fit(plan_deployment(asked))
    fewest = {remedy.parameter: remedy.value for remedy in diagnosis.remedies}["tensor_parallel_size"]
    assert plan_deployment(attrs.evolve(asked, tensor_parallel_size=int(fewest))).fits
    assert not plan_deployment(attrs.evolve(asked, tensor_parallel_size=int(fewest) // 2)).fits
    quantised = attrs.evolve(asked, quantization=quantization_schemes()["fp8"])
    assert plan_deployment(quantised).fits
