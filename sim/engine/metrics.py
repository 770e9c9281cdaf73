"""Record latencies, occupancy and throughput of a simulated run, in constant memory."""

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from operator import mul
from typing import TYPE_CHECKING

import attrs
import numpy as np
from numpy.typing import NDArray

from ...core.errors import InputError
from ...core.events import Commit, RowsAssigned, RowsReleased, as_ints
from ...core.scheduler.scheduler import Scheduler, StepOutcome
from ...core.types import Request, ScheduledStep, StepResult, largest, smallest
from .distributions import MAX_PENDING, NANOSECONDS, FinishedRequest, LatencySamples, LatencySketches, RunHistograms

if TYPE_CHECKING:
    from .engine import RunListener

MAX_POINTS = 2048
SERIES = ("kv_cache_usage", "num_requests_running", "num_requests_waiting")
_NO_TOKEN = -1


@attrs.frozen
class RequestRecord:
    """One finished request of a simulated run (a row of `--requests-out`); times as field report D07 defines them."""

    request_id: str  # the place of its row in the trace
    arrival_s: float  # when it was sent, seconds from the start of the run
    queue_time_s: float  # in the engine's queue up to the first admission; later preemptions count in `e2e_s`
    ttft_s: float  # from arrival to the first output token, queueing included
    tpot_s: float | None  # (e2e_s - ttft_s) / (num_output_tokens - 1); None for a single token
    e2e_s: float  # from arrival to the last output token
    num_prompt_tokens: int  # prompt tokens, cached ones included
    num_output_tokens: int  # tokens produced
    num_cached_tokens: int  # prompt tokens found in the prefix cache at the first admission
    num_preemptions: int  # how often it was preempted


class TimeSeries:
    """Samples of several named figures over time, at most 2,048: when full, every second one is dropped."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.times_s: list[float] = []
        self.values: list[tuple[float, ...]] = []
        self._stride = 1
        self._seen = 0

    def passes_over(self) -> bool:
        """Whether the next sample would be dropped; if so, it counts as offered and need not be computed."""
        is_dropped = self._seen % self._stride != 0
        self._seen += is_dropped
        return is_dropped

    def add(self, time_s: float, values: Sequence[float]) -> None:
        """Offer a sample; one in `stride` is kept."""
        if len(values) != len(self.names):
            raise InputError(f"a sample of {len(values)} figures for {len(self.names)} names")
        if self._seen % self._stride == 0:
            self.times_s.append(time_s)
            self.values.append(tuple(values))
            if len(self.times_s) >= MAX_POINTS:
                del self.times_s[1::2]
                del self.values[1::2]
                self._stride *= 2
        self._seen += 1

    def columns(self) -> dict[str, list[float]]:
        """`time_s` and one column per name."""
        columns = zip(*self.values, strict=True) if self.values else [()] * len(self.names)
        return {"time_s": list(self.times_s), **{n: list(c) for n, c in zip(self.names, columns, strict=True)}}


# When a request arrived, was first admitted, got its first and its last token: nanoseconds from the start of the run;
# -1 if there was no token yet.
RequestTimes = tuple[int, int, int, int]


class Recorder:
    """Measures a run from its commits (which request is in which row) and completed steps (who got a token, and when).

    Everything that it hears it passes on to `listeners`, with the time.

    Definitions (field report D07): TTFT runs from arrival to the first token and is not reset by a preemption; ITL is
    the gap between successive tokens of a request, so n tokens give n - 1 samples and a preemption is one long gap;
    TPOT is (E2E - TTFT) / (tokens - 1) of a finished request, undefined for a single token; E2E runs from arrival to
    the last token. The queue time ends with the first admission, as in vLLM's metrics.
    """

    def __init__(
        self,
        now_ns: Callable[[], int],
        num_rows: int,
        histograms: RunHistograms | None = None,
        on_finished: Callable[[RequestRecord], None] | None = None,
        listeners: Iterable["RunListener"] = (),
        http_ns: int = 0,
    ) -> None:
        """Watch a run. `now_ns` returns the time in whole nanoseconds from its start.

        `num_rows` are those of the block tables (`max_num_reqs`). Samples are counted in `histograms` too, if given.
        `on_finished` gets the record of each finished request; no record is kept here. A request reaches the engine
        `http_ns` after its arrival.
        """
        self._now_ns = now_ns
        self._on_finished = on_finished
        self._http_ns = http_ns
        self._listeners = tuple(listeners)
        self._samples = LatencySamples(histograms)
        self.series = TimeSeries(SERIES)
        self.num_steps = 0
        self.num_output_tokens = 0
        self.busy_ns = 0
        self.max_held_blocks = 0
        self.held_block_ns = 0  # Referenced blocks x nanoseconds for which they were held
        self._held_blocks = 0
        self._held_since_ns = 0
        # Times of requests without a row: arrival only, or all.
        self._arrival_ns: dict[str, int] = {}
        self._away: dict[str, RequestTimes] = {}
        # Times of requests in a row. Tokens come in batches, so the times of last tokens are an array.
        self._arrival_in = [0] * num_rows
        self._admitted_in = [0] * num_rows
        self._first_in = [_NO_TOKEN] * num_rows
        self._last_in = np.full(num_rows, _NO_TOKEN, dtype=np.int64)
        for listener in self._listeners:
            listener.started(self)

    @property
    def histograms(self) -> RunHistograms | None:
        """The given histograms, up to date."""
        return self._samples.histograms

    @property
    def latencies(self) -> LatencySketches:
        """TTFT, TPOT, ITL and E2E of all requests, up to date."""
        return self._samples.sketches

    def submitted(self, request: Request) -> None:
        """A request was accepted; its `arrival` (seconds) starts its clock unless it came from another engine."""
        if request.request_id not in self._away:
            self._arrival_ns[request.request_id] = round(request.arrival * 1e9)
        for listener in self._listeners:
            listener.submitted(self._now_ns(), request)

    def resume(self, request_id: str, times: RequestTimes) -> None:
        """A request comes from another engine: keep the times that were measured there."""
        self._away[request_id] = times

    def apply(self, commit: Commit) -> None:
        """Follow requests into and out of rows; a preempted one keeps its times."""
        for event in commit.events:
            if type(event) is RowsAssigned:
                self._rows_assigned(event)
            elif type(event) is RowsReleased:
                for request_id, row in zip(event.requests, as_ints(event.rows), strict=True):
                    self._away[request_id] = self._times_in(row)
        for listener in self._listeners:
            listener.apply(self._now_ns(), commit)

    def _rows_assigned(self, event: RowsAssigned) -> None:
        for request_id, row in zip(event.requests, as_ints(event.rows), strict=True):
            times = self._away.pop(request_id, None)
            if times is None:
                now = self._now_ns()
                times = (self._arrival_ns.pop(request_id, now), now, _NO_TOKEN, _NO_TOKEN)
            self._arrival_in[row], self._admitted_in[row], self._first_in[row], self._last_in[row] = times

    def _times_in(self, row: int) -> RequestTimes:
        return self._arrival_in[row], self._admitted_in[row], self._first_in[row], self._last_in.item(row)

    def scheduled(self, scheduler: Scheduler) -> None:
        """A step starts now, or the engine begins to wait: the blocks held now stay held until the next call."""
        now = self._now_ns()
        pool = scheduler.allocator.pool
        self.held_block_ns += self._held_blocks * (now - self._held_since_ns)
        self._held_blocks = held = pool.num_held_blocks
        self._held_since_ns = now
        if held > self.max_held_blocks:
            self.max_held_blocks = held
        if not self.series.passes_over():
            self.series.add(now / 1e9, (pool.usage, scheduler.num_running, scheduler.num_waiting))
        for listener in self._listeners:
            listener.scheduled(now, scheduler)

    def observe(self, step: ScheduledStep, result: StepResult, outcome: StepOutcome) -> None:
        """Account for one step that is completed now."""
        now = self._now_ns()
        durations = result.nanoseconds
        self.num_steps += step.num_steps
        self.busy_ns += sum(durations)
        self._samples.steps[step.load.num_tokens] += step.num_steps
        rows = outcome.sampled
        if len(rows):
            later = durations[1:]
            self._tokens_produced(rows, now - sum(later))
            if later:
                self._repeated(rows, later, now)
                # A macro-step's blocks were charged for the steps before the one that first uses them.
                self.held_block_ns -= sum(map(mul, step.blocks_taken_at, accumulate(durations)))
            elif step.num_draft_tokens is not None:
                # Accepted drafts arrive with the token before them.
                at_once = int(outcome.produced.sum()) - len(rows)
                self.num_output_tokens += at_once
                if at_once:
                    self._samples.gaps[0] += at_once
        for row, request in outcome.preempted:  # it left its row before this token arrived
            self._away[request.request_id] = self._times_in(row)
        if outcome.finished_requests:
            for row, request in zip(outcome.finished.tolist(), outcome.finished_requests, strict=True):
                self._finished(row, request, now)
        if outcome.finished_requests or len(self._samples.gaps) > MAX_PENDING:
            self._samples.count_when_many()
        for listener in self._listeners:
            listener.observe(now, step, result, outcome)

    def mean_held_blocks(self) -> float:
        """Time-weighted mean of the referenced blocks, from time 0 on."""
        return self.held_block_ns / self._held_since_ns if self._held_since_ns else 0.0

    def _tokens_produced(self, rows: NDArray[np.int64], now: int) -> None:
        self.num_output_tokens += len(rows)
        last = self._last_in[rows]
        self._last_in[rows] = now
        earliest, latest = smallest(last), largest(last)
        if earliest == _NO_TOKEN:
            fresh = last == _NO_TOKEN
            for row in rows[fresh].tolist():
                self._first_in[row] = now
                self._samples.first_tokens.append(now - self._arrival_in[row])
            last = last[~fresh]
            if not len(last):
                return
            earliest, latest = smallest(last), largest(last)
        # The whole batch nearly always waited for the same step.
        if earliest == latest:
            self._samples.gaps[now - latest] += len(last)
        else:
            values, counts = np.unique(last, return_counts=True)
            for value, count in zip(values.tolist(), counts.tolist(), strict=True):
                self._samples.gaps[now - value] += count

    def _repeated(self, rows: NDArray[np.int64], durations: tuple[int, ...], now: int) -> None:
        """Account for the tokens of the later steps of a macro-step: every request waited for each whole step."""
        self.num_output_tokens += len(rows) * len(durations)
        self._last_in[rows] = now
        first = durations[0]
        if durations.count(first) == len(durations):
            self._samples.gaps[first] += len(durations) * len(rows)
            return
        for nanoseconds in durations:
            self._samples.gaps[nanoseconds] += len(rows)

    def _finished(self, row: int, request: Request, now: int) -> None:
        self._away.pop(request.request_id, None)
        arrival, admitted, first, _ = self._times_in(row)
        tpot = (now - first) / (request.num_output_tokens - 1) if request.num_output_tokens > 1 else None
        num_cached_tokens = request.num_cached_tokens or 0
        counts = request.num_prompt_tokens, request.num_output_tokens, num_cached_tokens, request.num_preemptions
        queue_ns = admitted - arrival - self._http_ns
        self._samples.finished.append(FinishedRequest(arrival, queue_ns, admitted, first, now, tpot, *counts))
        if self._on_finished is not None:
            queue_s, ttft_s, e2e_s = (ns / NANOSECONDS for ns in (queue_ns, first - arrival, now - arrival))
            tpot_s = None if tpot is None else tpot / NANOSECONDS
            self._on_finished(
                RequestRecord(request.request_id, request.arrival, queue_s, ttft_s, tpot_s, e2e_s, *counts)
            )
