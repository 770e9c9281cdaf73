"""The smallest number, or the highest rate, that meets an SLO: bisection over full replays, every run kept."""

from collections.abc import Callable, Sequence
from typing import Any

import attrs

from ..core.errors import InputError
from .slo import Verdict


@attrs.frozen(kw_only=True)
class Trial:
    """One full replay: what was tried, whether it met the SLO, and its figures."""

    value: float
    verdict: Verdict
    figures: dict[str, Any] = attrs.field(factory=dict)

    @property
    def met(self) -> bool:
        """Whether it met the SLO."""
        return self.verdict.met

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"value": self.value, "met": self.met, "slo": self.verdict.figures, **self.figures}


@attrs.frozen(kw_only=True)
class SearchResult:
    """What a search found.

    Attributes:
        answer: the boundary: the smallest number (or highest rate) such that it met the SLO and the next one below
            (above) that was tried did not; None: nothing within the bounds meets it.
        trials: every run, in ascending order of what was tried.
        contradictions: pairs (met, missed) that speak against monotony: more should do whatever less did.
    """

    answer: float | None
    trials: tuple[Trial, ...]
    contradictions: tuple[tuple[float, float], ...]

    @property
    def is_monotone(self) -> bool:
        """Whether all runs agree that more capacity (or less traffic) never hurts."""
        return not self.contradictions

    def trial(self, value: float) -> Trial:
        """The run of a value."""
        return next(trial for trial in self.trials if trial.value == value)


Run = Callable[[Any], Trial]


class _Runs:
    """Runs each value once."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.done: dict[float, Trial] = {}

    def met(self, value: float) -> bool:
        if value not in self.done:
            self.done[value] = self._run(value)
        return self.done[value].met

    def result(self, answer: float | None, more_is_better: bool) -> SearchResult:
        trials = tuple(self.done[value] for value in sorted(self.done))
        ordered = trials if more_is_better else trials[::-1]
        contradictions = [
            (better.value, worse.value)
            for place, better in enumerate(ordered)
            if better.met
            for worse in ordered[place + 1 :]
            if not worse.met
        ]
        return SearchResult(answer=answer, trials=trials, contradictions=tuple(contradictions))


def smallest_meeting(run: Run, *, start: int = 1, most: int = 64, check_neighbours: bool = True) -> SearchResult:
    """The smallest whole number, from 1 to `most`, whose run meets the SLO.

    From `start` on, steps of 1, 2, 4, ... up or down bracket the answer; bisection closes the bracket. So the answer N
    was run, and N - 1 (unless N is 1) was run and did not meet it. With `check_neighbours`, N + 1 and N - 2 are run
    too: if either disagrees, the answers are not monotone, and the result says so.

    Args:
        run: replays one value.
        start: where the answer is expected.
        most: where to give up.
        check_neighbours: whether to look beyond the bracket.

    Raises:
        InputError: bounds that hold nothing.
    """
    if not 1 <= start <= most:
        raise InputError(f"the search starts at {start}; it must be at least 1 and at most {most}")
    runs = _Runs(run)
    missed, met = 0, most + 1  # nothing is below 1; whether `most` does is still to be seen
    value, step = start, 1
    upwards = not runs.met(start)
    while True:
        if runs.met(value):
            met = value
            if upwards or value == 1:
                break
            value = max(value - step, 1)
        else:
            missed = value
            if not upwards or value == most:
                break
            value = min(value + step, most)
        step *= 2
    while met - missed > 1:
        middle = (met + missed) // 2
        if runs.met(middle):
            met = middle
        else:
            missed = middle
    if met > most:
        return runs.result(None, True)
    if check_neighbours:
        for neighbour in (met + 1, met - 2):
            if 1 <= neighbour <= most:
                runs.met(neighbour)
    return runs.result(met, True)


def highest_meeting(
    run: Run, *, start: float = 1.0, lowest: float = 1 / 64, highest: float = 64.0, tolerance: float = 0.02
) -> SearchResult:
    """The highest rate, within a relative tolerance, whose run meets the SLO.

    From `start` on, factors of 2 bracket the answer; bisection of the logarithm closes the bracket to `tolerance`. Two
    more runs, one bracket below the answer and above what missed, check for answers that are not monotone.

    Raises:
        InputError: bounds that hold nothing, or a tolerance that is none.
    """
    if not 0 < lowest <= start <= highest or not tolerance > 0:
        raise InputError(f"the search from {start} within {lowest} to {highest} to {tolerance}: bounds must hold it")
    runs = _Runs(run)
    met, missed = _bracket(runs, start, lowest, highest)
    if met is None or missed is None:
        return runs.result(met, False)
    while missed / met > 1 + tolerance:
        middle = (met * missed) ** 0.5
        if runs.met(middle):
            met = middle
        else:
            missed = middle
    for neighbour in (met / (1 + tolerance), missed * (1 + tolerance)):
        if lowest <= neighbour <= highest:
            runs.met(neighbour)
    return runs.result(met, False)


def _bracket(runs: _Runs, start: float, lowest: float, highest: float) -> tuple[float | None, float | None]:
    """A rate that met the SLO and one, twice as high at most, that missed it; None for what is beyond the bounds."""
    value = start
    met: float | None = None
    missed: float | None = None
    while met is None or missed is None:
        if runs.met(value):
            met = value
            if value == highest:
                break
            value = min(value * 2, highest)
        else:
            missed = value
            if value == lowest:
                break
            value = max(value / 2, lowest)
    return met, missed


# Two-sided 95 % quantiles of Student's t distribution for 1, 2, ... degrees of freedom (any table of it).
_T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
_T_95_MORE = 2.131


@attrs.frozen(kw_only=True)
class Interval:
    """A mean over seeds and its 95 % confidence interval (Student's t); None where one seed tells nothing."""

    mean: float
    low: float | None
    high: float | None
    num_samples: int

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return attrs.asdict(self)


def confidence_interval(samples: Sequence[float]) -> Interval:
    """The mean of samples, one a seed, and where it lies with 95 % confidence.

    Beyond 16 samples the quantile of 15 degrees of freedom is used, which is a little too wide.
    """
    if not samples:
        raise InputError("a confidence interval needs at least one sample")
    count = len(samples)
    mean = sum(samples) / count
    if count == 1:
        return Interval(mean=mean, low=None, high=None, num_samples=1)
    variance = sum((sample - mean) ** 2 for sample in samples) / (count - 1)
    quantile = _T_95[count - 2] if count - 2 < len(_T_95) else _T_95_MORE
    half = quantile * (variance / count) ** 0.5
    return Interval(mean=mean, low=mean - half, high=mean + half, num_samples=count)
