"""How much of a device one engine may use: what "0.9" means, and the check at start-up that the memory is there.

Rules: golden/memory.jsonl (`request_memory`), field reports A10, A11, A13 and A15.
"""

import math
from collections.abc import Mapping
from enum import StrEnum

from ..errors import DoesNotFitError, InputError
from ..quantities import format_bytes, format_gib

# The one shape of a memory refusal: what was needed, what was there, the shortfall, and the largest value that works.


class MemoryCondition(StrEnum):
    """Why memory was refused. The names are those of the recorded runs in golden/memory.jsonl where they have one."""

    FREE_BELOW_REQUESTED = "free_below_requested"
    EXTERNAL_EXCEEDS_BUDGET = "external_exceeds_budget"
    FREE_GREW_DURING_PROFILING = "free_grew_during_profiling"
    FRONTEND_RESERVATION_LEAVES_NOTHING = "frontend_reservation_leaves_nothing"
    NO_AVAILABLE_MEMORY = "no_available_memory"
    REQUEST_DOES_NOT_FIT = "request_does_not_fit"
    EXPLICIT_BYTES_EXCEED_FREE = "explicit_bytes_exceed_free"
    OVERRIDE_EXCEEDS_FREE = "override_exceeds_free"
    WEIGHTS_EXCEED_DEVICE = "weights_exceed_device"


class MemoryShortfallError(DoesNotFitError):
    """It does not fit. `largest` maps an option to the largest value of it that works (empty: no value of any works).

    Attributes:
        condition: why.
        needed_bytes, available_bytes: both sides of the comparison that failed.
        shortfall_bytes: their difference, never negative.
        largest: option name -> largest value that works.
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
        """`what` opens the message, `remedy` ends it; the figures stand between them."""
        self.condition = condition
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes
        self.shortfall_bytes = max(needed_bytes - available_bytes, 0)
        self.largest = dict(largest)
        super().__init__(
            f"{what}: needed {format_bytes(needed_bytes)}, available {format_bytes(available_bytes)},"
            f" short by {format_bytes(self.shortfall_bytes)}. {remedy}"
        )


UTILIZATION_STEPS = 1000  # the flag is written with three decimals


class BudgetSemantics(StrEnum):
    """What the fraction is a fraction of (A15)."""

    OF_TOTAL = "of_total"  # vLLM: of the device's total; everything of this engine counts, the activation peak too
    OF_FREE = "of_free"  # TensorRT-LLM: of what is free once everything else has its memory; all of it is KV cache
    STATIC_FRACTION = "static_fraction"  # SGLang: of the total, for weights and KV cache; activations live outside it


def check_utilization(utilization: float) -> float:
    """The fraction itself, if it is one.

    Raises:
        InputError: not within (0, 1].
    """
    if not 0 < utilization <= 1:
        raise InputError(
            f"--gpu-memory-utilization {utilization}: give a fraction of the device's memory, above 0 and at most 1"
        )
    return utilization


def requested_bytes(total_bytes: int, utilization: float) -> int:
    """`ceil(total * utilization)`, in floating point as vLLM computes it."""
    return math.ceil(total_bytes * utilization)


def largest_utilization(total_bytes: int, free_bytes: int) -> float:
    """Largest utilization, with three decimals, whose request is free; 0.0 where none is."""
    steps = min(UTILIZATION_STEPS, max(free_bytes, 0) * UTILIZATION_STEPS // total_bytes + 1)
    while steps > 0 and requested_bytes(total_bytes, steps / UTILIZATION_STEPS) > free_bytes:
        steps -= 1
    return steps / UTILIZATION_STEPS


def smallest_utilization(total_bytes: int, wanted_bytes: int) -> float | None:
    """Smallest utilization, with three decimals, that requests at least `wanted_bytes`; None where none does."""
    steps = max(wanted_bytes * UTILIZATION_STEPS // total_bytes - 1, 1)
    while steps <= UTILIZATION_STEPS:
        if requested_bytes(total_bytes, steps / UTILIZATION_STEPS) >= wanted_bytes:
            return steps / UTILIZATION_STEPS
        steps += 1
    return None


def request_memory(
    *, total_bytes: int, free_bytes: int, gpu_memory_utilization: float, externally_held_bytes: int = 0
) -> int:
    """The memory this engine may use, in bytes: `ceil(total * utilization)` less weights that somebody else holds
    for it.

    Source: golden/memory.jsonl, `request_memory`.

    Raises:
        InputError: the utilization is not a fraction.
        MemoryShortfallError: less is free than requested (`free_below_requested`), or the external weights use up the
            request (`external_exceeds_budget`).
    """
    requested = requested_bytes(total_bytes, check_utilization(gpu_memory_utilization))
    if externally_held_bytes and requested <= externally_held_bytes:
        raise MemoryShortfallError(
            MemoryCondition.EXTERNAL_EXCEEDS_BUDGET,
            "the weights held outside this process leave nothing of the requested memory",
            needed_bytes=externally_held_bytes + 1,
            available_bytes=requested,
            largest={},
            remedy=_raise_utilization(total_bytes, externally_held_bytes + 1),
        )
    requested -= externally_held_bytes
    if free_bytes < requested:
        largest = largest_utilization(total_bytes, free_bytes + externally_held_bytes)
        raise MemoryShortfallError(
            MemoryCondition.FREE_BELOW_REQUESTED,
            f"less memory is free at start-up than --gpu-memory-utilization {gpu_memory_utilization} requests of"
            f" {format_gib(total_bytes)}",
            needed_bytes=requested,
            available_bytes=free_bytes,
            largest={"--gpu-memory-utilization": largest},
            remedy=(
                f"Largest --gpu-memory-utilization that starts: {largest:g}; or free"
                f" {format_bytes(requested - free_bytes)} held by other processes."
            ),
        )
    return requested


def check_startup_under_override(
    *,
    total_bytes: int,
    free_bytes: int,
    gpu_memory_utilization: float,
    non_kv_bytes: int,
    num_blocks: int,
    bytes_per_block: int,
    strict_startup: bool = False,
) -> int:
    """With `num_gpu_blocks_override` the real need is checked, not utilization * total (A10); returns that need in
    bytes.

    Args:
        total_bytes: of the device.
        free_bytes: of the device now.
        gpu_memory_utilization: what `strict_startup` checks.
        non_kv_bytes: everything but the pool, with what is only needed during a step.
        num_blocks: the override.
        bytes_per_block: on this rank.
        strict_startup: vLLM's rule: utilization * total must be free all the same.

    Raises:
        MemoryShortfallError: `override_exceeds_free`, or `free_below_requested` under `strict_startup`.
    """
    if strict_startup:
        request_memory(total_bytes=total_bytes, free_bytes=free_bytes, gpu_memory_utilization=gpu_memory_utilization)
    needed = non_kv_bytes + num_blocks * bytes_per_block
    if needed > free_bytes:
        largest = max(free_bytes - non_kv_bytes, 0) // bytes_per_block
        raise MemoryShortfallError(
            MemoryCondition.OVERRIDE_EXCEEDS_FREE,
            f"{num_blocks:,} blocks of {bytes_per_block:,} B beside {format_gib(non_kv_bytes)} of other memory",
            needed_bytes=needed,
            available_bytes=free_bytes,
            largest={"--num-gpu-blocks-override": largest},
            remedy=f"Largest --num-gpu-blocks-override that starts: {largest:,}.",
        )
    return needed


def check_explicit_kv_bytes(
    *, kv_cache_memory_bytes: int, free_bytes: int, non_kv_bytes: int, bytes_per_block: int
) -> int:
    """The pinned size of the pool, if it fits beside everything else (A13).

    Raises:
        InputError: zero or less. (vLLM takes 0 for "unset" when sizing and for "set" when suggesting.)
        MemoryShortfallError: `explicit_bytes_exceed_free`, with the largest accepted value in whole blocks.
    """
    if kv_cache_memory_bytes <= 0:
        raise InputError(
            f"--kv-cache-memory-bytes {kv_cache_memory_bytes}: give the size of the pool in bytes, above 0;"
            " leave the option away to size the pool by --gpu-memory-utilization"
        )
    needed = non_kv_bytes + kv_cache_memory_bytes
    if needed > free_bytes:
        num_blocks = max(free_bytes - non_kv_bytes, 0) // bytes_per_block
        largest = num_blocks * bytes_per_block
        raise MemoryShortfallError(
            MemoryCondition.EXPLICIT_BYTES_EXCEED_FREE,
            f"--kv-cache-memory-bytes {kv_cache_memory_bytes:,} beside {format_gib(non_kv_bytes)} of other memory",
            needed_bytes=needed,
            available_bytes=free_bytes,
            largest={"--kv-cache-memory-bytes": largest},
            remedy=(
                f"Largest --kv-cache-memory-bytes that starts: {largest:,} ({format_gib(largest)},"
                f" {num_blocks:,} blocks)."
            ),
        )
    return kv_cache_memory_bytes


def check_enough_kv_cache_memory(
    *, available_bytes: int, needed_bytes: int, estimated_max_model_len: int, max_model_len: int
) -> None:
    """Whether one request of `max_model_len` tokens fits what is left once the null block is set aside.

    Source: golden/memory.jsonl, `check_enough`.

    Raises:
        MemoryShortfallError: `no_available_memory` where nothing is left, else `request_does_not_fit`, with the largest
            length that fits if it is above 0.
    """
    if available_bytes <= 0:
        raise MemoryShortfallError(
            MemoryCondition.NO_AVAILABLE_MEMORY,
            "no memory is left for KV cache blocks",
            needed_bytes=needed_bytes,
            available_bytes=available_bytes,
            largest={},
            remedy=(
                "No --max-model-len works; raise --gpu-memory-utilization, lower --max-num-batched-tokens or"
                " --max-num-seqs, quantise the weights, or raise --tensor-parallel-size."
            ),
        )
    if needed_bytes > available_bytes:
        fits = estimated_max_model_len > 0
        raise MemoryShortfallError(
            MemoryCondition.REQUEST_DOES_NOT_FIT,
            f"one request of --max-model-len {max_model_len:,} tokens",
            needed_bytes=needed_bytes,
            available_bytes=available_bytes,
            largest={"--max-model-len": estimated_max_model_len} if fits else {},
            remedy=(
                f"Largest --max-model-len that fits: {estimated_max_model_len:,}."
                if fits
                else "No --max-model-len fits; raise --gpu-memory-utilization or --tensor-parallel-size."
            ),
        )


def neighbour_warnings(declared_utilizations: list[float]) -> tuple[str, ...]:
    """A warning if engines on one card declare more than the whole of it (A11)."""
    total = sum(declared_utilizations)
    if total <= 1 + 1e-9:
        return ()
    listed = " + ".join(f"{utilization:g}" for utilization in declared_utilizations)
    return (
        f"the engines on this card declare {listed} = {total:g} of its memory, more than the whole: the last to start"
        " is refused or all run out of memory under load",
    )


def _raise_utilization(total_bytes: int, wanted_bytes: int) -> str:
    smallest = smallest_utilization(total_bytes, wanted_bytes)
    if smallest is None:
        return "No --gpu-memory-utilization works on this device."
    return f"Smallest --gpu-memory-utilization that leaves anything: {smallest:g}."
