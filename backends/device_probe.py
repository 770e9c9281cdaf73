"""A device behind the planner's probe protocol: consistent readings, or a refusal that shows the numbers."""

import attrs

from ..core.errors import InputError
from ..core.memory_probe import MemoryKind, MemorySnapshot, unified_free_bytes
from .cuda_device import AllocatorBytes, DeviceAccess
from .host_memory import HostDevice


@attrs.frozen
class DeviceProbe:
    """The `MemoryProbe` of core over a real device.

    Attributes:
        device: CUDA, the host, or a script.
        attribute_process: whether the driver is asked what this process holds. Without it the profile says that its
            figures are estimates.
    """

    device: DeviceAccess
    attribute_process: bool = True

    def read(self) -> MemorySnapshot:
        """The memory once pending work has finished and everything that nothing uses was given back.

        Raises:
            InputError: figures that cannot be true together.
        """
        self.device.release_cached()
        return self.read_as_it_is()

    def read_as_it_is(self) -> MemorySnapshot:
        """The memory now, with what the allocator keeps for later.

        Raises:
            InputError: figures that cannot be true together.
        """
        free_bytes, total_bytes = self.device.free_and_total_bytes()
        if self.device.kind is MemoryKind.UNIFIED:
            free_bytes = unified_free_bytes(free_bytes, HostDevice().free_and_total_bytes()[0])
        counted = self.device.allocator_bytes()
        snapshot = MemorySnapshot(
            total_bytes=total_bytes,
            free_bytes=free_bytes,
            torch_allocated_bytes=counted.allocated_bytes or 0,
            torch_peak_bytes=counted.peak_bytes or 0,
            torch_reserved_bytes=counted.reserved_bytes or 0,
            process_bytes=self.device.process_bytes() if self.attribute_process else None,
            kind=self.device.kind,
        )
        problem = self._problem(snapshot, counted)
        if problem:
            raise InputError(f"{self.device.name} reads {_figures(snapshot, counted)}: {problem}")
        return snapshot

    def reset_peak(self) -> None:
        """Start a new peak of torch's allocated bytes."""
        self.device.reset_peak()

    def _problem(self, snapshot: MemorySnapshot, counted: AllocatorBytes) -> str | None:
        """What cannot be true of these figures, and what to do; None if nothing."""
        if snapshot.total_bytes <= 0:
            return "a device has memory; the driver's reading is unusable"
        if not 0 <= snapshot.free_bytes <= snapshot.total_bytes:
            return "free memory must lie between 0 and the total; the driver's reading is unusable"
        process = snapshot.process_bytes
        if process is not None and not 0 <= process <= snapshot.total_bytes:
            return "this process cannot hold that much; profile with attribute_process=False"
        return self._allocator_problem(snapshot, counted) if self.device.has_native_allocator else None

    def _allocator_problem(self, snapshot: MemorySnapshot, counted: AllocatorBytes) -> str | None:
        """The same for what torch's own allocator counts; a pluggable one is not held to it."""
        if counted.allocated_bytes is None or counted.peak_bytes is None or counted.reserved_bytes is None:
            return "torch's allocator did not count; touch the device once before it is read (warm_up)"
        if min(counted.allocated_bytes, counted.peak_bytes, counted.reserved_bytes) < 0:
            return "torch's allocator counts below 0; its statistics are unusable"
        if counted.peak_bytes < counted.allocated_bytes:
            return "the peak is below what is allocated; its statistics are unusable"
        if not counted.allocated_bytes <= counted.reserved_bytes <= snapshot.total_bytes:
            return "what torch reserves must lie between what it allocated and the total; its statistics are unusable"
        if snapshot.kind is MemoryKind.HOST or snapshot.process_bytes is None:
            return None
        if snapshot.process_bytes < counted.reserved_bytes:
            return (
                "this process holds less than torch reserves, so the driver means another process of the same id"
                " (a container's ids are not the host's); profile with attribute_process=False"
            )
        return None


def _figures(snapshot: MemorySnapshot, counted: AllocatorBytes) -> str:
    figures = {
        "total": snapshot.total_bytes,
        "free": snapshot.free_bytes,
        "torch allocated": counted.allocated_bytes,
        "torch peak": counted.peak_bytes,
        "torch reserved": counted.reserved_bytes,
        "this process": snapshot.process_bytes,
    }
    return ", ".join(f"{name} {'-' if value is None else f'{value:,} B'}" for name, value in figures.items())
