"""Service-level objectives, whether a run met them, and searches for the boundary."""

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from typing import Any

import attrs

from ...core.errors import InputError
from ..engine.metrics import RequestRecord
from ..figures import Document

PERCENT = 99


def _positive(_: object, attribute: "attrs.Attribute[float | None]", value: float | None) -> None:
    if value is not None and not 0 < value < float("inf"):
        raise InputError(f"{attribute.name} is {value}; it must be a number of seconds above 0")


@attrs.frozen(kw_only=True)
class Slo:
    """A service-level objective; every part that is not None must hold.

    Attributes:
        ttft_p99_s: limit of the 99th percentile (nearest rank) of TTFT, including queueing, over all requests.
        tpot_p99_s: limit of the 99th percentile of TPOT, over requests of two or more tokens.
        goodput_share: least share of requests that keep the limits below; needs at least one of them.
        ttft_s: TTFT limit of a single request, for the goodput.
        tpot_s: TPOT limit of a single request, for the goodput; a request of one token keeps it.
    """

    ttft_p99_s: float | None = attrs.field(default=None, validator=_positive)
    tpot_p99_s: float | None = attrs.field(default=None, validator=_positive)
    goodput_share: float | None = None
    ttft_s: float | None = attrs.field(default=None, validator=_positive)
    tpot_s: float | None = attrs.field(default=None, validator=_positive)

    def __attrs_post_init__(self) -> None:
        has_limits = self.ttft_s is not None or self.tpot_s is not None
        if self.ttft_p99_s is None and self.tpot_p99_s is None and self.goodput_share is None:
            raise InputError(
                "there is no SLO: give --slo-ttft-p99 SECONDS, --slo-tpot-p99 SECONDS, or --slo-goodput SHARE with "
                "--slo-ttft or --slo-tpot"
            )
        if (self.goodput_share is not None) != has_limits:
            raise InputError("--slo-goodput SHARE and a limit for each request (--slo-ttft, --slo-tpot) go together")
        if self.goodput_share is not None and not 0 < self.goodput_share <= 1:
            raise InputError(f"--slo-goodput is {self.goodput_share}; it must be a share above 0 and at most 1")

    def as_dict(self) -> dict[str, float]:
        """The parts that are given."""
        return {name: value for name, value in attrs.asdict(self).items() if value is not None}


@attrs.frozen(kw_only=True)
class Verdict:
    """Whether a run met every part of an SLO, and for each part `limit`, `value` and `met`.

    A value is None without a sample, and if so many requests were rejected that the percentile is infinite.
    """

    met: bool
    figures: dict[str, Document]


class SloTally:
    """Collects the latencies of one run's finished requests; pass `tally.finished` as `on_finished`."""

    def __init__(self, slo: Slo) -> None:
        self._slo = slo
        self._ttft_s: list[float] = []
        self._tpot_s: list[float] = []
        self._num_good = 0
        self._num_late = {"ttft_p99_s": 0, "tpot_p99_s": 0, "goodput_share": 0}

    def finished(self, record: RequestRecord) -> None:
        """Add a finished request."""
        slo = self._slo
        self._ttft_s.append(record.ttft_s)
        if record.tpot_s is not None:
            self._tpot_s.append(record.tpot_s)
        in_time = slo.ttft_s is None or record.ttft_s <= slo.ttft_s
        is_good = in_time and (slo.tpot_s is None or record.tpot_s is None or record.tpot_s <= slo.tpot_s)
        self._num_good += is_good
        late = self._num_late
        late["goodput_share"] += not is_good
        late["ttft_p99_s"] += slo.ttft_p99_s is not None and record.ttft_s > slo.ttft_p99_s
        late["tpot_p99_s"] += slo.tpot_p99_s is not None and (record.tpot_s or 0.0) > slo.tpot_p99_s

    def is_lost(self, num_requests: int) -> bool:
        """Whether the run of `num_requests` requests already misses the SLO, whatever the other requests do."""
        return any(count > room for count, room in self._rooms(num_requests).values())

    def _rooms(self, num_requests: int) -> dict[str, tuple[int, int]]:
        """For each part of the SLO: the late requests, and how many of `num_requests` may be late.

        Requests of one token have no TPOT, so the second number is an upper bound for TPOT.
        """
        room = num_requests - max(1, -(-PERCENT * num_requests // 100))
        rooms = {name: (self._num_late[name], room) for name in ("ttft_p99_s", "tpot_p99_s")}
        if self._slo.goodput_share is not None:
            good = math.ceil(self._slo.goodput_share * num_requests - 1e-9)
            rooms["goodput_share"] = (self._num_late["goodput_share"], num_requests - good)
        return rooms

    def lost(self) -> Verdict:
        """The verdict of a run that stopped early because it misses the SLO; no figure is final."""
        limits = self._slo.as_dict()
        named = [name for name in self._num_late if name in limits]
        return Verdict(
            met=False,
            figures={
                name: {"limit": limits[name], "value": None, "met": None, "num_late": self._num_late[name]}
                for name in named
            },
        )

    def verdict(self, num_requests: int) -> Verdict:
        """The verdict of a complete run; requests that did not finish count as infinitely late."""
        slo = self._slo
        num_lost = num_requests - len(self._ttft_s)
        figures: dict[str, Document] = {}
        for name, limit, samples in (
            ("ttft_p99_s", slo.ttft_p99_s, self._ttft_s),
            ("tpot_p99_s", slo.tpot_p99_s, self._tpot_s),
        ):
            if limit is not None:
                value = _percentile(samples, num_lost)
                shown = value if value is not None and math.isfinite(value) else None
                figures[name] = {"limit": limit, "value": shown, "met": value is None or value <= limit}
        if slo.goodput_share is not None:
            share = self._num_good / num_requests if num_requests else 1.0
            figures["goodput_share"] = {"limit": slo.goodput_share, "value": share, "met": share >= slo.goodput_share}
        return Verdict(met=all(figure["met"] for figure in figures.values()), figures=figures)


def _percentile(samples: list[float], num_lost: int) -> float | None:
    """The 99th percentile (nearest rank) of the samples plus `num_lost` infinite ones."""
    count = len(samples) + num_lost
    if not count:
        return None
    rank = max(1, -(-PERCENT * count // 100))
    return sorted(samples)[rank - 1] if rank <= len(samples) else math.inf


TOLERANCE = 0.02
# After a missed run, this many runs in a row must meet the SLO before the first of them counts as safe.
IN_A_ROW = 2
MOST_UNTIL_SAFE = 16
TRIAL_KEYS = ("value", "met", "slo")


@attrs.frozen(kw_only=True)
class Trial:
    """One replay: the tried value, whether it met the SLO, and its figures."""

    value: float
    verdict: Verdict
    figures: Document = attrs.field(factory=dict)

    @property
    def met(self) -> bool:
        """Whether it met the SLO."""
        return self.verdict.met

    def as_dict(self) -> Document:
        """For JSON."""
        return {"value": self.value, "met": self.met, "slo": self.verdict.figures, **self.figures}

    @classmethod
    def from_dict(cls, document: Document) -> "Trial":
        """The trial that `as_dict` described."""
        figures = {name: value for name, value in document.items() if name not in TRIAL_KEYS}
        value, met, slo = (document[name] for name in TRIAL_KEYS)
        return cls(value=value, verdict=Verdict(met=met, figures=slo), figures=figures)


@attrs.frozen(kw_only=True)
class SearchResult:
    """What a search found.

    Attributes:
        answer: the boundary: the smallest number (or highest rate) that met the SLO while the next tried one below
            (above) it missed. None if nothing within the bounds meets the SLO, or the search did not end.
        trials: every run, in ascending order of the tried value.
        contradictions: pairs (met, missed) where more capacity (or less traffic) missed the SLO and less met it.
        safe: every run from this number on (up to this rate) met the SLO; None if there is none.
    """

    answer: float | None
    trials: tuple[Trial, ...]
    contradictions: tuple[tuple[float, float], ...]
    safe: float | None

    @property
    def is_monotone(self) -> bool:
        """Whether more capacity (or less traffic) never hurt."""
        return not self.contradictions

    def trial(self, value: float) -> Trial:
        """The run of a value."""
        return next(trial for trial in self.trials if trial.value == value)


def search_result(trials: Sequence[Trial], answer: float | None, *, more_is_better: bool) -> SearchResult:
    """Summarize the runs of a search, whether it ended or not."""
    ascending = tuple(sorted(trials, key=lambda trial: trial.value))
    ordered = ascending if more_is_better else ascending[::-1]
    contradictions = [
        (better.value, worse.value)
        for place, better in enumerate(ordered)
        if better.met
        for worse in ordered[place + 1 :]
        if not worse.met
    ]
    met_to_the_end = list(takewhile(lambda trial: trial.met, reversed(ordered)))
    safe = met_to_the_end[-1].value if met_to_the_end else None
    return SearchResult(answer=answer, trials=ascending, contradictions=tuple(contradictions), safe=safe)


Run = Callable[[Any], Trial]
OnLeft = Callable[[int], None]
Step = Callable[[Any, int], Any]


class _Runs:
    """Runs each value once, and closes in on the boundary between those that meet the SLO and those that miss it."""

    def __init__(self, run: Run, probes: int, on_left: OnLeft) -> None:
        self._run, self._num_probes, self._on_left = run, probes, on_left
        self.done: dict[float, Trial] = {}

    def met(self, value: float) -> bool:
        if value not in self.done:
            self.done[value] = self._run(value)
        return self.done[value].met

    def result(self, answer: float | None, more_is_better: bool) -> SearchResult:
        return search_result(list(self.done.values()), answer, more_is_better=more_is_better)

    def bracket(self, start: Any, easier: Step, harder: Step) -> tuple[Any, Any]:
        """A value that met the SLO and one that missed it, from `start` in steps that double; None out of bounds."""
        met = missed = None
        value, step = start, 1
        while value is not None and (met is None or missed is None):
            if self.met(value):
                met, value = value, harder(value, step)
            else:
                missed, value = value, easier(value, step)
            step *= 2
        return met, missed

    def close(self, met: Any, missed: Any, middle: Callable[[Any, Any], Any], left: Callable[[Any, Any], int]) -> Any:
        """Bisect until no run is `left`; returns both values."""
        while num_left := left(met, missed):
            self._on_left(num_left + 2 * self._num_probes)
            value = middle(met, missed)
            met, missed = (value, missed) if self.met(value) else (met, value)
        return met, missed

    def probe(self, values: Sequence[float]) -> None:
        for place, value in enumerate(values):
            self._on_left(len(values) - place)
            self.met(value)

    def until_safe(self, values: Iterable[float], *, more_is_better: bool) -> None:
        """If a run beyond the answer missed, run more until two in a row meet, which gives a safe value.

        `values` go from the answer to more and more capacity (or less traffic).
        """
        sign = 1 if more_is_better else -1
        in_order = [sign * value for value in values]
        missed = [sign * value for value, trial in self.done.items() if not trial.met and sign * value > in_order[0]]
        in_a_row = 0
        for value in in_order if missed else ():
            if value > max(missed) and in_a_row < IN_A_ROW:
                in_a_row = in_a_row + 1 if self.met(sign * value) else 0


def smallest_meeting(
    run: Run, *, start: int = 1, most: int = 64, probes: int = 1, on_left: OnLeft = lambda left: None
) -> SearchResult:
    """Find the smallest whole number, from 1 to `most`, whose run meets the SLO.

    Steps of 1, 2, 4, ... from `start` up or down bracket the answer; bisection closes the bracket. So the answer N ran
    and met the SLO, and N - 1 (unless N is 1) ran and missed it. `probes` more runs on either side, nearest first,
    check that results are monotone; the result lists contradictions. Once the answer is bracketed, `on_left` is called
    with the most runs that are left.

    Raises InputError: `start` is out of bounds.
    """
    if not 1 <= start <= most:
        raise InputError(f"the search starts at {start}; it must be at least 1 and at most {most}")
    runs = _Runs(run, probes, on_left)
    met, missed = runs.bracket(
        start,
        easier=lambda value, step: min(value + step, most) if value < most else None,
        harder=lambda value, step: max(value - step, 1) if value > 1 else None,
    )
    if met is None:
        return runs.result(None, True)
    met, _ = runs.close(
        met,
        missed or 0,
        middle=lambda met, missed: (met + missed) // 2,
        left=lambda met, missed: (met - missed - 1).bit_length(),
    )
    above = [value for value in range(met + 1, most + 1) if value not in runs.done][:probes]
    below = [value for value in range(met - 1, 0, -1) if value not in runs.done][:probes]
    runs.probe([*above, *below])
    runs.until_safe(range(met, min(most, met + MOST_UNTIL_SAFE) + 1), more_is_better=True)
    return runs.result(met, True)


def highest_meeting(
    run: Run,
    *,
    start: float = 1.0,
    lowest: float = 1 / 64,
    highest: float = 64.0,
    tolerance: float = TOLERANCE,
    probes: int = 1,
    on_left: OnLeft = lambda left: None,
) -> SearchResult:
    """Find the highest rate, within a relative tolerance, whose run meets the SLO.

    Factors of 2 from `start` bracket the answer; bisection of the logarithm closes the bracket to `tolerance`: the
    answer r ran and met the SLO, and a rate of at most `r * (1 + tolerance)` ran and missed it. `probes` more rates on
    either side, each farther away, check that results are monotone.

    Raises InputError: `start` is out of bounds, or the tolerance is not positive.
    """
    if not 0 < lowest <= start <= highest or not tolerance > 0:
        raise InputError(
            f"the search starts at {start}; it must be from {lowest} to {highest}, with a tolerance above 0"
        )

    def left(met: float, missed: float) -> int:
        if missed / met <= 1 + tolerance:
            return 0
        return math.ceil(math.log2(math.log(missed / met) / math.log(1 + tolerance)))

    runs = _Runs(run, probes, on_left)
    met, missed = runs.bracket(
        start,
        easier=lambda value, _: max(value / 2, lowest) if value > lowest else None,
        harder=lambda value, _: min(value * 2, highest) if value < highest else None,
    )
    if met is None or missed is None:
        return runs.result(met, False)
    met, missed = runs.close(met, missed, middle=lambda met, missed: (met * missed) ** 0.5, left=left)
    # 1, 3, 7, ... tolerances away, so that a few probes look near and far.
    away = [(1 + tolerance) ** ((1 << number) - 1) for number in range(1, probes + 1)]
    values = [*(missed * factor for factor in away), *(met / factor for factor in away)]
    runs.probe([value for value in values if lowest <= value <= highest])
    lower = (met / (1 + tolerance) ** steps for steps in range(MOST_UNTIL_SAFE))
    runs.until_safe([value for value in lower if value >= lowest], more_is_better=False)
    return runs.result(met, False)


# Two-sided 95 % quantiles of Student's t distribution for 1, 2, ... degrees of freedom (any table of it).
_T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)


def confidence_interval(samples: Sequence[float]) -> dict[str, float | None]:
    """The mean over seeds and its 95 % confidence interval (Student's t); `low` and `high` are None for one seed.

    Beyond 16 samples the quantile of 15 degrees of freedom is used, which is a little too wide.
    """
    if not samples:
        raise InputError("a confidence interval needs at least one sample")
    count = len(samples)
    mean = sum(samples) / count
    if count == 1:
        return {"mean": mean, "low": None, "high": None, "num_samples": 1}
    variance = sum((sample - mean) ** 2 for sample in samples) / (count - 1)
    half = _T_95[min(count - 2, len(_T_95) - 1)] * (variance / count) ** 0.5
    return {"mean": mean, "low": mean - half, "high": mean + half, "num_samples": count}
