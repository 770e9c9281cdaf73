"""Runs the decisions of a recorded live run again: the same requests must give the same commits and slots.

The log provides what the engine cannot decide: arrivals, block hashes, where requests stopped, and aborts. The
scheduler, the allocator and `SimBackend` decide everything else again. Every commit is compared with the log's, and
the slots of every step with those of the device.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

import attrs

from ...backends.serving.engine.recording import recorded_configs, slots_crc32
from ...backends.sim_backend import SimBackend
from ...backends.sinks.log.reader import LogReader
from ...backends.sinks.log.rows import LoggedCommit, LoggedNote, Record, RequestArrived, RequestEnded, StepComputed
from ...core.allocator.allocator import KVCacheAllocator
from ...core.errors import InputError
from ...core.events import BlocksCached, Commit, Key, RowsAssigned, as_ints
from ...core.scheduler.engine import Wait, engine_loop
from ...core.scheduler.scheduler import Scheduler, StepOutcome
from ...core.types import Request, ScheduledStep, StepResult
from ..figures import Document
from ..traces.logged import is_live
from .text import described


class LoggedKeys:
    """Block hashes of each request: `RequestArrived` has those of its prompt, `RequestEnded` those of its output.

    If a request has no end in the log (the engine was killed, or still runs), the commits provide the hashes of its
    cached output blocks, which are the only ones that a later lookup can find. `num_unended` counts these requests.
    """

    def __init__(self, reader: LogReader) -> None:
        # A later request may reuse the id of an ended one.
        self._ends: defaultdict[str, deque[RequestEnded]] = defaultdict(deque)
        arrived: list[RequestArrived] = []
        for logged in reader.notes():
            if isinstance(logged.note, RequestEnded):
                self._ends[logged.note.request_id].append(logged.note)
            elif isinstance(logged.note, RequestArrived):
                arrived.append(logged.note)
        self.num_unended = len(arrived) - sum(len(ends) for ends in self._ends.values())
        self._registered = _registered_keys(reader) if self.num_unended else {}

    def of(self, note: RequestArrived) -> tuple[Key, ...]:
        """Hashes of a request's full blocks; call once per request, in the order of the log."""
        ends = self._ends[note.request_id]
        if ends:
            return note.prompt_keys + ends.popleft().output_keys
        keys = list(note.prompt_keys)
        registered = self._registered.get(note.request_id, {})
        while len(keys) in registered:
            keys.append(registered[len(keys)])
        return tuple(keys)


class KnownKeys:
    """A key source whose keys are all known."""

    def __init__(self, keys: tuple[Key, ...]) -> None:
        self._keys = keys

    def keys(self, start: int, stop: int) -> Sequence[Key]:
        """The known keys of blocks `start <= i < stop`."""
        return self._keys[start:stop]


def _registered_keys(reader: LogReader) -> dict[str, dict[int, Key]]:
    """Request -> block index -> hash, for blocks of the hash block size; the last request wins if an id repeats."""
    hash_block_size = reader.created.hash_block_size
    groups = [group for group, kind in enumerate(reader.created.groups) if kind.block_size == hash_block_size]
    request_in: dict[int, str] = {}
    found: dict[str, dict[int, Key]] = defaultdict(dict)
    for record in reader.records():
        for event in record.commit.events if isinstance(record, LoggedCommit) else ():
            if isinstance(event, RowsAssigned):
                request_in.update(zip(as_ints(event.rows), event.requests, strict=True))
            elif isinstance(event, BlocksCached) and event.group in groups:
                start = 0
                indices = as_ints(event.indices)
                for row, count in zip(as_ints(event.rows), as_ints(event.counts), strict=True):
                    stop = start + count
                    of_request = found[request_in[row]]
                    of_request.update(zip(indices[start:stop], event.keys[start:stop], strict=True))
                    start = stop
    return found


ABORTED = ("abort", "error")


@attrs.define
class Rerun:
    """What came out equal when a live run's decisions ran again, and the first difference in words, if there is one.

    `steps_with_slots` counts steps whose slots are in the log. `unended` counts requests without an end in the log (it
    is torn, or still being written).
    """

    commits: int = 0
    steps: int = 0
    requests: int = 0
    steps_with_slots: int = 0
    unended: int = 0
    divergence: str | None = None

    @property
    def is_equal(self) -> bool:
        """Whether the whole log came out equal."""
        return self.divergence is None

    def to_json(self) -> Document:
        """The document of `--json`."""
        return {"equal": self.is_equal, **attrs.asdict(self)}

    def describe(self) -> list[str]:
        """The result in a few lines of text."""
        equal = "block tables and free queue are equal"
        if self.steps_with_slots:
            equal += f"; the slots of {self.steps_with_slots:,} steps equal the device's"
        lines = [f"ran {self.requests:,} requests and {self.steps:,} steps again: {self.commits:,} commits, {equal}"]
        if self.unended:
            lines.append(f"{self.unended:,} requests do not end within the log")
        if self.divergence is not None:
            lines.append(f"NOT EQUAL: {self.divergence}")
        return lines


def run_live_again(reader: LogReader, on_progress: Callable[[int], None] = lambda count: None) -> Rerun:
    """Run the decisions of a live run again and compare; `on_progress` is called with the number of steps so far.

    Raises InputError: the log is not of a live run.
    """
    if not is_live(reader):
        raise InputError(f"{reader.directory} is not the log of a live engine (kvledger serve --log)")
    return _LiveRerun(reader, on_progress).run()


class _Diverged(Exception):
    """The first difference."""


class _LogOver(Exception):
    """The log has no more records."""


class _LiveRerun:
    _scheduler: Scheduler

    def __init__(self, reader: LogReader, on_progress: Callable[[int], None]) -> None:
        self._reader = reader
        self._on_progress = on_progress
        self._found = Rerun()
        self._records: Iterator[Record] = reader.records()
        self._peeked: Record | None = None
        self._keys = LoggedKeys(reader)
        self._found.unended = self._keys.num_unended
        self._backend = SimBackend()
        self._finished: dict[str, int] = {}

    def run(self) -> Rerun:
        try:
            self._decide()
        except _Diverged as difference:
            self._found.divergence = str(difference)
        except _LogOver:
            pass
        return self._found

    def _decide(self) -> None:
        config, limits = recorded_configs(self._reader.manifest.header, self._reader.created)
        self._scheduler = scheduler = Scheduler(limits, KVCacheAllocator(config, sinks=[self, self._backend]))
        loop = engine_loop(scheduler, [self._between_steps])
        move = next(loop)
        while True:
            if isinstance(move, Wait):
                if not self._take_in(()):
                    self._expect_the_end()
                move = loop.send(None)
            else:
                result = self._computed(move)
                if result is None:  # the engine failed in this step
                    self._take_in(())
                    self._expect_the_end()
                move = loop.send(result)

    def apply(self, commit: Commit) -> None:
        """Compare a commit of the rerun with the next record of the log."""
        record = self._next()
        if not isinstance(record, LoggedCommit) or record.commit != commit:
            mine = "; ".join(described(LoggedCommit(commit, None)))
            raise _Diverged(f"commit {commit.sequence} is [{mine}], but the log has [{_in_words(record)}]")
        self._found.commits += 1

    def _computed(self, step: ScheduledStep) -> StepResult | None:
        record = self._peek()
        if isinstance(record, LoggedNote) and isinstance(record.note, RequestEnded) and record.note.reason == "error":
            return None
        self._next()
        if not isinstance(record, LoggedNote) or not isinstance(record.note, StepComputed):
            raise _Diverged(f"step {self._found.steps} is next, but the log continues with {_in_words(record)}")
        note = record.note
        if note.load != step.load:
            raise _Diverged(f"step {self._found.steps} computes {step.load}; in the log it computed {note.load}")
        if note.slots_crc32 is not None:
            groups = range(len(self._backend.block_tables))
            found = slots_crc32([self._backend.slot_mapping(step.batch, group) for group in groups])
            if found != note.slots_crc32:
                raise _Diverged(f"the slots of step {self._found.steps} differ from the device's")
            self._found.steps_with_slots += 1
        self._found.steps += 1
        self._on_progress(self._found.steps)
        return StepResult((note.nanoseconds,), stopped=note.stopped)

    def _expect_the_end(self) -> NoReturn:
        """Check that no commit or step is left in the log when the rerun has nothing left to compute."""
        record = self._peek()
        if isinstance(record, LoggedCommit) or isinstance(record.note, StepComputed):
            raise _Diverged(f"nothing is left to compute, but the log continues with {_in_words(record)}")
        raise _LogOver

    def _between_steps(self, _step: ScheduledStep, _result: StepResult, outcome: StepOutcome) -> None:
        self._take_in(outcome.finished_requests)

    def _take_in(self, finished: Sequence[Request]) -> bool:
        """Apply the notes up to the next step; returns False if none was about a request."""
        self._finished.update({request.request_id: request.num_output_tokens for request in finished})
        taken = False
        while (note := self._note_of_a_request()) is not None:
            self._next()
            taken = True
            if isinstance(note, RequestArrived):
                self._arrive(note)
            elif note.reason in ABORTED:
                self._finished.pop(note.request_id, None)  # it finished before the engine failed
                self._scheduler.abort(note.request_id)
            else:
                self._compare_end(note)
        if self._finished:
            raise _Diverged(f"requests {', '.join(self._finished)} finish here, but not in the log")
        return taken

    def _note_of_a_request(self) -> RequestArrived | RequestEnded | None:
        try:
            record = self._peek()
        except _LogOver:
            if self._finished:  # the log ends between a step and its notes
                self._finished.clear()
                raise
            return None
        note = record.note if isinstance(record, LoggedNote) else None
        return note if isinstance(note, RequestArrived | RequestEnded) else None

    def _arrive(self, note: RequestArrived) -> None:
        self._found.requests += 1
        request = Request(
            request_id=note.request_id,
            num_prompt_tokens=note.num_prompt_tokens,
            max_tokens=note.facts["max_tokens"],
            keys=KnownKeys(self._keys.of(note)),
            priority=note.facts["priority"],
            arrival=note.arrival_s,
        )
        lead = note.facts.get("sample_of")
        if lead is None:
            self._scheduler.submit(request)
            return
        request.num_output_tokens = 1
        has_ended: bool = note.facts["has_ended"]
        self._scheduler.fork(lead, request, has_ended)
        if has_ended:
            self._finished[note.request_id] = 1

    def _compare_end(self, note: RequestEnded) -> None:
        produced = self._finished.pop(note.request_id, None)
        if produced != note.num_output_tokens:
            here = "does not finish here" if produced is None else f"finishes with {produced} output tokens"
            raise _Diverged(f"request {note.request_id!r} {here}; in the log it finishes with {note.num_output_tokens}")

    def _peek(self) -> Record:
        if self._peeked is None:
            self._peeked = next(self._records, None)
            if self._peeked is None:
                raise _LogOver
        return self._peeked

    def _next(self) -> Record:
        record = self._peek()
        self._peeked = None
        return record


def _in_words(record: Record) -> str:
    return "; ".join(described(record))
