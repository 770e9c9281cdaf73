"""Latencies, occupancy and throughput of a simulated run, in constant memory."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ..core.events import Commit, RowsAssigned, RowsReleased, as_ints
from ..core.scheduler import Scheduler, StepOutcome
from ..core.types import Request, ScheduledStep, StepResult
from .quantile_sketch import QuantileSketch
from .time_series import TimeSeries

SERIES = ("kv_cache_usage", "num_requests_running", "num_requests_waiting")


class Recorder:
    """Listens to commits (which request is in which row) and to completed steps (who got a token, and when).

    Definitions (field report D07): TTFT runs from arrival to the first token and is not reset by a preemption; ITL is
    the gap between successive tokens of a request, so n tokens give n - 1 samples and a preemption is one long one;
    TPOT is (E2E - TTFT) / (tokens - 1) of a finished request, undefined for a single token; E2E runs from arrival to
    the last token.
    """

    def __init__(self, now: Callable[[], float], num_rows: int) -> None:
        """Watch a run.

        Args:
            now: the clock to ask, in seconds from the start of the run.
            num_rows: rows of the block tables (`max_num_reqs`).
        """
        self._now = now
        self.ttft_s = QuantileSketch()
        self.itl_s = QuantileSketch()
        self.tpot_s = QuantileSketch()
        self.e2e_s = QuantileSketch()
        self.series = TimeSeries(SERIES)
        self.num_steps = 0
        self.num_output_tokens = 0
        self.busy_s = 0.0
        self.max_usage = 0.0
        self._usage_seconds = 0.0
        self._usage = 0.0
        self._usage_since = 0.0
        # Times of requests that are not in a row: arrival only, or (arrival, first token, last token).
        self._arrival: dict[str, float] = {}
        self._away: dict[str, tuple[float, float, float]] = {}
        self._arrival_in: NDArray[np.float64] = np.zeros(num_rows)
        self._first_in: NDArray[np.float64] = np.full(num_rows, np.nan)
        self._last_in: NDArray[np.float64] = np.full(num_rows, np.nan)

    def submitted(self, request: Request) -> None:
        """A request was accepted; its `arrival` starts its clock."""
        self._arrival[request.request_id] = request.arrival

    def aborted(self, request_id: str) -> None:
        """A request will not come back."""
        self._arrival.pop(request_id, None)
        self._away.pop(request_id, None)

    def apply(self, commit: Commit) -> None:
        """Follow requests into and out of rows; a preempted one keeps its times."""
        for event in commit.events:
            if type(event) is RowsAssigned:
                for request_id, row in zip(event.requests, as_ints(event.rows), strict=True):
                    times = self._away.pop(request_id, None)
                    if times is None:
                        times = (self._arrival.pop(request_id, self._now()), np.nan, np.nan)
                    self._arrival_in[row], self._first_in[row], self._last_in[row] = times
            elif type(event) is RowsReleased:
                for request_id, row in zip(event.requests, as_ints(event.rows), strict=True):
                    self._away[request_id] = (
                        self._arrival_in.item(row),
                        self._first_in.item(row),
                        self._last_in.item(row),
                    )

    def scheduled(self, scheduler: Scheduler) -> None:
        """A step starts now, or the engine begins to wait: blocks are held as they are from here on."""
        now = self._now()
        self._usage_seconds += self._usage * (now - self._usage_since)
        self._usage, self._usage_since = scheduler.allocator.pool.usage, now
        self.max_usage = max(self.max_usage, self._usage)
        self.series.add(now, (self._usage, scheduler.num_running, scheduler.num_waiting))

    def observe(self, step: ScheduledStep, result: StepResult, outcome: StepOutcome) -> None:
        """Account for one completed step, at the time the clock shows."""
        now = self._now()
        self.num_steps += 1
        self.busy_s += result.seconds
        rows = outcome.sampled
        if len(rows):
            self._tokens_produced(rows, now)
        for row, request in zip(outcome.finished.tolist(), outcome.finished_requests, strict=True):
            self._finished(row, request, now)

    def mean_usage(self) -> float:
        """Time-weighted mean share of usable blocks that were referenced, from time 0 on."""
        return self._usage_seconds / self._usage_since if self._usage_since else 0.0

    def _tokens_produced(self, rows: NDArray[np.int64], now: float) -> None:
        self.num_output_tokens += len(rows)
        gaps = now - self._last_in[rows]
        self._last_in[rows] = now
        fresh = np.isnan(gaps)
        if fresh.any():
            first_rows = rows[fresh]
            self._first_in[first_rows] = now
            for wait in (now - self._arrival_in[first_rows]).tolist():
                self.ttft_s.add(wait)
            gaps = gaps[~fresh]
            if not len(gaps):
                return
        # Nearly always the whole batch waited for the same step.
        shortest = gaps.min()
        if gaps.max() == shortest:
            self.itl_s.add(float(shortest), len(gaps))
        else:
            values, counts = np.unique(gaps, return_counts=True)
            for value, count in zip(values.tolist(), counts.tolist(), strict=True):
                self.itl_s.add(value, count)

    def _finished(self, row: int, request: Request, now: float) -> None:
        self._away.pop(request.request_id, None)
        self.e2e_s.add(now - self._arrival_in.item(row))
        if request.num_output_tokens > 1:
            self.tpot_s.add((now - self._first_in.item(row)) / (request.num_output_tokens - 1))
