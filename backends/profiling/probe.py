"""Reads a device's memory for the planner: consistent figures, or an error that shows them. Includes the host."""

import ctypes
import gc
import resource
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import attrs

from ...core.errors import InputError
from ...core.memory.profile import MemoryKind, MemorySnapshot
from ...core.quantities import KIB
from .device import AllocatorBytes, DeviceAccess

_RESET_PEAK = "5"  # written to clear_refs, this starts a new high-water mark; see proc(5)


def read_kib_fields(path: Path) -> Mapping[str, int]:
    """Read the `Name:  123 kB` lines of a file under /proc, in bytes.

    Raises:
        InputError: the file cannot be read.
    """
    try:
        text = path.read_text()
    except OSError as error:
        raise InputError(f"the host's memory cannot be read: {error}; this needs Linux with /proc") from error
    fields: dict[str, int] = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if len(words) == 2 and words[1] == "kB" and words[0].isdigit():
            fields[name] = int(words[0]) * KIB
    return fields


class HostDevice:
    """The host's memory for `device="cpu"`, read from /proc and from the process's own resource usage."""

    name = "host"
    kind = MemoryKind.HOST
    has_native_allocator = True  # resident bytes are always counted

    def __init__(self, proc: Path = Path("/proc")) -> None:
        """Read the kernel's files under `proc`."""
        self._proc = proc

    def warm_up(self) -> None:
        """Do nothing: a CPU's matrix libraries keep no workspace of a known size."""

    def release_cached(self) -> None:
        """Collect garbage, and make the C library release the pages that nothing uses."""
        gc.collect()
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, other C libraries do not
        if trim is not None:
            trim(0)

    def free_and_total_bytes(self) -> tuple[int, int]:
        """Bytes that can be allocated without swapping, and all bytes."""
        fields = self._fields("meminfo", "MemAvailable", "MemTotal")
        return fields["MemAvailable"], fields["MemTotal"]

    def allocator_bytes(self) -> AllocatorBytes:
        """Resident bytes now, and their peak since `reset_peak`.

        If the kernel does not tell or reset a process's peak, the most that this process ever held is used: never too
        little.
        """
        resident = self._fields("self/status", "VmRSS")["VmRSS"]
        highest = read_kib_fields(self._proc / "self/status").get("VmHWM")
        if highest is None:
            highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB
        return AllocatorBytes(allocated_bytes=resident, peak_bytes=max(highest, resident), reserved_bytes=resident)

    def process_bytes(self) -> int | None:
        return self._fields("self/status", "VmRSS")["VmRSS"]

    def reset_peak(self) -> None:
        """Start a new high-water mark; a kernel that forbids it keeps the old one, which is never too low."""
        try:
            (self._proc / "self/clear_refs").write_text(_RESET_PEAK)
        except OSError:
            return

    def allocator_settings(self) -> str:
        """Return an empty string: the host's allocator has no such settings."""
        return ""

    def set_allocator_settings(self, settings: str) -> None:
        """Do nothing."""

    def inference_mode(self) -> AbstractContextManager[Any]:
        """Torch's inference mode if torch is installed; a host can also be profiled without it."""
        try:
            import torch
        except ImportError:
            return nullcontext()
        return torch.inference_mode()

    def _fields(self, file: str, *names: str) -> Mapping[str, int]:
        fields = read_kib_fields(self._proc / file)
        missing = [name for name in names if name not in fields]
        if missing:
            raise InputError(f"{self._proc / file} does not say {', '.join(missing)}; it says {', '.join(fields)}")
        return fields


@attrs.frozen
class DeviceProbe:
    """Reads the memory of a device."""

    device: DeviceAccess  # a CUDA device, the host, or a test's script
    # Whether to ask the driver for the bytes of this process. Without them the profile says that its figures are
    # estimates.
    attribute_process: bool = True

    def read(self) -> MemorySnapshot:
        """Read the memory after pending work has finished and all unused memory was released.

        Raises:
            InputError: figures that cannot be true together.
        """
        self.device.release_cached()
        return self.read_as_it_is()

    def read_as_it_is(self) -> MemorySnapshot:
        """Read the memory now, including what the allocator keeps for later.

        Raises:
            InputError: figures that cannot be true together.
        """
        free_bytes, total_bytes = self.device.free_and_total_bytes()
        if self.device.kind is MemoryKind.UNIFIED:
            # The driver does not count page cache that the host gives up on demand; the host's own figure does.
            free_bytes = max(free_bytes, HostDevice().free_and_total_bytes()[0])
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
        """Say which figure cannot be true and what to do; None if all can be."""
        if snapshot.total_bytes <= 0:
            return "a device has memory; the driver's reading is unusable"
        if not 0 <= snapshot.free_bytes <= snapshot.total_bytes:
            return "free memory must lie between 0 and the total; the driver's reading is unusable"
        process = snapshot.process_bytes
        if process is not None and not 0 <= process <= snapshot.total_bytes:
            return "this process cannot hold that much; profile with attribute_process=False"
        return self._allocator_problem(snapshot, counted) if self.device.has_native_allocator else None

    def _allocator_problem(self, snapshot: MemorySnapshot, counted: AllocatorBytes) -> str | None:
        """As `_problem`, for the counts of torch's own allocator."""
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
