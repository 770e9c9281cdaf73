"""What one layer's KV cache stores: one small class per cache kind, each of which knows the bytes of its page.

A page is the memory of one block in one layer: `[num_head_slots, states per block, state_content_bytes]`. The rules are
those of vLLM 0.32, fixed by the recorded planning cases (`spec_page_size_bytes`, `request_bytes_at_max_model_len`).

    >>> spec = FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128, dtype="bf16")
    >>> spec.page_size_bytes
    65536
"""

import abc
import math
from fractions import Fraction
from typing import ClassVar

import attrs

from .cache_dtype import BITS_PER_ELEMENT, ScaleStorage, canonical_dtype, packed_bytes
from .errors import InputError
from .serving_limits import ServingLimits
from .validators import non_negative, positive


@attrs.frozen
class PageTerm:
    """One line of a page's bill: keys and values, scales, or padding.

    Attributes:
        name: what the bytes hold.
        num_bytes: bytes of this term in one block of one layer.
        formula: how they come about, with the numbers substituted.
    """

    name: str
    num_bytes: int
    formula: str


@attrs.frozen
class CellTerm:
    """Bytes that one term takes in one cell, that is for one head slot and one stored state."""

    name: str
    num_bytes: int
    formula: str


@attrs.frozen(kw_only=True)
class KVCacheSpec(abc.ABC):
    """The KV cache of one layer on one rank.

    Attributes:
        block_size: tokens that one block covers.
        page_size_padded: bytes that the page is padded to, so that layers of different pages can share a pool.
    """

    kind: ClassVar[str]

    block_size: int = attrs.field(validator=positive)
    page_size_padded: int | None = attrs.field(default=None, validator=attrs.validators.optional(positive))

    def __attrs_post_init__(self) -> None:
        page_bytes = self.unpadded_page_size_bytes
        if self.page_size_padded is not None and self.page_size_padded < page_bytes:
            raise InputError(
                f"{type(self).__name__}.page_size_padded is {self.page_size_padded:,} bytes, less than the page itself "
                f"({page_bytes:,} bytes)"
            )

    @property
    @abc.abstractmethod
    def num_head_slots(self) -> int:
        """Head slots (the H axis) of a page."""

    @abc.abstractmethod
    def states_per_block(self, block_size: int) -> int:
        """Stored states (the N axis) in a block of `block_size` tokens."""

    @property
    @abc.abstractmethod
    def cell_terms(self) -> tuple[CellTerm, ...]:
        """The bill of one cell (the C axis): what one head slot of one state stores."""

    @property
    @abc.abstractmethod
    def token_slots_key(self) -> tuple[object, ...]:
        """Equal for layers that always need equally many token slots; such layers may share a block table."""

    @abc.abstractmethod
    def max_blocks_per_request(self, limits: ServingLimits) -> int:
        """Most blocks that one request can hold at once.

        Raises:
            InputError: `limits` lacks a value that this kind depends on.
        """

    @abc.abstractmethod
    def max_blocks_formula(self, limits: ServingLimits) -> str:
        """How `max_blocks_per_request` comes about, with the numbers substituted.

        Raises:
            InputError: as `max_blocks_per_request`.
        """

    @abc.abstractmethod
    def floor_bytes(self, num_tokens: int) -> int:
        """Bytes that a sequence of `num_tokens` tokens occupies at least in this layer, before rounding to blocks."""

    @property
    def state_content_bytes(self) -> int:
        """Bytes of one cell: one head slot of one state, scales included."""
        return sum(term.num_bytes for term in self.cell_terms)

    @property
    def unpadded_page_size_bytes(self) -> int:
        """Bytes of one block of this layer, without padding."""
        return self.num_head_slots * self.states_per_block(self.block_size) * self.state_content_bytes

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block of this layer."""
        return self.page_size_padded if self.page_size_padded is not None else self.unpadded_page_size_bytes

    @property
    def bytes_per_token(self) -> Fraction:
        """Bytes that one more token adds in this layer, before rounding to blocks; 0 for a fixed state."""
        return Fraction(self.unpadded_page_size_bytes, self.block_size)

    @property
    def page_terms(self) -> tuple[PageTerm, ...]:
        """The page's bill, line by line; the lines add up to `page_size_bytes`."""
        num_cells = self.num_head_slots * self.states_per_block(self.block_size)
        cells_text = self._cells_text()
        terms = [
            PageTerm(cell.name, num_cells * cell.num_bytes, f"{cells_text} x {cell.formula}")
            for cell in self.cell_terms
        ]
        padding_bytes = self.page_size_bytes - self.unpadded_page_size_bytes
        if padding_bytes:
            text = f"{self.page_size_bytes:,} B padded page - {self.unpadded_page_size_bytes:,} B"
            terms.append(PageTerm("padding", padding_bytes, text))
        return tuple(terms)

    def max_memory_usage_bytes(self, limits: ServingLimits) -> int:
        """Most bytes that one request can hold in this layer, in whole blocks."""
        return self.max_blocks_per_request(limits) * self.page_size_bytes

    def with_page_size(self, page_size_bytes: int) -> "KVCacheSpec":
        """The same cache padded to a page of `page_size_bytes`."""
        return attrs.evolve(self, page_size_padded=page_size_bytes)

    def with_block_size(self, block_size: int) -> "KVCacheSpec":
        """The same cache in blocks of `block_size` tokens; a padded page is scaled with it."""
        padded = self.page_size_padded
        if padded is not None:
            padded = padded * block_size // self.block_size
        return attrs.evolve(self, block_size=block_size, page_size_padded=padded)

    def formula(self) -> str:
        """How the page comes about, with the numbers substituted; one line per term and one for the page."""
        lines = [f"{term.name}: {term.formula} = {term.num_bytes:,} B" for term in self.page_terms]
        per_token = self.bytes_per_token
        token_text = f"{int(per_token):,}" if per_token.denominator == 1 else f"{float(per_token):,.3f}"
        lines.append(
            f"page: {self.page_size_bytes:,} B a block of {self.block_size} tokens a layer, {token_text} B a token"
        )
        return "\n".join(lines)

    def _cells_text(self) -> str:
        return f"{self.states_per_block(self.block_size)} tokens x {self.num_head_slots} heads"


@attrs.frozen(kw_only=True)
class AttentionSpec(KVCacheSpec):
    """A cache of one key and one value vector per token and KV head.

    Attributes:
        num_kv_heads: KV heads on this rank (already divided by tensor parallelism).
        head_size: elements of one key vector.
        head_size_v: elements of one value vector; equal to `head_size` unless given, 0 where no value is stored.
        dtype: dtype of the elements.
        scales: scales stored beside quantised elements.
    """

    num_kv_heads: int = attrs.field(validator=positive)
    head_size: int = attrs.field(validator=positive)
    head_size_v: int = attrs.field(
        default=attrs.Factory(lambda self: self.head_size, takes_self=True), validator=non_negative
    )
    dtype: str = attrs.field(converter=canonical_dtype)
    scales: ScaleStorage | None = None

    @property
    def num_head_slots(self) -> int:
        """One slot per KV head."""
        return self.num_kv_heads

    def states_per_block(self, block_size: int) -> int:
        """One state per token."""
        return block_size

    @property
    def cell_terms(self) -> tuple[CellTerm, ...]:
        """Keys and values, and their scales."""
        return vector_cell_terms("keys and values", (self.head_size, self.head_size_v), self.dtype, self.scales)

    def floor_bytes(self, num_tokens: int) -> int:
        """Every token is kept."""
        return num_tokens * self.num_kv_heads * self.state_content_bytes


@attrs.frozen(kw_only=True)
class FullAttentionSpec(AttentionSpec):
    """Full attention (MHA, GQA, MQA): every token of the sequence is kept.

    Attributes:
        sliding_window: window of a sliding layer that is sized like a full one (hybrid allocation is off).
        attention_chunk_size: chunk of a chunked-local layer that is sized like a full one.
    """

    kind: ClassVar[str] = "full"

    sliding_window: int | None = attrs.field(default=None, validator=attrs.validators.optional(positive))
    attention_chunk_size: int | None = attrs.field(default=None, validator=attrs.validators.optional(positive))

    @property
    def token_slots_key(self) -> tuple[object, ...]:
        """All layers that keep every token need the same slots."""
        return ("full",)

    def max_blocks_per_request(self, limits: ServingLimits) -> int:
        """Blocks of the whole sequence, divided over the DCP ranks."""
        return every_token_blocks(self.block_size, limits)

    def max_blocks_formula(self, limits: ServingLimits) -> str:
        """`max_blocks_per_request` with the numbers substituted."""
        return every_token_formula(self.block_size, limits)


@attrs.frozen(kw_only=True)
class SlidingWindowSpec(AttentionSpec):
    """Sliding-window attention: only the last `sliding_window` tokens are read again."""

    kind: ClassVar[str] = "sliding"

    sliding_window: int = attrs.field(validator=positive)

    @property
    def token_slots_key(self) -> tuple[object, ...]:
        """Layers of one window need the same slots."""
        return ("sliding", self.sliding_window)

    def max_blocks_per_request(self, limits: ServingLimits) -> int:
        """Blocks of the window before the tokens in flight, and one more since a window may start inside a block.

        Raises:
            InputError: under DCP, which does not shard windows, or without `max_in_flight_tokens`.
        """
        if limits.decode_context_parallel_size > 1:
            raise InputError(
                f"decode context parallelism of {limits.decode_context_parallel_size} does not support sliding-window "
                "layers; use a decode context parallel size of 1"
            )
        num_tokens = min(self.sliding_window - 1 + required_in_flight(limits, self.kind), limits.max_model_len)
        return math.ceil(num_tokens / self.block_size) + 1

    def max_blocks_formula(self, limits: ServingLimits) -> str:
        """`max_blocks_per_request` with the numbers substituted."""
        held = f"{self.sliding_window} window - 1 + {limits.max_in_flight_tokens} in flight"
        num_blocks = self.max_blocks_per_request(limits)
        return f"ceil(min({held}, {limits.max_model_len} tokens) / {self.block_size}) + 1 = {num_blocks:,}"

    def floor_bytes(self, num_tokens: int) -> int:
        """The last `sliding_window` tokens are kept."""
        return min(num_tokens, self.sliding_window) * self.num_kv_heads * self.state_content_bytes


@attrs.frozen(kw_only=True)
class ChunkedLocalSpec(AttentionSpec):
    """Chunked-local attention (Llama 4): a token reads back to the start of its own chunk."""

    kind: ClassVar[str] = "chunked"

    attention_chunk_size: int = attrs.field(validator=positive)

    @property
    def token_slots_key(self) -> tuple[object, ...]:
        """Layers of one chunk size need the same slots."""
        return ("chunked", self.attention_chunk_size)

    def max_blocks_per_request(self, limits: ServingLimits) -> int:
        """Blocks of one whole chunk and the tokens in flight.

        Raises:
            InputError: without `max_in_flight_tokens`.
        """
        num_tokens = min(self.attention_chunk_size + required_in_flight(limits, self.kind), limits.max_model_len)
        return math.ceil(num_tokens / self.block_size)

    def max_blocks_formula(self, limits: ServingLimits) -> str:
        """`max_blocks_per_request` with the numbers substituted."""
        held = f"{self.attention_chunk_size} chunk + {limits.max_in_flight_tokens} in flight"
        num_blocks = self.max_blocks_per_request(limits)
        return f"ceil(min({held}, {limits.max_model_len} tokens) / {self.block_size}) = {num_blocks:,}"

    def floor_bytes(self, num_tokens: int) -> int:
        """At most one chunk is kept."""
        return min(num_tokens, self.attention_chunk_size) * self.num_kv_heads * self.state_content_bytes


@attrs.frozen(kw_only=True)
class CrossAttentionSpec(AttentionSpec):
    """Cross attention of an encoder-decoder model: the encoder's tokens, kept for the whole request."""

    kind: ClassVar[str] = "cross"

    @property
    def token_slots_key(self) -> tuple[object, ...]:
        """All cross-attention layers need the slots of the encoder's tokens."""
        return ("cross",)

    def max_blocks_per_request(self, limits: ServingLimits) -> int:
        """Blocks of the longest encoder input.

        Raises:
            InputError: without `max_encoder_tokens`.
        """
        if limits.max_encoder_tokens is None:
            raise InputError("cross-attention layers need max_encoder_tokens, the longest encoder input in tokens")
        return math.ceil(limits.max_encoder_tokens / self.block_size)

    def max_blocks_formula(self, limits: ServingLimits) -> str:
        """`max_blocks_per_request` with the numbers substituted."""
        num_blocks = self.max_blocks_per_request(limits)
        return f"ceil({limits.max_encoder_tokens} encoder tokens / {self.block_size}) = {num_blocks:,}"

    def floor_bytes(self, num_tokens: int) -> int:
        """`num_tokens` are the encoder's tokens, all of which are kept."""
        return num_tokens * self.num_kv_heads * self.state_content_bytes


def vector_cell_terms(
    name: str, sizes: tuple[int, ...], dtype: str, scales: ScaleStorage | None
) -> tuple[CellTerm, ...]:
    """The bill of a cell that stores vectors of `sizes` elements, with their scales on a line of their own."""
    sizes_text = " + ".join(str(size) for size in sizes)
    element_bytes = BITS_PER_ELEMENT[dtype] / 8
    text = f"({sizes_text}) x {element_bytes:g} B ({dtype})"
    terms = [CellTerm(name, sum(packed_bytes(dtype, size) for size in sizes), text)]
    if scales is not None:
        scale_bytes = [scales.bytes_for(size) for size in sizes]
        scale_text = " + ".join(str(num_bytes) for num_bytes in scale_bytes)
        terms.append(CellTerm("scales", sum(scale_bytes), f"({scale_text}) B"))
    return tuple(terms)


def every_token_blocks(block_size: int, limits: ServingLimits) -> int:
    """Blocks of a layer that keeps every token; each DCP rank keeps an equal share of them."""
    tokens_on_rank = math.ceil(limits.max_model_len / limits.decode_context_parallel_size)
    return math.ceil(tokens_on_rank / block_size)


def every_token_formula(block_size: int, limits: ServingLimits) -> str:
    """`every_token_blocks` with the numbers substituted."""
    shards = limits.decode_context_parallel_size
    tokens = (
        f"{limits.max_model_len} tokens" if shards == 1 else f"ceil({limits.max_model_len} tokens / {shards} ranks)"
    )
    return f"ceil({tokens} / {block_size}) = {every_token_blocks(block_size, limits):,}"


def required_in_flight(limits: ServingLimits, kind: str) -> int:
    """`max_in_flight_tokens`, which windowed layers cannot be sized without.

    Raises:
        InputError: it was not given.
    """
    if limits.max_in_flight_tokens is None:
        raise InputError(
            f"{kind} layers need max_in_flight_tokens (concurrent batches x max_num_batched_tokens): blocks leave the "
            "window only when a step is done"
        )
    return limits.max_in_flight_tokens
