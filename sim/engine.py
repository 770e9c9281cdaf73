"""Where the simulated clock ticks: SimPy processes around the engine loop, one event an engine step."""

from collections.abc import Iterable, Iterator
from typing import Any

import simpy

from ..core.engine import EngineLoop, Wait, engine_loop
from ..core.errors import DoesNotFitError
from ..core.scheduler import Scheduler
from ..core.types import Backend, Request
from .metrics import Recorder


class SimulatedEngine:
    """One engine in a SimPy environment: a process for its arrivals, a process for its steps.

        env = simpy.Environment()
        engine = SimulatedEngine(env, scheduler, backend, recorder)
        env.process(engine.arrivals(requests))
        env.run()
    """

    def __init__(self, env: simpy.Environment, scheduler: Scheduler, backend: Backend, recorder: Recorder) -> None:
        self._env = env
        self._scheduler = scheduler
        self._backend = backend
        self._recorder = recorder
        self._loop: EngineLoop = engine_loop(scheduler, [recorder.observe])
        self._idle: simpy.Event | None = None
        self.rejections: list[str] = []
        env.process(self._steps())

    def arrivals(self, requests: Iterable[Request]) -> Iterator[Any]:
        """Process: submit each request at its `arrival` (seconds, not decreasing). What can never fit is refused."""
        env = self._env
        for request in requests:
            if request.arrival > env.now:
                yield env.timeout(request.arrival - env.now)
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

    def _steps(self) -> Iterator[Any]:
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
                yield env.timeout(result.seconds)
                move = loop.send(result)
