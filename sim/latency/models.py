"""Latency models by name: how long an engine step takes.

Any object with `step_seconds(load)` and `assumptions()` is a latency model (`core.types.LatencyModel`). A class in the
registry also has `from_inputs`, which makes the model from what the user gave or raises `InputError` if it needs more,
and may name in `takes` the inputs that it reads. docs/extending.md shows one.
"""

from pathlib import Path
from typing import Any

import attrs

from ...core.deployment.deployment import Deployment
from ...core.errors import InputError
from ...core.registry import Registry
from ...core.types import LatencyModel
from .devices import Device
from .kernel_factors import CalibratedLatency, factors_in, read_factors
from .kernel_tables import has_kernel_tables


@attrs.frozen(kw_only=True)
class LatencyInputs:
    """Everything that a latency model can be made from; None: not given."""

    base_ms: float | None = None  # fixed time of a step, milliseconds
    us_per_prefill_token: float | None = None  # microseconds per prompt token
    us_per_decoding_sequence: float | None = None  # microseconds per decoding request
    latency_table: str | None = None  # path of a CSV file of measured steps
    kernel_profile: str | None = None  # path of a folder of profiled kernels
    calibration: str | None = None  # path of a file of factors
    enable_expert_parallel: bool = False  # whether each GPU holds whole experts
    deployment: Deployment | None = None  # model, ranks and limits
    device: Device | None = None  # the GPU of each rank
    weights_dtype: str = "auto"  # a quantization scheme, a dtype, or `auto`: what the model's config says


# Inputs that only some models read. Giving one to another model is an error.
OWN_INPUTS = (
    "base_ms",
    "us_per_prefill_token",
    "us_per_decoding_sequence",
    "latency_table",
    "kernel_profile",
    "enable_expert_parallel",
)


latency_models: Registry[type[Any]] = Registry("latency model", "kvledger.latency_models")


def make_latency(name: str | None, inputs: LatencyInputs) -> LatencyModel:
    """A latency model by name, or the one that the inputs are for.

    With None: `table` with a latency table; `kernels` with profiled kernels, or with a deployment on a device whose
    kernel times are installed; `roofline` with a deployment on any other device, or with decode context parallelism,
    which `kernels` does not know; else `linear`.

    Raises:
        InputError: there is no such model, it needs an input that is not given, or a given input has no effect on it.
    """
    if name is None:
        name = _fitting(inputs)
    factory = latency_models.get(name)
    for field in OWN_INPUTS:
        value = getattr(inputs, field)
        if value not in (None, False) and field not in getattr(factory, "takes", ()):
            option = f"--{field.replace('_', '-')}" + ("" if value is True else f" {value}")
            raise InputError(f"{option} has no effect on --latency {name}; leave it out")
    model = factory.from_inputs(inputs)
    if inputs.calibration is None or "calibration" in getattr(factory, "takes", ()):
        return model
    return CalibratedLatency.of(model, factors_in(read_factors(Path(inputs.calibration))))


def _fitting(inputs: LatencyInputs) -> str:
    if inputs.latency_table:
        return "table"
    if inputs.kernel_profile is not None:
        return "kernels"
    if inputs.deployment is None:
        return "linear"
    if inputs.device is None or inputs.deployment.decode_context_parallel_size > 1:
        return "roofline"
    return "kernels" if has_kernel_tables(inputs.device) else "roofline"
