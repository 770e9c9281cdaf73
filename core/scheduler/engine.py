"""The engine loop, without I/O and without a clock: a generator that drivers run on their own time."""

from collections.abc import Callable, Generator, Iterable
from typing import TypeAlias

import attrs

from ..types import ScheduledStep, StepResult
from .scheduler import Scheduler, StepOutcome


@attrs.frozen
class Wait:
    """Nothing can be computed until a request is submitted. Send None when one may have been."""


RepeatPolicy: TypeAlias = Callable[[ScheduledStep, int], int]
"""(step, largest possible number) -> how many more times to repeat a decode-only step in one go."""

EngineObserver: TypeAlias = Callable[[ScheduledStep, StepResult, StepOutcome], None]
EngineLoop: TypeAlias = Generator[ScheduledStep | Wait, StepResult | None, None]


def engine_loop(
    scheduler: Scheduler, observers: Iterable[EngineObserver] = (), repeats: RepeatPolicy | None = None
) -> EngineLoop:
    """Yield a step to compute, receive its result, account for it, and repeat.

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

    Several identical decode steps may become one macro-step if nothing can happen in between: `repeats` says how many,
    since only the driver knows when the next request can arrive. The result is the same as step by step, block id for
    block id.

    Raises:
        TypeError: the driver sent no result for a step.
    """
    observers = tuple(observers)
    while True:
        step = scheduler.schedule()
        if step is None:
            yield Wait()
            continue
        if repeats is not None:
            limit = scheduler.max_repeats(step)
            wanted = min(repeats(step, limit), limit) if limit else 0
            if wanted:
                step = scheduler.repeat(step, wanted)
        result = yield step
        if result is None:
            raise TypeError("the engine loop yielded a step and must be sent its StepResult")
        outcome = scheduler.complete(step, result.stopped, result.num_accepted_tokens)
        for observe in observers:
            observe(step, result, outcome)
