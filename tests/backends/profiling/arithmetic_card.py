"""A device whose memory is arithmetic, and a profiler that has measured it."""

from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import attrs
from kvledger.backends.profiling.device import AllocatorBytes
from kvledger.backends.profiling.graph_memory import GraphCaptures
from kvledger.backends.profiling.profiler import MeasuredMemory, MemoryProfiler
from kvledger.backends.profiling.step import ProfilingStep, StepLimits
from kvledger.core.memory.profile import MemoryKind

GIB = 1 << 30
MIB = 1 << 20
SETTINGS = "garbage_collection_threshold:0.8,roundup_power2_divisions:[256:1,>:4]"


@attrs.define
class Card:
    """A card of 80 GiB: what is taken from it is written down, and every call is remembered."""

    calls: list[str] = attrs.field(factory=list)
    settings: str = SETTINGS
    others_bytes: int = 10 * GIB
    context_bytes: int = GIB // 2
    allocated_bytes: int = 0
    peak_bytes: int = 0
    cached_bytes: int = 0
    attributes_process: bool = True
    has_native_allocator: bool = True
    name: str = "cuda:0 (a card of arithmetic)"
    kind: MemoryKind = MemoryKind.DEVICE
    total_bytes: int = 80 * GIB
    overridden: dict[str, Any] = attrs.field(factory=dict)

    def allocate(self, num_bytes: int) -> None:
        self.allocated_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)

    def free(self, num_bytes: int) -> None:
        """Freed memory stays reserved until the cache is emptied."""
        self.allocated_bytes -= num_bytes
        self.cached_bytes += num_bytes

    def part(self, name: str, transient_bytes: int, kept_bytes: int = 0) -> Callable[..., str]:
        """A callable that needs memory for its own time only, and keeps some."""

        def run(*arguments: object) -> str:
            self.calls.append(f"{name}{arguments}")
            self.allocate(transient_bytes + kept_bytes)
            self.free(transient_bytes)
            return f"output of {name}"

        return run

    # -- DeviceAccess --------------------------------------------------------------------------------------------------

    def warm_up(self) -> None:
        self.calls.append("warm_up")
        self.context_bytes += 40 * MIB
        self.allocate(32 * MIB)

    def release_cached(self) -> None:
        self.calls.append("release_cached")
        self.cached_bytes = 0

    def free_and_total_bytes(self) -> tuple[int, int]:
        self.calls.append("read")
        held = self.others_bytes + self.context_bytes + self.allocated_bytes + self.cached_bytes
        return self.overridden.get("free", self.total_bytes - held), self.total_bytes

    def allocator_bytes(self) -> AllocatorBytes:
        counted = AllocatorBytes(
            allocated_bytes=self.allocated_bytes,
            peak_bytes=self.peak_bytes,
            reserved_bytes=self.allocated_bytes + self.cached_bytes,
        )
        return attrs.evolve(counted, **{k: v for k, v in self.overridden.items() if k not in ("free", "process")})

    def process_bytes(self) -> int | None:
        if not self.attributes_process:
            return None
        return self.overridden.get("process", self.context_bytes + self.allocated_bytes + self.cached_bytes)

    def reset_peak(self) -> None:
        self.calls.append("reset_peak")
        self.peak_bytes = self.allocated_bytes

    def allocator_settings(self) -> str:
        return self.settings

    def set_allocator_settings(self, settings: str) -> None:
        self.calls.append(f"set {settings}")
        self.settings = settings

    def inference_mode(self) -> AbstractContextManager[Any]:
        @contextmanager
        def block() -> Any:
            self.calls.append("inference mode")
            yield
            self.calls.append("end of inference mode")

        return block()


LIMITS = StepLimits(max_num_batched_tokens=8192, max_num_seqs=3)


def a_step(card: Card) -> ProfilingStep:
    return ProfilingStep(model=card.part("model", 2 * GIB), sampler=card.part("sampler", GIB))


def measured_on(card: Card) -> tuple[MemoryProfiler, MeasuredMemory]:
    """A profiler that has been through the profile: 16 GiB of weights, half a GiB taken by libraries."""
    profiler = MemoryProfiler(card, LIMITS)
    profiler.take_baseline()
    profiler.load_weights(lambda: card.allocate(16 * GIB))
    card.context_bytes += GIB // 2
    return profiler, profiler.profile(a_step(card))


def profiled(card: Card) -> MemoryProfiler:
    return measured_on(card)[0]


def bytes_of(rows: tuple) -> dict[str, int]:
    return {row.name: row.num_bytes for row in rows}


def graphs(card: Card, sizes: tuple[int, ...] = (1, 2, 4, 8), shared: int = 96 * MIB) -> GraphCaptures:
    """The first graph holds what all share; each takes 4 MiB of its own."""
    captured: list[int] = []

    class Graph:
        def __init__(self, num_bytes: int) -> None:
            self.num_bytes = num_bytes
            card.context_bytes += num_bytes

        def __del__(self) -> None:
            card.context_bytes -= self.num_bytes

    def capture(size: int) -> Graph:
        card.calls.append(f"capture {size}")
        captured.append(size)
        return Graph(4 * MIB + (shared if len(captured) == 1 else 0))

    return GraphCaptures(mode="full", sizes=sizes, capture=capture)
