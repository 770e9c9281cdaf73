"""Records a live run as it happens, so that it can be verified, run again and compared (docs/live_serving.md).

Reading a recorded run needs no torch.
"""

import time
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs
import numpy as np
from numpy.typing import NDArray

from ....core.allocator.config import AllocatorConfig
from ....core.errors import InputError
from ....core.events import Commit, PoolCreated
from ....core.scheduler.config import SchedulerConfig
from ....core.scheduler.scheduler import Scheduler
from ....core.types import ScheduledStep, StepResult
from ...sinks.log.durable_log import Clock, DurableLog
from ...sinks.log.flush_policy import FlushPolicy
from ...sinks.log.rows import RequestArrived, RequestEnded, RunEnded, StepComputed

if TYPE_CHECKING:
    from ...cuda.backend import CudaBackend
    from .generation import Generation

COMMAND: Final = "serve"
# What wrote the log of a vLLM engine (backends/vllm).
RECORDED_VLLM: Final = "vllm"

# Allocator options that decisions depend on and the pool's first commit does not hold.
_RULES: Final = ("retention_interval", "max_in_flight_tokens", "watermark_blocks", "use_eagle", "release", "orphans")


def live_header(
    allocator: AllocatorConfig, scheduler: SchedulerConfig, facts: dict[str, Any], command: str = COMMAND
) -> dict[str, Any]:
    """Return the header of a live run's log; `facts` are others about the run, as plain JSON values."""
    return {
        "command": command,
        "allocator": {name: getattr(allocator, name) for name in _RULES},
        "scheduler": attrs.asdict(scheduler.for_content()),
        "facts": facts,
    }


def recorded_configs(header: dict[str, Any], created: PoolCreated) -> tuple[AllocatorConfig, SchedulerConfig]:
    """Return the configs of the engine whose log has this header and this first event."""
    allocator = AllocatorConfig(
        num_blocks=created.num_blocks,
        groups=created.groups,
        max_model_len=created.max_model_len,
        max_num_reqs=created.max_num_reqs,
        enable_caching=created.enable_caching,
        hash_block_size=created.hash_block_size,
        scheduler_block_size=created.scheduler_block_size,
        eviction=created.eviction,
        key_algorithm=created.key_algorithm,
        **header["allocator"],
    )
    # Logs without the option are of engines that protected every request that came back.
    return allocator, SchedulerConfig(**{"protect_preempted": True, **header["scheduler"]})


def slots_crc32(slots_of_groups: Iterable[NDArray[np.int64]]) -> int:
    """Return a checksum of the slots of a step's tokens: int64 `[num_tokens]` of each group, in order."""
    checksum = 0
    for slots in slots_of_groups:
        checksum = zlib.crc32(np.ascontiguousarray(slots, dtype="<i8").tobytes(), checksum)
    return checksum


class LiveRecording:
    """Logs a live engine's commits, and notes of what they do not tell: requests, their ends, and measured steps.

        recording = LiveRecording.create("run.log", flush=FlushPolicy(every_ms=50), allocator=..., scheduler=...)
        engine = LiveEngine(runner, allocator=..., scheduler=..., recording=recording)

    The engine closes it when it has stopped. It raises the errors of `DurableLog`, which stop the engine.

    Attributes:
        log: the log.
    """

    def __init__(self, log: DurableLog, header: dict[str, Any]) -> None:
        """Use `create` instead."""
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
            directory: directory of the log; empty, or it does not exist.
            flush: when commits reach the disk.
            allocator: the engine's allocator config.
            scheduler: the engine's scheduler config.
            facts: other facts about the run (the model, its device), as plain JSON values.

        Raises:
            InputError: something is in the directory, or a fact is no JSON value.
            LogWriteError: the directory cannot be written.
        """
        header = live_header(allocator, scheduler, dict(facts or {}))
        log = DurableLog.create(directory, flush=flush, clock=Clock("unix", time.time_ns), header=header)
        return cls(log, header)

    def begin(self, scheduler: Scheduler, backend: "CudaBackend") -> None:
        """Connect the engine, whose state goes into snapshots and whose slots go into notes; the engine calls it.

        Raises:
            InputError: the log was started for other settings, so the run could not be run again.
        """
        if live_header(scheduler.allocator.config, scheduler.config, self._header["facts"]) != self._header:
            raise InputError("the recording was made for other settings of allocator or scheduler than the engine's")
        self.log.live_state = scheduler.allocator.state
        self._backend = backend

    def apply(self, commit: Commit) -> None:
        """Log one commit."""
        self.log.apply(commit)

    def arrived(self, generation: "Generation", **facts: Any) -> None:
        """Note a request before it is handed to the scheduler; `facts` tell a sample, which comes with a token."""
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

    def ending(self, generation: "Generation", reason: str) -> None:
        """Note the end of a request; an abort is noted before its blocks are freed."""
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
        checksum = None
        if self._backend is not None:
            # The slots as they are on the device, group by group. The step is over, so reading them waits for nothing.
            checksum = slots_crc32(self._backend.slots[:, : step.batch.num_tokens].cpu().numpy())
        self.log.note(StepComputed(result.nanoseconds[0], step.load, result.stopped, checksum))

    def end(self) -> None:
        """Note the end of the run and close the log; a second call does nothing."""
        if self._backend is not None:
            self._backend = None
            self.log.note(RunEnded({"num_requests": self._num_requests}))
        self.log.close()
