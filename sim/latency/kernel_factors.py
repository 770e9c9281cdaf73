"""Factors on measured kernel times, and costs of the host: fitted to measured servers, kept in kernel_factors.json."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from ...core.errors import InputError
from ...core.types import LatencyModel, ScheduledStep, StepLoad, scheduled_seconds
from ..figures import not_negative
from .devices import Device

CLASSES = ("gemm", "experts", "attention_decode", "attention_prefill", "collectives", "head", "elementwise")
"""Classes of kernels; each has a factor."""
MAX_CAPTURED_TOKENS = 512  # of the largest step that a CUDA graph of vLLM holds, unless fewer sequences run
COSTS = ("layer_s", "uncaptured_layer_s", "prefill_step_s", "step_s", "sequence_s")
"""Costs of the host, in seconds."""
_OF_GROUPS = ("experts", "step", "prefill")  # factors that a kind of kernels or a pair can have
FITTED = Path(__file__).with_name("kernel_factors.json")


@attrs.frozen(kw_only=True)
class KernelFactors:
    """What a server makes of its kernels; 1 and 0 say that it runs them back to back.

    Attributes:
        gemm, experts, attention_decode, attention_prefill, collectives, head, elementwise: factors of classes.
        layer_s: time between the kernels of a layer.
        uncaptured_layer_s: the host's launches for a layer in a step that no CUDA graph holds, because it has more
            tokens than the largest graph: the step takes at least that long.
        prefill_step_s: added to such a step; nearly all of them compute long prompts.
        step_s: added to every step: scheduling and inputs, as far as the GPU waits for them.
        sequence_s: added for each sampled token: sampling, and its way to the client.
        step, prefill: factors of whole steps: those that a CUDA graph holds, and the others.
        is_of_pair: whether servers of the same model on the same device were measured.
        spread: 90 % of measured values lie within a factor of `1 + spread` of TPOT and of TTFT; None: not known.
        source: where the figures come from.
    """

    gemm: float = attrs.field(default=1.0, validator=not_negative)
    experts: float = attrs.field(default=1.0, validator=not_negative)
    attention_decode: float = attrs.field(default=1.0, validator=not_negative)
    attention_prefill: float = attrs.field(default=1.0, validator=not_negative)
    collectives: float = attrs.field(default=1.0, validator=not_negative)
    head: float = attrs.field(default=1.0, validator=not_negative)
    elementwise: float = attrs.field(default=1.0, validator=not_negative)
    layer_s: float = attrs.field(default=0.0, validator=not_negative)
    uncaptured_layer_s: float = attrs.field(default=0.0, validator=not_negative)
    prefill_step_s: float = attrs.field(default=0.0, validator=not_negative)
    step_s: float = attrs.field(default=0.0, validator=not_negative)
    sequence_s: float = attrs.field(default=0.0, validator=not_negative)
    step: float = attrs.field(default=1.0, validator=not_negative)
    prefill: float = attrs.field(default=1.0, validator=not_negative)
    is_of_pair: bool = False
    spread: tuple[float, float] | None = attrs.field(default=None, converter=attrs.converters.optional(tuple))
    source: str = "none: kernels as they were measured"

    def seconds(self, kernels: Mapping[str, Any], is_uncaptured: Any, num_sampled: Any, num_layers: Any) -> Any:
        """Seconds of a step from the seconds of its kernels by class; numbers, or arrays with one for each step."""
        total = self.layer_s * num_layers + sum([getattr(self, name) * seconds for name, seconds in kernels.items()])
        uncaptured = np.maximum(total, self.uncaptured_layer_s * num_layers) + self.prefill_step_s
        total = np.where(is_uncaptured, uncaptured * self.prefill, total * self.step)
        return total + self.step_s + self.sequence_s * num_sampled

    def assumptions(self) -> dict[str, object]:
        """Every factor, with its unit in the name."""
        factors: dict[str, object] = {f"{name}_factor": getattr(self, name) for name in (*CLASSES, "step", "prefill")}
        costs = {f"{name.removesuffix('_s')}_us": getattr(self, name) * 1e6 for name in COSTS}
        known: dict[str, object] = {}
        if self.spread is not None:
            known = {"spread_of_tpot": self.spread[0], "spread_of_ttft": self.spread[1]}
        return {**factors, **costs, **known, "factors_source": self.source}


def read_factors(path: Path = FITTED) -> Mapping[str, Any]:
    """The document of a fit: of `kvledger validate --fit`, or the shipped one.

    Raises InputError: the file cannot be read, or is not such a document.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from error
    except ValueError as error:
        raise InputError(f"{path}: not a JSON document: {error}") from error
    try:
        kinds = [(group, ("kernels",)) for group in document["kernels"]]
        pairs = [(pair, ("device", "model", "dtypes")) for pair in document["pairs"]]
        for group, names in (*kinds, *pairs, ({}, ())):
            _ = [group[name] for name in names]
            own = {name: group[name] for name in _OF_GROUPS if name in group}
            KernelFactors(**{**document["all"], **own, "source": document["source"]})
    except (KeyError, TypeError, InputError) as error:
        what = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else error
        raise InputError(
            f"{path}: not a file of factors, as validate --fit and explain-run --calibrate write them: {what}"
        ) from error
    return document


NO_FACTORS: Mapping[str, Any] = {"source": "none: kernels as they were profiled", "all": {}, "kernels": [], "pairs": []}


def factors_in(
    document: Mapping[str, Any], device: Device | None = None, model: str = "", dtypes: str = ""
) -> KernelFactors:
    """The factors of a document for a model on a device: `all`, times those of its kernels, times those of the pair."""
    values: dict[str, Any] = dict(document["all"])
    pair = (None if device is None else device.name, model, dtypes)
    groups = [
        *(group for group in document["kernels"] if device and group["kernels"] == kernels_of(device, dtypes)),
        *(each for each in document["pairs"] if (each["device"], each["model"], each["dtypes"]) == pair),
    ]
    for group in groups:
        for name in _OF_GROUPS:
            values[name] = values.get(name, 1.0) * group.get(name, 1.0)
        values["spread"] = group.get("spread", values.get("spread"))
    own, source = any("model" in group for group in groups), document["source"]
    if document["pairs"]:
        source += "; servers of this model on this device among them" if own else "; none of this model on this device"
    return KernelFactors(**{**values, "is_of_pair": own, "source": source})


def kernels_of(device: Device, dtypes: str) -> str:
    """What the speed of quantized kernels depends on: the generation of the GPU and the dtypes of the weights."""
    return f"sm{(device.cuda_capability or 0) // 10}0 {dtypes}"


@attrs.frozen(kw_only=True)
class CalibratedLatency:
    """Another model's steps under factors that were fitted to a server: scales, and costs added to steps."""

    inner: LatencyModel
    factors: KernelFactors
    max_captured_tokens: int = MAX_CAPTURED_TOKENS

    @classmethod
    def of(cls, inner: LatencyModel, factors: KernelFactors) -> "CalibratedLatency":
        """A model under factors; CUDA graphs hold the steps that the model says, if it says so."""
        captured = getattr(inner, "max_captured_tokens", MAX_CAPTURED_TOKENS)
        return cls(inner=inner, factors=factors, max_captured_tokens=captured)

    def step_seconds(self, load: StepLoad) -> float:
        return self._calibrated(self.inner.step_seconds(load), load)

    def scheduled_seconds(self, step: ScheduledStep, num_steps_later: int, load: StepLoad) -> float:
        return self._calibrated(scheduled_seconds(self.inner, step, num_steps_later, load), load)

    def _calibrated(self, seconds: float, load: StepLoad) -> float:
        is_uncaptured = load.num_tokens > self.max_captured_tokens
        return float(self.factors.seconds({"gemm": seconds}, is_uncaptured, load.num_sampled, 0))

    def assumptions(self) -> dict[str, object]:
        changed = {name: getattr(self.factors, name) for name in ("step", "prefill", "step_s", "prefill_step_s")}
        return {**self.inner.assumptions(), "calibration": self.factors.source, **changed}
