"""The simulated engine: SimPy processes around the engine loop, with at most one clock event per engine step.

The clock counts whole nanoseconds, so that sums of step times are exact and a run of macro-steps reports the same
figures, to the last digit, as a run of single steps.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from functools import partial
from typing import Any

import simpy

from ...core.errors import DoesNotFitError
from ...core.events import Commit
from ...core.scheduler.engine import EngineLoop, Wait, engine_loop
from ...core.scheduler.scheduler import Scheduler, StepOutcome
from ...core.types import Backend, Request, ScheduledStep, StepResult
from .metrics import Recorder

NANOSECONDS = 1_000_000_000
# Messages of the first rejections are kept; all are counted.
MAX_REJECTIONS_KEPT = 5


class RunListener:
    """Follows a run, for example to write a file; methods do nothing unless overridden.

    `now_ns` counts from the start of the run.
    """

    def started(self, recorder: Recorder) -> None:
        """The run begins; the recorder receives everything before the listeners do."""

    def submitted(self, now_ns: int, request: Request) -> None:
        """A request was accepted. It arrived then, or during the step that has just ended (asynchronous scheduling)."""

    def apply(self, now_ns: int, commit: Commit) -> None:
        """The allocator changed its state."""

    def scheduled(self, now_ns: int, scheduler: Scheduler) -> None:
        """A step starts now, or the engine begins to wait."""

    def observe(self, now_ns: int, step: ScheduledStep, result: StepResult, outcome: StepOutcome) -> None:
        """A step was completed now."""


class SimulatedEngine:
    """One engine in a SimPy environment: a process for its steps, and one for its arrivals unless others submit them.

    env = simpy.Environment()
    engine = SimulatedEngine(env, scheduler, backend, recorder)
    env.process(engine.arrivals(requests))
    env.run()
    """

    def __init__(
        self,
        env: simpy.Environment,
        scheduler: Scheduler,
        backend: Backend,
        recorder: Recorder,
        macro_steps: bool = True,
        next_arrival_ns: Callable[[], float] | None = None,
    ) -> None:
        """Start the engine's process, on a clock in whole nanoseconds.

        `macro_steps`: whether identical decode steps are taken in one go. `next_arrival_ns` returns, in a fleet, the
        earliest time at which a request may reach this engine or its router may read its state; no macro-step extends
        past it, so that the router sees what has happened by then. None: the engine is alone in its environment.
        """
        self._env = env
        self._next_arrival_ns = next_arrival_ns
        self._scheduler = scheduler
        self._backend = backend
        self._recorder = recorder
        self._macro_steps = macro_steps
        self._observers = [recorder.observe, self._report_ended]
        self._loop: EngineLoop = engine_loop(scheduler, self._observers, self._repeats if macro_steps else None)
        self._idle: simpy.Event | None = None
        self._busy_until_ns = 0
        self.rejections: list[str] = []
        # Called for each request that was refused or has finished, before the next step is decided.
        self.on_ended: Callable[[Request], None] | None = None
        # Calls to make when the running step ends, in order (asynchronous scheduling).
        self._arrived: deque[Callable[[], object]] = deque()
        env.process(self._steps())

    def arrivals(self, requests: Iterable[Request]) -> Generator[simpy.Event, Any, None]:
        """Process: submit each request at its `arrival` (seconds, not decreasing); refuse one that can never fit."""
        env = self._env
        for request in requests:
            arrival_ns = round(request.arrival * NANOSECONDS)
            if arrival_ns > env.now:
                yield env.timeout(arrival_ns - env.now)
            self.submit(request)

    def submit(self, request: Request) -> bool:
        """Hand a request to the scheduler now; False if it is refused."""
        try:
            self._scheduler.submit(request)
        except DoesNotFitError as error:
            if len(self.rejections) < MAX_REJECTIONS_KEPT:
                self.rejections.append(str(error))
            if self.on_ended is not None:
                self.on_ended(request)
            return False
        self._recorder.submitted(request)
        self._wake()
        return True

    def received(self, request_id: str) -> None:
        """The tokens that a request waited for have been copied in."""
        self._scheduler.received(request_id)
        self._wake()

    def sent(self, request_id: str) -> None:
        """Another engine has read the blocks that a finished request kept."""
        self._scheduler.sent(request_id)
        self._wake()

    @property
    def next_move_ns(self) -> float:
        """The earliest time of its next action: the end of its step; infinity while it waits for a request."""
        if self._idle is None:
            return self._busy_until_ns
        return self._env.now if self._idle.triggered else float("inf")

    @property
    def may_admit(self) -> bool:
        """Whether its next step could admit a request."""
        return self._scheduler.num_waiting > 0

    def _wake(self) -> None:
        if self._idle is not None and not self._idle.triggered:
            self._idle.succeed()

    def _report_ended(self, _step: ScheduledStep, _result: StepResult, outcome: StepOutcome) -> None:
        if self.on_ended is not None:
            for request in outcome.finished_requests:
                self.on_ended(request)

    def _repeats(self, step: ScheduledStep, limit: int) -> int:
        """How often the step may repeat: a repetition may start if nothing can reach this engine before it does."""
        if self._next_arrival_ns is not None:
            until_ns = self._next_arrival_ns()
        else:
            until_ns = float("inf") if self._scheduler.head_is_blocked else self._env.peek()
        return self._backend.repeats_before(step, limit, until_ns - self._env.now)

    def _steps(self) -> Generator[simpy.Event, Any, None]:
        env, loop, backend, recorder = self._env, self._loop, self._backend, self._recorder
        move = next(loop)
        while True:
            if isinstance(move, Wait) and self._arrived:  # before the first step, or while it was decided
                self._take_in()
                move = loop.send(None)
                continue
            recorder.scheduled(self._scheduler)
            if isinstance(move, Wait):
                self._idle = env.event()
                yield self._idle
                self._idle = None
                move = loop.send(None)
                continue
            backend.submit(move)
            result = backend.collect()
            self._busy_until_ns = int(env.now) + sum(result.nanoseconds)
            for duration_ns in self._waits(result.nanoseconds):
                self._take_in()
                yield env.timeout(duration_ns)
            move = loop.send(result)
            if not isinstance(move, Wait):
                self._take_in()

    def _waits(self, nanoseconds: tuple[int, ...]) -> tuple[int, ...]:
        """The times to let pass until a step, or the steps of a macro-step, have ended."""
        return (sum(nanoseconds),)

    def _take_in(self) -> None:
        """Make the waiting calls."""
        while self._arrived:
            self._arrived.popleft()()


class AsyncSchedulingEngine(SimulatedEngine):
    """vLLM's `--async-scheduling`, its default: each step is decided while the step before it runs.

    What a step gives back, places and blocks, can be used by the step after the next one. With drafts only arrivals are
    late: what a step gives back can be used by the next one.

    When a request arrives during a step, the next step is already decided, so the request joins the one after it. On
    average its first token comes after half a step, a whole step and its own step; an engine that decides between steps
    saves the whole step in the middle. An idle engine starts immediately.
    """

    def submit(self, request: Request) -> bool:
        """Hand a request over now. Returns False only if the engine is idle and refuses it."""
        if self._idle is not None:
            return super().submit(request)
        self._arrived.append(partial(super().submit, request))
        return True

    def received(self, request_id: str) -> None:
        """As `SimulatedEngine`, but too late for the step that is already decided."""
        self._hand_over(partial(super().received, request_id))

    def sent(self, request_id: str) -> None:
        """As `SimulatedEngine`, but too late for the step that is already decided."""
        self._hand_over(partial(super().sent, request_id))

    @property
    def may_admit(self) -> bool:
        """As `SimulatedEngine`, including requests handed over during the step."""
        return bool(self._arrived) or super().may_admit

    def _hand_over(self, call: Callable[[], object]) -> None:
        if self._idle is not None:
            call()
        else:
            self._arrived.append(call)

    def _repeats(self, step: ScheduledStep, limit: int) -> int:
        """A step after an arrival is not repeated, so that the request is scheduled when it ends."""
        return 0 if self._arrived else super()._repeats(step, limit)

    def _steps(self) -> Generator[simpy.Event, Any, None]:
        return super()._steps() if self._scheduler.config.num_speculative_tokens else self._overlapped_steps()

    def _overlapped_steps(self) -> Generator[simpy.Event, Any, None]:
        """Decide each step before the one that runs has been accounted for.

        The decision falls when the step before ends. vLLM makes it when that step starts, and learns of nothing in
        between, so that it is the same.
        """
        env, scheduler, backend, recorder = self._env, self._scheduler, self._backend, self._recorder
        while True:
            self._take_in()  # what was sent before the engine ran for the first time
            step = scheduler.schedule()
            recorder.scheduled(scheduler)
            if step is None:
                self._idle = env.event()
                yield self._idle
                self._idle = None
                continue
            may_repeat = False
            while step is not None:
                if may_repeat:
                    limit = scheduler.max_repeats(step)
                    times = min(self._repeats(step, limit), limit) if limit else 0
                    step = scheduler.repeat(step, times) if times else step
                backend.submit(step)
                result = backend.collect()
                self._busy_until_ns = int(env.now) + sum(result.nanoseconds)
                for duration_ns in self._waits(result.nanoseconds):
                    self._take_in()
                    yield env.timeout(duration_ns)
                following = scheduler.schedule()
                outcome = scheduler.complete(step, result.stopped, result.num_accepted_tokens)
                for observe in self._observers:
                    observe(step, result, outcome)
                took_in = bool(self._arrived)
                self._take_in()
                if following is not None:
                    recorder.scheduled(scheduler)
                # What was given back or has arrived may let a request in after the step that is already decided.
                changed = took_in or bool(outcome.finished_requests and scheduler.num_waiting)
                may_repeat = self._macro_steps and not changed
                step = following

    def _waits(self, nanoseconds: tuple[int, ...]) -> tuple[int, ...]:
        """Behind a blocked queue head, requests may arrive in any step of a macro-step.

        Only those of its last step are too late for the decision that follows it.
        """
        *earlier, last = nanoseconds
        return (sum(earlier), last) if earlier else (last,)
