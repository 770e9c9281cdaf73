"""Seeded workloads fitted to a trace: the same lengths, arrivals and reuse, none of its blocks; and how close they are.

Every request of the trace is described by its relation to an earlier one: how many requests ago that was, how long its
prompt was, how many blocks the two share, and how many tokens are new. A generated request draws one of these
descriptions and searches, about as many requests ago, for the generated request that fits it best:

    fresh      shares nothing; only its length counts
    continues  its prompt begins with the whole earlier one (a next turn): the same growth
    repeats    its prompt is the earlier one
    branches   shares some first blocks, then differs: the same number of blocks, the same rest

A model keeps up to MAX_SAMPLES descriptions of seven numbers each and the tables of `ArrivalModel`.
"""

from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from ...core.errors import InputError
from ..cache.lru_curve import LruCurve, lru_curve
from ..cache.prompt_blocks import PromptBlocks, read_prompt_blocks
from ..cache.reuse import reuse_times
from ..random_draws import Draws
from ..traces import Trace, TraceInfo, TraceRequest
from ..traces.rows import RowTrace, TurnRecord
from .stream import BlockIds, TurnRequest, WorkloadModel, open_stream

NUM_CLASSES = 8
# Quantiles that are kept of the gaps of each class and of the batch sizes.
NUM_QUANTILES = 128


@attrs.frozen
class ArrivalModel:
    """When requests arrive: a point process. Each table lists equally likely values, smallest first."""

    gaps_s: tuple[tuple[float, ...], ...]  # for each class of gaps, seconds between two batches
    next_class: tuple[tuple[float, ...], ...]  # for each class, cumulative probabilities of the class that follows
    batch_sizes: tuple[int, ...]  # requests that share a timestamp

    def times(self, draws: Draws) -> Iterator[float]:
        """Arrival times without end, from 0 s on."""
        now, kind = 0.0, 0
        while True:
            for _ in range(_drawn(self.batch_sizes, draws)):
                yield now
            if not self.gaps_s:
                continue
            kind = bisect_right(self.next_class[kind], draws.uniform())
            now += _drawn(self.gaps_s[kind], draws)

    def as_dict(self) -> dict[str, object]:
        """Its size and means, for the report."""
        return {
            "gap_classes": len(self.gaps_s),
            "mean_gap_s_of_class": [sum(gaps) / len(gaps) for gaps in self.gaps_s],
            "mean_batch_size": sum(self.batch_sizes) / len(self.batch_sizes),
        }


def fit_arrivals(times_s: npt.NDArray[np.float64]) -> ArrivalModel:
    """The model of recorded arrivals (seconds, not decreasing). Raises `InputError` if there are none."""
    if not len(times_s):
        raise InputError("there are no arrivals to fit a workload to")
    batches, sizes = np.unique(times_s, return_counts=True)
    gaps = np.diff(batches)
    batch_sizes = tuple(int(size) for size in _quantiles(np.sort(sizes)))
    if not len(gaps):
        return ArrivalModel((), (), batch_sizes)
    # Classes of equal share; equal gaps share a class.
    edges = np.unique(np.quantile(gaps, np.arange(1, NUM_CLASSES) / NUM_CLASSES, method="higher"))
    _, kinds = np.unique(np.searchsorted(edges, gaps, side="left"), return_inverse=True)
    num_kinds = int(kinds.max()) + 1
    counts = np.zeros((num_kinds, num_kinds))
    np.add.at(counts, (kinds[:-1], kinds[1:]), 1)
    shares = np.bincount(kinds, minlength=num_kinds) / len(kinds)
    followed = counts.sum(axis=1, keepdims=True)
    chances = np.where(followed > 0, counts / np.maximum(followed, 1), shares)
    return ArrivalModel(
        tuple(tuple(float(gap) for gap in _quantiles(np.sort(gaps[kinds == kind]))) for kind in range(num_kinds)),
        # Without the last one, which is 1: a uniform draw is compared with them.
        tuple(tuple(accumulate(row.tolist()))[:-1] for row in chances),
        batch_sizes,
    )


def _quantiles(ordered: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """At most NUM_QUANTILES equally likely values, each the mean of its share, so that the mean is kept."""
    if len(ordered) <= NUM_QUANTILES:
        return ordered
    if ordered.dtype.kind == "i":
        at = (np.arange(NUM_QUANTILES) + 0.5) / NUM_QUANTILES
        return ordered[(at * len(ordered)).astype(np.int64)]
    return np.array([piece.mean() for piece in np.array_split(ordered, NUM_QUANTILES)])


def _drawn(values: Sequence[Any], draws: Draws) -> Any:
    return values[int(draws.uniform() * len(values))]


IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
MAX_SAMPLES = 8_192
FRESH, CONTINUES, REPEATS, BRANCHES = range(4)
KINDS = ("fresh", "continues", "repeats", "branches")
UNKNOWN_S = -1.0
# The block size at which prompts without ids are read: one block each.
NO_BLOCKS = 1 << 30


@attrs.frozen(eq=False)
class Samples:
    """Descriptions of requests, one an index; int64 but for the times, which are those of `Turn` (UNKNOWN_S: None)."""

    kind: IntArray  # FRESH, CONTINUES, REPEATS or BRANCHES
    age: IntArray  # requests back to the earlier request, at least 1; 0 for a fresh one
    earlier_length: IntArray  # tokens of the earlier prompt
    shared_blocks: IntArray  # blocks of it that the prompt begins with
    new_tokens: IntArray  # tokens after the earlier prompt (continues) or the shared blocks (branches), or all
    output_length: IntArray  # tokens of the answer
    turn_age: IntArray  # requests back to the turn before it in its session; 0 if it opens a session or none is known
    think_s: FloatArray
    gap_s: FloatArray
    answered_s: FloatArray

    def __len__(self) -> int:
        return len(self.kind)

    def thinned(self, at_most: int) -> "Samples":
        """At most `at_most` of them, evenly spaced."""
        if len(self) <= at_most:
            return self
        at = np.arange(at_most) * len(self) // at_most
        return Samples(**{field.name: getattr(self, field.name)[at] for field in attrs.fields(Samples)})


@attrs.frozen(eq=False)
class FittedParameters:
    """The fitted parameters; `links_turns`: whether requests carry turns; `source`: the trace's name."""

    source: str
    block_size: int | None
    full_blocks_only: bool
    links_turns: bool
    records_think_times: bool
    duration_s: float
    num_requests: int
    arrivals: ArrivalModel
    samples: Samples

    def as_dict(self) -> dict[str, object]:
        """A summary for the report, without the tables."""
        kinds = np.bincount(self.samples.kind, minlength=len(KINDS))
        return {
            "fitted_to": self.source,
            "block_size": self.block_size,
            "num_requests": self.num_requests,
            "duration_s": self.duration_s,
            "num_samples": len(self.samples),
            **{f"share_{name}": int(count) / len(self.samples) for name, count in zip(KINDS, kinds, strict=True)},
            "arrivals": self.arrivals.as_dict(),
        }


class OutputLengths:
    """Wraps a trace and records the lengths of its answers while it is read."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._lengths = array("q")

    @property
    def info(self) -> TraceInfo:
        """The trace's own."""
        return self._trace.info

    def __iter__(self) -> Iterator[TraceRequest]:
        for request in self._trace:
            self._lengths.append(request.output_length)
            yield request

    def as_array(self) -> IntArray:
        """Tokens of each answer, in order."""
        return np.array(self._lengths, dtype=np.int64)


class _Recorded(OutputLengths):
    """Also records the links between turns."""

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        self.turn_age = array("q")
        self.times = {"think_s": array("d"), "gap_s": array("d"), "answered_s": array("d")}

    def __iter__(self) -> Iterator[TraceRequest]:
        index_of: dict[int, int] = {}
        for index, request in enumerate(super().__iter__()):
            turn = request.turn
            before = [] if turn is None else [index_of[place] for place in turn.waits_for if place in index_of]
            self.turn_age.append(index - max(before) if before else 0)
            for name, times in self.times.items():
                seconds = None if turn is None else getattr(turn, name)
                times.append(UNKNOWN_S if seconds is None else seconds)
            if turn is not None:
                index_of[request.place] = index
            yield request


def _describe(prompts: PromptBlocks, recorded: _Recorded) -> Samples:
    lengths, block_size = prompts.input_lengths, prompts.block_size
    num_requests = prompts.num_requests
    is_known = prompts.previous_request >= 0
    shared = np.bincount(prompts.requests[is_known], minlength=num_requests)
    has_earlier = shared > 0
    earlier = np.zeros(num_requests, dtype=np.int64)
    last_shared = (prompts.starts[:-1] + shared - 1)[has_earlier]
    earlier[has_earlier] = prompts.previous_request[last_shared]
    earlier_length = np.where(has_earlier, lengths[earlier], 0)
    continues = has_earlier & (shared >= earlier_length // block_size) & (lengths > earlier_length)
    repeats = has_earlier & (lengths == earlier_length) & (shared == prompts.counts)
    kind = np.where(has_earlier, BRANCHES, FRESH)
    kind[continues] = CONTINUES
    kind[repeats] = REPEATS
    beyond_shared = np.maximum(lengths - shared * block_size, 1)
    new_tokens = np.select(
        [kind == CONTINUES, kind == REPEATS, kind == BRANCHES],
        [lengths - earlier_length, np.zeros_like(lengths), beyond_shared],
        lengths,
    )
    return Samples(
        kind=kind,
        age=np.where(has_earlier, np.arange(num_requests) - earlier, 0),
        earlier_length=earlier_length,
        shared_blocks=shared,
        new_tokens=new_tokens,
        output_length=recorded.as_array(),
        turn_age=np.array(recorded.turn_age, dtype=np.int64),
        **{name: np.array(times) for name, times in recorded.times.items()},
    )


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
        if kind == FRESH:
            earlier, length, ids = None, int(samples.new_tokens[sample]), []
        else:
            earlier = self._find_earlier(sample, kind)
            length, ids = self._built_on(earlier, sample, kind)
        if self._block_size is not None and kind != REPEATS:
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
            if not self._num_made and not (self._samples.kind == FRESH).any():
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
        if kind == BRANCHES:
            too_short = self._lengths[at] < samples.shared_blocks[sample] * (self._block_size or 1)
            costs = distance + too_short * _CONTINUED
        else:
            wanted = int(samples.earlier_length[sample])
            costs = np.abs(self._lengths[at] - wanted) + wanted * distance // (8 * window)
            if kind == CONTINUES:
                costs = costs + self._penalties[at]
        return int(numbers[int(costs.argmin())])

    def _built_on(self, earlier: int, sample: int, kind: int) -> tuple[int, list[int]]:
        """The length of the new prompt, and the ids that it takes from the earlier one."""
        samples, block_size = self._samples, self._block_size or 1
        at = earlier % self._held
        earlier_length, earlier_ids = int(self._lengths[at]), self._ids[at]
        new_tokens = int(samples.new_tokens[sample])
        if kind == REPEATS:
            return earlier_length, earlier_ids
        if kind == CONTINUES:
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
    return None if value == UNKNOWN_S else float(value)


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
        prompts = read_prompt_blocks(recorded, NO_BLOCKS if self.parameters.block_size is None else None)
        generated = Shape.of(prompts, recorded.as_array(), self.parameters.block_size is not None)
        return closeness(self.shape, generated)


def fit_workload(trace: Trace) -> FittedWorkload:
    """Fit a workload to a trace in one pass, with 4 bytes of memory per block event."""
    recorded = _Recorded(trace)
    # A prompt without ids shares nothing, whatever the block size.
    prompts = read_prompt_blocks(recorded, NO_BLOCKS if trace.info.trace_block_size is None else None)
    info, arrivals_s = trace.info, prompts.arrivals_s
    samples = _describe(prompts, recorded)
    parameters = FittedParameters(
        source=info.name,
        block_size=info.trace_block_size,
        full_blocks_only=info.full_blocks_only,
        links_turns=bool(samples.turn_age.any()),
        records_think_times=info.records_think_times,
        duration_s=float(arrivals_s[-1] - arrivals_s[0]),
        num_requests=prompts.num_requests,
        arrivals=fit_arrivals(arrivals_s),
        samples=samples.thinned(MAX_SAMPLES),
    )
    return FittedWorkload(parameters, Shape.of(prompts, recorded.as_array(), info.trace_block_size is not None))


def open_fitted(trace: Trace, *, seed: int = 0, **window: Any) -> RowTrace:
    """Fit to a trace, measure how close the fit is, and open a workload whose report states both."""
    fitted = fit_workload(trace)
    return open_stream(fitted.model(fitted.closeness(seed)), seed=seed, **window)
