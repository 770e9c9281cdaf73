"""How much of a device one engine may use: what "0.9" means, the checks at start-up, and the pool sizes that fit.

Rules: golden/memory.jsonl (`request_memory`, `startup_plan_gate`), field reports A10, A11 and A13 to A15.
"""

import math
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import attrs

from ..errors import DoesNotFitError, InputError
from ..quantities import format_bytes, format_gib

UTILIZATION_STEPS = 1000  # a utilization is written with three decimals


class MemoryCondition(StrEnum):
    """Why memory was refused. The names are those of the recorded runs in golden/memory.jsonl where they have one."""

    FREE_BELOW_REQUESTED = "free_below_requested"
    EXTERNAL_EXCEEDS_BUDGET = "external_exceeds_budget"
    FREE_GREW_DURING_PROFILING = "free_grew_during_profiling"
    EXPLICIT_BYTES_EXCEED_FREE = "explicit_bytes_exceed_free"


class MemoryShortfallError(DoesNotFitError):
    """Not enough memory: the message names what was needed, what was available, the shortfall and a remedy.

    Attributes:
        condition: why.
        needed_bytes, available_bytes: both sides of the comparison that failed.
        shortfall_bytes: their difference, never negative.
        largest: parameter name -> largest value of it that works; empty if no value of any works.
    """

    def __init__(
        self,
        condition: MemoryCondition,
        what: str,
        *,
        needed_bytes: int,
        available_bytes: int,
        largest: Mapping[str, int | float],
        remedy: str,
    ) -> None:
        """Build the message: `what`, then the figures, then `remedy`."""
        self.condition = condition
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes
        self.shortfall_bytes = max(needed_bytes - available_bytes, 0)
        self.largest = dict(largest)
        super().__init__(
            f"{what}: needed {format_bytes(needed_bytes)}, available {format_bytes(available_bytes)},"
            f" short by {format_bytes(self.shortfall_bytes)}. {remedy}"
        )


class BudgetSemantics(StrEnum):
    """What the memory fraction is a fraction of (A15)."""

    OF_TOTAL = "of_total"  # vLLM: of the device's total; everything of this engine counts, the activation peak too
    OF_FREE = "of_free"  # TensorRT-LLM: of what is free once everything else has its memory; all of it is KV cache
    STATIC_FRACTION = "static_fraction"  # SGLang: of the total, for weights and KV cache; activations live outside it


def check_utilization(utilization: float) -> float:
    """Return the fraction itself.

    Raises:
        InputError: it is not within (0, 1].
    """
    if not 0 < utilization <= 1:
        raise InputError(
            f"gpu_memory_utilization {utilization}: give a fraction of the device's memory, above 0 and at most 1"
        )
    return utilization


def requested_bytes(total_bytes: int, utilization: float) -> int:
    """`ceil(total * utilization)`, in floating point as vLLM computes it."""
    return math.ceil(total_bytes * utilization)


def largest_utilization(total_bytes: int, free_bytes: int) -> float:
    """Largest utilization, with three decimals, whose request is free; 0.0 if there is none."""
    steps = min(UTILIZATION_STEPS, max(free_bytes, 0) * UTILIZATION_STEPS // total_bytes + 1)
    while steps > 0 and requested_bytes(total_bytes, steps / UTILIZATION_STEPS) > free_bytes:
        steps -= 1
    return steps / UTILIZATION_STEPS


def smallest_utilization(total_bytes: int, wanted_bytes: int) -> float | None:
    """Smallest utilization, with three decimals, that requests at least `wanted_bytes`; None if there is none."""
    steps = max(wanted_bytes * UTILIZATION_STEPS // total_bytes - 1, 1)
    while steps <= UTILIZATION_STEPS:
        if requested_bytes(total_bytes, steps / UTILIZATION_STEPS) >= wanted_bytes:
            return steps / UTILIZATION_STEPS
        steps += 1
    return None


def request_memory(
    *, total_bytes: int, free_bytes: int, gpu_memory_utilization: float, externally_held_bytes: int = 0
) -> int:
    """Bytes that this engine may use: `ceil(total * utilization)` less the weights that another process holds for it.

    Source: golden/memory.jsonl, `request_memory`.

    Raises:
        InputError: the utilization is not a fraction.
        MemoryShortfallError: less is free than requested (`free_below_requested`), or the external weights use up the
            request (`external_exceeds_budget`).
    """
    requested = requested_bytes(total_bytes, check_utilization(gpu_memory_utilization))
    if externally_held_bytes and requested <= externally_held_bytes:
        smallest = smallest_utilization(total_bytes, externally_held_bytes + 1)
        raise MemoryShortfallError(
            MemoryCondition.EXTERNAL_EXCEEDS_BUDGET,
            "the weights held outside this process leave nothing of the requested memory",
            needed_bytes=externally_held_bytes + 1,
            available_bytes=requested,
            largest={},
            remedy="No gpu_memory_utilization works on this device."
            if smallest is None
            else f"Smallest gpu_memory_utilization that leaves anything: {smallest:g}.",
        )
    requested -= externally_held_bytes
    if free_bytes < requested:
        largest = largest_utilization(total_bytes, free_bytes + externally_held_bytes)
        raise MemoryShortfallError(
            MemoryCondition.FREE_BELOW_REQUESTED,
            f"less memory is free at start-up than gpu_memory_utilization {gpu_memory_utilization} requests of"
            f" {format_gib(total_bytes)}",
            needed_bytes=requested,
            available_bytes=free_bytes,
            largest={"gpu_memory_utilization": largest},
            remedy=(
                f"Largest gpu_memory_utilization that starts: {largest:g}; or free"
                f" {format_bytes(requested - free_bytes)} held by other processes."
            ),
        )
    return requested


def check_explicit_kv_bytes(
    *, kv_cache_memory_bytes: int, free_bytes: int, non_kv_bytes: int, bytes_per_block: int
) -> int:
    """Return the pinned size of the pool if it fits beside everything else (A13).

    Raises:
        InputError: zero or less. (vLLM takes 0 for "unset" when sizing and for "set" when suggesting.)
        MemoryShortfallError: `explicit_bytes_exceed_free`, with the largest accepted value in whole blocks.
    """
    if kv_cache_memory_bytes <= 0:
        raise InputError(
            f"kv_cache_memory_bytes {kv_cache_memory_bytes}: give the size of the pool in bytes, above 0;"
            " leave it out to size the pool by gpu_memory_utilization"
        )
    needed = non_kv_bytes + kv_cache_memory_bytes
    if needed > free_bytes:
        largest = largest_fitting(free_bytes, non_kv_bytes, bytes_per_block)
        raise MemoryShortfallError(
            MemoryCondition.EXPLICIT_BYTES_EXCEED_FREE,
            f"kv_cache_memory_bytes {kv_cache_memory_bytes:,} beside {format_gib(non_kv_bytes)} of other memory",
            needed_bytes=needed,
            available_bytes=free_bytes,
            largest={"kv_cache_memory_bytes": largest.num_bytes},
            remedy=(
                f"Largest kv_cache_memory_bytes that starts: {largest.num_bytes:,} ({format_gib(largest.num_bytes)},"
                f" {largest.num_blocks:,} blocks)."
            ),
        )
    return kv_cache_memory_bytes


def neighbour_warnings(declared_utilizations: list[float]) -> tuple[str, ...]:
    """Warn if the engines on one card together declare more than the whole card (A11)."""
    total = sum(declared_utilizations)
    if total <= 1 + 1e-9:
        return ()
    listed = " + ".join(f"{utilization:g}" for utilization in declared_utilizations)
    return (
        f"the engines on this card declare {listed} = {total:g} of its memory, more than the whole: the last to start"
        " is refused or all run out of memory under load",
    )


@attrs.frozen(kw_only=True)
class WholeBlocks:
    """A pool of whole blocks: exactly `num_blocks * bytes_per_block` bytes, so the same size gives the same pool."""

    num_blocks: int
    bytes_per_block: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the pool."""
        return self.num_blocks * self.bytes_per_block


def largest_fitting(limit_bytes: int, non_kv_bytes: int, bytes_per_block: int) -> WholeBlocks:
    """The largest pool of whole blocks beside `non_kv_bytes` within `limit_bytes`; one more block does not fit (A14).

    Args:
        limit_bytes: the request, or all that is free on the device.
        non_kv_bytes: consumed, transient headroom, and the graphs once (actual if known, else the estimate).
        bytes_per_block: on this rank.

    Raises:
        InputError: `bytes_per_block` is below 1.
    """
    if bytes_per_block < 1:
        raise InputError(f"bytes_per_block is {bytes_per_block}; a block takes at least one byte")
    return WholeBlocks(
        num_blocks=max(limit_bytes - non_kv_bytes, 0) // bytes_per_block, bytes_per_block=bytes_per_block
    )


@attrs.frozen(kw_only=True)
class GraphUtilizations:
    """How reserving graph memory changes the meaning of one utilization (A14), with four decimals as in vLLM's logs."""

    current: float  # the utilization as set
    without_graphs: float  # its equivalent where graphs are not reserved, as vLLM did before 0.21
    to_keep_the_pool: float  # the utilization that keeps the pool of that time


def graph_utilizations(utilization: float, graph_bytes: int, total_bytes: int) -> GraphUtilizations:
    """The three utilizations that vLLM prints about reserved graph memory."""
    share = graph_bytes / total_bytes
    return GraphUtilizations(
        current=round(utilization, 4),
        without_graphs=round(utilization - share, 4),
        to_keep_the_pool=round(utilization + share, 4),
    )


def applicable_startup_plan(plan: Mapping[str, Any], free_bytes: int) -> int | None:
    """The pinned pool size in an earlier start-up's plan if it may be used again, else None.

    It may if its bytes are a positive integer and at least as much memory is free as was then.
    Source: golden/memory.jsonl, `startup_plan_gate`.
    """
    planned, baseline = plan.get("kv_cache_memory_bytes"), plan.get("free_memory_baseline")
    if not isinstance(planned, int) or isinstance(planned, bool) or planned <= 0:
        return None
    if not isinstance(baseline, int) or isinstance(baseline, bool) or free_bytes < baseline:
        return None
    return planned
