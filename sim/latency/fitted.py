"""Fit step times to the steps that a live engine measured: read them from its log, fit a cost per figure of a step."""

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import TYPE_CHECKING, Final

import attrs
import numpy as np
from numpy.typing import NDArray

from ...core.errors import InputError
from ...core.types import LatencyModel, StepLoad

if TYPE_CHECKING:
    from ...backends.sinks.log.reader import LogReader

COLUMNS = StepLoad._fields
# Terms of a step's time: fields of `StepLoad`, and two more.
BASE: Final = "base"  # the fixed cost of a step
PREFILL_STEP: Final = "prefill_step"  # 1 for a step with prefill tokens: it runs outside CUDA graphs, whatever its size
PLAIN: Final = (BASE, "num_prefill_tokens", "num_decode_tokens")  # the terms of `LinearLatency`
# The same, plus attention over the cached context, and sampling; and for engines that capture decode steps only.
WITH_CONTEXT: Final = (*PLAIN, "prefill_context_tokens", "decode_context_tokens", "num_sampled")
WITH_PREFILL_STEPS: Final = (*WITH_CONTEXT, PREFILL_STEP)

_ROUNDS = 30
# Steps with a smaller relative error count equally; otherwise the best-fitting steps would decide everything.
_LEAST_ERROR = 0.01
# Lower bound of a prediction as a share of the measured time, while costs are still far off.
_LEAST_SHARE = 0.01


@attrs.frozen(eq=False)
class MeasuredSteps:
    """Measured steps, in the order in which they ran."""

    loads: NDArray[np.int64]  # int64 `[num_steps, 6]`, the figures of `StepLoad` in its order
    seconds: NDArray[np.float64]  # float64 `[num_steps]`, how long each took

    def __len__(self) -> int:
        return len(self.seconds)

    def __getitem__(self, which: slice | NDArray[np.bool_]) -> "MeasuredSteps":
        return MeasuredSteps(self.loads[which], self.seconds[which])

    def column(self, name: str) -> NDArray[np.int64]:
        """One figure of every step: int64 `[num_steps]`."""
        return self.loads[:, COLUMNS.index(name)]

    def each(self) -> Iterator[tuple[StepLoad, float]]:
        """(load, seconds) of each step."""
        for load, seconds in zip(self.loads.tolist(), self.seconds.tolist(), strict=True):
            yield StepLoad(*load), seconds

    def predicted(self, latency: LatencyModel) -> NDArray[np.float64]:
        """The seconds that a model predicts for every step: float64 `[num_steps]`."""
        return np.array([latency.step_seconds(load) for load, _ in self.each()])

    def kinds(self) -> list[tuple[str, NDArray[np.bool_]]]:
        """(description, mask) of each kind of step, by what it computes; the smallest steps first."""
        prefill, decode = self.column("num_prefill_tokens"), self.column("num_decode_tokens")
        out: list[tuple[str, NDArray[np.bool_]]] = []
        parts = (("decode", prefill == 0), ("prefill", decode == 0), ("both", (prefill > 0) & (decode > 0)))
        buckets = np.frexp((prefill + decode).astype(np.float64))[1] - 1  # floor(log2)
        for name, is_part in parts:
            for bucket in np.unique(buckets[is_part]).tolist():
                first, last = 1 << bucket, (2 << bucket) - 1
                extent = f"{first:,}" if first == last else f"{first:,} to {last:,}"
                out.append((f"{name}, {extent} tokens", is_part & (buckets == bucket)))
        return out

    def means(self, which: NDArray[np.bool_]) -> tuple[StepLoad, float]:
        """The mean load, rounded, and the median time of some steps; the median ignores a few outliers."""
        return StepLoad(*np.rint(self.loads[which].mean(axis=0)).astype(int).tolist()), float(
            np.median(self.seconds[which])
        )


def measured_steps(reader: "LogReader", skip_first: int = 0) -> MeasuredSteps:
    """The steps of a live run, but the first `skip_first`, while the device warms up.

    Raises:
        InputError: it is not the log of a live run, or holds too few steps.
    """
    from ...backends.sinks.log.rows import StepComputed
    from ..traces.logged import is_live

    if not is_live(reader):
        raise InputError(f"{reader.directory} holds no measured steps: it is not the log of a live engine")
    if skip_first < 0:
        raise InputError(f"skip_first is {skip_first}; give 0 or more steps to leave out")
    loads: list[Sequence[int]] = []
    nanoseconds: list[int] = []
    for logged in reader.notes():
        if isinstance(logged.note, StepComputed):
            loads.append(tuple(logged.note.load))
            nanoseconds.append(logged.note.nanoseconds)
    if len(loads) - skip_first < 2:
        raise InputError(
            f"{reader.directory} holds {len(loads)} measured steps, of which {skip_first} are left out; at least 2 are "
            "needed to calibrate a model and to test it"
        )
    return MeasuredSteps(
        np.array(loads, dtype=np.int64).reshape(-1, len(COLUMNS))[skip_first:],
        np.array(nanoseconds, dtype=np.float64)[skip_first:] / 1e9,
    )


@attrs.frozen
class FittedLatency:
    """`sum(cost * figure)` seconds a step; no cost is negative."""

    costs: dict[str, float]  # seconds per unit of a figure of `StepLoad`, of `BASE` and of `PREFILL_STEP`, by name
    num_steps: int  # measured steps that the costs were fitted to
    untold: tuple[str, ...] = ()  # terms that the steps do not determine; they cost nothing here

    def step_seconds(self, load: StepLoad) -> float:
        return sum([cost * _amount(load, name) for name, cost in self.costs.items()])

    def assumptions(self) -> dict[str, object]:
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
    """Fit the costs of a step, none of them negative, by median regression: half of the steps took longer.

    Steps that something else on the machine delayed therefore have no influence. The fit is a least-squares fit of the
    differences relative to the predicted time (relative to the measured time, long steps would count too little and
    every prediction would be too low), repeated with each step weighted by its error in the round before.

    Raises:
        InputError: there are no steps, or all terms are 0 in all of them.
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
    """Costs with `shares @ costs` closest to `wanted`; there are few terms, so every subset of them is tried."""
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
