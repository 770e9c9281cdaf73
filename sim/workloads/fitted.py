"""Seeded workloads fitted to a trace: the same shape under other block ids, and how close the two are."""

from collections.abc import Iterator
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from ..cache.lru_curve import LruCurve, lru_curve
from ..cache.prompt_blocks import PromptBlocks, read_prompt_blocks
from ..cache.reuse import reuse_times
from ..random_draws import Draws
from ..traces import Trace
from ..traces.rows import RowTrace, TurnRecord
from . import fit
from .fit import FittedParameters, FloatArray, IntArray, OutputLengths, fit_parameters
from .stream import BlockIds, TurnRequest, WorkloadModel, open_stream

# The best earlier request is searched around the drawn age: within this many requests plus this share of the age. Long
# prompts are rare, so finding one takes a wider search.
SEARCH_WINDOW = 32
SEARCH_SHARE = 4
# The cost of an earlier request that was continued already: worse than any difference in length.
_CONTINUED = 1 << 40
PERCENTILES = (10, 50, 90, 99)
# Capacities at which hit rates are compared, as shares of the trace's distinct blocks.
CAPACITY_SHARES = (0.005, 0.02, 0.05, 0.1, 0.2, 0.4, 1.0)


def fitted_requests(parameters: FittedParameters, seed: int) -> Iterator[TurnRequest]:
    """Requests without end, in order of arrival from 0 s on."""
    draws = Draws(seed)
    generator = _Generator(parameters)
    for now in parameters.arrivals.times(draws):
        yield (now, *generator.next_request(draws))


class _Generator:
    """Generates requests; holds those that later requests may build on, as many as the largest age."""

    def __init__(self, parameters: FittedParameters) -> None:
        self._parameters = parameters
        self._samples = parameters.samples
        self._block_size = parameters.block_size
        self._new_ids = BlockIds()
        largest_age = int(max(self._samples.age.max(), self._samples.turn_age.max()))
        self._held = largest_age + _search_window(largest_age) + 1
        self._lengths: IntArray = np.zeros(self._held, dtype=np.int64)
        self._penalties: IntArray = np.zeros(self._held, dtype=np.int64)
        self._ids: list[list[int]] = [[]] * self._held
        self._num_made = 0

    def next_request(self, draws: Draws) -> tuple[int, int, tuple[int, ...] | None, TurnRecord | None]:
        """(input length, output length, hash ids, session record) of one more request."""
        sample = self._draw_sample(draws)
        samples = self._samples
        kind = int(samples.kind[sample])
        if kind == fit.FRESH:
            earlier, length, ids = None, int(samples.new_tokens[sample]), []
        else:
            earlier = self._find_earlier(sample, kind)
            length, ids = self._built_on(earlier, sample, kind)
        if self._block_size is not None and kind != fit.REPEATS:
            ids = ids + self._new_ids.new(-(-length // self._block_size) - len(ids))
        record = self._turn(sample, earlier)
        self._hold(length, ids)
        return length, int(samples.output_length[sample]), self._known(ids, length), record

    def _draw_sample(self, draws: Draws) -> int:
        """Draw a sample whose earlier request can exist by now."""
        while True:
            sample = int(draws.uniform() * len(self._samples))
            if self._samples.age[sample] <= self._num_made and self._samples.turn_age[sample] <= self._num_made:
                return sample
            if not self._num_made and not (self._samples.kind == fit.FRESH).any():
                return sample

    def _find_earlier(self, sample: int, kind: int) -> int:
        """The number of the earlier request that is most like the one described, about `age` requests ago."""
        samples = self._samples
        age = int(samples.age[sample])
        target = self._num_made - age
        window = _search_window(age)
        numbers = np.arange(max(target - window, 0), min(target + window + 1, self._num_made))
        at = numbers % self._held
        distance = np.abs(numbers - target)
        if kind == fit.BRANCHES:
            too_short = self._lengths[at] < samples.shared_blocks[sample] * (self._block_size or 1)
            costs = distance + too_short * _CONTINUED
        else:
            wanted = int(samples.earlier_length[sample])
            costs = np.abs(self._lengths[at] - wanted) + wanted * distance // (8 * window)
            if kind == fit.CONTINUES:
                costs = costs + self._penalties[at]
        return int(numbers[int(costs.argmin())])

    def _built_on(self, earlier: int, sample: int, kind: int) -> tuple[int, list[int]]:
        """The length of the new prompt, and the ids that it takes from the earlier one."""
        samples, block_size = self._samples, self._block_size or 1
        at = earlier % self._held
        earlier_length, earlier_ids = int(self._lengths[at]), self._ids[at]
        new_tokens = int(samples.new_tokens[sample])
        if kind == fit.REPEATS:
            return earlier_length, earlier_ids
        if kind == fit.CONTINUES:
            self._penalties[at] = _CONTINUED
            return earlier_length + new_tokens, earlier_ids[: earlier_length // block_size]
        kept = min(int(samples.shared_blocks[sample]), earlier_length // block_size)
        return kept * block_size + new_tokens, earlier_ids[:kept]

    def _turn(self, sample: int, earlier: int | None) -> TurnRecord | None:
        """The request as a turn after the one it builds on, or after the request that is `turn_age` back."""
        samples, number = self._samples, self._num_made
        if not self._parameters.links_turns:
            return None
        turn_age = int(samples.turn_age[sample])
        after: tuple[int, ...] = ()
        if turn_age:
            after = (number - turn_age,)
            if earlier is not None and turn_age == samples.age[sample]:
                after = (earlier,)
        think_s, answered_s = _seconds(samples.think_s[sample]), _seconds(samples.answered_s[sample])
        return TurnRecord(
            key=number, after=after, think_s=think_s, keeps_own_gap=think_s is None, answered_s=answered_s
        )

    def _hold(self, length: int, ids: list[int]) -> None:
        at = self._num_made % self._held
        self._lengths[at], self._penalties[at], self._ids[at] = length, 0, ids
        self._num_made += 1

    def _known(self, ids: list[int], length: int) -> tuple[int, ...] | None:
        """The ids as the trace would have them: None, one per block, or one per full block."""
        if self._block_size is None:
            return None
        return tuple(ids[: length // self._block_size] if self._parameters.full_blocks_only else ids)


def _search_window(age: int) -> int:
    return SEARCH_WINDOW + age // SEARCH_SHARE


def _seconds(value: float) -> float | None:
    return None if value == fit.UNKNOWN_S else float(value)


@attrs.frozen(eq=False)
class Shape:
    """The properties of a stream of requests that are compared; `curve` is None if prompts have no ids."""

    input_lengths: IntArray
    output_lengths: IntArray
    arrivals_s: FloatArray
    num_block_events: int
    num_distinct_blocks: int
    curve: LruCurve | None
    reuse_times_s: dict[str, float]

    @classmethod
    def of(cls, prompts: PromptBlocks, output_lengths: IntArray, has_ids: bool) -> "Shape":
        """The shape of prompts and the lengths of their answers."""
        return cls(
            prompts.input_lengths,
            output_lengths,
            prompts.arrivals_s,
            prompts.num_block_events,
            prompts.num_distinct_blocks,
            lru_curve(prompts) if has_ids else None,
            reuse_times(prompts) if has_ids else {},
        )


def closeness(trace: Shape, workload: Shape) -> dict[str, Any]:
    """Figures of both and their distances.

    `ks` is the Kolmogorov-Smirnov distance: the largest difference of the two cumulative distributions, 0 to 1. Hit
    rates are LRU, as shares of blocks, at the same capacities in blocks.
    """
    out: dict[str, Any] = {
        "requests": {"trace": len(trace.input_lengths), "workload": len(workload.input_lengths)},
        "input_length": _compared(trace.input_lengths, workload.input_lengths),
        "output_length": _compared(trace.output_lengths, workload.output_lengths),
        "gap_s": _compared(np.diff(trace.arrivals_s), np.diff(workload.arrivals_s)),
        "requests_per_s": {"trace": _rate(trace.arrivals_s), "workload": _rate(workload.arrivals_s)},
        "gap_variation": {"trace": _variation(trace.arrivals_s), "workload": _variation(workload.arrivals_s)},
    }
    if trace.curve is not None and workload.curve is not None:
        sizes = sorted({max(1, round(share * trace.num_distinct_blocks)) for share in CAPACITY_SHARES})
        rates = [
            {
                "num_blocks": size,
                "trace": trace.curve.at(size).hit_blocks / trace.num_block_events,
                "workload": workload.curve.at(size).hit_blocks / workload.num_block_events,
            }
            for size in sizes
        ]
        out["hit_rate"] = rates
        out["largest_hit_rate_difference"] = max(abs(rate["trace"] - rate["workload"]) for rate in rates)
        out["reuse_time_s"] = {"trace": trace.reuse_times_s, "workload": workload.reuse_times_s}
    return out


def closeness_sentence(figures: dict[str, Any]) -> str:
    """A summary in one sentence, for a note on the terminal."""
    prompt, answer, rate = (figures[name] for name in ("input_length", "output_length", "requests_per_s"))
    parts = [
        f"mean prompt {prompt['workload']['mean']:,.0f} tokens beside {prompt['trace']['mean']:,.0f}",
        f"mean answer {answer['workload']['mean']:,.1f} beside {answer['trace']['mean']:,.1f}",
        f"{rate['workload']:,.3g} requests a second beside {rate['trace']:,.3g}",
    ]
    if "hit_rate" in figures:
        parts.append(f"LRU hit rates within {figures['largest_hit_rate_difference'] * 100:.1f} points")
    return "fitted workload beside its trace: " + ", ".join(parts)


def _compared(trace: npt.NDArray[Any], workload: npt.NDArray[Any]) -> dict[str, Any]:
    return {"trace": _figures(trace), "workload": _figures(workload), "ks": _ks_distance(trace, workload)}


def _figures(values: npt.NDArray[Any]) -> dict[str, float]:
    if not len(values):
        return {}
    return {
        "mean": float(values.mean()),
        **{f"p{percent}": float(np.percentile(values, percent, method="inverted_cdf")) for percent in PERCENTILES},
    }


def _ks_distance(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> float | None:
    if not len(one) or not len(other):
        return None
    values = np.concatenate((one, other))
    ranks = [np.searchsorted(np.sort(each), values, side="right") / len(each) for each in (one, other)]
    return float(np.abs(ranks[0] - ranks[1]).max())


def _rate(arrivals_s: FloatArray) -> float | None:
    span = float(arrivals_s[-1] - arrivals_s[0]) if len(arrivals_s) else 0.0
    return (len(arrivals_s) - 1) / span if span else None


def _variation(arrivals_s: FloatArray) -> float | None:
    """Standard deviation of the gaps divided by their mean: 1 for a Poisson process, more for bursts."""
    gaps = np.diff(arrivals_s)
    mean = float(gaps.mean()) if len(gaps) else 0.0
    return float(gaps.std()) / mean if mean else None


@attrs.frozen(eq=False)
class FittedWorkload:
    """A model of a trace. `open` makes workloads; `closeness` compares one with the trace.

    model = fit_workload(open_trace("conversation_trace.jsonl.gz"))
    replay(model.open(seed=1, limit=100_000), ...)
    """

    parameters: FittedParameters
    shape: Shape

    def model(self, closeness: dict[str, Any] | None = None) -> WorkloadModel:
        """The workload model; `closeness` is shown in the report."""
        parameters = self.parameters
        return WorkloadModel(
            name=f"fitted to {parameters.source}",
            resembles=parameters.source,
            parameters=parameters,
            requests=fitted_requests,
            duration_s=parameters.duration_s or 1.0,
            trace_block_size=parameters.block_size,
            stated={**parameters.as_dict(), **({} if closeness is None else {"closeness": closeness})},
            about=None if closeness is None else closeness_sentence(closeness),
            timestamp_unit="us",
            format="fitted workload",
            full_blocks_only=parameters.full_blocks_only,
            links_turns=parameters.links_turns,
            records_think_times=parameters.records_think_times and parameters.links_turns,
        )

    def open(self, *, seed: int = 0, **window: Any) -> RowTrace:
        """A workload; options as in `open_stream`. It lasts as long as the trace unless a duration is given."""
        return open_stream(self.model(), seed=seed, **window)

    def closeness(self, seed: int = 0) -> dict[str, Any]:
        """Compare lengths, arrivals and reuse of as many requests as the trace has with the trace's own."""
        recorded = OutputLengths(self.open(seed=seed, limit=self.parameters.num_requests))
        prompts = read_prompt_blocks(recorded, fit.NO_BLOCKS if self.parameters.block_size is None else None)
        generated = Shape.of(prompts, recorded.as_array(), self.parameters.block_size is not None)
        return closeness(self.shape, generated)


def fit_workload(trace: Trace) -> FittedWorkload:
    """Fit a workload to a trace in one pass, with 4 bytes of memory per block event."""
    parameters, prompts, output_lengths = fit_parameters(trace)
    return FittedWorkload(parameters, Shape.of(prompts, output_lengths, parameters.block_size is not None))


def open_fitted(trace: Trace, *, seed: int = 0, **window: Any) -> RowTrace:
    """Fit to a trace, measure how close the fit is, and open a workload whose report states both."""
    fitted = fit_workload(trace)
    return open_stream(fitted.model(fitted.closeness(seed)), seed=seed, **window)
