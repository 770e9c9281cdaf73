"""Writes a run for a trace viewer (Perfetto, chrome://tracing): engine steps, requests, counters.

The track "engine steps" has a slice per step. Under "requests", each request is an asynchronous slice from arrival to
its last token, with its phases inside: queued, prefill, decode; after a preemption preempted, prefill, decode again.
Counters show the usage of the pool, and running and waiting requests.
"""

import gzip
import json
from collections.abc import Mapping
from typing import Any, BinaryIO, cast

import attrs

from ...core.events import BlocksFreed, Commit, FreeReason, RowsAssigned, RowsReleased, as_ints
from ...core.scheduler.scheduler import Scheduler, StepOutcome
from ...core.types import Request, ScheduledStep, StepResult
from ..engine.distributions import NANOSECONDS
from ..engine.engine import RunListener
from .tables import OutputFile

# A higher level makes the file a tenth smaller and takes several times as long.
_COMPRESSION_LEVEL = 3


def microseconds(nanoseconds: int) -> str:
    """A JSON number that is exact to the nanosecond: 1234567 -> "1234.567"."""
    whole, rest = divmod(nanoseconds, 1000)
    return f"{whole}.{rest:03d}" if rest else str(whole)


class TraceEventFile:
    """Writes the Trace Event Format, compressed if the name ends in .gz. The same events give the same bytes."""

    def __init__(self, file: OutputFile) -> None:
        """Begin the document."""
        self._compressed: gzip.GzipFile | None = None
        self._stream = cast(BinaryIO, file.stream)
        if file.path.suffix == ".gz":
            # Without the name and the time of writing, which differ from run to run.
            self._compressed = gzip.GzipFile("", "wb", _COMPRESSION_LEVEL, self._stream, mtime=0)
            self._stream = cast(BinaryIO, self._compressed)
        self._separator = b"\n"
        self._stream.write(b'{"displayTimeUnit":"ms","traceEvents":[')

    def write(self, at_ns: int, phase: str, fields: str, args: Mapping[str, Any] | None = None) -> None:
        """Add one event; `phase` is the format's letter for its kind, `fields` are more, JSON without braces."""
        shown = "" if args is None else ',"args":' + json.dumps(args, separators=(",", ":"), ensure_ascii=False)
        event = f'{{"ph":"{phase}","ts":{microseconds(at_ns)},{fields}{shown}}}'
        self._stream.write(self._separator + event.encode())
        self._separator = b",\n"

    def finish(self) -> None:
        """End the document; its owner closes the file."""
        self._stream.write(b"\n]}\n")
        if self._compressed is not None:
            self._compressed.close()


QUEUED, PREFILL, DECODE, PREEMPTED = "queued", "prefill", "decode", "preempted"


@attrs.define(eq=False)
class _Follow:
    """An unfinished request; `number` identifies its events."""

    request: Request
    number: int
    phase: str


# An event to write: nanoseconds, the letter of its kind, fields, details.
_Event = tuple[int, str, str, Mapping[str, Any] | None]


class EngineTrace(RunListener):
    """Writes an engine's events in order of time, and buffers at most the events of two steps."""

    def __init__(self, file: TraceEventFile, number: int = 0, name: str = "") -> None:
        """Write to a file, which the engines of a fleet share under their own numbers and names."""
        self._file = file
        engine_pid, requests_pid = 2 * number + 1, 2 * number + 2
        self._engine = f'"pid":{engine_pid}'
        self._steps = f'"pid":{engine_pid},"tid":1'
        # The viewer joins asynchronous slices by category and number.
        category = f"request on {name}" if name else "request"
        self._requests = f'"pid":{requests_pid},"tid":1,"cat":{json.dumps(category)}'
        self._pending: list[_Event] = []
        self._by_id: dict[str, _Follow] = {}
        self._in_row: dict[int, _Follow] = {}
        self._prefilling: set[int] = set()
        self._num_submitted = 0
        self._num_steps = 0
        self._held_blocks = 0
        self._counters: dict[str, Mapping[str, float]] = {}
        for pid, track in ((engine_pid, "engine"), (requests_pid, "requests")):
            shown = f"{track} {name}".strip()
            file.write(0, "M", f'"name":"process_name","pid":{pid},"tid":1', {"name": shown})
        file.write(0, "M", f'"name":"thread_name",{self._steps}', {"name": "engine steps"})

    def submitted(self, now_ns: int, request: Request) -> None:
        """Begin a request's slice at its arrival, which async scheduling may notice later."""
        del now_ns
        arrival_ns = round(request.arrival * NANOSECONDS)
        follow = _Follow(request, self._num_submitted, QUEUED)
        self._by_id[request.request_id] = follow
        self._num_submitted += 1
        args = {"num_prompt_tokens": request.num_prompt_tokens, "max_tokens": request.max_tokens}
        self._add_slice(arrival_ns, "b", f"request {request.request_id}", follow, args)
        self._add_slice(arrival_ns, "b", QUEUED, follow)

    def apply(self, now_ns: int, commit: Commit) -> None:
        """Record admissions, preemptions and aborts."""
        reason: FreeReason | None = None
        for event in commit.events:
            if type(event) is BlocksFreed:
                reason = event.reason
            elif type(event) is RowsAssigned:
                for request_id, row in zip(event.requests, as_ints(event.rows), strict=True):
                    self._admitted(now_ns, request_id, row)
            elif type(event) is RowsReleased:
                for row in as_ints(event.rows):
                    self._released(now_ns, row, reason)

    def scheduled(self, now_ns: int, scheduler: Scheduler) -> None:
        """Record the counters that changed."""
        pool = scheduler.allocator.pool
        self._held_blocks = pool.num_held_blocks
        self._count(now_ns, "kv_cache_usage", {"share": pool.usage})
        numbers = {"running": scheduler.num_running, "waiting": scheduler.num_waiting}
        self._count(now_ns, "num_requests", numbers)

    def observe(self, now_ns: int, step: ScheduledStep, result: StepResult, outcome: StepOutcome) -> None:
        """Record a slice per engine step, and the ends of phases and requests."""
        start_ns = now_ns - sum(result.nanoseconds)
        first_end_ns = start_ns + result.nanoseconds[0]
        self._add_steps(start_ns, step, result)
        if self._prefilling:
            for row in outcome.sampled.tolist():
                if row in self._prefilling:
                    self._prefilling.discard(row)
                    self._next_phase(first_end_ns, self._in_row[row], DECODE)
        for row, request in zip(outcome.finished.tolist(), outcome.finished_requests, strict=True):
            self._in_row.pop(row, None)  # it may have left its row before its last token arrived
            self._end(now_ns, self._by_id.pop(request.request_id), "finished")
        self._write_before(start_ns)

    def finish(self) -> None:
        """Write the buffered events; the owner of the file ends the document."""
        self._write_before(None)

    def _admitted(self, now_ns: int, request_id: str, row: int) -> None:
        follow = self._by_id.get(request_id)
        if follow is None:
            return
        self._in_row[row] = follow
        self._prefilling.add(row)
        self._next_phase(now_ns, follow, PREFILL)

    def _released(self, now_ns: int, row: int, reason: FreeReason | None) -> None:
        """Record a preemption or abort; `observe`, which comes later, ends finished requests."""
        if row not in self._in_row or reason is FreeReason.FINISHED:
            return
        follow = self._in_row.pop(row)
        self._prefilling.discard(row)
        if reason is FreeReason.PREEMPTED:
            self._next_phase(now_ns, follow, PREEMPTED)
        else:
            del self._by_id[follow.request.request_id]
            self._end(now_ns, follow, "aborted")

    def _next_phase(self, at_ns: int, follow: _Follow, phase: str) -> None:
        self._add_slice(at_ns, "e", follow.phase, follow)
        follow.phase = phase
        self._add_slice(at_ns, "b", phase, follow)

    def _end(self, at_ns: int, follow: _Follow, outcome: str) -> None:
        request = follow.request
        self._add_slice(at_ns, "e", follow.phase, follow)
        args = {
            "outcome": outcome,
            "num_output_tokens": request.num_output_tokens,
            "num_cached_tokens": request.num_cached_tokens,
            "num_preemptions": request.num_preemptions,
        }
        self._add_slice(at_ns, "e", f"request {request.request_id}", follow, args)

    def _add_steps(self, start_ns: int, step: ScheduledStep, result: StepResult) -> None:
        load = step.load
        # A macro-step takes its blocks at its start; each step shows the blocks in use by then.
        num_blocks = self._held_blocks - sum(step.blocks_taken_at)
        args = {
            "num_requests": len(step.batch.rows),
            "num_tokens": load.num_tokens,
            "num_prefill_tokens": load.num_prefill_tokens,
            "num_decode_tokens": load.num_decode_tokens,
        }
        kind = "prefill" if not load.num_decode_tokens else "mixed" if load.num_prefill_tokens else "decode"
        for nanoseconds, taken in zip(result.nanoseconds, (0, *step.blocks_taken_at), strict=False):
            num_blocks += taken
            fields = f'"dur":{microseconds(nanoseconds)},"name":"{kind}",{self._steps}'
            shown = {"step": self._num_steps, **args, "num_held_blocks": num_blocks}
            self._pending.append((start_ns, "X", fields, shown))
            start_ns += nanoseconds
            self._num_steps += 1

    def _count(self, at_ns: int, name: str, values: Mapping[str, float]) -> None:
        if self._counters.get(name) != values:
            self._counters[name] = values
            self._pending.append((at_ns, "C", f'"name":"{name}",{self._engine}', values))

    def _add_slice(
        self, at_ns: int, phase: str, name: str, follow: _Follow, args: Mapping[str, Any] | None = None
    ) -> None:
        fields = f'"name":{json.dumps(name, ensure_ascii=False)},"id":{follow.number},{self._requests}'
        self._pending.append((at_ns, phase, fields, args))

    def _write_before(self, before_ns: int | None) -> None:
        """Write the events before a time; no earlier event can follow, because the engine notices a request during the
        step in which it arrives, or right after it.
        """
        self._pending.sort(key=lambda event: event[0])
        number = len(self._pending)
        if before_ns is not None:
            number = next((i for i, event in enumerate(self._pending) if event[0] >= before_ns), number)
        for event in self._pending[:number]:
            self._file.write(*event)
        del self._pending[:number]
