"""What a device says about its memory, behind a protocol of two methods: scripted readings and a real GPU are alike.

A profile is two readings of one device: before anything of this process was loaded, and after weights were loaded and a
largest step was run. Everything the ledger calls "measured" comes from their difference.
"""

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Protocol

import attrs

from .errors import InputError, MisuseError
from .memory_errors import MemoryCondition, MemoryShortfallError
from .quantities import format_bytes


class MemoryKind(StrEnum):
    """Whose memory the utilization governs."""

    DEVICE = "device"  # a card with memory of its own
    UNIFIED = "unified"  # one memory for host and device: what the host can reclaim counts as free
    HOST = "host"  # the CPU backend: the same flag governs host memory


@attrs.frozen(kw_only=True)
class MemorySnapshot:
    """One reading. All figures are bytes.

    Attributes:
        total_bytes: as the driver reports it, a little less than the label on the card.
        free_bytes: device-wide; every process on the card moves it.
        torch_allocated_bytes: live tensors now.
        torch_peak_bytes: largest `torch_allocated_bytes` since the peak was reset. From *allocated*, not from reserved:
            the allocator's cached segments are not use, and a pluggable allocator need not count them at all.
        torch_reserved_bytes: what torch's allocator holds of the device. May be negative under pluggable allocators.
        process_bytes: what the driver attributes to this process, where it can; None where it cannot.
        kind: whose memory this is.
    """

    total_bytes: int
    free_bytes: int
    torch_allocated_bytes: int
    torch_peak_bytes: int
    torch_reserved_bytes: int
    process_bytes: int | None = None
    kind: MemoryKind = MemoryKind.DEVICE

    @property
    def used_bytes(self) -> int:
        """Device-wide use by everybody."""
        return self.total_bytes - self.free_bytes

    @property
    def non_torch_bytes(self) -> int:
        """Device-wide use that torch's allocator of this process does not hold: contexts, libraries, neighbours."""
        return self.used_bytes - self.torch_reserved_bytes

    @property
    def others_bytes(self) -> int | None:
        """What other processes hold, where the driver can tell; None where it cannot."""
        return None if self.process_bytes is None else self.used_bytes - self.process_bytes


def unified_free_bytes(driver_free_bytes: int, host_available_bytes: int) -> int:
    """Free memory of a device that shares the host's memory, in bytes.

    The driver of such a device does not count page cache that the host would give up on demand; the host's own
    figure for available memory does. The larger of the two is what an allocation can really have.
    """
    return max(driver_free_bytes, host_available_bytes)


class MemoryProbe(Protocol):
    """A device that can be read. Implementations: `ScriptedProbe` here, a real device in the backends."""

    def read(self) -> MemorySnapshot:
        """The memory now, after pending work has finished."""
        ...

    def reset_peak(self) -> None:
        """Start a new peak of torch's allocated bytes."""
        ...


@attrs.define
class ScriptedProbe:
    """A probe that gives prepared readings in order, for tests and for replaying recorded ones."""

    readings: Sequence[MemorySnapshot]
    num_reads: int = attrs.field(default=0, init=False)
    num_peak_resets: int = attrs.field(default=0, init=False)

    def read(self) -> MemorySnapshot:
        """The next reading.

        Raises:
            MisuseError: the script is used up.
        """
        if self.num_reads == len(self.readings):
            raise MisuseError(f"the script holds {len(self.readings)} readings, and a further one was asked for")
        self.num_reads += 1
        return self.readings[self.num_reads - 1]

    def reset_peak(self) -> None:
        """Counted, so that a test can see that it happened."""
        self.num_peak_resets += 1


@attrs.frozen(kw_only=True)
class MemoryProfile:
    """Two readings around loading and one largest step, and what they say about this process. All figures are bytes.

    Attributes:
        before, after: readings before anything was loaded, and after the profiling run.
        weights_bytes: measured around loading; None where nobody measured it.
        strict_profiling: vLLM's rule: the device-wide difference is this process's, and free memory that grew is an
            error.
            By default (A12) this process's own use is taken where the probe can attribute it, else the increase of
            torch's reserved bytes is a floor, and what the device-wide difference does not explain is a warning.
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
                "free memory grew during profiling, so another process released memory and the difference says nothing",
                needed_bytes=self.after.free_bytes,
                available_bytes=self.before.free_bytes,
                largest={},
                remedy="Start when the neighbours are still, or profile with strict_profiling=False.",
            )

    @property
    def device_delta_bytes(self) -> int:
        """Free before less free after: what everybody on the card took in the meantime; negative if they gave back."""
        return self.before.free_bytes - self.after.free_bytes

    @property
    def torch_increase_bytes(self) -> int:
        """Growth of torch's reserved bytes, which only this process causes; 0 where a pluggable allocator shrinks
        it.
        """
        return max(self.after.torch_reserved_bytes - self.before.torch_reserved_bytes, 0)

    @property
    def is_attributed(self) -> bool:
        """Whether the driver told this process's memory apart from its neighbours' in both readings."""
        return self.before.process_bytes is not None and self.after.process_bytes is not None

    @property
    def total_consumed_bytes(self) -> int:
        """What this process took and still holds: weights, libraries, workspaces."""
        if self.strict_profiling:
            return self.device_delta_bytes
        if self.before.process_bytes is not None and self.after.process_bytes is not None:
            return max(self.after.process_bytes - self.before.process_bytes, 0)
        return max(self.device_delta_bytes, self.torch_increase_bytes)

    @property
    def unexplained_bytes(self) -> int:
        """How much more memory is free than this process's own use explains: positive if neighbours gave back."""
        return self.total_consumed_bytes - self.device_delta_bytes

    @property
    def transient_headroom_bytes(self) -> int:
        """What a largest step needs on top of what stays: peak less allocated at the end; never negative."""
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


def profile_memory(
    probe: MemoryProbe,
    before: MemorySnapshot,
    largest_step: Callable[[], None],
    *,
    weights_bytes: int | None,
    strict_profiling: bool = False,
) -> MemoryProfile:
    """Run `largest_step` once and read the device after it; `before` is the reading taken before anything was loaded.

    Raises:
        MemoryShortfallError: `strict_profiling`, and free memory grew (condition `free_grew_during_profiling`).
    """
    probe.reset_peak()
    largest_step()
    return MemoryProfile(
        before=before, after=probe.read(), weights_bytes=weights_bytes, strict_profiling=strict_profiling
    )
