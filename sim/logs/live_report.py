"""Compares measured step times of a live run with predictions, and calibrates the latency models.

Each model has three errors: before calibration, after calibration on the fitted steps, and on unseen steps (fitted to
every other step, tested on the rest).
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import attrs
import numpy as np
from numpy.typing import NDArray

from ...core.models.geometry import load_geometry
from ...core.types import LatencyModel
from ..figures import Document
from ..latency.calibration import FITTED_FACTORS, MeasuredStep, fit_factors
from ..latency.devices import find_device
from ..latency.fitted import BASE, PLAIN, WITH_CONTEXT, WITH_PREFILL_STEPS, FittedLatency, MeasuredSteps, fit_latency
from ..latency.linear import LinearLatency
from ..latency.roofline import RooflineLatency

if TYPE_CHECKING:
    from ...backends.sinks.log.reader import LogReader

PREFILL_FACTORS = ("compute_efficiency",)
EAGER_FACTORS = ("uncaptured_layer_s",)


@attrs.frozen(eq=False)
class CalibratedModel:
    """One latency model against the measured steps, before calibration (None without default costs) and after it.

    Errors are mean absolute relative errors of a step; `total_error` is the relative error of the total predicted time.
    """

    name: str
    before: LatencyModel | None
    after: LatencyModel
    error_before: float | None
    error_after: float
    error_unseen: float
    total_error: float

    def to_json(self) -> Document:
        """JSON values, with errors in %."""
        return {
            "name": self.name,
            "mape_before_pct": None if self.error_before is None else self.error_before * 100,
            "mape_pct": self.error_after * 100,
            "mape_unseen_pct": self.error_unseen * 100,
            "total_error_pct": self.total_error * 100,
            "assumptions": self.after.assumptions(),
        }


@attrs.frozen(eq=False)
class LiveReport:
    """Measured steps and the models calibrated to them."""

    steps: MeasuredSteps
    models: tuple[CalibratedModel, ...]

    @property
    def best(self) -> CalibratedModel:
        """The model that predicts unseen steps best; on a tie the one with fewer terms."""
        return min(self.models, key=lambda model: model.error_unseen)

    def rows(self) -> list[Document]:
        """Measured and predicted means per kind of step, of the best model."""
        best, steps = self.best, self.steps
        after = steps.predicted(best.after)
        before = None if best.before is None else steps.predicted(best.before)
        out: list[Document] = []
        for name, which in steps.kinds():
            measured, predicted = steps.seconds[which].mean(), after[which].mean()
            out.append(
                {
                    "kind": name,
                    "steps": int(which.sum()),
                    "measured_ms": measured * 1e3,
                    "measured_median_ms": float(np.median(steps.seconds[which])) * 1e3,
                    "predicted_before_ms": None if before is None else before[which].mean() * 1e3,
                    "predicted_ms": predicted * 1e3,
                    "error_pct": (predicted / measured - 1) * 100,
                    "step_error_pct": _error(after[which], steps.seconds[which]) * 100,
                }
            )
        return out

    @property
    def replay_options(self) -> str:
        """The linear model as options of `kvledger replay`, with the live engine's way to run and no HTTP server."""
        costs = next(model.after for model in self.models if model.name == "linear")
        assert isinstance(costs, FittedLatency)
        options = {
            "--base-ms": costs.costs.get(BASE, 0.0) * 1e3,
            "--us-per-prefill-token": costs.costs.get("num_prefill_tokens", 0.0) * 1e6,
            "--us-per-decoding-sequence": costs.costs.get("num_decode_tokens", 0.0) * 1e6,
        }
        costs_given = " ".join(f"{name} {value:.6g}" for name, value in options.items())
        return f"--latency linear {costs_given} --no-async-scheduling --http-ms 0"

    def to_json(self) -> Document:
        """Plain values for `--json`."""
        return {
            "steps": len(self.steps),
            "measured_seconds": float(self.steps.seconds.sum()),
            "best": self.best.name,
            "models": [model.to_json() for model in self.models],
            "kinds": self.rows(),
            "replay_options": self.replay_options,
        }


def live_report(steps: MeasuredSteps, roofline: RooflineLatency | None = None) -> LiveReport:
    """Compare and calibrate every latency model; `roofline` is the model expected before measuring, if any.

    Raises InputError: there are no steps.
    """
    terms = {"linear": PLAIN, "linear with context": WITH_CONTEXT, "linear with prefill steps": WITH_PREFILL_STEPS}
    models = [
        _calibrated(name, LinearLatency() if of is PLAIN else None, steps, lambda some, of=of: fit_latency(some, of))
        for name, of in terms.items()
    ]
    if roofline is not None:
        models.append(_calibrated("roofline", roofline, steps, lambda some: fit_roofline(some, roofline)))
    return LiveReport(steps=steps, models=tuple(models))


def served_roofline(reader: "LogReader", model: str, gpu: str, weights_dtype: str = "auto") -> RooflineLatency:
    """The roofline expected of a live engine, from the presets of its model and device.

    Steps with more tokens than the largest captured decode step count as running outside CUDA graphs.

    Raises InputError: an unknown model or device, or a model whose computation is unknown.
    """
    header = reader.manifest.header
    expected = RooflineLatency.for_model(
        load_geometry(model),
        find_device(gpu),
        max_num_seqs=header["scheduler"]["max_num_seqs"],
        weights_dtype=weights_dtype,
        enforce_eager=True,
    )
    captured = header["facts"].get("cudagraph_capture_sizes", [])
    return attrs.evolve(expected, max_captured_tokens=max(captured, default=0))


def fit_roofline(steps: MeasuredSteps, start: RooflineLatency) -> RooflineLatency:
    """Fit a roofline's device factors to measured steps, with one measurement per kind of step."""
    measured: list[MeasuredStep] = []
    for name, which in steps.kinds():
        load, seconds = steps.means(which)
        measured.append(MeasuredStep(latency=start, load=load, seconds=seconds, label=name))
    free = [name for name in FITTED_FACTORS if getattr(start.factors, name)]
    if steps.column("num_prefill_tokens").any():
        free += PREFILL_FACTORS
    tokens = steps.column("num_prefill_tokens") + steps.column("num_decode_tokens")
    if (tokens > start.max_captured_tokens).any() and start.factors.uncaptured_layer_s:
        free += EAGER_FACTORS
    return attrs.evolve(start, factors=fit_factors(measured, start=start.factors, free=free).factors)


def _calibrated(
    name: str, before: LatencyModel | None, steps: MeasuredSteps, fit: Callable[[MeasuredSteps], LatencyModel]
) -> CalibratedModel:
    after = fit(steps)
    seen, unseen = steps[::2], steps[1::2]
    predicted = steps.predicted(after)
    return CalibratedModel(
        name=name,
        before=before,
        after=after,
        error_before=None if before is None else _error(steps.predicted(before), steps.seconds),
        error_after=_error(predicted, steps.seconds),
        error_unseen=_error(unseen.predicted(fit(seen)), unseen.seconds),
        total_error=float(predicted.sum() / steps.seconds.sum() - 1),
    )


def _error(predicted: NDArray[np.float64], measured: NDArray[np.float64]) -> float:
    """Mean absolute relative error."""
    return float(np.abs(predicted / measured - 1).mean())
