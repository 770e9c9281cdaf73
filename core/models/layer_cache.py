"""What the layers of a model store, before anyone chose a block size, a dtype or a number of ranks.

A `LayerCache` is a fact about an architecture; `spec` turns it into the pages of a deployment, and `floor_bytes`
says what one sequence occupies at least. Kinds and formulas: golden/model_kv_bytes.jsonl.
"""

import abc
import math
from collections.abc import Mapping, Sequence
from enum import StrEnum

import attrs

from ..errors import InputError
from ..planner.cache_dtype import BITS_PER_ELEMENT, CacheFormat
from ..planner.parallel import tensor_parallel_spec
from ..planner.specs import (
    ChunkedLocalSpec,
    CompressedStateSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaLikeSpec,
    MLASpec,
    SlidingWindowSpec,
    StateArray,
)


class CachePart(StrEnum):
    """Which line of a model's bill a cache belongs to."""

    KV = "kv"  # keys and values, latents, compressed states: grows with the sequence
    INDEXER = "indexer"  # keys of a sparse-attention indexer: grows with the sequence
    STATE = "state"  # fixed per sequence


@attrs.frozen(kw_only=True)
class LayerCache(abc.ABC):
    """One cache that one layer stores.

    Attributes:
        part: the line of the bill.
        fixed_dtype: the dtype where the model fixes it whatever the cache dtype; None: the cache dtype.
    """

    part: CachePart = CachePart.KV
    fixed_dtype: str | None = None

    def format(self, cache_format: CacheFormat) -> CacheFormat:
        """The storage format of this cache in a deployment with `cache_format`."""
        return cache_format if self.fixed_dtype is None else CacheFormat(self.fixed_dtype)

    @abc.abstractmethod
    def spec(self, block_size: int, cache_format: CacheFormat) -> KVCacheSpec:
        """The pages of the whole layer (all heads, one rank)."""

    @abc.abstractmethod
    def floor_bytes(self, num_tokens: int, cache_format: CacheFormat) -> int:
        """Bytes that a sequence of `num_tokens` tokens occupies at least, before any rounding to blocks."""

    @abc.abstractmethod
    def token_bytes_formula(self, cache_format: CacheFormat) -> str:
        """What one token (or one sequence, for a state) adds, with the numbers substituted."""


def _element_bytes(cache_format: CacheFormat) -> str:
    return f"{BITS_PER_ELEMENT[cache_format.dtype] / 8:g} B ({cache_format.dtype})"


@attrs.frozen(kw_only=True)
class AttentionCache(LayerCache):
    """Keys and values of every token, of the last `sliding_window`, or of the chunk (at most one of the two is
    given).
    """

    num_kv_heads: int
    head_size: int
    head_size_v: int = attrs.field(default=attrs.Factory(lambda self: self.head_size, takes_self=True))
    sliding_window: int | None = None
    attention_chunk_size: int | None = None

    def spec(self, block_size: int, cache_format: CacheFormat) -> KVCacheSpec:
        """A full, sliding-window or chunked-local spec."""
        storage = self.format(cache_format)
        heads = self.num_kv_heads
        if self.sliding_window is not None:
            return SlidingWindowSpec(
                block_size=block_size,
                num_kv_heads=heads,
                head_size=self.head_size,
                head_size_v=self.head_size_v,
                dtype=storage.dtype,
                scales=storage.scales,
                sliding_window=self.sliding_window,
            )
        if self.attention_chunk_size is not None:
            return ChunkedLocalSpec(
                block_size=block_size,
                num_kv_heads=heads,
                head_size=self.head_size,
                head_size_v=self.head_size_v,
                dtype=storage.dtype,
                scales=storage.scales,
                attention_chunk_size=self.attention_chunk_size,
            )
        return FullAttentionSpec(
            block_size=block_size,
            num_kv_heads=heads,
            head_size=self.head_size,
            head_size_v=self.head_size_v,
            dtype=storage.dtype,
            scales=storage.scales,
        )

    def floor_bytes(self, num_tokens: int, cache_format: CacheFormat) -> int:
        """Tokens kept x heads x (head_size + head_size_v) x element bytes, and the scales."""
        return self.spec(1, cache_format).floor_bytes(num_tokens)

    def token_bytes_formula(self, cache_format: CacheFormat) -> str:
        """Heads x (K + V) x element bytes."""
        return (
            f"{self.num_kv_heads} heads x ({self.head_size} + {self.head_size_v})"
            f" x {_element_bytes(self.format(cache_format))}"
        )


@attrs.frozen(kw_only=True)
class LatentCache(LayerCache):
    """One vector a token, shared by all heads: MLA's latent, or the keys of an indexer. Never divided by TP."""

    head_size: int

    def spec(self, block_size: int, cache_format: CacheFormat) -> KVCacheSpec:
        """An MLA spec."""
        storage = self.format(cache_format)
        return MLASpec(block_size=block_size, head_size=self.head_size, dtype=storage.dtype, scales=storage.scales)

    def floor_bytes(self, num_tokens: int, cache_format: CacheFormat) -> int:
        """Tokens x head_size x element bytes: one latent, no factor 2."""
        return self.spec(1, cache_format).floor_bytes(num_tokens)

    def token_bytes_formula(self, cache_format: CacheFormat) -> str:
        """One vector x element bytes."""
        return f"1 x {self.head_size} x {_element_bytes(self.format(cache_format))}"


@attrs.frozen(kw_only=True)
class CompressedCache(LayerCache):
    """One state for every `tokens_per_state` complete tokens (DeepSeek V4's compressed layers and their indexer)."""

    head_size: int
    tokens_per_state: int

    def spec(self, block_size: int, cache_format: CacheFormat) -> KVCacheSpec:
        """A compressed-state spec; its block size must be a multiple of `tokens_per_state`."""
        storage = self.format(cache_format)
        return CompressedStateSpec(
            block_size=block_size,
            head_size=self.head_size,
            tokens_per_state=self.tokens_per_state,
            dtype=storage.dtype,
            scales=storage.scales,
        )

    def floor_bytes(self, num_tokens: int, cache_format: CacheFormat) -> int:
        """floor(tokens / tokens_per_state) x head_size x element bytes."""
        return self.spec(self.tokens_per_state, cache_format).floor_bytes(num_tokens)

    def token_bytes_formula(self, cache_format: CacheFormat) -> str:
        """One state x element bytes, per state."""
        storage = self.format(cache_format)
        return f"{self.head_size} x {_element_bytes(storage)} every {self.tokens_per_state} tokens"


@attrs.frozen(kw_only=True)
class WindowBufferCache(LayerCache):
    """A buffer of `sliding_window` vectors that a sequence holds whole from its first token (DeepSeek V4)."""

    head_size: int
    sliding_window: int

    def spec(self, block_size: int, cache_format: CacheFormat) -> KVCacheSpec:
        """A sliding window of one head that stores no separate value."""
        storage = self.format(cache_format)
        return SlidingWindowSpec(
            block_size=block_size,
            num_kv_heads=1,
            head_size=self.head_size,
            head_size_v=0,
            dtype=storage.dtype,
            scales=storage.scales,
            sliding_window=self.sliding_window,
        )

    def floor_bytes(self, num_tokens: int, cache_format: CacheFormat) -> int:
        """Window x head_size x element bytes, whatever the number of tokens."""
        return self.spec(1, cache_format).floor_bytes(self.sliding_window)

    def token_bytes_formula(self, cache_format: CacheFormat) -> str:
        """One vector x element bytes, for a window of tokens."""
        storage = self.format(cache_format)
        return f"{self.sliding_window} tokens x {self.head_size} x {_element_bytes(storage)}, whole from the start"


@attrs.frozen(kw_only=True)
class StateCache(LayerCache):
    """A state of fixed size a sequence: a convolution's inputs and a recurrent matrix per head (gated delta nets, KDA).

    The convolution keeps `kernel - 1` inputs of the query, key and value channels; the matrix is key_dim x value_dim
    per value head, in fp32 unless a model says otherwise.
    """

    part: CachePart = CachePart.STATE
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
    def states(self) -> tuple[StateArray, StateArray]:
        """The two arrays, with the axis that tensor parallelism divides."""
        conv = StateArray((self.conv_kernel_size - 1, self.conv_channels), self.conv_dtype, "conv state", tp_axis=1)
        recurrent = StateArray(
            (self.num_value_heads, self.key_head_dim, self.value_head_dim),
            self.recurrent_dtype,
            "recurrent state",
            tp_axis=0,
        )
        return conv, recurrent

    def spec(self, block_size: int, cache_format: CacheFormat) -> KVCacheSpec:
        """One page is one state, whatever the cache dtype."""
        return MambaLikeSpec(block_size=block_size, states=self.states)

    def floor_bytes(self, num_tokens: int, cache_format: CacheFormat) -> int:
        """Both arrays, whatever the number of tokens."""
        return sum(array.num_bytes for array in self.states)

    def token_bytes_formula(self, cache_format: CacheFormat) -> str:
        """Both arrays, a sequence."""
        conv, recurrent = self.states
        return f"{conv.num_bytes:,} B conv + {recurrent.num_bytes:,} B recurrent a sequence"


@attrs.frozen
class SequenceBytes:
    """What one sequence occupies at least, by line of the bill, in bytes."""

    kv: int
    indexer: int
    state: int

    @property
    def total(self) -> int:
        """Everything that grows with the sequence."""
        return self.kv + self.indexer

    @property
    def total_with_state(self) -> int:
        """The same and the fixed state."""
        return self.total + self.state


LayerCaches = Sequence[Sequence[LayerCache]]


def sequence_bytes(layers: LayerCaches, num_tokens: int, cache_format: CacheFormat) -> SequenceBytes:
    """The floor for one sequence of `num_tokens` tokens, over all layers (golden/model_kv_bytes.jsonl).

    Raises:
        InputError: fewer than 0 tokens.
    """
    if num_tokens < 0:
        raise InputError(f"a sequence of {num_tokens} tokens; give 0 or more")
    by_part = dict.fromkeys(CachePart, 0)
    for caches in layers:
        for cache in caches:
            by_part[cache.part] += cache.floor_bytes(num_tokens, cache_format)
    return SequenceBytes(by_part[CachePart.KV], by_part[CachePart.INDEXER], by_part[CachePart.STATE])


def layer_specs(layers: LayerCaches, block_size: int, cache_format: CacheFormat) -> Mapping[str, KVCacheSpec]:
    """The caches of all layers as pages, by name, in the order of the layers; layers that store nothing are left
    out.
    """
    specs: dict[str, KVCacheSpec] = {}
    for index, caches in enumerate(layers):
        for cache in caches:
            name = f"layers.{index}.{_name(cache)}"
            if name in specs:
                name = f"{name}.{cache.__class__.__name__}"
            specs[name] = cache.spec(block_size, cache_format)
    return specs


def _name(cache: LayerCache) -> str:
    if cache.part is CachePart.INDEXER:
        return "indexer"
    if isinstance(cache, StateCache):
        return "state"
    return "compressed" if isinstance(cache, CompressedCache) else "attn"


def state_aligned_block_size(
    layers: LayerCaches, cache_format: CacheFormat, alignment: int, tensor_parallel_size: int
) -> int | None:
    """Smallest attention block, a multiple of `alignment` tokens, whose page holds a whole state; None without states.

    Models with states need it: a state is one page, so an attention page smaller than a state would have to be padded
    to it. Both are what one rank holds. Block sizes of several hundred tokens on such models come from here.
    """
    caches = dict.fromkeys(cache for per_layer in layers for cache in per_layer)

    def page_bytes(cache: LayerCache) -> int:
        return tensor_parallel_spec(cache.spec(1, cache_format), tensor_parallel_size).page_size_bytes

    states = [page_bytes(cache) for cache in caches if isinstance(cache, StateCache)]
    tokens = [
        page_bytes(cache)
        for cache in caches
        if isinstance(cache, AttentionCache | LatentCache) and cache.part is CachePart.KV
    ]
    if not states or not tokens:
        return None
    return alignment * math.ceil(max(states) / (alignment * min(tokens)))
