"""KV cache specs: one small class per cache kind, which knows the bytes of a page and the blocks of a request.

A page is the memory of one block in one layer: `[num_head_slots, states per block, state_content_bytes]`. The rules are
those of vLLM 0.32, fixed by the recorded planning cases (`spec_page_size_bytes`, `request_bytes_at_max_model_len`).

    >>> spec = FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128, dtype="bf16")
    >>> spec.page_size_bytes
    65536
"""

import abc
import math
from fractions import Fraction
from typing import ClassVar, Literal

import attrs

from ..errors import InputError, non_negative, one_of, positive
from .cache_dtype import BITS_PER_ELEMENT, PackedHead, ScaleStorage, canonical_dtype, packed_bytes

StateCacheMode = Literal["none", "align", "all"]
"""When state layers keep snapshots for prefix caching: never, at aligned boundaries, or for every block."""


@attrs.frozen(kw_only=True)
class ServingLimits:
    """Limits that bound the blocks which one request can hold at once, whatever the model.

    Attributes:
        max_model_len: longest sequence of one request, tokens.
        max_in_flight_tokens: concurrent batches x max_num_batched_tokens; only windowed and chunked layers need it.
        max_encoder_tokens: longest encoder input of one request, tokens; only cross attention needs it.
        decode_context_parallel_size: ranks that the tokens of full-attention layers are spread over (DCP).
        state_cache_mode: when state layers keep snapshots; only state layers need it.
    """

    max_model_len: int = attrs.field(validator=positive)
    max_in_flight_tokens: int | None = attrs.field(default=None, validator=attrs.validators.optional(positive))
    max_encoder_tokens: int | None = attrs.field(default=None, validator=attrs.validators.optional(non_negative))
    decode_context_parallel_size: int = attrs.field(default=1, validator=positive)
    state_cache_mode: StateCacheMode | None = attrs.field(
        default=None, validator=attrs.validators.optional(one_of("none", "align", "all"))
    )


@attrs.frozen
class Term:
    """One part of a page or of a cell (one head slot of one stored state): keys and values, scales, or padding.

    Attributes:
        name: what the bytes hold.
        num_bytes: bytes of this part.
        formula: how they are computed, with the numbers substituted.
    """

    name: str
    num_bytes: int
    formula: str


@attrs.frozen(kw_only=True)
class KVCacheSpec(abc.ABC):
    """The KV cache of one layer on one rank.

    Attributes:
        block_size: tokens that one block covers.
        page_size_padded: bytes to which the page is padded, so that layers of different pages can share a pool.
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
    def cell_terms(self) -> tuple[Term, ...]:
        """Parts of one cell (the C axis): what one head slot of one state stores."""

    @property
    @abc.abstractmethod
    def token_slots_key(self) -> tuple[object, ...]:
        """Equal for layers that always need the same number of token slots; such layers may share a block table."""

    @abc.abstractmethod
    def max_blocks_per_request(self, limits: ServingLimits) -> int:
        """Most blocks that one request can hold at once.

        Raises:
            InputError: `limits` lacks a value that this kind depends on.
        """

    @abc.abstractmethod
    def _max_blocks_text(self, limits: ServingLimits) -> str: ...

    def max_blocks_formula(self, limits: ServingLimits) -> str:
        """How `max_blocks_per_request` is computed, with the numbers substituted.

        Raises:
            InputError: as `max_blocks_per_request`.
        """
        num_blocks = self.max_blocks_per_request(limits)
        return f"{self._max_blocks_text(limits)} = {num_blocks:,}"

    @abc.abstractmethod
    def floor_bytes(self, num_tokens: int) -> int:
        """Fewest bytes that a sequence of `num_tokens` tokens occupies in this layer, before rounding to blocks."""

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
    def page_terms(self) -> tuple[Term, ...]:
        """Parts of one page; they add up to `page_size_bytes`."""
        num_cells = self.num_head_slots * self.states_per_block(self.block_size)
        cells = self._cells_text()
        terms = [Term(term.name, num_cells * term.num_bytes, f"{cells} x {term.formula}") for term in self.cell_terms]
        padding_bytes = self.page_size_bytes - self.unpadded_page_size_bytes
        if padding_bytes:
            text = f"{self.page_size_bytes:,} B padded page - {self.unpadded_page_size_bytes:,} B"
            terms.append(Term("padding", padding_bytes, text))
        return tuple(terms)

    def with_page_size(self, page_size_bytes: int) -> "KVCacheSpec":
        """Return the same cache padded to a page of `page_size_bytes`."""
        return attrs.evolve(self, page_size_padded=page_size_bytes)

    def with_block_size(self, block_size: int) -> "KVCacheSpec":
        """Return the same cache in blocks of `block_size` tokens; a padded page is scaled with it."""
        padded = self.page_size_padded
        if padded is not None:
            padded = padded * block_size // self.block_size
        return attrs.evolve(self, block_size=block_size, page_size_padded=padded)

    def formula(self) -> str:
        """How the page is computed, with the numbers substituted: one line per part and one for the page."""
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
    """Stores one key and one value vector per token and KV head.

    Attributes:
        num_kv_heads: KV heads on this rank (already divided by tensor parallelism).
        head_size: elements of one key vector.
        head_size_v: elements of one value vector; equal to `head_size` unless given, 0 where no value is stored.
        dtype: dtype of the elements.
        scales: scales stored beside quantised elements.
        packed: the slot of a head's key and value, where they differ in bits; `dtype` is then uint8.
    """

    num_kv_heads: int = attrs.field(validator=positive)
    head_size: int = attrs.field(validator=positive)
    head_size_v: int = attrs.field(
        default=attrs.Factory(lambda self: self.head_size, takes_self=True), validator=non_negative
    )
    dtype: str = attrs.field(converter=canonical_dtype)
    scales: ScaleStorage | None = None
    packed: PackedHead | None = None

    @property
    def num_head_slots(self) -> int:
        """One slot per KV head."""
        return self.num_kv_heads

    def states_per_block(self, block_size: int) -> int:
        """One state per token."""
        return block_size

    @property
    def cell_terms(self) -> tuple[Term, ...]:
        """Keys and values, and their scales."""
        if self.packed is not None:
            sizes = (self.head_size, self.head_size_v)
            text = self.packed.formula(*sizes)
            return (Term("packed keys and values", self.packed.bytes_for(*sizes), text),)
        return _vector_terms("keys and values", (self.head_size, self.head_size_v), self.dtype, self.scales)

    def floor_bytes(self, num_tokens: int) -> int:
        """Every token is kept."""
        return num_tokens * self.num_kv_heads * self.state_content_bytes


@attrs.frozen(kw_only=True)
class FullAttentionSpec(AttentionSpec):
    """Full attention (MHA, GQA, MQA): keeps every token of the sequence.

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
        return _every_token_blocks(self.block_size, limits)

    def _max_blocks_text(self, limits: ServingLimits) -> str:
        return _every_token_text(self.block_size, limits)


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
        """Blocks of the window and the tokens in flight, and one more because a window may start inside a block.

        Raises:
            InputError: under DCP, which does not shard windows, or without `max_in_flight_tokens`.
        """
        if limits.decode_context_parallel_size > 1:
            raise InputError(
                f"decode_context_parallel_size {limits.decode_context_parallel_size} does not support sliding-window "
                "layers; use 1"
            )
        num_tokens = min(self.sliding_window - 1 + _required_in_flight(limits, self.kind), limits.max_model_len)
        return math.ceil(num_tokens / self.block_size) + 1

    def _max_blocks_text(self, limits: ServingLimits) -> str:
        held = f"{self.sliding_window} window - 1 + {limits.max_in_flight_tokens} in flight"
        return f"ceil(min({held}, {limits.max_model_len} tokens) / {self.block_size}) + 1"

    def floor_bytes(self, num_tokens: int) -> int:
        """The last `sliding_window` tokens are kept."""
        return min(num_tokens, self.sliding_window) * self.num_kv_heads * self.state_content_bytes


@attrs.frozen(kw_only=True)
class ChunkedLocalSpec(AttentionSpec):
    """Chunked-local attention (Llama 4): a token attends back to the start of its own chunk."""

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
        num_tokens = min(self.attention_chunk_size + _required_in_flight(limits, self.kind), limits.max_model_len)
        return math.ceil(num_tokens / self.block_size)

    def _max_blocks_text(self, limits: ServingLimits) -> str:
        held = f"{self.attention_chunk_size} chunk + {limits.max_in_flight_tokens} in flight"
        return f"ceil(min({held}, {limits.max_model_len} tokens) / {self.block_size})"

    def floor_bytes(self, num_tokens: int) -> int:
        """At most one chunk is kept."""
        return min(num_tokens, self.attention_chunk_size) * self.num_kv_heads * self.state_content_bytes


@attrs.frozen(kw_only=True)
class CrossAttentionSpec(AttentionSpec):
    """Cross attention of an encoder-decoder model: keeps the encoder's tokens for the whole request.

    The tokens of `floor_bytes` are the encoder's.
    """

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
        return math.ceil(required_encoder_tokens(limits) / self.block_size)

    def _max_blocks_text(self, limits: ServingLimits) -> str:
        return f"ceil({limits.max_encoder_tokens} encoder tokens / {self.block_size})"


def _vector_terms(name: str, sizes: tuple[int, ...], dtype: str, scales: ScaleStorage | None) -> tuple[Term, ...]:
    """Parts of a cell that stores vectors of `sizes` elements: the elements, and the scales as a part of their own."""
    sizes_text = " + ".join(str(size) for size in sizes)
    element_bytes = BITS_PER_ELEMENT[dtype] / 8
    text = f"({sizes_text}) x {element_bytes:g} B ({dtype})"
    terms = [Term(name, sum(packed_bytes(dtype, size) for size in sizes), text)]
    if scales is not None:
        scale_bytes = [scales.bytes_for(size) for size in sizes]
        scale_text = " + ".join(str(num_bytes) for num_bytes in scale_bytes)
        terms.append(Term("scales", sum(scale_bytes), f"({scale_text}) B"))
    return tuple(terms)


def _every_token_blocks(block_size: int, limits: ServingLimits) -> int:
    """Blocks of a layer that keeps every token; each DCP rank keeps an equal share of them."""
    tokens_on_rank = math.ceil(limits.max_model_len / limits.decode_context_parallel_size)
    return math.ceil(tokens_on_rank / block_size)


def _every_token_text(block_size: int, limits: ServingLimits) -> str:
    """The formula of `_every_token_blocks` with the numbers substituted."""
    shards = limits.decode_context_parallel_size
    tokens = (
        f"{limits.max_model_len} tokens" if shards == 1 else f"ceil({limits.max_model_len} tokens / {shards} ranks)"
    )
    return f"ceil({tokens} / {block_size})"


def _required_in_flight(limits: ServingLimits, kind: str) -> int:
    """Return `max_in_flight_tokens`, which windowed and chunked layers need.

    Raises:
        InputError: it was not given.
    """
    if limits.max_in_flight_tokens is None:
        raise InputError(
            f"{kind} layers need max_in_flight_tokens (concurrent batches x max_num_batched_tokens): blocks leave the "
            "window only when a step is done"
        )
    return limits.max_in_flight_tokens


def required_encoder_tokens(limits: ServingLimits) -> int:
    """Return `max_encoder_tokens`, which cross-attention layers need.

    Raises:
        InputError: it was not given.
    """
    if limits.max_encoder_tokens is None:
        raise InputError("cross-attention layers need max_encoder_tokens, the longest encoder input in tokens")
    return limits.max_encoder_tokens


@attrs.frozen(kw_only=True)
class LatentSpec(KVCacheSpec):
    """Stores one vector per state, shared by all heads; every tensor-parallel rank holds it whole."""

    @property
    def num_head_slots(self) -> int:
        """One slot: the vector serves all heads, so tensor parallelism never divides it."""
        return 1

    @property
    def token_slots_key(self) -> tuple[object, ...]:
        """Every token is kept, as in full attention."""
        return ("full",)

    def max_blocks_per_request(self, limits: ServingLimits) -> int:
        """Blocks of the whole sequence, divided over the DCP ranks."""
        return _every_token_blocks(self.block_size, limits)

    def _max_blocks_text(self, limits: ServingLimits) -> str:
        return _every_token_text(self.block_size, limits)

    def states_per_block(self, block_size: int) -> int:
        """One state per token."""
        return block_size

    def floor_bytes(self, num_tokens: int) -> int:
        """Every state is kept."""
        return self.states_per_block(num_tokens) * self.state_content_bytes


@attrs.frozen(kw_only=True)
class MLASpec(LatentSpec):
    """Multi-head latent attention: one latent vector per token, no factor 2 for K and V (DeepSeek V2/V3, Kimi K2).

    Attributes:
        head_size: elements of the latent, kv_lora_rank + qk_rope_head_dim.
        dtype: dtype of the elements.
        scales: scales stored beside quantised elements.
    """

    kind: ClassVar[str] = "mla"

    head_size: int = attrs.field(validator=positive)
    dtype: str = attrs.field(converter=canonical_dtype)
    scales: ScaleStorage | None = None

    @property
    def cell_terms(self) -> tuple[Term, ...]:
        """The latent, and its scales."""
        return _vector_terms("latent", (self.head_size,), self.dtype, self.scales)


@attrs.frozen(kw_only=True)
class CompressedStateSpec(LatentSpec):
    """States that each cover several tokens (DeepSeek V4's compressed layers and their indexer).

    Attributes:
        tokens_per_state: tokens that one state covers; divides the block size.
        head_size: elements of one state.
        dtype: dtype of the elements.
        scales: scales stored beside quantised elements.
    """

    kind: ClassVar[str] = "compressed"

    tokens_per_state: int = attrs.field(validator=positive)
    head_size: int = attrs.field(validator=positive)
    dtype: str = attrs.field(converter=canonical_dtype)
    scales: ScaleStorage | None = None

    def __attrs_post_init__(self) -> None:
        if self.block_size % self.tokens_per_state:
            raise InputError(
                f"CompressedStateSpec: a block of {self.block_size} tokens is not a whole number of states of "
                f"{self.tokens_per_state} tokens; use a block size that is a multiple of {self.tokens_per_state}"
            )
        super().__attrs_post_init__()

    def states_per_block(self, block_size: int) -> int:
        """One state per `tokens_per_state` complete tokens."""
        return block_size // self.tokens_per_state

    @property
    def cell_terms(self) -> tuple[Term, ...]:
        """The compressed state, and its scales."""
        return _vector_terms("compressed state", (self.head_size,), self.dtype, self.scales)

    def _cells_text(self) -> str:
        return f"{self.block_size} tokens / {self.tokens_per_state} tokens a state"


@attrs.frozen(kw_only=True)
class OpaqueSpec(LatentSpec):
    """A packed per-token format known only by its size, e.g. the 656 bytes of DeepSeek's sparse fp8 MLA.

    Attributes:
        opaque_bytes_per_token: bytes that one token takes in this layer, everything included.
        parts: how they are computed, if that is known.
    """

    kind: ClassVar[str] = "opaque"

    opaque_bytes_per_token: int = attrs.field(validator=positive)
    parts: str = ""

    @property
    def cell_terms(self) -> tuple[Term, ...]:
        """The packed token."""
        size = self.opaque_bytes_per_token
        return (Term("packed token", size, f"({self.parts})" if self.parts else f"{size} B"),)


@attrs.frozen
class StateArray:
    """One array of a fixed state.

    Attributes:
        shape: elements along each axis, on this rank.
        dtype: dtype of the elements.
        name: what it holds (`conv`, `recurrent`).
        tp_axis: axis that tensor parallelism divides; None: every rank holds the whole array.
    """

    shape: tuple[int, ...] = attrs.field(converter=tuple)
    dtype: str = attrs.field(converter=canonical_dtype)
    name: str = "state"
    tp_axis: int | None = None

    def __attrs_post_init__(self) -> None:
        if not self.shape or any(size < 1 for size in self.shape):
            raise InputError(f"StateArray.shape is {self.shape!r}; every axis must be at least 1")
        if self.tp_axis is not None and not 0 <= self.tp_axis < len(self.shape):
            raise InputError(f"StateArray.tp_axis is {self.tp_axis}; the shape {self.shape!r} has no such axis")

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole array."""
        return packed_bytes(self.dtype, math.prod(self.shape))


@attrs.frozen(kw_only=True)
class MambaLikeSpec(KVCacheSpec):
    """A state of fixed size per sequence (Mamba, gated delta nets, KDA): one page holds one whole state.

    Attributes:
        states: the arrays of one state, on this rank.
        num_speculative_blocks: further states that one request holds for draft tokens.
    """

    kind: ClassVar[str] = "mamba"

    states: tuple[StateArray, ...] = attrs.field(converter=tuple)
    num_speculative_blocks: int = attrs.field(default=0, validator=non_negative)

    @property
    def num_head_slots(self) -> int:
        """One slot: a page is one state."""
        return 1

    def states_per_block(self, block_size: int) -> int:
        """One state, whatever the number of tokens."""
        return 1

    @property
    def cell_terms(self) -> tuple[Term, ...]:
        """Each array of the state."""
        return tuple(
            Term(
                array.name,
                array.num_bytes,
                f"{' x '.join(str(size) for size in array.shape)} x {BITS_PER_ELEMENT[array.dtype] / 8:g} B "
                f"({array.dtype})",
            )
            for array in self.states
        )

    @property
    def bytes_per_token(self) -> Fraction:
        """A fixed state does not grow with the sequence."""
        return Fraction(0)

    @property
    def token_slots_key(self) -> tuple[object, ...]:
        """State layers of one page size and one number of speculative states need the same slots."""
        return ("mamba", self.num_speculative_blocks, self.page_size_bytes)

    def max_blocks_per_request(self, limits: ServingLimits) -> int:
        """One state; one more in `align` mode for the snapshot; one per block in `all` mode; drafts on top.

        Raises:
            InputError: without `state_cache_mode`.
        """
        if limits.state_cache_mode is None:
            raise InputError("state layers need state_cache_mode: 'none', 'align' or 'all'")
        if limits.state_cache_mode == "all":
            num_states = math.ceil(limits.max_model_len / self.block_size)
        else:
            num_states = 2 if limits.state_cache_mode == "align" else 1
        return num_states + self.num_speculative_blocks

    def _max_blocks_text(self, limits: ServingLimits) -> str:
        states = {
            "none": "1 state",
            "align": "1 state + 1 snapshot",
            "all": f"ceil({limits.max_model_len} tokens / {self.block_size}) snapshots",
            None: "",
        }[limits.state_cache_mode]
        return f"{states} + {self.num_speculative_blocks} for drafts"

    def floor_bytes(self, num_tokens: int) -> int:
        """One state, whatever the number of tokens."""
        return self.state_content_bytes

    def with_block_size(self, block_size: int) -> "MambaLikeSpec":
        """Return the same state: its page does not depend on the block size."""
        return attrs.evolve(self, block_size=block_size)

    def _cells_text(self) -> str:
        return "1 state"
