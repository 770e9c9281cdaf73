"""Fit the parameters of a seeded workload to a trace: the same lengths, arrivals and reuse, none of its blocks.

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
from ..cache.prompt_blocks import PromptBlocks, read_prompt_blocks
from ..random_draws import Draws
from ..traces import Trace, TraceInfo, TraceRequest

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


def fit_parameters(trace: Trace) -> tuple[FittedParameters, PromptBlocks, IntArray]:
    """Fit to a trace. Also returns its prompts and the lengths of its answers, to compare a workload with."""
    recorded = _Recorded(trace)
    # A prompt without ids shares nothing, whatever the block size.
    prompts = read_prompt_blocks(recorded, NO_BLOCKS if trace.info.trace_block_size is None else None)
    info = trace.info
    arrivals_s = prompts.arrivals_s
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
    return parameters, prompts, recorded.as_array()


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
