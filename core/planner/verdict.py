"""Why a plan is refused, and the warnings that it carries: sentences with the numbers of the plan."""

import enum
from collections.abc import Mapping, Sequence

import attrs

from ..errors import DoesNotFitError
from ..quantities import format_bytes
from .inputs import PlanInputs
from .layout import KVCacheGroup
from .ranks import RankPlan, blocks_per_request, tightest_rank
from .specs import CrossAttentionSpec, KVCacheSpec


class PlanCondition(enum.StrEnum):
    """Why a plan is refused; the first three names are those of the recorded planning cases."""

    NO_AVAILABLE_MEMORY = "no_available_memory"
    REQUEST_DOES_NOT_FIT = "request_does_not_fit"
    AUTO_FIT_ZERO = "auto_fit_zero"
    OVERRIDE_EXCEEDS_MEMORY = "override_exceeds_memory"


class PlanRefusedError(DoesNotFitError):
    """The pool cannot serve what was asked: needed and available figures, the shortfall, and the largest that works.

    Attributes:
        condition: why.
        rank: the rank that falls short.
        needed_blocks: blocks that one request needs (or, for an override, that it asks for).
        num_blocks: blocks of the pool on that rank, the null block included.
        needed_bytes, available_bytes: the same in bytes on that rank.
        shortfall_bytes: bytes missing on that rank, the null block included; with that much more it fits.
        largest: parameter name -> largest value of it that works; empty if none does.
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


def override_refusal(inputs: PlanInputs, ranks: Sequence[RankPlan]) -> PlanRefusedError | None:
    """The refusal of an override that asks for more blocks than the memory of the tightest rank holds, if it does."""
    override = inputs.num_gpu_blocks_override
    if override is None or not inputs.validate_override:
        return None
    tightest = min(
        (rank for rank in ranks if rank.bytes_per_block), key=lambda rank: rank.available_bytes // rank.bytes_per_block
    )
    available_bytes = tightest.available_bytes
    largest = available_bytes // tightest.bytes_per_block
    if override <= largest:
        return None
    needed_bytes = override * tightest.bytes_per_block
    shortfall_bytes = needed_bytes - available_bytes
    message = (
        f"num_gpu_blocks_override {override:,} does not fit: needed {format_bytes(needed_bytes)} on rank "
        f"{tightest.rank}, available {format_bytes(available_bytes)}; short by {format_bytes(shortfall_bytes)}. "
        f"Way out: lower num_gpu_blocks_override to at most {largest:,}, the largest that fits."
    )
    return PlanRefusedError(
        PlanCondition.OVERRIDE_EXCEEDS_MEMORY,
        message,
        rank=tightest.rank,
        needed_blocks=override,
        num_blocks=max(largest, 0),
        needed_bytes=needed_bytes,
        available_bytes=available_bytes,
        shortfall_bytes=shortfall_bytes,
        largest={"num_gpu_blocks_override": largest} if largest > 0 else {},
    )


def request_refusal(
    inputs: PlanInputs, groups: Sequence[KVCacheGroup], ranks: Sequence[RankPlan]
) -> PlanRefusedError | None:
    """The refusal of the longest request, if it does not fit; with auto-fit, of a request of a single token."""
    auto_fits, override = inputs.auto_fit_max_model_len, inputs.num_gpu_blocks_override
    max_model_len = 1 if auto_fits else inputs.max_model_len
    needed_blocks = blocks_per_request(groups, attrs.evolve(inputs.limits, max_model_len=max_model_len))
    tightest = tightest_rank(ranks)
    num_blocks, block_bytes = tightest.num_blocks_alone, tightest.bytes_per_block
    if needed_blocks <= num_blocks - 1:
        return None
    available_bytes = tightest.available_bytes if override is None else override * block_bytes
    if auto_fits:
        condition = PlanCondition.AUTO_FIT_ZERO
    elif available_bytes <= block_bytes:
        # One byte beyond the null block makes vLLM say how much more is needed (golden error.one-block-only).
        condition = PlanCondition.NO_AVAILABLE_MEMORY
    else:
        condition = PlanCondition.REQUEST_DOES_NOT_FIT
    needed_bytes = needed_blocks * block_bytes
    shortfall_bytes = (needed_blocks + 1) * block_bytes - available_bytes
    usable_blocks = max(num_blocks - 1, 0)
    largest = min(rank.largest_max_model_len for rank in ranks)
    remedies = [
        f"lower max_model_len to at most {largest:,}, the largest that fits"
        if largest
        else "no max_model_len fits, not even 1 token",
        f"raise num_gpu_blocks_override to at least {needed_blocks + 1:,}"
        if override is not None
        else "raise gpu_memory_utilization or kv_cache_memory_bytes, or lower max_num_batched_tokens (its activations "
        "take memory from the pool)",
        "use more ranks or a smaller kv_cache_dtype",
    ]
    message = (
        f"one request of {max_model_len:,} tokens does not fit: needed {needed_blocks:,} blocks = "
        f"{format_bytes(needed_bytes)} on rank {tightest.rank}; "
        f"{'available' if override is None else 'num_gpu_blocks_override'} {format_bytes(available_bytes)} = "
        f"{num_blocks:,} blocks, of which {usable_blocks:,} are usable (block 0 is reserved); short by "
        f"{needed_blocks - usable_blocks:,} blocks = {format_bytes(shortfall_bytes)}. Way out: {'; '.join(remedies)}."
    )
    return PlanRefusedError(
        condition,
        message,
        rank=tightest.rank,
        needed_blocks=needed_blocks,
        num_blocks=num_blocks,
        needed_bytes=needed_bytes,
        available_bytes=available_bytes,
        shortfall_bytes=shortfall_bytes,
        largest={"max_model_len": largest} if largest else {},
    )


@attrs.frozen
class HybridWaste:
    """Bytes of one sequence, before rounding to blocks (A16).

    Attributes:
        num_tokens: length of the sequence.
        full_bytes: if every layer keeps every token.
        floor_bytes: if every layer keeps only what it reads again.
    """

    num_tokens: int
    full_bytes: int
    floor_bytes: int

    @property
    def wasted_share(self) -> float:
        """Share of the memory that is never read again if every layer is sized like full attention."""
        return 1 - self.floor_bytes / self.full_bytes if self.full_bytes else 0.0


def hybrid_waste(layer_specs: Mapping[str, KVCacheSpec], num_tokens: int) -> HybridWaste:
    """Compare full sizing with window-aware sizing for one sequence of `num_tokens` tokens.

    The comparison leaves out cross-attention layers: they keep encoder tokens, to which no window applies.
    """
    specs = [spec for spec in layer_specs.values() if not isinstance(spec, CrossAttentionSpec)]
    floor_bytes = [spec.floor_bytes(num_tokens) for spec in specs]
    full_bytes = [
        max(int(spec.bytes_per_token * num_tokens), floor) for spec, floor in zip(specs, floor_bytes, strict=True)
    ]
    return HybridWaste(num_tokens, sum(full_bytes), sum(floor_bytes))


def plan_warnings(
    inputs: PlanInputs, groups: Sequence[KVCacheGroup], ranks: Sequence[RankPlan], max_model_len: int
) -> tuple[str, ...]:
    """Every warning that applies to a plan, one sentence each."""
    return (
        *_override_warnings(inputs, ranks),
        *_idle_warnings(ranks),
        *_full_sizing_warnings(inputs, max_model_len),
        *_unequal_group_warnings(groups),
        *_padding_warnings(groups),
    )


def _override_warnings(inputs: PlanInputs, ranks: Sequence[RankPlan]) -> list[str]:
    override = inputs.num_gpu_blocks_override
    if override is None:
        return []
    would_fit = min(rank.available_bytes // rank.bytes_per_block for rank in ranks if rank.bytes_per_block)
    return [
        f"num_gpu_blocks_override {override:,} replaces the {max(would_fit, 0):,} blocks that fit; every figure uses it"
    ]


def _idle_warnings(ranks: Sequence[RankPlan]) -> list[str]:
    bottlenecks = [rank.rank for rank in ranks if rank.is_bottleneck]
    return [
        f"rank {rank.rank} leaves {format_bytes(rank.idle_bytes)} idle: the pool is held to {rank.num_blocks:,} blocks "
        f"by rank {', '.join(map(str, bottlenecks))}, while it alone would hold {rank.num_blocks_alone:,}"
        for rank in ranks
        if bottlenecks and not rank.is_bottleneck and rank.idle_bytes
    ]


def _full_sizing_warnings(inputs: PlanInputs, max_model_len: int) -> list[str]:
    if not inputs.disable_hybrid_kv_cache_manager:
        return []
    waste = hybrid_waste(inputs.layer_specs, max_model_len)
    if waste.floor_bytes == waste.full_bytes:
        return []
    return [
        "hybrid allocation is off, so windowed layers are sized like full attention: "
        f"{waste.wasted_share:.2%} of a request of {max_model_len:,} tokens is never read again"
    ]


def _unequal_group_warnings(groups: Sequence[KVCacheGroup]) -> list[str]:
    widest = max(group.bytes_per_block for group in groups)
    narrow = [index for index, group in enumerate(groups) if group.bytes_per_block < widest]
    if not narrow:
        return []
    unused = 1 - sum(group.bytes_per_block for group in groups) / (widest * len(groups))
    return [
        f"groups {', '.join(map(str, narrow))} fill less of a block than the widest group, and every block is as wide: "
        f"{unused:.2%} of a block is unused on average over the groups"
    ]


def _padding_warnings(groups: Sequence[KVCacheGroup]) -> list[str]:
    warnings: list[str] = []
    for index, group in enumerate(groups):
        padding_bytes = group.spec.page_size_bytes - group.spec.unpadded_page_size_bytes
        if padding_bytes:
            warnings.append(
                f"pages of group {index} ({group.spec.kind}) are padded by {padding_bytes:,} of "
                f"{group.spec.page_size_bytes:,} bytes, so that all pages are equal"
            )
    return warnings
