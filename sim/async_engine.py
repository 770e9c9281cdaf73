"""The simulated engine under asynchronous scheduling: every step is decided while the one before it runs."""

from collections import deque
from collections.abc import Callable, Generator
from functools import partial
from typing import Any

import simpy

from ..backends.sim_backend import SimBackend
from ..core.engine import Wait
from ..core.scheduler import Scheduler
from ..core.types import Request, ScheduledStep
from .engine import SimulatedEngine
from .run_listener import EngineWatcher


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
        backend: SimBackend,
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
