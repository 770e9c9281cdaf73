"""Readings of a device's memory, and what two of them tell about one process.

A profile is two readings of one device: before this process loaded anything, and after it loaded the weights and ran a
largest step. Everything that the ledger calls "measured" comes from their difference.
"""

from enum import StrEnum

import attrs

from ..errors import InputError
from ..quantities import format_bytes
from .budget import MemoryCondition, MemoryShortfallError


class MemoryKind(StrEnum):
    """Which memory the utilization governs."""

    DEVICE = "device"  # a card with memory of its own
    UNIFIED = "unified"  # one memory for host and device: what the host can reclaim counts as free
    HOST = "host"  # the CPU backend: the same flag governs host memory


@attrs.frozen(kw_only=True)
class MemorySnapshot:
    """One reading of a device. All figures are bytes."""

    total_bytes: int  # as the driver reports it, a little less than the label on the card
    free_bytes: int  # device-wide; every process on the card changes it
    torch_allocated_bytes: int  # live tensors now
    # Largest `torch_allocated_bytes` since the peak was reset. From *allocated*, not from reserved: the allocator's
    # cached segments are not in use, and a pluggable allocator need not count them at all.
    torch_peak_bytes: int
    torch_reserved_bytes: int  # what torch's allocator holds of the device. May be negative under pluggable allocators.
    process_bytes: int | None = None  # what the driver attributes to this process; None if the driver cannot tell
    kind: MemoryKind = MemoryKind.DEVICE  # which memory this is


@attrs.frozen(kw_only=True)
class MemoryProfile:
    """Two readings around loading and one largest step: what this process took. All figures are bytes.

    Attributes:
        before, after: readings before anything was loaded, and after the profiling run.
        weights_bytes: measured around loading; None if not measured.
        strict_profiling: vLLM's rule: the device-wide difference is this process's, and free memory that grew is an
            error.
            By default (A12) the profile takes this process's own use if the driver attributes it; otherwise the
            increase of torch's reserved bytes is a floor. What the device-wide difference does not explain is a
            warning.
    """

    before: MemorySnapshot
    after: MemorySnapshot
    weights_bytes: int | None
    strict_profiling: bool = False

    def __attrs_post_init__(self) -> None:
        if self.before.total_bytes != self.after.total_bytes:
            raise InputError(
                f"the two readings are of different devices: {self.before.total_bytes:,} and"
                f" {self.after.total_bytes:,} bytes in total"
            )
        if self.strict_profiling and self.device_delta_bytes < 0:
            raise MemoryShortfallError(
                MemoryCondition.FREE_GREW_DURING_PROFILING,
                "free memory grew during profiling, so another process released memory and the difference is useless",
                needed_bytes=self.after.free_bytes,
                available_bytes=self.before.free_bytes,
                largest={},
                remedy="Start while the other processes are idle, or profile with strict_profiling=False.",
            )

    @property
    def device_delta_bytes(self) -> int:
        """Free before less free after: what all processes took in between; negative if they gave memory back."""
        return self.before.free_bytes - self.after.free_bytes

    @property
    def torch_increase_bytes(self) -> int:
        """Growth of torch's reserved bytes, which only this process causes; 0 if a pluggable allocator shrinks it."""
        return max(self.after.torch_reserved_bytes - self.before.torch_reserved_bytes, 0)

    @property
    def is_attributed(self) -> bool:
        """Whether the driver attributed memory to this process in both readings."""
        return self.before.process_bytes is not None and self.after.process_bytes is not None

    @property
    def total_consumed_bytes(self) -> int:
        """Bytes that this process took and still holds: weights, libraries, workspaces."""
        if self.strict_profiling:
            return self.device_delta_bytes
        if self.before.process_bytes is not None and self.after.process_bytes is not None:
            return max(self.after.process_bytes - self.before.process_bytes, 0)
        return max(self.device_delta_bytes, self.torch_increase_bytes)

    @property
    def unexplained_bytes(self) -> int:
        """Free bytes beyond what this process's own use explains: positive if other processes gave memory back."""
        return self.total_consumed_bytes - self.device_delta_bytes

    @property
    def transient_headroom_bytes(self) -> int:
        """Bytes that a largest step needs on top of what stays: peak less allocated at the end; never negative."""
        return max(self.after.torch_peak_bytes - self.after.torch_allocated_bytes, 0)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a reader must know before trusting the figures."""
        out: list[str] = []
        if self.unexplained_bytes:
            verb = "released" if self.unexplained_bytes > 0 else "taken"
            out.append(
                f"{format_bytes(abs(self.unexplained_bytes))} of device memory were {verb} during profiling by other"
                " processes; they are neither charged nor credited to this one"
            )
        if not self.strict_profiling and not self.is_attributed:
            out.append(
                "the driver does not attribute memory to processes here: what this process holds is an estimate (the"
                " device-wide difference, but at least the increase of torch's reserved bytes)"
            )
        return tuple(out)
