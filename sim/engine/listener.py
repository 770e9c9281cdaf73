"""Who else may follow a simulated run: files that are written while it goes on."""

from collections.abc import Callable, Sequence
from typing import Protocol

from ...core.events import Commit
from ...core.scheduler.scheduler import Scheduler, StepOutcome
from ...core.types import Request, ScheduledStep, StepResult
from .metrics import Recorder


class EngineWatcher(Protocol):
    """What a simulated engine reports to."""

    def submitted(self, request: Request) -> None:
        """A request was accepted."""
        ...

    def scheduled(self, scheduler: Scheduler) -> None:
        """A step starts now, or the engine begins to wait."""
        ...

    def observe(self, step: ScheduledStep, result: StepResult, outcome: StepOutcome) -> None:
        """A step was completed now."""
        ...


class RunListener:
    """Follows a run; each method does nothing unless it is overridden. `now_ns` counts from the start of the run."""

    def started(self, recorder: Recorder) -> None:
        """The run begins; the recorder is told of everything before its listeners are."""

    def submitted(self, now_ns: int, request: Request) -> None:
        """A request was accepted. It arrived then, or during the step that has just ended (asynchronous scheduling)."""

    def apply(self, now_ns: int, commit: Commit) -> None:
        """The allocator changed its state."""

    def scheduled(self, now_ns: int, scheduler: Scheduler) -> None:
        """A step starts now, or the engine begins to wait."""

    def observe(self, now_ns: int, step: ScheduledStep, result: StepResult, outcome: StepOutcome) -> None:
        """A step was completed now."""


class Broadcast:
    """An `EngineWatcher` and a sink that tells a recorder first, and every listener the time as well."""

    def __init__(self, now_ns: Callable[[], int], recorder: Recorder, listeners: Sequence[RunListener]) -> None:
        self._now_ns = now_ns
        self._recorder = recorder
        self._listeners = tuple(listeners)
        for listener in self._listeners:
            listener.started(recorder)

    def submitted(self, request: Request) -> None:
        """Pass it on."""
        self._recorder.submitted(request)
        for listener in self._listeners:
            listener.submitted(self._now_ns(), request)

    def apply(self, commit: Commit) -> None:
        """Pass it on."""
        self._recorder.apply(commit)
        for listener in self._listeners:
            listener.apply(self._now_ns(), commit)

    def scheduled(self, scheduler: Scheduler) -> None:
        """Pass it on."""
        self._recorder.scheduled(scheduler)
        for listener in self._listeners:
            listener.scheduled(self._now_ns(), scheduler)

    def observe(self, step: ScheduledStep, result: StepResult, outcome: StepOutcome) -> None:
        """Pass it on."""
        self._recorder.observe(step, result, outcome)
        for listener in self._listeners:
            listener.observe(self._now_ns(), step, result, outcome)
