"""Where the simulated clock ticks: SimPy processes around the engine loop, at most one event an engine step.

The clock counts whole nanoseconds, so that sums of step times are exact and a run of macro-steps reports the same
figures, to the last digit, as one of single steps.
"""

from collections.abc import Generator, Iterable
from typing import Any

import simpy

from ..backends.sim_backend import SimBackend
from ..core.engine import EngineLoop, Wait, engine_loop
from ..core.errors import DoesNotFitError
from ..core.scheduler import Scheduler
from ..core.types import Request, ScheduledStep
from .metrics import Recorder

NANOSECONDS = 1_000_000_000


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
        backend: SimBackend,
        recorder: Recorder,
        macro_steps: bool = True,
    ) -> None:
        self._env = env
        self._scheduler = scheduler
        self._backend = backend
        self._recorder = recorder
        self._loop: EngineLoop = engine_loop(scheduler, [recorder.observe], self._repeats if macro_steps else None)
        self._idle: simpy.Event | None = None
        self.rejections: list[str] = []
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
            self.rejections.append(str(error))
            return False
        self._recorder.submitted(request)
        if self._idle is not None and not self._idle.triggered:
            self._idle.succeed()
        return True

    def _repeats(self, step: ScheduledStep, limit: int) -> int:
        """A repetition may start as long as nothing else can happen before it does: that is the next SimPy event."""
        horizon_ns = float("inf") if self._scheduler.head_is_blocked else self._env.peek() - self._env.now
        return self._backend.repeats_before(step, limit, horizon_ns)

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
                yield env.timeout(sum(result.nanoseconds))
                move = loop.send(result)
