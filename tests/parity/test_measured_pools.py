"""Pools of real servers, predicted from their configuration alone: one test per row of measured_serving.jsonl.

The rows do not record the device's total. 79.19 GiB (the H100 preset) is assumed; 79.65 GiB, which other cards of this
kind report, must do as well. Dense models are held to max(2 % of the pool, 1 % of the requested memory).
"""

import json
from typing import Any

import pytest
from kvledger.core.deployment.deployment import Deployment
from kvledger.core.deployment.estimates import reserves_graph_memory
from kvledger.core.deployment.plan import DeploymentPlan, plan_deployment
from kvledger.core.memory.budget import requested_bytes
from kvledger.core.memory.ledger import RowSource, sum_bytes
from kvledger.core.models.catalog import catalogue_name
from kvledger.core.models.geometry import builtin_geometry
from kvledger.core.models.weights import scheme_by_name
from kvledger.sim.latency.devices import find_device

from tests.parity.golden import golden_dir

GIB = 1 << 30
OTHER_TOTALS = {"H100": int(79.65 * GIB)}
# Quantised checkpoints of built-in models: the base model and the scheme.
QUANTISED = {"RedHatAI/Llama-4-Scout-17B-16E-Instruct-FP8-dynamic": "llama-4-scout-17b-16e"}


def _rows() -> list[Any]:
    path = golden_dir() / "measured_serving.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [json.loads(line) for line in lines if line.strip()]
    return [pytest.param(row, id=f"{row['id']}-{row['model'].rsplit('/', 1)[-1]}") for row in rows]


def _plan(row: dict[str, Any], total_bytes: int) -> DeploymentPlan:
    name = QUANTISED.get(row["model"], row["model"])
    if catalogue_name(name) is None:
        pytest.skip(f"{row['model']} is not built in")
    quantised = row["weights_dtype"] != "fp16/bf16"
    return plan_deployment(
        Deployment(
            geometry=builtin_geometry(name),
            total_bytes=total_bytes,
            free_bytes=total_bytes,
            utilization=row["gpu_memory_utilization"],
            tensor_parallel_size=row["tensor_parallel_size"],
            max_num_seqs=row["max_num_seqs"],
            max_num_batched_tokens=row["max_num_batched_tokens"],
            block_size=row["block_size"],
            max_model_len=4096,
            quantization=scheme_by_name(row["weights_dtype"]) if quantised else None,
            ignore_config_quantization=not quantised,
            reserve_graph_memory=reserves_graph_memory(row["engine"].removeprefix("vLLM ")),
        )
    )


def _totals(row: dict[str, Any]) -> tuple[int, ...]:
    device = find_device(row["gpu"])
    return (device.total_bytes, *[OTHER_TOTALS[device.name]] * (device.name in OTHER_TOTALS))


@pytest.mark.parametrize("row", _rows())
def test_planning_predicts_the_pool_of_a_real_server(row: dict[str, Any]) -> None:
    measured = row["num_gpu_blocks"]
    for total_bytes in _totals(row):
        plan = _plan(row, total_bytes)
        fewest, most = plan.blocks_range
        assert fewest <= plan.num_blocks <= most
        if plan.warnings:
            # A part of the model is not in its config: the plan gives a range, and says what it does not know.
            assert fewest <= measured <= most
            assert "not counted" in plan.warnings[0]
            assert "not known" in plan.stages[0].ledger.row("encoder").formula
            continue
        requested = requested_bytes(total_bytes, row["gpu_memory_utilization"])
        tolerance = max(0.02 * measured, 0.01 * requested / plan.bytes_per_block)
        assert abs(plan.num_blocks - measured) <= tolerance


@pytest.mark.parametrize("row", _rows())
def test_planning_of_a_real_server_labels_every_row_as_an_estimate_with_its_formula(row: dict[str, Any]) -> None:
    plan = _plan(row, _totals(row)[0])
    ledger = plan.stages[0].ledger
    assert all(entry.source is RowSource.ESTIMATE and entry.formula for entry in ledger.non_kv_rows)
    beyond_weights = ledger.non_kv_bytes - ledger.row("weights").num_bytes
    if not plan.warnings:
        assert 0.4 * GIB <= beyond_weights <= 1.5 * GIB
    assert sum_bytes(plan.rows(plan.stages[0])) == plan.deployment.total_bytes
