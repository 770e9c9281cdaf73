"""The host's memory behind the same protocol as a card's: what this process holds, and the most it held.

Nothing counts torch's tensors on the host, so the figures are the process's resident bytes: memory that was allocated
and never touched is not in them.
"""

import ctypes
import gc
import resource
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from ..core.errors import InputError
from ..core.memory_probe import MemoryKind
from ..core.quantities import KIB
from .cuda_device import AllocatorBytes

_RESET_PEAK = "5"  # what proc(5) wants in clear_refs to start a new high-water mark


def read_kib_fields(path: Path) -> Mapping[str, int]:
    """The `Name:  123 kB` lines of a file as Linux writes them under /proc, in bytes.

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
    """`DeviceAccess` for `device="cpu"`, from /proc and the process's own resource usage."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        """`proc` is where the kernel's files are."""
        self._proc = proc

    @property
    def name(self) -> str:
        """`host`."""
        return "host"

    @property
    def kind(self) -> MemoryKind:
        """The host's."""
        return MemoryKind.HOST

    @property
    def has_native_allocator(self) -> bool:
        """True: resident bytes are always counted."""
        return True

    def warm_up(self) -> None:
        """Nothing to warm: a CPU's matrix libraries keep no workspace that is known beforehand."""

    def release_cached(self) -> None:
        """Collect garbage, and have the C library give back the pages that it holds and nothing uses."""
        gc.collect()
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, other C libraries do not
        if trim is not None:
            trim(0)

    def free_and_total_bytes(self) -> tuple[int, int]:
        """What an allocation can have without swapping, and all there is."""
        fields = self._fields("meminfo", "MemAvailable", "MemTotal")
        return fields["MemAvailable"], fields["MemTotal"]

    def allocator_bytes(self) -> AllocatorBytes:
        """Resident bytes now, and at most since the peak was reset.

        Where the kernel does not say it per process, or does not reset it, the most that this process ever held
        stands for the peak: never too little.
        """
        resident = self._fields("self/status", "VmRSS")["VmRSS"]
        highest = read_kib_fields(self._proc / "self/status").get("VmHWM")
        if highest is None:
            highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB
        return AllocatorBytes(allocated_bytes=resident, peak_bytes=max(highest, resident), reserved_bytes=resident)

    def process_bytes(self) -> int | None:
        """Resident bytes of this process."""
        return self._fields("self/status", "VmRSS")["VmRSS"]

    def reset_peak(self) -> None:
        """Start a new high-water mark; a kernel that forbids it keeps the old one, which is never too little."""
        try:
            (self._proc / "self/clear_refs").write_text(_RESET_PEAK)
        except OSError:
            return

    def allocator_settings(self) -> str:
        """None: the host's allocator has no such settings."""
        return ""

    def set_allocator_settings(self, settings: str) -> None:
        """Nothing to set."""

    def inference_mode(self) -> AbstractContextManager[Any]:
        """torch's, where torch is there; a host can also be profiled without it."""
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
