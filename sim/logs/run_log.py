"""Records a run as it happens: its options, its requests, and every commit with its time.

    with RunLog("run.log", command="replay", options=options, trace=source, flush=FlushPolicy(every_ms=50)) as run:
        report = replay(run.trace, ..., listeners=[run])

`kvledger log replay` runs such a log again, with the same options or with changed ones.
"""

from pathlib import Path
from typing import Any, Final

import attrs

from ...backends.sinks.log.durable_log import Clock, DurableLog
from ...backends.sinks.log.flush_policy import FlushPolicy
from ...backends.sinks.log.rows import RequestArrived, RunEnded
from ...core.events import Commit
from ...core.scheduler.scheduler import Scheduler
from ..engine.engine import RunListener
from ..figures import Document
from ..scenario.traffic import ObservedTrace
from ..traces.trace import Trace, TraceInfo, TraceRequest

CLOCK: Final = "simulated"


class RunLog(RunListener):
    """A listener that writes the log of one run, on `trace`, which notes each request when the run takes it."""

    def __init__(
        self, directory: str | Path, *, command: str, options: Document, trace: Trace, flush: FlushPolicy
    ) -> None:
        """Start the log of a run in an empty or new directory; the options of the command are JSON values.

        Raises:
            InputError: the directory is not empty, or an option is not a JSON value.
            LogWriteError: the directory cannot be written.
        """
        self._now_ns = 0
        header = {"command": command, "options": options, "trace": plain_info(trace.info)}
        clock = Clock(CLOCK, lambda: self._now_ns)
        self.log = DurableLog.create(directory, flush=flush, clock=clock, header=header)
        self.trace: Trace = ObservedTrace(trace, lambda _, row: self.log.note(arrival_of(row)))

    def apply(self, now_ns: int, commit: Commit) -> None:
        """Log one commit."""
        self._now_ns = now_ns
        self.log.apply(commit)

    def scheduled(self, now_ns: int, scheduler: Scheduler) -> None:
        """Give the log the live state, so that it need not fold one for snapshots."""
        self.log.live_state = scheduler.allocator.state

    def close(self) -> None:
        """Note the final facts of the trace, and close the log."""
        self.log.note(RunEnded({"trace": plain_info(self.trace.info)}))
        self.log.close()

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None:
            self.close()
        else:  # the run did not end, so the log gets no end note
            self.log.__exit__(kind, error, trace)


def plain_info(info: TraceInfo) -> Document:
    """All facts of a trace, as JSON values."""
    plain = attrs.asdict(info)
    plain["unused_fields"] = sorted(info.unused_fields)
    return plain


def arrival_of(row: TraceRequest) -> RequestArrived:
    """The note of one row of a trace, from which `LoggedTrace` makes the same row."""
    facts: dict[str, Any] = {}
    if row.hash_ids == ():
        facts["hash_ids"] = []  # a prompt with ids but no full block, unlike a prompt without ids
    if row.turn is not None:
        facts["turn"] = attrs.asdict(row.turn)
    if row.priority:
        facts["priority"] = row.priority
    return RequestArrived(str(row.place), row.arrival_s, row.input_length, row.output_length, row.hash_ids or (), facts)
