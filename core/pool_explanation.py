"""The reverse question: which blocks two lines of a start-up log stand for, and which geometry they could be.

"41.73 GiB" and "261,648 tokens" fix the number of blocks, and the bytes of a block up to the decimals that were
printed. What does not follow from the two lines is not invented: stacks of equal layers are tried, and what remains
is named.
"""

import attrs

from .cache_dtype import BITS_PER_ELEMENT
from .errors import InputError
from .quantities import MIB
from .startup_log import GibFigure

MAX_LAYERS = 160
_HEADS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 28, 32, 40, 48, 64)
_HEAD_SIZES = (64, 80, 96, 112, 120, 128, 160, 192, 256, 512)
_LATENT_SIZES = (320, 512, 576, 640)
_DTYPES = ("bf16", "fp8_e4m3", "fp32", "int4")


@attrs.frozen(kw_only=True)
class UniformStack:
    """Equal layers whose pages add up to a block of the right size."""

    num_layers: int
    num_kv_heads: int
    head_size: int
    dtype: str
    is_latent: bool
    bytes_per_block: int

    def __str__(self) -> str:
        """In words."""
        shape = f"latent of {self.head_size}" if self.is_latent else f"{self.num_kv_heads} KV heads x {self.head_size}"
        return f"{self.num_layers} layers of {shape} in {self.dtype} ({self.bytes_per_block:,} B a block)"


@attrs.frozen(kw_only=True)
class PoolExplanation:
    """What the two lines fix.

    Attributes:
        num_blocks: of the pool.
        block_size: tokens of a block.
        low_bytes_per_block, high_bytes_per_block: smallest and largest block that fits both lines, in bytes.
        candidates: stacks of equal layers within that range.
        page_size_bytes: of one layer of the geometry asked about; None where none was.
        whole_layers: layers of that geometry that a block holds at most.
        remainder_low_bytes, remainder_high_bytes: what whole layers of it leave over in a block.
    """

    num_blocks: int
    block_size: int
    low_bytes_per_block: int
    high_bytes_per_block: int
    candidates: tuple[UniformStack, ...]
    page_size_bytes: int | None = None
    whole_layers: int = 0
    remainder_low_bytes: int = 0
    remainder_high_bytes: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether some whole number of layers of the geometry asked about gives a block within the range."""
        if self.page_size_bytes is None:
            return bool(self.candidates)
        most, too_few = self.high_bytes_per_block, self.low_bytes_per_block - 1
        return most // self.page_size_bytes > too_few // self.page_size_bytes

    def sentences(self) -> tuple[str, ...]:
        """The explanation in words."""
        out = [
            f"{self.num_blocks:,} blocks of {self.block_size} tokens",
            f"a block takes {self.low_bytes_per_block:,} to {self.high_bytes_per_block:,} bytes"
            f" ({self.low_bytes_per_block / MIB:.3f} MiB); the range is that of the GiB figure's last decimal",
        ]
        if self.page_size_bytes is not None:
            out.append(self._geometry_sentence())
        if self.candidates:
            out.append("stacks of equal layers that give such a block: " + "; ".join(map(str, self.candidates[:8])))
        elif not (self.page_size_bytes is not None and self.is_whole):
            out.append(
                f"no stack of up to {MAX_LAYERS} equal layers of usual heads, sizes and dtypes gives such a block. What"
                " could: layers of several sizes (an indexer, a draft model's layer, full and sliding layers that"
                " differ), pages padded to one size, scales stored beside quantised elements, several groups, where the"
                " logged tokens are concurrency x max_model_len and not blocks x block size, or a GiB line of another"
                " rank than the one that decides the pool"
            )
        return tuple(out)

    def _geometry_sentence(self) -> str:
        page = self.page_size_bytes or 1
        low, high = self.low_bytes_per_block / page, self.high_bytes_per_block / page
        if self.is_whole:
            return f"{self.high_bytes_per_block // page} layers with pages of {page:,} B give such a block"
        return (
            f"layers with pages of {page:,} B would have to be {low:.3f} to {high:.3f} in number:"
            f" {self.whole_layers} leave {self.remainder_low_bytes:,} to {self.remainder_high_bytes:,} bytes of every"
            f" block unexplained, {self.whole_layers + 1} would not fit"
        )


def explain_pool(
    available: GibFigure, kv_cache_tokens: int, block_size: int, page_size_bytes: int | None = None
) -> PoolExplanation:
    """What the two logged lines fix.

    `num_blocks = floor(available / bytes_per_block)`, so bytes_per_block lies above available / (num_blocks + 1) and at
    most at available / num_blocks, over every amount that prints as the logged figure.

    Args:
        available: "Available KV cache memory".
        kv_cache_tokens: "GPU KV cache size".
        block_size: tokens of a block.
        page_size_bytes: of one layer of a geometry to check against.

    Raises:
        InputError: the tokens are no whole number of blocks.
    """
    if block_size < 1 or kv_cache_tokens < 1 or kv_cache_tokens % block_size:
        raise InputError(
            f"{kv_cache_tokens:,} tokens are no whole number of blocks of {block_size} tokens; give the server's"
            " --block-size, or the tokens stand for several groups (concurrency x max_model_len)"
        )
    num_blocks = kv_cache_tokens // block_size
    low_available, high_available = available.range_bytes
    low = low_available // (num_blocks + 1) + 1
    high = high_available // num_blocks
    whole = high // page_size_bytes if page_size_bytes else 0
    return PoolExplanation(
        num_blocks=num_blocks,
        block_size=block_size,
        low_bytes_per_block=low,
        high_bytes_per_block=high,
        candidates=uniform_stacks(low, high, block_size),
        page_size_bytes=page_size_bytes,
        whole_layers=whole,
        remainder_low_bytes=max(low - whole * page_size_bytes, 0) if page_size_bytes else 0,
        remainder_high_bytes=high - whole * page_size_bytes if page_size_bytes else 0,
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
