"""Runs the decisions of a recorded vLLM engine again with our scheduler and allocator, and compares step by step.

The recording provides arrivals, block hashes, ends and aborts. Commits are not compared one by one, because vLLM's
manager and ours cut a step into commits differently: compared are the batch of each step, and the block tables and the
free queue that its decisions leave.
"""

from collections.abc import Callable
from typing import Any

from ...backends.serving.engine.recording import recorded_configs
from ...backends.sinks.log.reader import LogReader
from ...backends.sinks.log.rows import LoggedCommit, RequestArrived, RequestEnded, StepComputed
from ...core.allocator.allocator import KVCacheAllocator
from ...core.errors import DoesNotFitError, InputError, KVLedgerError
from ...core.events import CacheReset, TokensPlaced, as_ints
from ...core.ledger.replay_checks import CheckedReplay
from ...core.ledger.state import LedgerState
from ...core.scheduler.scheduler import Scheduler
from ...core.types import Request, ScheduledStep
from .live_rerun import ABORTED, KnownKeys, LoggedKeys, Rerun


def run_engine_again(reader: LogReader, on_progress: Callable[[int], None] = lambda count: None) -> Rerun:
    """Decide each step of a recorded vLLM engine again; `on_progress` is called with the number of steps so far.

    Raises:
        InputError: the run cannot be decided again: it used drafts, or stopped requests early under asynchronous
            scheduling.
    """
    return _EngineRerun(reader, on_progress).run()


class _Diverged(Exception):
    """The first difference."""


class _EngineRerun:
    def __init__(self, reader: LogReader, on_progress: Callable[[int], None]) -> None:
        self._reader = reader
        self._on_progress = on_progress
        self._found = Rerun()
        self._keys = LoggedKeys(reader)
        self._found.unended = self._keys.num_unended
        config, limits = recorded_configs(reader.manifest.header, reader.created)
        self._is_async = bool(reader.manifest.header["facts"].get("async_scheduling"))
        self._stops, ends_early = stops_by_step(reader)
        if limits.num_speculative_tokens:
            raise InputError(f"{reader.directory} is of an engine with drafts: which were accepted is not in the log")
        if self._is_async and ends_early:
            raise InputError(
                f"{reader.directory} is of an asynchronous engine whose requests stop early ({ends_early} of them): "
                "it computes a step more for each, which our engine does not"
            )
        self._theirs = CheckedReplay(LedgerState(reader.created))
        self._scheduler = Scheduler(limits, KVCacheAllocator(config))
        self._in_flight: list[ScheduledStep] = []

    def run(self) -> Rerun:
        try:
            for record in self._reader.records():
                if isinstance(record, LoggedCommit):
                    self._commit(record)
                elif isinstance(record.note, RequestArrived):
                    self._arrive(record.note)
                elif isinstance(record.note, StepComputed):
                    self._computed()
                elif isinstance(record.note, RequestEnded) and record.note.reason in ABORTED:
                    self._scheduler.abort(record.note.request_id)
        except (_Diverged, KVLedgerError) as difference:
            self._found.divergence = str(difference)
        return self._found

    def _commit(self, record: LoggedCommit) -> None:
        self._theirs.apply(record.commit)
        self._found.commits += 1
        for event in record.commit.events:
            if isinstance(event, TokensPlaced):  # vLLM's recorder places the tokens of a step together
                self._schedule(event)
            elif isinstance(event, CacheReset):
                if len(self._scheduler.running_rows):
                    raise _Diverged(
                        f"after step {self._found.steps} the engine was told to preempt all requests and to reset its "
                        "cache, which is not decided again"
                    )
                self._scheduler.reset_prefix_cache()

    def _schedule(self, placed: TokensPlaced) -> None:
        step = self._scheduler.schedule()
        state = self._theirs.state
        columns = (as_ints(column) for column in placed)
        theirs = {state.request_of[row]: (first, count) for row, first, count in zip(*columns, strict=True)}
        ours: dict[str | None, tuple[int, int]] = {}
        if step is not None:
            self._in_flight.append(step)
            rows = step.batch.rows.tolist()
            names = [self._scheduler.request_in(row).request_id for row in rows]
            batch = zip(step.batch.first_positions.tolist(), step.batch.counts.tolist(), strict=True)
            ours = dict(zip(names, batch, strict=True))
        self._same("(first position, tokens) by request", theirs, ours)
        mine = self._scheduler.allocator.state
        self._same("block tables", tables_of(state), tables_of(mine))
        self._same("free queue", state.pool.free_queue.order(), mine.pool.free_queue.order())
        self._found.steps += 1
        self._on_progress(self._found.steps)

    def _same(self, what: str, theirs: Any, ours: Any) -> None:
        if theirs == ours:
            return
        if isinstance(theirs, dict):
            names = [name for name in {**theirs, **ours} if theirs.get(name) != ours.get(name)]
            theirs, ours = ({name: each.get(name) for name in names[:4]} for each in (theirs, ours))
        elif isinstance(theirs, list):
            place = next((i for i, pair in enumerate(zip(theirs, ours, strict=False)) if pair[0] != pair[1]), 0)
            what += f" from place {place} on"
            theirs, ours = theirs[place : place + 8], ours[place : place + 8]
        raise _Diverged(f"step {self._found.steps}, {what}: in the log {theirs}, decided again {ours}")

    def _computed(self) -> None:
        step = self._in_flight.pop(0)
        stopped = self._stops.pop(0)
        rows = [self._scheduler.allocator.row_of(name) for name in stopped if self._scheduler.allocator.holds(name)]
        self._scheduler.complete(step, stopped=rows)

    def _arrive(self, note: RequestArrived) -> None:
        self._found.requests += 1
        request = Request(
            note.request_id,
            note.num_prompt_tokens,
            max_tokens=note.facts["max_tokens"],
            keys=KnownKeys(self._keys.of(note)),
            priority=note.facts["priority"],
            arrival=note.arrival_s,
        )
        try:
            self._scheduler.submit(request)
        except DoesNotFitError as error:
            raise _Diverged(f"request {note.request_id!r} is refused: {error}") from error


def stops_by_step(reader: LogReader) -> tuple[list[list[str]], int]:
    """Return which requests stopped before their length with each computed step, and how many there are."""
    stops: list[list[str]] = []
    for logged in reader.notes():
        if isinstance(logged.note, StepComputed):
            stops.append([])
        elif isinstance(logged.note, RequestEnded) and logged.note.reason == "stop" and stops:
            stops[-1].append(logged.note.request_id)
    return stops, sum(map(len, stops))


def tables_of(state: LedgerState) -> dict[str, list[list[int]]]:
    """Return the blocks of each request, by group."""
    return {name: [list(table.blocks(row)) for table in state.tables] for name, row in state.row_of.items()}
