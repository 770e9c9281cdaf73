"""Factors fitted to measured points: known ones are found again, and errors are told apart in and out of sample."""

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import pytest
from kvledger.core.errors import InputError
from kvledger.core.models.geometry import load_geometry
from kvledger.sim.latency.devices import find_device
from kvledger.sim.latency.kernel_factors import CLASSES, KernelFactors, factors_in
from kvledger.sim.latency.kernel_tables import Curve
from kvledger.sim.latency.kernels import KernelLatency
from kvledger.sim.measured.fitting import EXPECTED, FittedFactors, _Points, fit_kernel_factors
from kvledger.sim.measured.point_kernels import PointKernels
from kvledger.sim.measured.points import MeasuredPoint

PAIRS = (
    ("H100", "llama-3.1-8b", "none"), ("H200", "gpt-oss-20b", "auto"), ("H200", "llama-3.1-70b", "fp8"),
    ("B200", "gpt-oss-120b", "auto"), ("B200", "qwen3-32b", "fp8"),
)  # fmt: skip
POINTS_PER_PAIR = 6
EXPERTS_OF_B200 = 1.4
SHARED = {**{name: value for name, (value, _) in EXPECTED.items()}, "gemm": 1.25, "attention_decode": 0.7}
# Factors of steps without prompts, and with them.
OF_PAIRS = dict(zip(PAIRS, ((1, 1), (0.9, 1), (1, 1.15), (1.1, 0.9), (1, 1)), strict=True))


def _model(model: str) -> KernelLatency:
    flat = Curve((0.0,), (0.0,))
    return KernelLatency(
        by_tokens={"gemm": flat}, by_sampled=flat, attention=object(), factors=KernelFactors(),  # pyright: ignore[reportArgumentType]
        num_layers=load_geometry(model).num_hidden_layers, sources={}, dtypes="bf16+mxfp4" if "oss" in model else "fp8",
        description=model,
    )  # fmt: skip


def _point(pair: tuple[str, str, str], number: int, draws: np.random.Generator) -> PointKernels:
    """A benchmark of 400 steps, a tenth of them with prompt tokens; its measured means are those of known factors."""
    device, model, quantization = pair
    steps = 400
    is_uncaptured = draws.uniform(size=steps) < 0.1
    users = 4 << number
    scale = {"gemm": 5e-3, "experts": 4e-3 * ("oss" in model), "attention_decode": 3e-3, "collectives": 1e-3}
    kernels = {
        name: np.exp(draws.uniform(-2.5, 1.0)) * each * (1 + users / 100) * draws.uniform(0.9, 1.1, steps)
        for name, each in scale.items()
    }
    kernels["attention_prefill"] = is_uncaptured * draws.uniform(1e-3, 2e-2, steps)
    if not scale["experts"]:
        del kernels["experts"]
    point = MeasuredPoint(
        name=f"{model}-{number}", engine="vllm", engine_version="0.19.0", geometry=load_geometry(model),
        precision=quantization, quantization=quantization, is_requantized=False, device=find_device(device),
        tensor_parallel_size=1,
        pipeline_parallel_size=1, data_parallel_size=1, expert_parallel_size=1, concurrency=users, input_len=1024,
        output_len=128, ttft_ms=None, tpot_ms=None, place="",
    )  # fmt: skip
    found = PointKernels(
        point=point, model=_model(model), kernels=kernels, is_uncaptured=is_uncaptured,
        num_sampled=np.full(steps, float(users)), in_ttft=is_uncaptured * draws.uniform(size=steps) / 4,
        in_tpot=draws.uniform(0.5, 1.5, steps) / steps,
    )  # fmt: skip
    step, prefill = OF_PAIRS[pair]
    experts = EXPERTS_OF_B200 if device == "B200" else 1.0
    ttft_s, tpot_s = found.means_s(KernelFactors(**{**SHARED, "experts": experts, "step": step, "prefill": prefill}))
    return attrs.evolve(found, point=attrs.evolve(point, ttft_ms=ttft_s * 1e3, tpot_ms=tpot_s * 1e3))


def _points() -> list[PointKernels]:
    draws = np.random.default_rng(7)
    return [_point(pair, number, draws) for pair in PAIRS for number in range(POINTS_PER_PAIR)]


@pytest.fixture(scope="module")
def points() -> list[PointKernels]:
    return _points()


@pytest.fixture(scope="module")
def fitted(points: list[PointKernels]) -> FittedFactors:
    return fit_kernel_factors(points, "known factors")


def test_known_factors_are_found_again(points: Sequence[PointKernels], fitted: FittedFactors) -> None:
    summary = fitted.summary()["in_sample"]
    assert summary["tpot_mape"] < 0.02
    assert summary["ttft_mape"] < 0.03
    everything: dict[str, Any] = fitted.document["all"]
    assert everything["gemm"] == pytest.approx(SHARED["gemm"], rel=0.1)  # pulled to what was expected
    assert everything["attention_decode"] == pytest.approx(SHARED["attention_decode"], rel=0.1)
    h200, b200 = (
        factors_in(fitted.document, find_device(device), model, "bf16+mxfp4")
        for device, model, _ in PAIRS
        if "oss" in model
    )
    (step_h200, _), (step_b200, _) = (OF_PAIRS[pair] for pair in PAIRS if "oss" in pair[1])
    expected = EXPERTS_OF_B200 * step_b200 / step_h200
    assert b200.experts * b200.step / (h200.experts * h200.step) == pytest.approx(expected, rel=0.15)


def test_points_without_both_latencies_are_left_out(points: Sequence[PointKernels], fitted: FittedFactors) -> None:
    half = attrs.evolve(points[0], point=attrs.evolve(points[0].point, ttft_ms=None))
    assert fit_kernel_factors([*points, half], "known factors").document == fitted.document
    with pytest.raises(InputError, match="no point has both latencies"):
        fit_kernel_factors([half], "nothing")


def test_held_out_errors_are_larger_than_those_in_sample(fitted: FittedFactors) -> None:
    summary = fitted.summary()
    assert summary["in_sample"]["tpot_mape"] < summary["held_points"]["tpot_mape"]
    for latency in ("tpot_mape", "ttft_mape"):
        assert summary["held_points"][latency] < summary["held_pairs"][latency]


def test_the_document_predicts_what_the_fit_does(points: Sequence[PointKernels], fitted: FittedFactors) -> None:
    for number, each in enumerate(points):
        factors = factors_in(fitted.document, each.point.device, each.point.geometry.name, each.dtypes)
        assert factors.is_of_pair
        assert each.point.tpot_ms is not None
        error = each.means_s(factors)[1] * 1e3 / each.point.tpot_ms - 1
        assert error == pytest.approx(fitted.in_sample.tpot[number], abs=0.01)


def test_ninety_percent_of_held_out_errors_lie_in_the_ranges(fitted: FittedFactors) -> None:
    tpot_spread, ttft_spread = fitted.document["all"]["spread"]
    for errors, spread in ((fitted.held_pairs.tpot, tpot_spread), (fitted.held_pairs.ttft, ttft_spread)):
        inside = (1 / (1 + spread) <= 1 + errors) & (1 + errors <= 1 + spread)
        assert 0.85 <= inside.mean() <= 0.95


def test_one_wild_point_hardly_moves_the_fit(points: Sequence[PointKernels], fitted: FittedFactors) -> None:
    wild = attrs.evolve(points[0], point=attrs.evolve(points[0].point, tpot_ms=1000.0))
    moved = fit_kernel_factors([wild, *points[1:]], "one wild point")
    assert moved.document["all"]["gemm"] == pytest.approx(fitted.document["all"]["gemm"], rel=0.1)
    assert np.median(np.abs(moved.in_sample.tpot)) < 0.03


def test_condensed_steps_have_the_means_of_all_steps(points: Sequence[PointKernels]) -> None:
    shared = np.array(list(SHARED.values()))
    data = _Points(points)
    assert len(data.owner) < 0.15 * sum(len(each.is_uncaptured) for each in points)
    ttft, tpot = data.means(shared, np.ones(len(data.kinds)))
    factors = KernelFactors(**SHARED)
    exact = np.array([each.means_s(factors) for each in points])
    assert ttft == pytest.approx(exact[:, 0], rel=0.01)
    assert tpot == pytest.approx(exact[:, 1], rel=0.01)
    assert data.kernels.shape[1] == len(CLASSES)
