"""Where the simulated clock ticks: SimPy processes around the engine loop, at most one event an engine step.

The clock counts whole nanoseconds, so that sums of step times are exact and a run of macro-steps reports the same
figures, to the last digit, as one of single steps.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from functools import partial
from typing import Any

import simpy

from ...core.errors import DoesNotFitError
from ...core.scheduler.engine import EngineLoop, Wait, engine_loop
from ...core.scheduler.scheduler import Scheduler, StepOutcome
from ...core.types import Backend, Request, ScheduledStep, StepResult
from .listener import EngineWatcher

NANOSECONDS = 1_000_000_000
# Refusals are counted without end, and told in words for the first few.
MAX_REJECTIONS_KEPT = 5


class SimulatedEngine:
    """One engine in a SimPy environment: a process for its arrivals, a process for its steps.

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
        recorder: EngineWatcher,
        macro_steps: bool = True,
        next_arrival_ns: Callable[[], float] | None = None,
    ) -> None:
        """Start the engine's process.

        Args:
            env: the clock, in whole nanoseconds.
            scheduler: decides the steps.
            backend: computes and times them.
            recorder: measures them.
            macro_steps: whether identical decode steps are taken in one go.
            next_arrival_ns: in a fleet, when this engine may next be reached, or asked for by its router; no step is
                decided beyond it, so that what a router has heard by then is what has happened. None: this engine is
                alone in its environment.
        """
        self._env = env
        self._next_arrival_ns = next_arrival_ns
        self._scheduler = scheduler
        self._backend = backend
        self._recorder = recorder
        observers = [recorder.observe, self._tell_ended]
        self._loop: EngineLoop = engine_loop(scheduler, observers, self._repeats if macro_steps else None)
        self._idle: simpy.Event | None = None
        self._busy_until_ns = 0
        self.rejections: list[str] = []
        self.on_ended: Callable[[Request], None] | None = None
        """Called for each request that finished, before the next step is decided, or that was refused."""
        env.process(self._steps())

    def arrivals(self, requests: Iterable[Request]) -> Generator[simpy.Event, Any, None]:
        """Process: submit each request at its `arrival` (seconds, not decreasing). What can never fit is refused."""
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
        """Tokens that a request waited for were copied in."""
        self._scheduler.received(request_id)
        self._wake()

    def sent(self, request_id: str) -> None:
        """The blocks that a finished request kept were read by another engine."""
        self._scheduler.sent(request_id)
        self._wake()

    @property
    def next_move_ns(self) -> float:
        """The engine does nothing before: the end of its step, or for ever until something is handed to it."""
        if self._idle is None:
            return self._busy_until_ns
        return self._env.now if self._idle.triggered else float("inf")

    @property
    def may_admit(self) -> bool:
        """Whether a request could be admitted at its next step."""
        return self._scheduler.num_waiting > 0

    def _wake(self) -> None:
        if self._idle is not None and not self._idle.triggered:
            self._idle.succeed()

    def _tell_ended(self, _step: ScheduledStep, _result: StepResult, outcome: StepOutcome) -> None:
        if self.on_ended is not None:
            for request in outcome.finished_requests:
                self.on_ended(request)

    def _repeats(self, step: ScheduledStep, limit: int) -> int:
        """A repetition may start as long as nothing can reach this engine before it does."""
        if self._next_arrival_ns is not None:
            until_ns = self._next_arrival_ns()
        else:
            until_ns = float("inf") if self._scheduler.head_is_blocked else self._env.peek()
        return self._backend.repeats_before(step, limit, until_ns - self._env.now)

    def _steps(self) -> Generator[simpy.Event, Any, None]:
        env, loop, backend, recorder = self._env, self._loop, self._backend, self._recorder
        move = next(loop)
        while True:
            recorder.scheduled(self._scheduler)
            if isinstance(move, Wait):
                self._idle = env.event()
                yield self._idle
                self._idle = None
                move = loop.send(None)
            else:
                backend.submit(move)
                result = backend.collect()
                duration_ns = sum(result.nanoseconds)
                self._busy_until_ns = int(env.now) + duration_ns
                yield env.timeout(duration_ns)
                move = loop.send(result)


# The simulated engine under asynchronous scheduling: every step is decided while the one before it runs.


class AsyncSchedulingEngine(SimulatedEngine):
    """vLLM's `--async-scheduling`, on by default there.

    When a request arrives while a step runs, the next step is decided already; the request joins the one after it. So
    its first token comes, in the mean, half a step, a whole step and its own step after its arrival, where an engine
    that decides between steps needs no whole step in the middle. An idle engine starts at once.
    """

    def __init__(
        self,
        env: simpy.Environment,
        scheduler: Scheduler,
        backend: Backend,
        recorder: EngineWatcher,
        macro_steps: bool = True,
        next_arrival_ns: Callable[[], float] | None = None,
    ) -> None:
        """As `SimulatedEngine`."""
        # What was handed over during the step that runs, in order.
        self._arrived: deque[Callable[[], object]] = deque()
        super().__init__(env, scheduler, backend, recorder, macro_steps, next_arrival_ns)

    def submit(self, request: Request) -> bool:
        """Hand a request over now. True unless the engine is idle and refuses it at once."""
        if self._idle is not None:
            return super().submit(request)
        self._arrived.append(partial(super().submit, request))
        return True

    def received(self, request_id: str) -> None:
        """As `SimulatedEngine`, and too late for the step that is decided already."""
        self._hand_over(partial(super().received, request_id))

    def sent(self, request_id: str) -> None:
        """As `SimulatedEngine`, and too late for the step that is decided already."""
        self._hand_over(partial(super().sent, request_id))

    @property
    def may_admit(self) -> bool:
        """As `SimulatedEngine`, what was handed over meanwhile included."""
        return bool(self._arrived) or super().may_admit

    def _hand_over(self, news: Callable[[], object]) -> None:
        if self._idle is not None:
            news()
        else:
            self._arrived.append(news)

    def _repeats(self, step: ScheduledStep, limit: int) -> int:
        """The step that follows an arrival stands alone: the request is looked at when it ends."""
        return 0 if self._arrived else super()._repeats(step, limit)

    def _steps(self) -> Generator[simpy.Event, Any, None]:
        env, loop, backend, recorder = self._env, self._loop, self._backend, self._recorder
        move = next(loop)
        while True:
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
            *earlier, last = result.nanoseconds
            if earlier:
                # Behind a blocked head requests may arrive in any step of a macro-step; only those of its last step
                # are too late for the decision that follows it.
                yield env.timeout(sum(earlier))
                self._take_in()
            yield env.timeout(last)
            move = loop.send(result)
            if self._take_in() and isinstance(move, Wait):
                move = loop.send(None)

    def _take_in(self) -> bool:
        """Take in what arrived so far; False if nothing did."""
        arrived = bool(self._arrived)
        while self._arrived:
            self._arrived.popleft()()
        return arrived
