"""Why a plan is refused, with what was needed, what was there, the shortfall, and the largest value that works."""

import enum
from collections.abc import Mapping

from .errors import DoesNotFitError
from .quantities import format_bytes


class PlanCondition(enum.StrEnum):
    """Why a plan is refused; the first three names are those of the recorded planning cases."""

    NO_AVAILABLE_MEMORY = "no_available_memory"
    REQUEST_DOES_NOT_FIT = "request_does_not_fit"
    AUTO_FIT_ZERO = "auto_fit_zero"
    OVERRIDE_EXCEEDS_MEMORY = "override_exceeds_memory"


class PlanRefusedError(DoesNotFitError):
    """The pool does not serve what was asked.

    Attributes:
        condition: why.
        rank: the rank that falls short.
        needed_blocks: blocks that one request needs (or, for an override, that it asks for).
        num_blocks: blocks of the pool on that rank, the null block included.
        needed_bytes, available_bytes: the same in bytes on that rank.
        shortfall_bytes: what is missing on that rank, the null block included; given that much more, it fits.
        largest: option -> largest value of it that works; empty where none does.
    """

    def __init__(
        self,
        condition: PlanCondition,
        message: str,
        *,
        rank: int,
        needed_blocks: int,
        num_blocks: int,
        needed_bytes: int,
        available_bytes: int,
        shortfall_bytes: int,
        largest: Mapping[str, int],
    ) -> None:
        """Keep the figures beside the message."""
        self.condition = condition
        self.rank = rank
        self.needed_blocks = needed_blocks
        self.num_blocks = num_blocks
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes
        self.shortfall_bytes = shortfall_bytes
        self.largest = dict(largest)
        super().__init__(message)


def request_refusal(
    condition: PlanCondition,
    *,
    rank: int,
    max_model_len: int,
    needed_blocks: int,
    num_blocks: int,
    bytes_per_block: int,
    available_bytes: int,
    largest_max_model_len: int,
    num_gpu_blocks_override: int | None,
) -> PlanRefusedError:
    """One request of `max_model_len` tokens needs more than the usable blocks of the tightest rank."""
    needed_bytes = needed_blocks * bytes_per_block
    shortfall_bytes = (needed_blocks + 1) * bytes_per_block - available_bytes
    usable_blocks = max(num_blocks - 1, 0)
    source = "num_gpu_blocks_override" if num_gpu_blocks_override is not None else "available"
    remedies = [
        f"raise num_gpu_blocks_override to at least {needed_blocks + 1:,}"
        if num_gpu_blocks_override is not None
        else "raise gpu_memory_utilization or kv_cache_memory_bytes, or lower max_num_batched_tokens (its activations "
        "take memory from the pool)",
        "use more ranks or a smaller kv_cache_dtype",
    ]
    if largest_max_model_len:
        remedies.insert(0, f"lower max_model_len to at most {largest_max_model_len:,}, the largest that fits")
    else:
        remedies.insert(0, "no max_model_len fits, not even 1 token")
    message = (
        f"one request of {max_model_len:,} tokens does not fit: needed {needed_blocks:,} blocks = "
        f"{format_bytes(needed_bytes)} on rank {rank}; {source} {format_bytes(available_bytes)} = {num_blocks:,} "
        f"blocks, of which {usable_blocks:,} are usable (block 0 is reserved); short by "
        f"{needed_blocks - usable_blocks:,} blocks = {format_bytes(shortfall_bytes)}. Way out: {'; '.join(remedies)}."
    )
    return PlanRefusedError(
        condition,
        message,
        rank=rank,
        needed_blocks=needed_blocks,
        num_blocks=num_blocks,
        needed_bytes=needed_bytes,
        available_bytes=available_bytes,
        shortfall_bytes=shortfall_bytes,
        largest={"max_model_len": largest_max_model_len} if largest_max_model_len else {},
    )


def override_refusal(
    *, rank: int, override: int, bytes_per_block: int, available_bytes: int, largest_override: int
) -> PlanRefusedError:
    """An override asks for more blocks than the memory of the tightest rank holds."""
    needed_bytes = override * bytes_per_block
    shortfall_bytes = needed_bytes - available_bytes
    message = (
        f"num_gpu_blocks_override {override:,} does not fit: needed {format_bytes(needed_bytes)} on rank {rank}, "
        f"available {format_bytes(available_bytes)}; short by {format_bytes(shortfall_bytes)}. Way out: lower "
        f"num_gpu_blocks_override to at most {largest_override:,}, the largest that fits."
    )
    return PlanRefusedError(
        PlanCondition.OVERRIDE_EXCEEDS_MEMORY,
        message,
        rank=rank,
        needed_blocks=override,
        num_blocks=max(available_bytes // bytes_per_block, 0),
        needed_bytes=needed_bytes,
        available_bytes=available_bytes,
        shortfall_bytes=shortfall_bytes,
        largest={"num_gpu_blocks_override": largest_override} if largest_override > 0 else {},
    )
