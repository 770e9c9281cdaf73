"""Answers four complaints, and explains a pool of which only two lines of a server's log are known.

The complaints are "the pool is smaller than I expected", "raising utilization gained little", "memory is free but
start-up fails" and "one request does not fit"; an answer has the responsible row, the numbers, and the smallest change
of each parameter. A logged pool is compared with stacks of equal layers, and with a model's layers.
"""

from collections import Counter
from collections.abc import Sequence

import attrs

from ..errors import InputError
from ..memory.budget import BudgetSemantics, largest_utilization, requested_bytes
from ..memory.ledger import LedgerRow, RowRole, sum_bytes
from ..models.geometry import ModelGeometry
from ..models.layer_cache import AttentionCache, CachePart, LatentCache, LayerCache
from ..planner.cache_dtype import BITS_PER_ELEMENT, known_cache_dtypes
from ..planner.parallel import tensor_parallel_spec
from ..quantities import MIB, format_bytes, format_gib
from .deployment import Deployment
from .plan import DeploymentPlan
from .remedies import Remedy, find_remedies, minimum_tensor_parallel_size, startup_remedies
from .startup_log import GibFigure


@attrs.frozen
class Diagnosis:
    """The answer to a complaint."""

    complaint: str
    row: str  # name of the responsible ledger row, or of the parameter that sizes the pool
    row_bytes: int
    # Sentences about the numbers; they name parameters as vLLM does (`gpu_memory_utilization`).
    findings: tuple[str, ...]
    remedies: tuple[Remedy, ...]  # changes that help


def pool_smaller_than_expected(plan: DeploymentPlan, expected_num_blocks: int) -> Diagnosis:
    """Explain why the pool holds fewer than `expected_num_blocks`.

    Raises:
        InputError: it does not.
    """
    if expected_num_blocks <= plan.num_blocks:
        raise InputError(f"{expected_num_blocks:,} blocks were expected and the pool holds {plan.num_blocks:,}")
    stage = plan.bottleneck_stage
    per_block = plan.bytes_per_block
    missing = expected_num_blocks * per_block - max(stage.ledger.available_bytes, 0)
    row = _responsible(stage.ledger.non_kv_rows, missing)
    findings = [
        f"{expected_num_blocks:,} blocks of {per_block:,} B need {format_bytes(expected_num_blocks * per_block)};"
        f" {format_bytes(stage.ledger.available_bytes)} are available, {format_bytes(missing)} less",
        f"the row that explains it is {row.name}: {format_bytes(row.num_bytes)} ({row.source}; {row.formula})",
    ]
    tensor_parallel_size = plan.deployment.tensor_parallel_size
    if tensor_parallel_size > 1 and expected_num_blocks > plan.num_blocks * tensor_parallel_size * 9 // 10:
        findings.append(
            f"the memory of {tensor_parallel_size} tensor-parallel ranks does not add up to more blocks: each rank"
            " holds its heads of every block, so the pool is what one rank holds"
        )
    remedies = find_remedies(plan.deployment, lambda changed: changed.num_blocks >= expected_num_blocks)
    return Diagnosis("the pool is smaller than expected", row.name, row.num_bytes, tuple(findings), remedies)


def _responsible(rows: tuple[LedgerRow, ...], missing: int) -> LedgerRow:
    """The smallest row besides the weights that alone explains the missing bytes; the largest if together they do.

    Else the weights: no other row is large enough to matter.
    """
    others = [row for row in rows if row.name != "weights"]
    explaining = [row for row in others if row.num_bytes >= missing]
    if explaining:
        return min(explaining, key=lambda row: row.num_bytes)
    if others and (sum_bytes(tuple(others)) >= missing or len(others) == len(rows)):
        return max(others, key=lambda row: row.num_bytes)
    return next(row for row in rows if row.name == "weights")


def raising_utilization_gained_little(lower: DeploymentPlan, higher: DeploymentPlan) -> Diagnosis:
    """Explain why the second plan, with a higher utilization, holds hardly more than the first.

    Raises:
        InputError: the second utilization is not higher.
    """
    low, high = lower.deployment, higher.deployment
    if high.utilization <= low.utilization:
        raise InputError(f"utilization {high.utilization:g} is not higher than {low.utilization:g}")
    gained = higher.num_blocks - lower.num_blocks
    findings = [
        f"from gpu_memory_utilization {low.utilization:g} to {high.utilization:g} the pool goes from"
        f" {lower.num_blocks:,} to {higher.num_blocks:,} blocks (+{gained:,})"
    ]
    sizes = ("kv_cache_memory_bytes", "num_gpu_blocks_override", "max_total_tokens")
    pinned = [name for name in sizes if getattr(high, name) is not None and not gained]
    if pinned:
        row, row_bytes = pinned[0], 0
        findings.append(f"{row} {getattr(high, row):,} sizes the pool, so utilization changes nothing")
    else:
        row, row_bytes = _grown_most(lower, higher)
        more = requested_bytes(high.total_bytes, high.utilization) - requested_bytes(low.total_bytes, low.utilization)
        findings.append(
            f"{high.utilization - low.utilization:.3f} of {format_gib(high.total_bytes)} are {format_bytes(more)}, at"
            f" most {more // higher.bytes_per_block:,} blocks of {higher.bytes_per_block:,} B"
        )
        if row_bytes > more // 10:
            findings.append(f"{format_bytes(row_bytes)} of it went to {row}, which grew at the same time")
        else:
            row, row_bytes = "KV cache blocks", more
            findings.append("every byte more went to the pool; its blocks are large, or the step was small")
    return Diagnosis("raising utilization gained little", row, row_bytes, tuple(findings), remedies=())


def _grown_most(lower: DeploymentPlan, higher: DeploymentPlan) -> tuple[str, int]:
    before = {row.name: row.num_bytes for row in lower.bottleneck_stage.ledger.non_kv_rows}
    growth = {row.name: row.num_bytes - before.get(row.name, 0) for row in higher.bottleneck_stage.ledger.non_kv_rows}
    name = max(growth, key=lambda row: growth[row])
    return name, growth[name]


def free_memory_but_startup_fails(deployment: Deployment) -> Diagnosis:
    """Explain why an engine is refused at start-up although memory is free.

    Raises:
        InputError: the requested memory is free, so start-up does not fail for lack of it.
    """
    requested = requested_bytes(deployment.total_bytes, deployment.utilization) - deployment.externally_held_bytes
    if deployment.semantics is BudgetSemantics.OF_FREE or requested <= deployment.free_bytes:
        raise InputError(f"{format_bytes(requested)} are requested and {format_bytes(deployment.free_bytes)} are free")
    held = deployment.total_bytes - deployment.free_bytes
    largest = largest_utilization(deployment.total_bytes, deployment.free_bytes + deployment.externally_held_bytes)
    findings = (
        f"gpu_memory_utilization {deployment.utilization:g} asks for {format_bytes(requested)} of"
        f" {format_gib(deployment.total_bytes)} in total, whatever this model needs",
        f"{format_bytes(deployment.free_bytes)} are free, since {format_bytes(held)} are held by others: short by"
        f" {format_bytes(requested - deployment.free_bytes)}",
        f"largest gpu_memory_utilization that starts: {largest:g}",
    )
    remedies = startup_remedies(deployment, largest)
    return Diagnosis("memory is free but start-up fails", "requested", requested, findings, remedies)


def one_request_does_not_fit(plan: DeploymentPlan) -> Diagnosis:
    """Explain why one request of the longest length does not fit, and what would make it fit.

    Raises:
        InputError: it does.
    """
    if plan.refusal is None:
        raise InputError(f"one request of {plan.pool.max_model_len:,} tokens fits")
    stage = plan.bottleneck_stage
    per_block = plan.bytes_per_block
    missing = (plan.pool.blocks_per_request + 1) * per_block - stage.ledger.available_bytes
    findings = [str(plan.refusal)]
    if stage.ledger.available_bytes <= 0:
        weights = max(stage.ledger.non_kv_rows, key=lambda row: row.num_bytes)
        minimum = minimum_tensor_parallel_size(plan.deployment, lambda changed: changed.fits)
        findings.append(
            f"{weights.name} alone take {format_bytes(weights.num_bytes)} of the"
            f" {format_bytes(stage.ledger.budget.requested_bytes)} requested"
            + (f"; smallest tensor_parallel_size that fits: {minimum}" if minimum else "")
        )
        row = weights
    else:
        row = _responsible(stage.ledger.non_kv_rows, missing)
        findings.append(
            f"the row to look at is {row.name}: {format_bytes(row.num_bytes)} ({row.source}; {row.formula})"
        )
    transient = [other for other in stage.ledger.non_kv_rows if other.role is RowRole.TRANSIENT and other is not row]
    findings.extend(f"{other.name} takes {format_bytes(other.num_bytes)} ({other.formula})" for other in transient)
    remedies = find_remedies(plan.deployment, lambda changed: changed.fits)
    return Diagnosis("one request does not fit", row.name, row.num_bytes, tuple(findings), remedies)


MAX_LAYERS = 160
_HEADS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 28, 32, 40, 48, 64)
_HEAD_SIZES = (64, 80, 96, 112, 120, 128, 160, 192, 256, 512)
_LATENT_SIZES = (320, 512, 576, 640)
_DTYPES = ("bf16", "fp8_e4m3", "fp32", "int4")


@attrs.frozen(kw_only=True)
class UniformStack:
    """Equal layers whose pages add up to a block of a wanted size."""

    num_layers: int
    num_kv_heads: int
    head_size: int
    dtype: str
    is_latent: bool
    bytes_per_block: int

    def __str__(self) -> str:
        """The stack in words."""
        shape = f"latent of {self.head_size}" if self.is_latent else f"{self.num_kv_heads} KV heads x {self.head_size}"
        return f"{self.num_layers} layers of {shape} in {self.dtype} ({self.bytes_per_block:,} B a block)"


@attrs.frozen(kw_only=True)
class ModelStack:
    """The layers of a model under one cache dtype, on one rank.

    Attributes:
        kv_cache_dtype: the dtype.
        parts: (number, what one stores, bytes that a token takes in one).
        block_size: tokens per block.
    """

    kv_cache_dtype: str
    parts: tuple[tuple[int, str, int], ...]
    block_size: int

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token in all layers."""
        return sum(count * num_bytes for count, _, num_bytes in self.parts)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of a block in all layers."""
        return self.bytes_per_token * self.block_size

    def __str__(self) -> str:
        """The layers in words."""
        parts = " and ".join(f"{count} {what} of {num_bytes:,} B" for count, what, num_bytes in self.parts)
        return (
            f"{parts} a token ({self.kv_cache_dtype}): {self.bytes_per_token:,} B a token,"
            f" {self.bytes_per_block:,} B a block"
        )


def model_stacks(
    geometry: ModelGeometry, block_size: int, tensor_parallel_size: int, kv_cache_dtypes: Sequence[str] = ()
) -> tuple[ModelStack, ...]:
    """The model's layers under each of these dtypes (all known ones unless given), each size once.

    Empty for a model that keeps a window, a state or a compressed state: its blocks are not tokens x bytes.
    """
    if not all(_keeps_every_token(cache) for cache in geometry.caches()):
        return ()
    stacks: dict[tuple[tuple[int, str, int], ...], ModelStack] = {}
    for dtype in kv_cache_dtypes or known_cache_dtypes():
        try:
            storage = geometry.cache_format(dtype)
            sizes = Counter(
                (_what(cache), tensor_parallel_spec(cache.spec(1, storage), tensor_parallel_size).page_size_bytes)
                for cache in geometry.caches()
            )
        except InputError:
            if kv_cache_dtypes:
                raise
            continue  # a dtype that this model's caches cannot have
        parts = tuple((count, what, num_bytes) for (what, num_bytes), count in sizes.items())
        stacks.setdefault(parts, ModelStack(kv_cache_dtype=dtype, parts=parts, block_size=block_size))
    return tuple(stacks.values())


def _keeps_every_token(cache: LayerCache) -> bool:
    if isinstance(cache, AttentionCache):
        return cache.sliding_window is None and cache.attention_chunk_size is None
    return isinstance(cache, LatentCache)


def _what(cache: LayerCache) -> str:
    if isinstance(cache, LatentCache):
        return "keys" if cache.part is CachePart.INDEXER else "latents"
    return "layers"


@attrs.frozen(kw_only=True)
class PoolExplanation:
    """What two lines of a start-up log determine: the blocks of its pool, and the geometries that they could have.

    Attributes:
        num_blocks: number of blocks in the pool.
        block_size: tokens per block.
        low_bytes_per_block, high_bytes_per_block: smallest and largest block that fits both lines, in bytes.
        candidates: stacks of equal layers within that range.
        page_size_bytes: page of one layer of the geometry to check; None without one.
        stacks: the layers of the model to check, under each dtype that it could have.
    """

    num_blocks: int
    block_size: int
    low_bytes_per_block: int
    high_bytes_per_block: int
    candidates: tuple[UniformStack, ...]
    page_size_bytes: int | None = None
    stacks: tuple[ModelStack, ...] = ()

    @property
    def model_candidates(self) -> tuple[ModelStack, ...]:
        """The dtypes under which the model's layers give a block within the range."""
        low, high = self.low_bytes_per_block, self.high_bytes_per_block
        return tuple(stack for stack in self.stacks if low <= stack.bytes_per_block <= high)

    @property
    def is_whole(self) -> bool:
        """Whether some whole number of layers of the geometry to check gives a block within the range."""
        if self.model_candidates:
            return True
        if self.page_size_bytes is None:
            return bool(self.candidates) and not self.stacks
        most, too_few = self.high_bytes_per_block, self.low_bytes_per_block - 1
        return most // self.page_size_bytes > too_few // self.page_size_bytes

    def sentences(self) -> tuple[str, ...]:
        """The explanation in words."""
        out = [
            f"{self.num_blocks:,} blocks of {self.block_size} tokens",
            f"a block takes {self.low_bytes_per_block:,} to {self.high_bytes_per_block:,} bytes"
            f" ({self.low_bytes_per_block / MIB:.3f} MiB); the range is that of the GiB figure's last decimal",
        ]
        if self.model_candidates:
            out.append("the model's layers give such a block with " + "; or ".join(map(str, self.model_candidates)))
        elif self.page_size_bytes is not None:
            out.append(self._geometry_sentence(self.page_size_bytes))
        elif self.stacks:
            out.append("the model's layers do not: " + "; ".join(map(str, self.stacks[:6])))
        if self.candidates:
            out.append("stacks of equal layers that give such a block: " + "; ".join(map(str, self.candidates[:8])))
        elif not self.model_candidates and not (self.page_size_bytes is not None and self.is_whole):
            out.append(
                f"no stack of up to {MAX_LAYERS} equal layers of usual heads, sizes and dtypes gives such a block. What"
                " could: layers of several sizes (an indexer, a draft model's layer, full and sliding layers that"
                " differ), pages padded to one size, scales stored beside quantised elements, several groups, where the"
                " logged tokens are concurrency x max_model_len and not blocks x block size, or a GiB line of another"
                " rank than the one that decides the pool"
            )
        return tuple(out)

    def _geometry_sentence(self, page: int) -> str:
        low, high = self.low_bytes_per_block, self.high_bytes_per_block
        layers, rest = divmod(high, page)
        if self.is_whole:
            return f"{layers} layers with pages of {page:,} B give such a block"
        return (
            f"layers with pages of {page:,} B would have to be {low / page:.3f} to {high / page:.3f} in number:"
            f" {layers} leave {max(low - layers * page, 0):,} to {rest:,} bytes of every block unexplained,"
            f" {layers + 1} would not fit"
        )


def explain_pool(
    available: GibFigure,
    kv_cache_tokens: int,
    block_size: int,
    page_size_bytes: int | None = None,
    stacks: tuple[ModelStack, ...] = (),
) -> PoolExplanation:
    """Derive blocks and bytes per block from two logged lines.

    `num_blocks = floor(available / bytes_per_block)`, so bytes_per_block lies above available / (num_blocks + 1) and at
    most at available / num_blocks, over every amount that prints as the logged figure.

    Args:
        available: the figure of "Available KV cache memory".
        kv_cache_tokens: the figure of "GPU KV cache size".
        block_size: tokens per block.
        page_size_bytes: page of one layer of a geometry to check.
        stacks: the layers of a model to check.

    Raises:
        InputError: the tokens are not a whole number of blocks.
    """
    if block_size < 1 or kv_cache_tokens < 1 or kv_cache_tokens % block_size:
        raise InputError(
            f"{kv_cache_tokens:,} tokens are no whole number of blocks of {block_size} tokens; give the server's"
            " block_size, or the tokens stand for several groups (concurrency x max_model_len)"
        )
    num_blocks = kv_cache_tokens // block_size
    low_available, high_available = available.range_bytes
    low = low_available // (num_blocks + 1) + 1
    high = high_available // num_blocks
    return PoolExplanation(
        num_blocks=num_blocks,
        block_size=block_size,
        low_bytes_per_block=low,
        high_bytes_per_block=high,
        candidates=uniform_stacks(low, high, block_size),
        page_size_bytes=page_size_bytes,
        stacks=stacks,
    )


def uniform_stacks(low_bytes: int, high_bytes: int, block_size: int) -> tuple[UniformStack, ...]:
    """Stacks of equal layers whose block lies within the range, fewest layers first."""
    pages = [
        (heads, size, dtype, False, 2 * heads * size) for heads in _HEADS for size in _HEAD_SIZES for dtype in _DTYPES
    ]
    pages += [(1, size, dtype, True, size) for size in _LATENT_SIZES for dtype in _DTYPES]
    found: list[UniformStack] = []
    for heads, size, dtype, is_latent, elements in pages:
        page_bytes = elements * block_size * BITS_PER_ELEMENT[dtype] // 8
        most = min(high_bytes // page_bytes, MAX_LAYERS)
        found.extend(
            UniformStack(
                num_layers=num_layers,
                num_kv_heads=heads,
                head_size=size,
                dtype=dtype,
                is_latent=is_latent,
                bytes_per_block=num_layers * page_bytes,
            )
            for num_layers in range(-(-low_bytes // page_bytes), most + 1)
        )
    return tuple(sorted(found, key=lambda stack: (stack.num_layers, stack.dtype, stack.num_kv_heads)))
