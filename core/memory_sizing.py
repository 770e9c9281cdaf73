"""From a profile to the bytes of the KV cache as a worker does it at start-up, and which size to pin next time.

Rules: golden/memory.jsonl (`available_memory`, `startup_plan_gate`), field reports A12 to A14.
"""

from collections.abc import Mapping
from typing import Any

import attrs

from .errors import InputError
from .memory_budget import check_explicit_kv_bytes, check_utilization, requested_bytes
from .memory_errors import MemoryCondition, MemoryShortfallError
from .memory_probe import MemoryProfile
from .quantities import MIB

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
