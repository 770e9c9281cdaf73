"""Explains a pool whose configuration is not known, from two lines of a server's log: blocks, and the bytes of one.

The bytes of a block are compared with stacks of equal layers, and with the layers of a model where one is given.
"""

from collections import Counter
from collections.abc import Sequence

import attrs

from ..errors import InputError
from ..models.geometry import ModelGeometry
from ..models.layer_cache import AttentionCache, CachePart, LatentCache, LayerCache
from ..planner.cache_dtype import BITS_PER_ELEMENT, known_cache_dtypes
from ..planner.parallel import tensor_parallel_spec
from ..quantities import MIB
from .startup_log import GibFigure

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
