"""What the layers of a model store, independent of block size, cache dtype and number of ranks.

A `LayerCache` is a fact about an architecture; `spec` turns it into the pages of a deployment, and `floor_bytes`
is the least that one sequence occupies. Kinds and formulas: golden/model_kv_bytes.jsonl.
"""

import abc
import math
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, ClassVar

import attrs

from ..errors import InputError
from ..planner import specs
from ..planner.cache_dtype import BITS_PER_ELEMENT, PACKED_LATENT_SIZES, CacheFormat, PackedLatent, ScaleStorage
from ..planner.parallel import tensor_parallel_spec
from ..planner.specs import KVCacheSpec, StateArray


class CachePart(StrEnum):
    """The part of a sequence's bytes that a cache is counted in."""

    KV = "kv"  # keys and values, latents, compressed states: grows with the sequence
    INDEXER = "indexer"  # keys of a sparse-attention indexer: grows with the sequence
    STATE = "state"  # fixed per sequence


@attrs.frozen(kw_only=True)
class LayerCache(abc.ABC):
    """One cache of one layer."""

    label: ClassVar[str] = "attn"  # what the layer's name in `layer_specs` ends with

    part: CachePart = CachePart.KV  # the part of a sequence's bytes that it is counted in
    fixed_dtype: str | None = None  # the dtype that the model fixes whatever the cache dtype; None: the cache dtype
    fixed_scales: ScaleStorage | None = None  # scales stored beside elements of the fixed dtype

    def format(self, cache_format: CacheFormat) -> CacheFormat:
        """The storage format of this cache in a deployment with `cache_format`."""
        return cache_format if self.fixed_dtype is None else CacheFormat(self.fixed_dtype, self.fixed_scales)

    @abc.abstractmethod
    def spec(self, block_size: int, cache_format: CacheFormat) -> KVCacheSpec:
        """The pages of the whole layer (all heads, one rank)."""

    def floor_bytes(self, num_tokens: int, cache_format: CacheFormat) -> int:
        """Least bytes that a sequence of `num_tokens` tokens occupies, before any rounding to blocks."""
        return self.spec(1, cache_format).floor_bytes(num_tokens)

    @abc.abstractmethod
    def token_bytes_formula(self, cache_format: CacheFormat) -> str:
        """What one token (or one sequence, for a state) adds, with the numbers substituted."""

    def _shape(self, block_size: int, cache_format: CacheFormat) -> dict[str, Any]:
        """The fields that the specs of attention caches share."""
        storage = self.format(cache_format)
        return {"block_size": block_size, "dtype": storage.dtype, "scales": storage.scales}

    def _element_bytes(self, cache_format: CacheFormat, *sizes: int) -> str:
        storage = self.format(cache_format)
        text = f"{BITS_PER_ELEMENT[storage.dtype] / 8:g} B ({storage.dtype})"
        if storage.scales is None:
            return text
        return f"{text} + {' + '.join(str(storage.scales.bytes_for(size)) for size in sizes)} B of scales"


@attrs.frozen(kw_only=True)
class AttentionCache(LayerCache):
    """Keys and values of every token, of the last `sliding_window` tokens, or of the last chunk.

    At most one of `sliding_window` and `attention_chunk_size` is given. A token takes heads x (head_size +
    head_size_v) elements, and the scales.
    """

    num_kv_heads: int
    head_size: int
    head_size_v: int = attrs.field(default=attrs.Factory(lambda self: self.head_size, takes_self=True))
    sliding_window: int | None = None
    attention_chunk_size: int | None = None

    def spec(self, block_size: int, cache_format: CacheFormat) -> KVCacheSpec:
        shape: dict[str, Any] = {
            **self._shape(block_size, cache_format),
            "num_kv_heads": self.num_kv_heads,
            "head_size": self.head_size,
            "head_size_v": self.head_size_v,
        }
        packed = self.format(cache_format).packed
        if packed is not None:
            shape["packed"] = packed
        if self.sliding_window is not None:
            return specs.SlidingWindowSpec(**shape, sliding_window=self.sliding_window)
        if self.attention_chunk_size is not None:
            return specs.ChunkedLocalSpec(**shape, attention_chunk_size=self.attention_chunk_size)
        return specs.FullAttentionSpec(**shape)

    def token_bytes_formula(self, cache_format: CacheFormat) -> str:
        """Heads x (K + V) x element bytes."""
        packed, sizes = self.format(cache_format).packed, (self.head_size, self.head_size_v)
        if packed is not None:
            return f"{self.num_kv_heads} heads x {packed.formula(*sizes)}"
        if self.format(cache_format).scales is not None:
            text = self._element_bytes(cache_format, *sizes)
            return f"{self.num_kv_heads} heads x (({self.head_size} + {self.head_size_v}) x {text})"
        return (
            f"{self.num_kv_heads} heads x ({self.head_size} + {self.head_size_v}) x {self._element_bytes(cache_format)}"
        )


@attrs.frozen(kw_only=True)
class LatentCache(LayerCache):
    """One vector per token, shared by all heads: MLA's latent, or the keys of an indexer.

    Every rank stores it whole. A token takes head_size elements: one latent, no factor 2; or the bytes of a packed
    record, where the cache dtype asks for one.
    """

    head_size: int

    def spec(self, block_size: int, cache_format: CacheFormat) -> KVCacheSpec:
        """An MLA spec, or an opaque one of a packed record.

        Raises:
            InputError: a packed record that does not hold a latent of this size.
        """
        record = self.format(cache_format).latent
        if record is None:
            return specs.MLASpec(**self._shape(block_size, cache_format), head_size=self.head_size)
        if self.head_size not in PACKED_LATENT_SIZES:
            sizes = " or ".join(map(str, PACKED_LATENT_SIZES))
            raise InputError(
                f"kv_cache_dtype {record.name!r} packs latents of {sizes} elements; this model's have {self.head_size}."
                " Use fp8_e4m3"
            )
        return specs.OpaqueSpec(
            block_size=block_size, opaque_bytes_per_token=record.bytes_per_token, parts=record.formula
        )

    def token_bytes_formula(self, cache_format: CacheFormat) -> str:
        """One vector x element bytes, or the parts of a packed record."""
        record = self.format(cache_format).latent
        if record is not None:
            return f"{record.bytes_per_token} B ({record.name}: {record.formula})"
        return f"1 x {self.head_size} x {self._element_bytes(cache_format, self.head_size)}"


@attrs.frozen(kw_only=True)
class RecordCache(LayerCache):
    """So many bytes a token, whatever the cache dtype; every rank stores them whole (described by hand)."""

    bytes_per_token: int

    def spec(self, block_size: int, cache_format: CacheFormat) -> KVCacheSpec:
        """An opaque spec."""
        return specs.OpaqueSpec(block_size=block_size, opaque_bytes_per_token=self.bytes_per_token)

    def token_bytes_formula(self, cache_format: CacheFormat) -> str:
        """The bytes."""
        return f"{self.bytes_per_token:,} B"


@attrs.frozen(kw_only=True)
class VectorCache(LayerCache):
    """Vectors that a packed dtype stores as records, which this kind of cache knows by their dtype.

    Attributes:
        head_size: elements of a vector.
        records: the records that it has, one for each packed dtype.
    """

    head_size: int
    records: tuple[PackedLatent, ...] = ()

    def _record(self, cache_format: CacheFormat) -> PackedLatent | None:
        """The record under a packed dtype; None under any other.

        Raises:
            InputError: the cache has no record of that dtype.
        """
        asked = cache_format.latent
        if asked is None:
            return None
        record = next((record for record in self.records if record.name == asked.name), None)
        if record is None and self.fixed_dtype is None:
            known = ", ".join(record.name for record in self.records) or "none"
            raise InputError(f"kv_cache_dtype {asked.name!r} has no record for these layers; known: {known}")
        return record

    def _vector(self, block_size: int, cache_format: CacheFormat, tokens_per_vector: int = 1) -> dict[str, Any]:
        """The fields of a spec that stores the vectors, or their records as bytes in an aligned page."""
        record = self._record(cache_format)
        if record is None:
            return {**self._shape(block_size, cache_format), "head_size": self.head_size}
        page_bytes = block_size // tokens_per_vector * record.bytes_per_token
        padded = -(-page_bytes // record.page_alignment) * record.page_alignment
        return {
            "block_size": block_size,
            "dtype": "uint8",
            "head_size": record.bytes_per_token,
            "page_size_padded": padded if padded > page_bytes else None,
        }

    def _vector_text(self, cache_format: CacheFormat) -> str:
        record = self._record(cache_format)
        if record is not None:
            return f"{record.bytes_per_token} B ({record.name}: {record.formula})"
        return f"{self.head_size} x {self._element_bytes(cache_format, self.head_size)}"


@attrs.frozen(kw_only=True)
class CompressedCache(VectorCache):
    """One state for every `tokens_per_state` complete tokens (DeepSeek V4's compressed layers and their indexer)."""

    label = "compressed"

    tokens_per_state: int

    def spec(self, block_size: int, cache_format: CacheFormat) -> KVCacheSpec:
        """A compressed-state spec; its block size must be a multiple of `tokens_per_state`."""
        return specs.CompressedStateSpec(
            **self._vector(block_size, cache_format, self.tokens_per_state), tokens_per_state=self.tokens_per_state
        )

    def floor_bytes(self, num_tokens: int, cache_format: CacheFormat) -> int:
        """floor(tokens / tokens_per_state) x head_size x element bytes."""
        return self.spec(self.tokens_per_state, cache_format).floor_bytes(num_tokens)

    def token_bytes_formula(self, cache_format: CacheFormat) -> str:
        """One state x element bytes, per state."""
        return f"{self._vector_text(cache_format)} every {self.tokens_per_state} tokens"


@attrs.frozen(kw_only=True)
class WindowBufferCache(VectorCache):
    """A buffer of `sliding_window` vectors that a sequence holds whole from its first token (DeepSeek V4).

    Attributes:
        sliding_window: tokens of the window.
        block_tokens: tokens of its own blocks, where they divide the model's.
    """

    sliding_window: int
    block_tokens: int = 64

    def spec(self, block_size: int, cache_format: CacheFormat) -> KVCacheSpec:
        """A sliding window of one head that stores no separate value, in smaller blocks than the states beside it."""
        if block_size % self.block_tokens == 0:
            block_size = self.block_tokens
        return specs.SlidingWindowSpec(
            **self._vector(block_size, cache_format),
            num_kv_heads=1,
            head_size_v=0,
            sliding_window=self.sliding_window,
        )

    def floor_bytes(self, num_tokens: int, cache_format: CacheFormat) -> int:
        """Window x head_size x element bytes, whatever the number of tokens."""
        return super().floor_bytes(self.sliding_window, cache_format)

    def token_bytes_formula(self, cache_format: CacheFormat) -> str:
        """One vector x element bytes, for a window of tokens."""
        return f"{self.sliding_window} tokens x {self._vector_text(cache_format)}, whole from the start"


@attrs.frozen(kw_only=True)
class CompressorCache(LayerCache):
    """The inputs of the states that are not complete yet: the last `sliding_window` tokens in fp32 (DeepSeek V4).

    Attributes:
        state_size: elements that a token adds: keys and gates, twice where two states overlap.
        sliding_window: tokens that a state is made of.
        block_tokens: tokens of its own blocks.
        page_alignment: bytes that a page is rounded up to a multiple of where the cache is packed.
    """

    label = "compressor"

    part: CachePart = CachePart.STATE
    state_size: int
    sliding_window: int
    block_tokens: int
    page_alignment: int

    def spec(self, block_size: int, cache_format: CacheFormat) -> KVCacheSpec:
        """A sliding window of one vector a token, in its own small blocks."""
        spec = specs.SlidingWindowSpec(
            block_size=self.block_tokens,
            num_kv_heads=1,
            head_size=self.state_size,
            head_size_v=0,
            dtype="fp32",
            sliding_window=self.sliding_window,
        )
        if cache_format.latent is None:
            return spec
        return spec.with_page_size(-(-spec.page_size_bytes // self.page_alignment) * self.page_alignment)

    def floor_bytes(self, num_tokens: int, cache_format: CacheFormat) -> int:
        """The whole window, whatever the number of tokens."""
        return super().floor_bytes(self.sliding_window, cache_format)

    def token_bytes_formula(self, cache_format: CacheFormat) -> str:
        """The whole window, per sequence."""
        return f"{self.sliding_window} tokens x {self.state_size} x 4 B (fp32) a sequence"


@attrs.frozen(kw_only=True)
class SequenceStateCache(LayerCache):
    """A state of fixed size per sequence. Each of `num_draft_tokens` drafts adds an input to its convolution, and a
    state of its own for each request.
    """

    label = "state"

    part: CachePart = CachePart.STATE
    num_draft_tokens: int = 0

    @property
    @abc.abstractmethod
    def states(self) -> tuple[StateArray, ...]:
        """Its arrays, with the axis that tensor parallelism divides."""

    def spec(self, block_size: int, cache_format: CacheFormat) -> KVCacheSpec:
        """One page is one state, whatever the cache dtype."""
        return specs.MambaLikeSpec(
            block_size=block_size, states=self.states, num_speculative_blocks=self.num_draft_tokens
        )

    def floor_bytes(self, num_tokens: int, cache_format: CacheFormat) -> int:
        """All arrays, whatever the number of tokens."""
        return sum(array.num_bytes for array in self.states)

    def token_bytes_formula(self, cache_format: CacheFormat) -> str:
        """All arrays, per sequence."""
        arrays = " + ".join(f"{array.num_bytes:,} B {array.name.removesuffix(' state')}" for array in self.states)
        return f"{arrays} a sequence"

    def _conv_state(self, conv_kernel_size: int, channels: int, dtype: str) -> StateArray:
        num_inputs = conv_kernel_size - 1 + self.num_draft_tokens
        return StateArray((num_inputs, channels), dtype, "conv state", tp_axis=1)


@attrs.frozen(kw_only=True)
class StateCache(SequenceStateCache):
    """A convolution's inputs and a recurrent matrix per head (delta nets, KDA).

    The convolution keeps `kernel - 1` inputs of the query, key and value channels; the matrix is key_dim x value_dim
    per value head, in fp32 unless a model says otherwise.
    """

    conv_kernel_size: int
    num_key_heads: int
    key_head_dim: int
    num_value_heads: int
    value_head_dim: int
    conv_dtype: str = "bf16"
    recurrent_dtype: str = "fp32"

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution: queries and keys of the key heads, values of the value heads."""
        return 2 * self.num_key_heads * self.key_head_dim + self.num_value_heads * self.value_head_dim

    @property
    def states(self) -> tuple[StateArray, ...]:
        """The inputs of the convolution, and the matrices."""
        shape = (self.num_value_heads, self.key_head_dim, self.value_head_dim)
        return (
            self._conv_state(self.conv_kernel_size, self.conv_channels, self.conv_dtype),
            StateArray(shape, self.recurrent_dtype, "recurrent state", tp_axis=0),
        )


@attrs.frozen(kw_only=True)
class OpaqueStateCache(SequenceStateCache):
    """So many bytes a sequence, which tensor parallelism divides (described by hand)."""

    state_bytes: int

    @property
    def states(self) -> tuple[StateArray, ...]:
        """One array of bytes."""
        return (StateArray((self.state_bytes,), "uint8", "state", tp_axis=0),)


@attrs.frozen(kw_only=True)
class ShortConvCache(SequenceStateCache):
    """The last `kernel - 1` inputs of a short convolution, in the model's dtype (LFM2)."""

    conv_kernel_size: int
    channels: int
    conv_dtype: str = "bf16"

    @property
    def states(self) -> tuple[StateArray, ...]:
        """The inputs of the convolution."""
        return (self._conv_state(self.conv_kernel_size, self.channels, self.conv_dtype),)


@attrs.frozen(kw_only=True)
class Mamba2Cache(SequenceStateCache):
    """A convolution's inputs and a matrix of head_dim x state_size per head (Mamba 2).

    The convolution has the channels of all heads, and two state vectors for each group.
    """

    conv_kernel_size: int
    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    conv_dtype: str = "bf16"
    recurrent_dtype: str = "fp32"

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution."""
        return self.num_heads * self.head_dim + 2 * self.num_groups * self.state_size

    @property
    def states(self) -> tuple[StateArray, ...]:
        """The inputs of the convolution, and the matrices."""
        shape = (self.num_heads, self.head_dim, self.state_size)
        return (
            self._conv_state(self.conv_kernel_size, self.conv_channels, self.conv_dtype),
            StateArray(shape, self.recurrent_dtype, "recurrent state", tp_axis=0),
        )


@attrs.frozen
class SequenceBytes:
    """Least bytes that one sequence occupies, by part."""

    kv: int
    indexer: int
    state: int

    @property
    def total(self) -> int:
        """Everything that grows with the sequence."""
        return self.kv + self.indexer


LayerCaches = Sequence[Sequence[LayerCache]]


def state_aligned_block_size(
    layers: LayerCaches, cache_format: CacheFormat, alignment: int, tensor_parallel_size: int
) -> int | None:
    """Smallest attention block, a multiple of `alignment` tokens, whose page holds a whole state; None without states.

    A state is one page, so a smaller attention page would have to be padded to it. Both sizes are those on one rank.
    Block sizes of several hundred tokens on models with states come from here.
    """
    caches = dict.fromkeys(cache for per_layer in layers for cache in per_layer)

    def page_bytes(cache: LayerCache) -> int:
        return tensor_parallel_spec(cache.spec(1, cache_format), tensor_parallel_size).page_size_bytes

    states = [page_bytes(cache) for cache in caches if isinstance(cache, SequenceStateCache)]
    tokens = [
        page_bytes(cache)
        for cache in caches
        if isinstance(cache, AttentionCache | LatentCache) and cache.part is CachePart.KV
    ]
    if not states or not tokens:
        return None
    return alignment * math.ceil(max(states) / (alignment * min(tokens)))
