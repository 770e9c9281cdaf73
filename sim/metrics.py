"""Latencies, occupancy and throughput of a simulated run, in constant memory."""

from collections import Counter
from collections.abc import Callable

import attrs
import numpy as np
from numpy.typing import NDArray

from ..core.events import Commit, RowsAssigned, RowsReleased, as_ints
from ..core.reductions import largest, smallest
from ..core.scheduler import Scheduler, StepOutcome
from ..core.types import Request, ScheduledStep, StepResult
from .quantile_sketch import QuantileSketch
from .request_record import RequestRecord
from .run_histograms import NANOSECONDS, RunHistograms
from .time_series import TimeSeries

_NO_TOKEN = -1


@attrs.frozen
class RequestTimes:
    """The clocks of a request, in nanoseconds from the start of the run; -1 where there was no token yet."""

    arrival_ns: int
    admitted_ns: int
    first_ns: int = _NO_TOKEN
    last_ns: int = _NO_TOKEN


SERIES = ("kv_cache_usage", "num_requests_running", "num_requests_waiting")


class Recorder:
    """Listens to commits (which request is in which row) and to completed steps (who got a token, and when).

    Definitions (field report D07): TTFT runs from arrival to the first token and is not reset by a preemption; ITL is
    the gap between successive tokens of a request, so n tokens give n - 1 samples and a preemption is one long one;
    TPOT is (E2E - TTFT) / (tokens - 1) of a finished request, undefined for a single token; E2E runs from arrival to
    the last token. The queue time ends with the first admission, as in vLLM's metrics.
    """

    def __init__(
        self,
        now_ns: Callable[[], int],
        num_rows: int,
        histograms: RunHistograms | None = None,
        on_finished: Callable[[RequestRecord], None] | None = None,
    ) -> None:
        """Watch a run.

        Args:
            now_ns: the clock to ask, in whole nanoseconds from the start of the run.
            num_rows: rows of the block tables (`max_num_reqs`).
            histograms: where samples are counted besides; None: nowhere.
            on_finished: given the record of each request as it finishes; nothing of it is kept here.
        """
        self._now_ns = now_ns
        self.histograms = histograms
        self._on_finished = on_finished
        self.ttft_ns = QuantileSketch()
        self.itl_ns = QuantileSketch()
        self.tpot_ns = QuantileSketch()
        self.e2e_ns = QuantileSketch()
        self.series = TimeSeries(SERIES)
        self.num_steps = 0
        self.num_output_tokens = 0
        self.busy_ns = 0
        self.max_held_blocks = 0
        self._held_block_ns = 0
        self._held_blocks = 0
        self._held_since_ns = 0
        # Times of requests that are not in a row: arrival only, or (arrival, first admission, first token, last token).
        self._arrival_ns: dict[str, int] = {}
        self._away: dict[str, tuple[int, int, int, int]] = {}
        self._arrival_in = np.zeros(num_rows, dtype=np.int64)
        self._admitted_in = np.zeros(num_rows, dtype=np.int64)
        self._first_in = np.full(num_rows, _NO_TOKEN, dtype=np.int64)
        self._last_in = np.full(num_rows, _NO_TOKEN, dtype=np.int64)

    def submitted(self, request: Request) -> None:
        """A request was accepted; its `arrival` (seconds) starts its clock, unless that runs already."""
        if request.request_id in self._away:
            return
        self._arrival_ns[request.request_id] = round(request.arrival * 1e9)

    def resume(self, request_id: str, times: RequestTimes) -> None:
        """A request comes from another engine: its clocks go on as they stood there."""
        self._away[request_id] = (times.arrival_ns, times.admitted_ns, times.first_ns, times.last_ns)

    def apply(self, commit: Commit) -> None:
        """Follow requests into and out of rows; a preempted one keeps its times."""
        for event in commit.events:
            if type(event) is RowsAssigned:
                for request_id, row in zip(event.requests, as_ints(event.rows), strict=True):
                    times = self._away.pop(request_id, None)
                    if times is None:
                        now = self._now_ns()
                        times = (self._arrival_ns.pop(request_id, now), now, _NO_TOKEN, _NO_TOKEN)
                    self._arrival_in[row], self._admitted_in[row], self._first_in[row], self._last_in[row] = times
            elif type(event) is RowsReleased:
                for request_id, row in zip(event.requests, as_ints(event.rows), strict=True):
                    self._away[request_id] = (
                        self._arrival_in.item(row),
                        self._admitted_in.item(row),
                        self._first_in.item(row),
                        self._last_in.item(row),
                    )

    def scheduled(self, scheduler: Scheduler) -> None:
        """A step starts now, or the engine begins to wait: blocks are held as they are from here on."""
        now = self._now_ns()
        self._held_block_ns += self._held_blocks * (now - self._held_since_ns)
        self._held_blocks, self._held_since_ns = scheduler.allocator.pool.num_held_blocks, now
        self.max_held_blocks = max(self.max_held_blocks, self._held_blocks)
        usage = scheduler.allocator.pool.usage
        self.series.add(now / 1e9, (usage, scheduler.num_running, scheduler.num_waiting))

    def observe(self, step: ScheduledStep, result: StepResult, outcome: StepOutcome) -> None:
        """Account for one completed step, at the time the clock shows."""
        now = self._now_ns()
        durations = result.nanoseconds
        self.num_steps += step.num_steps
        self.busy_ns += sum(durations)
        if self.histograms is not None:
            self.histograms.step_tokens.add(step.load.num_tokens, step.num_steps)
        rows = outcome.sampled
        if len(rows):
            later = durations[1:]
            self._tokens_produced(rows, now - sum(later))
            if later:
                self._repeated(rows, later, now)
                self._held_block_ns -= _block_ns_not_yet_held(step.blocks_taken_at, durations)
            elif step.num_draft_tokens is not None:
                # Accepted drafts arrive with the token before them.
                at_once = int(outcome.produced.sum()) - len(rows)
                self.num_output_tokens += at_once
                if at_once:
                    self._gap(0, at_once)
        for row, request in zip(outcome.finished.tolist(), outcome.finished_requests, strict=True):
            self._finished(row, request, now)

    @property
    def held_block_ns(self) -> int:
        """Referenced blocks x nanoseconds for which they were held."""
        return self._held_block_ns

    def mean_held_blocks(self) -> float:
        """Time-weighted mean of the referenced blocks, from time 0 on."""
        return self._held_block_ns / self._held_since_ns if self._held_since_ns else 0.0

    def _tokens_produced(self, rows: NDArray[np.int64], now: int) -> None:
        self.num_output_tokens += len(rows)
        last = self._last_in[rows]
        self._last_in[rows] = now
        earliest, latest = smallest(last), largest(last)
        if earliest == _NO_TOKEN:
            fresh = last == _NO_TOKEN
            first_rows = rows[fresh]
            self._first_in[first_rows] = now
            for arrival in self._arrival_in[first_rows].tolist():
                self.ttft_ns.add(now - arrival)
                if self.histograms is not None:
                    self.histograms.ttft_ns.add(now - arrival)
            last = last[~fresh]
            if not len(last):
                return
            earliest, latest = smallest(last), largest(last)
        # Nearly always the whole batch waited for the same step.
        if earliest == latest:
            self._gap(now - latest, len(last))
        else:
            values, counts = np.unique(last, return_counts=True)
            for value, count in zip(values.tolist(), counts.tolist(), strict=True):
                self._gap(now - value, count)

    def _repeated(self, rows: NDArray[np.int64], durations: tuple[int, ...], now: int) -> None:
        """The tokens of the later steps of a macro-step: every request waited for each step in full."""
        self.num_output_tokens += len(rows) * len(durations)
        self._last_in[rows] = now
        for nanoseconds, times in Counter(durations).items():
            self._gap(nanoseconds, times * len(rows))

    def _gap(self, nanoseconds: int, count: int) -> None:
        self.itl_ns.add(nanoseconds, count)
        if self.histograms is not None:
            self.histograms.itl_ns.add(nanoseconds, count)

    def _finished(self, row: int, request: Request, now: int) -> None:
        self._away.pop(request.request_id, None)
        arrival, admitted, first = (times.item(row) for times in (self._arrival_in, self._admitted_in, self._first_in))
        tpot = (now - first) / (request.num_output_tokens - 1) if request.num_output_tokens > 1 else None
        self.e2e_ns.add(now - arrival)
        if tpot is not None:
            self.tpot_ns.add(tpot)
        if self.histograms is not None:
            self.histograms.finished(request, arrival, admitted, first, now, tpot)
        if self._on_finished is not None:
            self._on_finished(
                RequestRecord(
                    request_id=request.request_id,
                    arrival_s=request.arrival,
                    queue_time_s=(admitted - arrival) / NANOSECONDS,
                    ttft_s=(first - arrival) / NANOSECONDS,
                    tpot_s=None if tpot is None else tpot / NANOSECONDS,
                    e2e_s=(now - arrival) / NANOSECONDS,
                    num_prompt_tokens=request.num_prompt_tokens,
                    num_output_tokens=request.num_output_tokens,
                    num_cached_tokens=request.num_cached_tokens or 0,
                    num_preemptions=request.num_preemptions,
                )
            )


def _block_ns_not_yet_held(blocks_taken_at: tuple[int, ...], durations: tuple[int, ...]) -> int:
    """What a macro-step's blocks were charged for the steps before the one in which they are first used."""
    elapsed = 0
    total = 0
    for taken, nanoseconds in zip(blocks_taken_at, durations, strict=False):
        elapsed += nanoseconds
        total += taken * elapsed
    return total
