"""Factors on kernel times: the formula, and the documents that hold them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvledger.core.errors import InputError
from kvledger.sim.latency.devices import find_device
from kvledger.sim.latency.kernel_factors import FITTED, KernelFactors, factors_in, kernels_of, read_factors

DOCUMENT: dict[str, Any] = {
    "source": "a fit",
    "all": {"gemm": 1.5, "experts": 2.0, "step_s": 0.001, "spread": [0.5, 0.8]},
    "kernels": [{"kernels": "sm90 fp8", "experts": 3.0}],
    "pairs": [
        {"device": "H200", "model": "m", "dtypes": "fp8", "step": 0.5, "prefill": 2.0, "spread": [0.1, 0.2]},
        {"device": "B200", "model": "m", "dtypes": "fp8", "step": 9.0, "prefill": 9.0, "spread": [0.1, 0.2]},
    ],
}
H200 = find_device("H200")


def test_the_formula_has_every_factor_and_every_cost() -> None:
    factors = KernelFactors(
        gemm=2.0, head=3.0, layer_s=0.01, uncaptured_layer_s=0.1, prefill_step_s=1.0, step_s=5.0, sequence_s=0.5,
        step=10.0, prefill=100.0,
    )  # fmt: skip
    kernels = {"gemm": 1.0, "head": 2.0}
    gpu_s = 2 * 1 + 3 * 2 + 4 * 0.01
    assert factors.seconds(kernels, False, 6, 4) == pytest.approx(10 * gpu_s + 5 + 3)
    assert factors.seconds(kernels, True, 6, 4) == pytest.approx(100 * (gpu_s + 1) + 5 + 3)
    # The host's launches bound a step of prompts, and no other.
    assert factors.seconds(kernels, True, 0, 400) == pytest.approx(100 * (400 * 0.1 + 1) + 5)
    assert factors.seconds(kernels, False, 0, 400) == pytest.approx(10 * (8 + 4) + 5)


def test_steps_in_arrays_take_as_long_as_one_by_one() -> None:
    factors = KernelFactors(gemm=1.3, prefill=2.0, step=0.5, prefill_step_s=0.1)
    seconds, prompts, sampled = np.array([1.0, 2.0]), np.array([True, False]), np.array([3.0, 4.0])
    together = factors.seconds({"gemm": seconds}, prompts, sampled, 8)
    alone = [
        factors.seconds({"gemm": s}, p, n, 8)
        for s, p, n in zip(seconds.tolist(), prompts.tolist(), sampled.tolist(), strict=True)
    ]
    assert together.tolist() == pytest.approx(alone)


def test_factors_of_a_pair_are_those_of_all_times_those_of_its_kernels_times_its_own() -> None:
    factors = factors_in(DOCUMENT, H200, "m", "fp8")
    assert (factors.gemm, factors.experts, factors.step, factors.prefill) == (1.5, 6.0, 0.5, 2.0)
    assert (factors.is_of_pair, factors.spread, factors.step_s) == (True, (0.1, 0.2), 0.001)
    assert factors.source == "a fit; servers of this model on this device among them"


def test_another_model_has_the_factors_of_its_kernels_and_of_all() -> None:
    factors = factors_in(DOCUMENT, H200, "another", "fp8")
    assert (factors.experts, factors.step, factors.is_of_pair, factors.spread) == (6.0, 1.0, False, (0.5, 0.8))
    assert factors.source == "a fit; none of this model on this device"
    assert factors_in(DOCUMENT, H200, "another", "bf16").experts == 2.0
    assert factors_in(DOCUMENT).gemm == 1.5  # profiled kernels have no device


def test_kernels_are_alike_on_one_generation_of_gpus_with_one_dtype() -> None:
    assert kernels_of(find_device("H100"), "fp8") == kernels_of(H200, "fp8") == "sm90 fp8"
    assert kernels_of(find_device("B300"), "nvfp4") == kernels_of(find_device("B200"), "nvfp4") == "sm100 nvfp4"


def test_the_shipped_factors_can_be_read_and_name_what_they_were_fitted_to() -> None:
    factors = factors_in(read_factors(), find_device("B200"), "gpt-oss-120b", "bf16+mxfp4")
    assert factors.is_of_pair
    assert "434 public serving points" in str(factors.assumptions()["factors_source"])
    assert FITTED.name == "kernel_factors.json"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"source": None}, "'source' is missing"),
        ({"pairs": None}, "'pairs' is missing"),
        ({"pairs": [{"model": "m", "dtypes": "fp8"}]}, "'device' is missing"),
        ({"kernels": [{"experts": 1.0}]}, "'kernels' is missing"),
        ({"kernels": 3}, "not iterable"),
        ({"all": {"gemms": 1.0}}, "gemms"),
        ({"all": {"gemm": -1.0}}, "gemm"),
        ({"all": {"gemm": "fast"}}, "str"),
        ({"pairs": [{"device": "H200", "model": "m", "dtypes": "fp8", "step": -2}]}, "step"),
    ],
)
def test_a_document_of_another_shape_is_refused_by_the_name_of_what_is_wrong(
    change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    path = tmp_path / "factors.json"
    path.write_text(json.dumps({name: value for name, value in {**DOCUMENT, **change}.items() if value is not None}))
    with pytest.raises(InputError, match=f"factors.json: not a file of factors.*{said}"):
        read_factors(path)


@pytest.mark.parametrize(("text", "said"), [("{", "not a JSON document"), ("[1]", "not a file of factors")])
def test_a_file_that_is_no_document_is_refused(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "factors.json"
    path.write_text(text)
    with pytest.raises(InputError, match=said):
        read_factors(path)


def test_a_missing_file_is_named_and_a_file_that_changed_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "factors.json"
    with pytest.raises(InputError, match=r"factors.json: No such file"):
        read_factors(path)
    for gemm in (1.0, 2.0):
        path.write_text(json.dumps({**DOCUMENT, "all": {"gemm": gemm}}))
        assert factors_in(read_factors(path)).gemm == gemm
