"""The device that the memory profiler reads: a protocol of plain calls, and a CUDA device through torch and NVML."""

import gc
import os
from contextlib import AbstractContextManager
from importlib import import_module
from types import ModuleType
from typing import Any, Protocol

import attrs

from ...core.errors import InputError
from ...core.memory.profile import MemoryKind

WARM_UP_SIZE = 256  # rows of the square matrices whose product makes the libraries allocate their workspaces


@attrs.frozen(kw_only=True)
class AllocatorBytes:
    """Counts of torch's allocator, in bytes; None where it does not count (a pluggable allocator)."""

    allocated_bytes: int | None
    peak_bytes: int | None
    reserved_bytes: int | None


class DeviceAccess(Protocol):
    """The calls that the profiler makes to a device. Every call acts at once; nothing is cached."""

    @property
    def name(self) -> str:
        """The device's name in error messages."""
        ...

    @property
    def kind(self) -> MemoryKind:
        """The kind of memory that the figures belong to."""
        ...

    @property
    def has_native_allocator(self) -> bool:
        """Whether torch's own caching allocator is in use; a pluggable one need not count anything."""
        ...

    def warm_up(self) -> None:
        """Make the matrix libraries allocate the handles and workspaces that they keep."""

    def release_cached(self) -> None:
        """Collect garbage, wait for pending work, then release what the allocator holds and nothing uses."""

    def free_and_total_bytes(self) -> tuple[int, int]:
        """Free and total bytes of the whole device, as the driver says now."""
        ...

    def allocator_bytes(self) -> AllocatorBytes:
        """The counts of torch's allocator now."""
        ...

    def process_bytes(self) -> int | None:
        """Bytes that the driver attributes to this process; None where it cannot."""
        ...

    def reset_peak(self) -> None:
        """Start a new peak of allocated bytes."""

    def allocator_settings(self) -> str:
        """The allocator's settings as they were last set, in one string (`name:value,name:[a:1,b:2]`)."""
        ...

    def set_allocator_settings(self, settings: str) -> None:
        """Apply settings. torch takes `max_split_size_mb` as unlimited where the string leaves it out."""

    def inference_mode(self) -> AbstractContextManager[Any]:
        """A context in which no gradients are recorded: they would keep every activation."""
        ...


def describe_torch(torch: ModuleType) -> str:
    """Say why a device may be missing: torch's version, its build, and the visible devices."""
    build = torch.version.cuda and f"CUDA {torch.version.cuda}"
    build = build or (getattr(torch.version, "hip", None) and f"ROCm {torch.version.hip}") or "no CUDA (a CPU build)"
    count = torch.cuda.device_count()
    names = ", ".join(f"{index}: {torch.cuda.get_device_name(index)}" for index in range(count))
    text = f"torch {torch.__version__} built for {build}, {count} CUDA devices visible" + (
        f" ({names})" if names else ""
    )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return text if visible is None else f"{text}, CUDA_VISIBLE_DEVICES={visible!r}"


def import_torch() -> ModuleType:
    """Import torch.

    Raises:
        InputError: it is not installed.
    """
    try:
        import torch
    except ImportError as missing:
        raise InputError(
            f"a CUDA device was asked for, and torch cannot be imported ({missing}); install kvledger[cuda]"
        ) from missing
    return torch


def open_cuda_device(index: int = 0, *, torch: ModuleType | None = None) -> "CudaDevice":
    """Open device `index` of those visible to this process.

    Args:
        index: as in `cuda:0`.
        torch: the module to use in place of the installed one.

    Raises:
        InputError: torch is missing, sees no CUDA device, or none of that index; the message says what was found.
    """
    torch = import_torch() if torch is None else torch
    if not torch.cuda.is_available():
        raise InputError(
            f"a CUDA device was asked for and there is none: {describe_torch(torch)}."
            " Use device='cpu', or a CUDA build of torch on a machine with a driver and a card."
        )
    if not 0 <= index < torch.cuda.device_count():
        raise InputError(f"cuda:{index} was asked for and is not there: {describe_torch(torch)}")
    return CudaDevice(torch, index)


class CudaDevice:
    """A CUDA device through torch, and through NVML (the module `pynvml`, if installed) for one process's bytes."""

    def __init__(self, torch: ModuleType, index: int) -> None:
        """Use `open_cuda_device` instead, which checks that the device exists."""
        self._torch = torch
        self._index = index
        self._device = torch.device("cuda", index)

    @property
    def name(self) -> str:
        """`cuda:0 (the card's name)`."""
        return f"cuda:{self._index} ({self._torch.cuda.get_device_name(self._index)})"

    @property
    def kind(self) -> MemoryKind:
        """UNIFIED if the card is integrated with its host, else DEVICE."""
        properties = self._torch.cuda.get_device_properties(self._index)
        return MemoryKind.UNIFIED if getattr(properties, "is_integrated", 0) else MemoryKind.DEVICE

    @property
    def has_native_allocator(self) -> bool:
        return self._torch.cuda.get_allocator_backend() == "native"

    def warm_up(self) -> None:
        """Run a product through cuBLAS and one (with a bias) through cuBLASLt, in bf16 and fp32."""
        torch = self._torch
        for dtype in (torch.bfloat16, torch.float32):
            square = torch.ones((WARM_UP_SIZE, WARM_UP_SIZE), dtype=dtype, device=self._device)
            bias = torch.ones(WARM_UP_SIZE, dtype=dtype, device=self._device)
            torch.mm(square, square)
            torch.addmm(bias, square, square)
        torch.cuda.synchronize(self._index)

    def release_cached(self) -> None:
        gc.collect()
        self._torch.cuda.synchronize(self._index)
        with self._torch.cuda.device(self._index):
            self._torch.cuda.empty_cache()

    def free_and_total_bytes(self) -> tuple[int, int]:
        free_bytes, total_bytes = self._torch.cuda.mem_get_info(self._index)
        return free_bytes, total_bytes

    def allocator_bytes(self) -> AllocatorBytes:
        stats = self._torch.cuda.memory_stats(self._index)
        return AllocatorBytes(
            allocated_bytes=stats.get("allocated_bytes.all.current"),
            peak_bytes=stats.get("allocated_bytes.all.peak"),
            reserved_bytes=stats.get("reserved_bytes.all.current"),
        )

    def process_bytes(self) -> int | None:
        """Bytes that NVML lists under this process's id on this card.

        None without `pynvml`, on a card whose id NVML does not know, and in a container that numbers its own processes:
        there the id is not listed, which says nothing.
        """
        try:
            pynvml = import_module("pynvml")
        except ImportError:
            return None
        uuid = str(self._torch.cuda.get_device_properties(self._index).uuid)
        try:
            pynvml.nvmlInit()
            try:
                card = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
                listed = [
                    p.usedGpuMemory for p in pynvml.nvmlDeviceGetComputeRunningProcesses(card) if p.pid == os.getpid()
                ]
            finally:
                pynvml.nvmlShutdown()
        except pynvml.NVMLError:
            return None
        known = [used_bytes for used_bytes in listed if used_bytes is not None]
        return sum(known) if known else None

    def reset_peak(self) -> None:
        self._torch.cuda.reset_peak_memory_stats(self._index)

    def allocator_settings(self) -> str:
        """The settings in force; if this torch cannot say, those of the environment, which it read at start-up."""
        current = getattr(self._torch._C, "_accelerator_getAllocatorSettings", None)
        if current is not None:
            return current()
        return os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""

    def set_allocator_settings(self, settings: str) -> None:
        setter = getattr(self._torch._C, "_accelerator_setAllocatorSettings", None)
        if setter is None:
            setter = self._torch.cuda.memory._set_allocator_settings
        setter(settings)

    def inference_mode(self) -> AbstractContextManager[Any]:
        return self._torch.inference_mode()
