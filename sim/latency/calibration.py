"""Calibrate a roofline to a few measured steps, and report its error before and after."""

import math
from collections.abc import Callable, Iterator, Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from ...core.errors import InputError
from ...core.types import StepLoad
from .devices import DeviceFactors
from .roofline import RooflineLatency

FITTED_FACTORS = (
    "weights_bandwidth_efficiency",
    "kv_bandwidth_efficiency",
    "layer_s",
    "expert_layer_s",
    "all_reduce_s",
    "step_s",
    "sampler_s_per_logit",
)
"""The factors that decode steps determine; steps with long prompts determine `compute_efficiency` as well."""

# A fit whose moves are shorter has converged.
_SETTLED_STEP = 1e-9
# Longer moves leave the range in which the model is close to linear.
_LONGEST_STEP = 1.0
_MAX_ITERATIONS = 200
_DIFFERENCE = 1e-6


@attrs.frozen(kw_only=True)
class MeasuredStep:
    """One measurement."""

    latency: RooflineLatency  # the deployment that was measured; only its factors change
    load: StepLoad  # what the step computed (means over many steps are fine: the model is close to linear in them)
    seconds: float  # how long it took
    label: str  # its name in reports; measurements with one label are left out together

    def __attrs_post_init__(self) -> None:
        if not 0 < self.seconds < math.inf:
            raise InputError(f"measured step {self.label!r}: {self.seconds} s; a step takes more than 0 s")

    def relative_error(self, factors: DeviceFactors) -> float:
        """Predicted / measured - 1."""
        return attrs.evolve(self.latency, factors=factors).step_seconds(self.load) / self.seconds - 1


@attrs.frozen(kw_only=True)
class Calibration:
    """The fitted factors and their errors."""

    factors: DeviceFactors  # the result; its `source` says how it was fitted
    free: tuple[str, ...]  # names of the factors that were fitted
    labels: tuple[str, ...]  # labels of the measured steps, in order
    errors_before: tuple[float, ...]  # relative errors of the start, in the same order
    errors_after: tuple[float, ...]  # relative errors of the result

    @property
    def mape_before(self) -> float:
        """Mean absolute percentage error of the start, %."""
        return mean_absolute_percentage_error(self.errors_before)

    @property
    def mape(self) -> float:
        """Mean absolute percentage error of the result, %, on the steps it was fitted to."""
        return mean_absolute_percentage_error(self.errors_after)

    def to_json(self) -> dict[str, object]:
        """Plain values: factors, errors of each step, and their means."""
        steps = [
            {"label": label, "error_before_pct": before * 100, "error_pct": after * 100}
            for label, before, after in zip(self.labels, self.errors_before, self.errors_after, strict=True)
        ]
        return {
            "free": list(self.free),
            "factors": self.factors.assumptions(),
            "mape_before_pct": self.mape_before,
            "mape_pct": self.mape,
            "steps": steps,
        }


def mean_absolute_percentage_error(relative_errors: Sequence[float]) -> float:
    """Mean of the absolute relative errors, in %."""
    return 100 * sum(abs(error) for error in relative_errors) / len(relative_errors)


def fit_factors(
    steps: Sequence[MeasuredStep],
    *,
    start: DeviceFactors,
    free: Sequence[str] = FITTED_FACTORS,
    measurement_error: float = 0.02,
    spread: float = 0.3,
) -> Calibration:
    """Fit the factors of one GPU type.

    It is a least-squares fit of the relative errors in units of `measurement_error` that pulls every free factor to its
    start: a change by the factor `exp(spread)` (for an efficiency: of its odds) costs as much as one step that is off
    by `measurement_error`. Factors that the steps do not determine therefore stay at their start, and a single step is
    enough for a fit.

    Args:
        steps: measurements on one GPU type; models, ranks and loads may differ.
        start: the factors expected before measuring.
        free: the factors to fit.
        measurement_error: expected relative error of a measurement.
        spread: expected distance of a factor from its start.

    Raises:
        InputError: no steps, several GPU types, a factor that is unknown or starts at 0, or numbers out of range.
    """
    _check(steps, free, measurement_error, spread)
    starts = [_start(name, start) for name in free]

    def factors_at(moves: NDArray[np.float64]) -> DeviceFactors:
        values = {name: _moved(name, *each) for name, *each in zip(free, starts, moves.tolist(), strict=True)}
        return attrs.evolve(start, **values)

    def residuals(moves: NDArray[np.float64]) -> NDArray[np.float64]:
        factors = factors_at(moves)
        errors = [step.relative_error(factors) / measurement_error for step in steps]
        return np.concatenate([np.array(errors), moves / spread])

    factors = factors_at(_least_squares(residuals, len(starts)))
    labels = tuple(step.label for step in steps)
    source = f"fitted to {len(steps)} measured steps ({', '.join(dict.fromkeys(labels))}); start: {start.source}"
    return Calibration(
        factors=attrs.evolve(factors, source=source),
        free=tuple(free),
        labels=labels,
        errors_before=tuple(step.relative_error(start) for step in steps),
        errors_after=tuple(step.relative_error(factors) for step in steps),
    )


def leave_one_out(
    steps: Sequence[MeasuredStep], fit: Callable[[Sequence[MeasuredStep]], Calibration]
) -> Iterator[tuple[str, DeviceFactors, tuple[float, ...]]]:
    """For each label: (label, factors fitted without its steps, their relative errors on those steps)."""
    for label in dict.fromkeys(step.label for step in steps):
        left_out = [step for step in steps if step.label == label]
        factors = fit([step for step in steps if step.label != label]).factors
        yield label, factors, tuple(step.relative_error(factors) for step in left_out)


def _start(name: str, factors: DeviceFactors) -> float:
    value = getattr(factors, name)
    if not value or (name.endswith("_efficiency") and value >= 1):
        raise InputError(f"factor {name} starts at {value}, from where it cannot move; start elsewhere")
    return value


def _moved(name: str, start: float, move: float) -> float:
    """A factor after a move on an unbounded scale: the logarithm of a cost, or the log-odds of an efficiency."""
    if not name.endswith("_efficiency"):
        return start * math.exp(move)
    return 1 / (1 + (1 / start - 1) * math.exp(-move))


def _check(steps: Sequence[MeasuredStep], free: Sequence[str], measurement_error: float, spread: float) -> None:
    if not steps:
        raise InputError("a fit needs at least one measured step")
    devices = sorted({step.latency.device.name for step in steps})
    if len(devices) > 1:
        raise InputError(f"the measured steps are of {', '.join(devices)}; fit the factors of one GPU type at a time")
    known = [field.name for field in attrs.fields(DeviceFactors) if field.name != "source"]
    unknown = [name for name in free if name not in known]
    if unknown or not free:
        raise InputError(f"cannot fit {', '.join(unknown) or 'no factor at all'}; factors are {', '.join(known)}")
    for name, value in (("measurement_error", measurement_error), ("spread", spread)):
        if not 0 < value < math.inf:
            raise InputError(f"{name} is {value}; it must be above 0")


def _least_squares(residuals: Callable[[NDArray[np.float64]], NDArray[np.float64]], size: int) -> NDArray[np.float64]:
    """Levenberg-Marquardt from 0, with numeric derivatives."""
    moves = np.zeros(size)
    current = residuals(moves)
    damping = 1e-3
    for _ in range(_MAX_ITERATIONS):
        columns = [(residuals(moves + _DIFFERENCE * unit) - current) / _DIFFERENCE for unit in np.eye(size)]
        jacobian = np.array(columns).T
        normal = jacobian.T @ jacobian
        step = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), -jacobian.T @ current)
        step *= min(1.0, _LONGEST_STEP / np.abs(step).max(initial=_SETTLED_STEP))
        tried = residuals(moves + step)
        if tried @ tried <= current @ current:
            moves, current, damping = moves + step, tried, damping / 4
            if np.abs(step).max() < _SETTLED_STEP:
                break
        else:
            damping *= 4
    return moves
