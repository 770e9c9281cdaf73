"""What a device says about its memory, behind a protocol of two methods: scripted readings and a real GPU are alike.

A profile is two readings of one device: before anything of this process was loaded, and after weights were loaded and a
largest step was run. Everything the ledger calls "measured" comes from their difference.
"""

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Protocol

import attrs

from ..errors import InputError, MisuseError
from ..quantities import MIB, format_bytes
from .budget import MemoryCondition, MemoryShortfallError, check_explicit_kv_bytes, check_utilization, requested_bytes


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


# From a profile to the bytes of the KV cache as a worker does it at start-up, and which size to pin next time.

SUGGESTION_MARGIN_BYTES = 150 * MIB  # what vLLM keeps back from the size it suggests


@attrs.frozen(kw_only=True)
class SizingOptions:
    """What the user set. All sizes are bytes.

    Attributes:
        gpu_memory_utilization: fraction of the device's total.
        kv_cache_memory_bytes: the pool's size, pinned; None: sized by utilization.
        frontend_reservation_bytes: taken off the pool for multimodal inputs passed between processes.
        reserve_graph_memory: whether the graph estimate is set aside (vLLM since 0.21).
        externally_held_bytes: weights that somebody else holds for this engine.
        validate: whether pinned bytes are checked (A13). vLLM does not, and takes 0 for unset when sizing.
    """

    gpu_memory_utilization: float
    kv_cache_memory_bytes: int | None = None
    frontend_reservation_bytes: int = 0
    reserve_graph_memory: bool = True
    externally_held_bytes: int = 0
    validate: bool = True


@attrs.frozen(kw_only=True)
class SizedMemory:
    """The outcome. All figures are bytes; `available_bytes` may be negative, which planning refuses with the numbers.

    Attributes:
        requested_bytes: what utilization asks for.
        total_consumed_bytes: what this process holds after the profiling run.
        peak_activation_bytes: transient headroom, and the graph estimate where it is reserved.
        profiled_available_bytes: what profiling leaves for the pool, before anything pinned.
        available_bytes: what the pool may take.
        warnings: what the profile warns of, and what was ignored.
    """

    requested_bytes: int
    total_consumed_bytes: int
    peak_activation_bytes: int
    profiled_available_bytes: int
    available_bytes: int
    free_before_bytes: int
    is_pinned: bool
    warnings: tuple[str, ...] = ()


def determine_available_memory(
    profile: MemoryProfile, options: SizingOptions, *, cudagraph_estimate_bytes: int, bytes_per_block: int = 1
) -> SizedMemory:
    """What the KV cache may take, from one profile.

    available = requested - consumed - transient headroom - graph estimate (where reserved), or the pinned bytes,
    less the frontend reservation. The profile is needed in either case: pinned bytes are checked against it.

    That the request was free at start-up is a check of its own, made before anything is loaded: `request_memory`.

    Args:
        profile: readings before loading and after a largest step.
        options: what the user set.
        cudagraph_estimate_bytes: what graphs will take when they are captured.
        bytes_per_block: so that the largest pinned size in an error is whole blocks; 1 where no geometry is known.

    Raises:
        InputError: the utilization or the pinned size is no valid value.
        MemoryShortfallError: the pinned size does not fit, or the frontend's part leaves nothing.
    """
    utilization = check_utilization(options.gpu_memory_utilization)
    requested = requested_bytes(profile.before.total_bytes, utilization) - options.externally_held_bytes
    graphs = cudagraph_estimate_bytes if options.reserve_graph_memory else 0
    peak_activation = profile.transient_headroom_bytes + graphs
    profiled = requested - profile.total_consumed_bytes - peak_activation
    warnings = list(profile.warnings)
    pinned = options.kv_cache_memory_bytes
    if pinned is not None and options.validate:
        check_explicit_kv_bytes(
            kv_cache_memory_bytes=pinned,
            free_bytes=profile.before.free_bytes,
            non_kv_bytes=profile.total_consumed_bytes + profile.transient_headroom_bytes + cudagraph_estimate_bytes,
            bytes_per_block=bytes_per_block,
        )
    if pinned:
        warnings.append(
            f"--kv-cache-memory-bytes {pinned:,} sizes the pool: --gpu-memory-utilization"
            f" {options.gpu_memory_utilization:g} is ignored"
        )
    available = (pinned or profiled) - options.frontend_reservation_bytes
    if options.frontend_reservation_bytes and available <= 0:
        raise MemoryShortfallError(
            MemoryCondition.FRONTEND_RESERVATION_LEAVES_NOTHING,
            "the memory set aside for multimodal inputs leaves nothing for the KV cache",
            needed_bytes=options.frontend_reservation_bytes + bytes_per_block,
            available_bytes=pinned or profiled,
            largest={"frontend reservation": max((pinned or profiled) - bytes_per_block, 0)},
            remedy=(
                f"Largest reservation that leaves one block: {max((pinned or profiled) - bytes_per_block, 0):,} B."
            ),
        )
    return SizedMemory(
        requested_bytes=requested,
        total_consumed_bytes=profile.total_consumed_bytes,
        peak_activation_bytes=peak_activation,
        profiled_available_bytes=profiled,
        available_bytes=available,
        free_before_bytes=profile.before.free_bytes,
        is_pinned=pinned is not None,
        warnings=tuple(warnings),
    )


@attrs.frozen(kw_only=True)
class KVBytesSuggestion:
    """A value of `--kv-cache-memory-bytes` up to the request, and one up to all that is free on the device."""

    to_requested_limit_bytes: int
    to_gpu_limit_bytes: int


def suggested_vllm(sized: SizedMemory, cudagraph_actual_bytes: int) -> KVBytesSuggestion:
    """The sizes that vLLM suggests after start-up: limit - consumed - peak activation - *actual* graphs - 150 MiB.

    The graph memory counts twice where its estimate was reserved, since the estimate is part of the peak activation.
    """
    used = sized.total_consumed_bytes + sized.peak_activation_bytes + cudagraph_actual_bytes + SUGGESTION_MARGIN_BYTES
    return KVBytesSuggestion(
        to_requested_limit_bytes=sized.requested_bytes - used, to_gpu_limit_bytes=sized.free_before_bytes - used
    )


@attrs.frozen(kw_only=True)
class WholeBlocks:
    """A pool of whole blocks: `num_blocks * bytes_per_block` bytes exactly, so that it comes back as it was given."""

    num_blocks: int
    bytes_per_block: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the pool."""
        return self.num_blocks * self.bytes_per_block


def largest_fitting(limit_bytes: int, non_kv_bytes: int, bytes_per_block: int) -> WholeBlocks:
    """The largest pool of whole blocks beside `non_kv_bytes` within `limit_bytes`; one block more does not fit (A14).

    Args:
        limit_bytes: the request, or all that is free on the device.
        non_kv_bytes: consumed, transient headroom, and the graphs once (actual if known, else the estimate).
        bytes_per_block: on this rank.
    """
    if bytes_per_block < 1:
        raise InputError(f"bytes_per_block is {bytes_per_block}; a block takes at least one byte")
    return WholeBlocks(
        num_blocks=max(limit_bytes - non_kv_bytes, 0) // bytes_per_block, bytes_per_block=bytes_per_block
    )


@attrs.frozen(kw_only=True)
class GraphUtilizations:
    """What reserving graph memory does to the meaning of one utilization (A14), with four decimals as in the logs."""

    current: float
    without_graphs: float
    to_keep_the_pool: float


def graph_utilizations(utilization: float, graph_bytes: int, total_bytes: int) -> GraphUtilizations:
    """The utilization as set, its equivalent of old (graphs not reserved), and the one that keeps the old pool."""
    share = graph_bytes / total_bytes
    return GraphUtilizations(
        current=round(utilization, 4),
        without_graphs=round(utilization - share, 4),
        to_keep_the_pool=round(utilization + share, 4),
    )


def applicable_startup_plan(plan: Mapping[str, Any], free_bytes: int) -> int | None:
    """The pinned size of an earlier start-up's plan, where it may be used again; else None.

    It may where its bytes are a positive integer and at least as much is free as was then.
    Source: golden/memory.jsonl, `startup_plan_gate`.
    """
    planned, baseline = plan.get("kv_cache_memory_bytes"), plan.get("free_memory_baseline")
    if not isinstance(planned, int) or isinstance(planned, bool) or planned <= 0:
        return None
    if not isinstance(baseline, int) or isinstance(baseline, bool) or free_bytes < baseline:
        return None
    return planned
