"""Step times as a sum over what a step computes, with costs fitted to measured steps."""

from itertools import combinations
from typing import Any, Final

import attrs
import numpy as np
from numpy.typing import NDArray

from ...core.errors import InputError
from ...core.types import StepLoad
from .measured_steps import MeasuredSteps

BASE: Final = "base"
"""The cost of a step whatever it computes; other names are fields of `StepLoad`, and `PREFILL_STEP`."""
PLAIN: Final = (BASE, "num_prefill_tokens", "num_decode_tokens")
"""The terms of `LinearLatency`."""
WITH_CONTEXT: Final = (*PLAIN, "prefill_context_tokens", "decode_context_tokens", "num_sampled")
"""The same, attention over what is cached, and sampling."""

PREFILL_STEP: Final = "prefill_step"
"""1 for a step with prefill tokens: a live engine runs it outside CUDA graphs, whatever its size."""
WITH_PREFILL_STEPS: Final = (*WITH_CONTEXT, PREFILL_STEP)
"""The same, where decode steps alone are captured."""

_ROUNDS = 30
# Below this relative error steps count alike; without it the best-fitting ones would decide alone.
_LEAST_ERROR = 0.01
# Nothing is predicted to take less than this share of what it took, while costs are still far off.
_LEAST_SHARE = 0.01


@attrs.frozen
class FittedLatency:
    """`sum(cost * figure)` seconds a step; none of the costs is negative.

    Attributes:
        costs: seconds for each unit of a figure of `StepLoad`, of `BASE` and of `PREFILL_STEP`, by name.
        num_steps: measured steps that they were fitted to.
        untold: terms that were to be fitted and of which those steps tell nothing; they cost nothing here.
    """

    costs: dict[str, float]
    num_steps: int
    untold: tuple[str, ...] = ()

    def step_seconds(self, load: StepLoad) -> float:
        """Seconds that the step takes."""
        return sum([cost * _amount(load, name) for name, cost in self.costs.items()])

    def assumptions(self) -> dict[str, Any]:
        """The costs in microseconds, and where they come from."""
        return {
            "latency_model": "linear in " + ", ".join(name.replace("_", " ") for name in self.costs),
            **{f"us_per_{_unit(name)}": cost * 1e6 for name, cost in self.costs.items()},
            "coefficients_source": f"fitted to {self.num_steps} measured steps",
            **({"not_told_by_the_steps": list(self.untold)} if self.untold else {}),
        }


def _amount(load: StepLoad, name: str) -> int:
    if name == BASE:
        return 1
    return int(load.num_prefill_tokens > 0) if name == PREFILL_STEP else getattr(load, name)


def _unit(name: str) -> str:
    return "step" if name == BASE else name.removeprefix("num_").removesuffix("s")


def fit_latency(steps: MeasuredSteps, terms: tuple[str, ...] = WITH_CONTEXT) -> FittedLatency:
    """Costs that are not negative and lie in the middle: of steps that compute alike, half took longer.

    Median regression, so that steps which something else on the machine held up decide nothing: least squares of the
    differences relative to the predicted time (relative to the measured one, long times would count for too little,
    and every prediction would be too low), repeated with each step weighed by what the round before left it.

    Raises:
        InputError: no steps, or none that the terms tell apart from nothing.
    """
    if not len(steps):
        raise InputError("a fit needs at least one measured step")
    figures = np.column_stack([_figure(steps, name) for name in terms])
    told = figures.max(axis=0) > 0
    if not told.any():
        raise InputError(f"the measured steps have nothing of {', '.join(terms)}")
    scale = figures[:, told].max(axis=0)
    shares = figures[:, told] / scale
    costs, weights, predicted = np.zeros(len(scale)), np.ones(len(steps)), steps.seconds
    for _ in range(_ROUNDS):
        costs = _non_negative_least_squares(shares / predicted[:, None], steps.seconds / predicted, weights)
        predicted = np.maximum(shares @ costs, _LEAST_SHARE * steps.seconds)
        weights = 1 / np.maximum(np.abs(steps.seconds / predicted - 1), _LEAST_ERROR)
    names = [name for name, is_told in zip(terms, told.tolist(), strict=True) if is_told]
    return FittedLatency(
        costs=dict(zip(names, (costs / scale).tolist(), strict=True)),
        num_steps=len(steps),
        untold=tuple(name for name in terms if name not in names),
    )


def _figure(steps: MeasuredSteps, name: str) -> NDArray[np.float64]:
    if name == BASE:
        return np.ones(len(steps))
    figure = steps.column("num_prefill_tokens") > 0 if name == PREFILL_STEP else steps.column(name)
    return figure.astype(np.float64)


def _non_negative_least_squares(
    shares: NDArray[np.float64], wanted: NDArray[np.float64], weights: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Costs with `shares @ costs` closest to `wanted`; the terms are few, so every subset of them is tried."""
    size = shares.shape[1]
    gram = shares.T @ (shares * weights[:, None])
    target = shares.T @ (weights * wanted)
    best, best_value = np.zeros(size), 0.0
    for count in range(1, size + 1):
        for subset in combinations(range(size), count):
            index = list(subset)
            costs = np.linalg.lstsq(gram[np.ix_(index, index)], target[index], rcond=None)[0]
            value = -float(costs @ target[index])
            if costs.min() >= 0 and value < best_value:
                best, best_value = np.zeros(size), value
                best[index] = costs
    return best
