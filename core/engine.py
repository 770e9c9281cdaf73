"""The engine loop, once, without I/O and without a clock: a generator that drivers run on their own time."""

from collections.abc import Callable, Generator, Iterable
from typing import TypeAlias

import attrs

from .scheduler import Scheduler, StepOutcome
from .types import ScheduledStep, StepResult


@attrs.frozen
class Wait:
    """Nothing can be computed until something is submitted. Send None when it may have been."""


EngineObserver: TypeAlias = Callable[[ScheduledStep, StepResult, StepOutcome], None]
EngineLoop: TypeAlias = Generator[ScheduledStep | Wait, StepResult | None, None]

WAIT = Wait()


def engine_loop(scheduler: Scheduler, observers: Iterable[EngineObserver] = ()) -> EngineLoop:
    """Yield a step to be computed, be sent its result, account for it, and so on.

        loop = engine_loop(scheduler)
        move = next(loop)
        while True:
            if isinstance(move, Wait):
                move = loop.send(wait_until_something_is_submitted())   # returns None
            else:
                backend.submit(move)
                move = loop.send(backend.collect())

    Every commit of a step has reached every sink before the step is yielded. Observers are called after a step is
    accounted for. The loop never ends by itself; close the generator.
    """
    observers = tuple(observers)
    while True:
        step = scheduler.schedule()
        if step is None:
            yield WAIT
            continue
        result = yield step
        if result is None:
            raise TypeError("the engine loop yielded a step and must be sent its StepResult")
        outcome = scheduler.complete(step, result.stopped)
        for observe in observers:
            observe(step, result, outcome)
