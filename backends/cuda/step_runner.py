"""The model behind a backend: it starts a step's work on the device. Also measures how long the step takes."""

import time
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import attrs
import numpy as np
import torch
from numpy.typing import NDArray

from ...core.types import ScheduledStep


@attrs.frozen(eq=False)
class StepOutputs:
    """The outputs of a step; the fields are those of `StepResult`."""

    outputs: Any = None  # any object that the engine's observers understand (sampled tokens)
    # int64 `[num_reqs]`, accepted drafts; None if the step had no drafts.
    num_accepted_tokens: NDArray[np.int64] | None = None
    stopped: tuple[int, ...] = ()  # rows whose request ends with this step's token


FinishStep: TypeAlias = Callable[[], StepOutputs]


class StepRunner(Protocol):
    """A model. Its layers call the backend's `write_kv`; the slots are computed before it is launched."""

    def launch(self, step: ScheduledStep) -> FinishStep:
        """Start the step's work without waiting for the device.

        Returns:
            A function that waits for the outputs and returns them; `collect` calls it once.
        """
        ...


class StepTimer:
    """Measures one step: by events on a GPU, by the clock on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        if device.type == "cuda":
            self._events = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        self._started_ns = 0

    def start(self) -> None:
        """Note that the step's work starts."""
        self._started_ns = time.perf_counter_ns()
        if self._events is not None:
            self._events[0].record()

    def stop(self) -> None:
        """Note that all of the step's work has been started."""
        if self._events is not None:
            self._events[1].record()

    def nanoseconds(self) -> int:
        """Wait for the work; return how long it took, at least 1."""
        if self._events is None:
            return max(time.perf_counter_ns() - self._started_ns, 1)
        begin, end = self._events
        end.synchronize()
        return max(round(begin.elapsed_time(end) * 1e6), 1)
