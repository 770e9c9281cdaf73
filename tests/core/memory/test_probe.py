"""Readings of a device, and what two of them say about one process among others."""

import pytest
from kvledger.core.errors import InputError
from kvledger.core.memory.budget import MemoryCondition, MemoryShortfallError
from kvledger.core.memory.profile import MemoryKind, MemoryProfile, MemorySnapshot

GIB = 1 << 30


def snapshot(free: float, *, allocated: float = 0, peak: float = 0, reserved: float = 0, process: float | None = None):
    return MemorySnapshot(
        total_bytes=80 * GIB,
        free_bytes=int(free * GIB),
        torch_allocated_bytes=int(allocated * GIB),
        torch_peak_bytes=int(peak * GIB),
        torch_reserved_bytes=int(reserved * GIB),
        process_bytes=None if process is None else int(process * GIB),
    )


def test_the_peak_is_of_allocated_memory_not_of_reserved() -> None:
    profile = MemoryProfile(
        before=snapshot(70),
        after=snapshot(50, allocated=16, peak=18, reserved=20),
        weights_bytes=None,
        strict_profiling=True,
    )
    assert profile.transient_headroom_bytes == 2 * GIB


def test_a_peak_below_what_is_allocated_and_negative_reserved_bytes_are_clamped() -> None:
    # A pluggable allocator that torch does not count.
    profile = MemoryProfile(
        before=snapshot(70),
        after=snapshot(60, allocated=4, peak=3, reserved=-2),
        weights_bytes=None,
    )
    assert profile.transient_headroom_bytes == 0
    assert profile.torch_increase_bytes == 0
    assert profile.total_consumed_bytes == 10 * GIB


def test_strict_profiling_takes_free_memory_that_grew_for_an_error() -> None:
    with pytest.raises(MemoryShortfallError) as refused:
        MemoryProfile(before=snapshot(50), after=snapshot(51), weights_bytes=None, strict_profiling=True)
    assert refused.value.condition is MemoryCondition.FREE_GREW_DURING_PROFILING


def test_readings_of_two_devices_are_refused() -> None:
    other = MemorySnapshot(
        total_bytes=1, free_bytes=1, torch_allocated_bytes=0, torch_peak_bytes=0, torch_reserved_bytes=0
    )
    with pytest.raises(InputError, match="different devices"):
        MemoryProfile(before=snapshot(50), after=other, weights_bytes=None)


def test_the_same_profile_governs_host_memory_on_the_cpu_backend() -> None:
    before, after = (
        MemorySnapshot(
            total_bytes=64 * GIB,
            free_bytes=free * GIB,
            torch_allocated_bytes=0,
            torch_peak_bytes=0,
            torch_reserved_bytes=0,
            kind=MemoryKind.HOST,
        )
        for free in (60, 44)
    )
    profile = MemoryProfile(before=before, after=after, weights_bytes=15 * GIB, strict_profiling=True)
    assert profile.total_consumed_bytes == 16 * GIB
    assert profile.before.kind is MemoryKind.HOST
