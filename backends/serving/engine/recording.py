"""A live run, written down as it happens, so that it can be proved, run again and compared (docs/live_serving.md)."""

import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....core.allocator.config import AllocatorConfig
from ....core.errors import InputError
from ....core.events import Commit
from ....core.scheduler.config import SchedulerConfig
from ....core.scheduler.scheduler import Scheduler
from ....core.types import ScheduledStep, StepResult
from ...cuda.backend import CudaBackend
from ...sinks.log.durable_log import Clock, DurableLog
from ...sinks.log.flush_policy import FlushPolicy
from ...sinks.log.rows import RequestArrived, RequestEnded, RunEnded, StepComputed
from .generation import Generation
from .recorded_run import live_header, slots_crc32


class LiveRecording:
    """Writes a live engine's commits, and notes of what they do not say: requests, their ends, and measured steps.

        recording = LiveRecording.create("run.log", flush=FlushPolicy(every_ms=50), allocator=..., scheduler=...)
        engine = LiveEngine(runner, allocator=..., scheduler=..., recording=recording)

    The engine closes it when it has stopped. What it raises is what `DurableLog` raises, and stops the engine.

    Attributes:
        log: what is written.
    """

    def __init__(self, log: DurableLog, header: dict[str, Any]) -> None:
        """See `create`."""
        self.log = log
        self._header = header
        self._backend: CudaBackend | None = None
        self._num_requests = 0

    @classmethod
    def create(
        cls,
        directory: str | Path,
        *,
        flush: FlushPolicy,
        allocator: AllocatorConfig,
        scheduler: SchedulerConfig,
        facts: dict[str, Any] | None = None,
    ) -> "LiveRecording":
        """Start the log of a run.

        Args:
            directory: where; empty or not there yet.
            flush: when commits reach the disk.
            allocator: as the engine is given it.
            scheduler: as the engine is given it.
            facts: what else is to be known of the run (the model, its device), as plain JSON values.

        Raises:
            InputError: something is in the directory, or a fact is no JSON value.
            LogWriteError: the directory cannot be written.
        """
        header = live_header(allocator, scheduler, dict(facts or {}))
        log = DurableLog.create(directory, flush=flush, clock=Clock("unix", time.time_ns), header=header)
        return cls(log, header)

    def begin(self, scheduler: Scheduler, backend: CudaBackend) -> None:
        """The engine: whose state snapshots are taken of, and whose slots are noted.

        Raises:
            InputError: it is not the engine that the log was started for, so that its run could not be run again.
        """
        if live_header(scheduler.allocator.config, scheduler.config, self._header["facts"]) != self._header:
            raise InputError("the recording was made for other settings of allocator or scheduler than the engine's")
        self.log.live_state = scheduler.allocator.state
        self._backend = backend

    def apply(self, commit: Commit) -> None:
        """Log one commit."""
        self.log.apply(commit)

    def arrived(self, generation: Generation) -> None:
        """Note a request before the scheduler hears of it."""
        self._arrived(generation, {})

    def forked(self, generation: Generation, lead: Generation, has_ended: bool) -> None:
        """Note a sample before the scheduler hears of it."""
        self._arrived(generation, {"sample_of": lead.request.request_id, "has_ended": has_ended})

    def _arrived(self, generation: Generation, facts: dict[str, Any]) -> None:
        request, keys = generation.request, generation.keys
        self._num_requests += 1
        self.log.note(
            RequestArrived(
                request_id=request.request_id,
                arrival_s=request.arrival,
                num_prompt_tokens=request.num_prompt_tokens,
                prompt_keys=tuple(keys.keys(0, request.num_prompt_tokens // keys.hash_block_size)),
                facts={"max_tokens": request.max_tokens, "priority": request.priority, **facts},
            )
        )

    def ending(self, generation: Generation, reason: str) -> None:
        """Note a request's end; of an abort, before its blocks are freed."""
        self.log.note(
            RequestEnded(
                request_id=generation.request.request_id,
                reason=reason,
                num_output_tokens=generation.num_output_tokens,
                output_keys=tuple(generation.output_keys()),
            )
        )

    def computed(self, step: ScheduledStep, result: StepResult) -> None:
        """Note a step before the scheduler accounts for it: how long it took, and the slots that it wrote."""
        self.log.note(
            StepComputed(
                nanoseconds=result.nanoseconds[0],
                load=step.load,
                stopped=result.stopped,
                slots_crc32=None if self._backend is None else slots_crc32(self._slots(step)),
            )
        )

    def end(self) -> None:
        """Note the end of the run and close the log; a second call does nothing."""
        if self._backend is not None:
            self._backend = None
            self.log.note(RunEnded({"num_requests": self._num_requests}))
        self.log.close()

    def _slots(self, step: ScheduledStep) -> NDArray[np.int64]:
        """As they stand on the device, a group after the other; the step is over, so reading them waits for nothing."""
        assert self._backend is not None
        return self._backend.slots[:, : step.batch.num_tokens].cpu().numpy()
