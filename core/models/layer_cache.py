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

from ..planner import specs
from ..planner.cache_dtype import BITS_PER_ELEMENT, CacheFormat
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

    def format(self, cache_format: CacheFormat) -> CacheFormat:
        """The storage format of this cache in a deployment with `cache_format`."""
        return cache_format if self.fixed_dtype is None else CacheFormat(self.fixed_dtype)

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

    def _element_bytes(self, cache_format: CacheFormat) -> str:
        dtype = self.format(cache_format).dtype
        return f"{BITS_PER_ELEMENT[dtype] / 8:g} B ({dtype})"


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
        if self.sliding_window is not None:
            return specs.SlidingWindowSpec(**shape, sliding_window=self.sliding_window)
        if self.attention_chunk_size is not None:
            return specs.ChunkedLocalSpec(**shape, attention_chunk_size=self.attention_chunk_size)
        return specs.FullAttentionSpec(**shape)

    def token_bytes_formula(self, cache_format: CacheFormat) -> str:
        sizes = f"({self.head_size} + {self.head_size_v})"
        return f"{self.num_kv_heads} heads x {sizes} x {self._element_bytes(cache_format)}"


@attrs.frozen(kw_only=True)
class LatentCache(LayerCache):
    """One vector per token, shared by all heads: MLA's latent, or the keys of an indexer.

    Every rank stores it whole. A token takes head_size elements: one latent, no factor 2.
    """

    head_size: int

    def spec(self, block_size: int, cache_format: CacheFormat) -> KVCacheSpec:
        return specs.MLASpec(**self._shape(block_size, cache_format), head_size=self.head_size)

    def token_bytes_formula(self, cache_format: CacheFormat) -> str:
        return f"1 x {self.head_size} x {self._element_bytes(cache_format)}"


@attrs.frozen(kw_only=True)
class CompressedCache(LayerCache):
    """One state for every `tokens_per_state` complete tokens (DeepSeek V4's compressed layers and their indexer)."""

    label = "compressed"

    head_size: int
    tokens_per_state: int

    def spec(self, block_size: int, cache_format: CacheFormat) -> KVCacheSpec:
        """A compressed-state spec; its block size must be a multiple of `tokens_per_state`."""
        return specs.CompressedStateSpec(
            **self._shape(block_size, cache_format), head_size=self.head_size, tokens_per_state=self.tokens_per_state
        )

    def floor_bytes(self, num_tokens: int, cache_format: CacheFormat) -> int:
        """floor(tokens / tokens_per_state) x head_size x element bytes."""
        return self.spec(self.tokens_per_state, cache_format).floor_bytes(num_tokens)

    def token_bytes_formula(self, cache_format: CacheFormat) -> str:
        return f"{self.head_size} x {self._element_bytes(cache_format)} every {self.tokens_per_state} tokens"


@attrs.frozen(kw_only=True)
class WindowBufferCache(LayerCache):
    """A buffer of `sliding_window` vectors that a sequence holds whole from its first token (DeepSeek V4)."""

    head_size: int
    sliding_window: int

    def spec(self, block_size: int, cache_format: CacheFormat) -> KVCacheSpec:
        """A sliding window of one head that stores no separate value."""
        return specs.SlidingWindowSpec(
            **self._shape(block_size, cache_format),
            num_kv_heads=1,
            head_size=self.head_size,
            head_size_v=0,
            sliding_window=self.sliding_window,
        )

    def floor_bytes(self, num_tokens: int, cache_format: CacheFormat) -> int:
        """Window x head_size x element bytes, whatever the number of tokens."""
        return super().floor_bytes(self.sliding_window, cache_format)

    def token_bytes_formula(self, cache_format: CacheFormat) -> str:
        element_bytes = self._element_bytes(cache_format)
        return f"{self.sliding_window} tokens x {self.head_size} x {element_bytes}, whole from the start"


@attrs.frozen(kw_only=True)
class StateCache(LayerCache):
    """A state of fixed size per sequence: a convolution's inputs and a recurrent matrix per head (delta nets, KDA).

    The convolution keeps `kernel - 1` inputs of the query, key and value channels; the matrix is key_dim x value_dim
    per value head, in fp32 unless a model says otherwise. Each of `num_draft_tokens` drafts adds an input, and a state
    of its own for each request.
    """

    label = "state"

    part: CachePart = CachePart.STATE
    conv_kernel_size: int
    num_key_heads: int
    key_head_dim: int
    num_value_heads: int
    value_head_dim: int
    conv_dtype: str = "bf16"
    recurrent_dtype: str = "fp32"
    num_draft_tokens: int = 0

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution: queries and keys of the key heads, values of the value heads."""
        return 2 * self.num_key_heads * self.key_head_dim + self.num_value_heads * self.value_head_dim

    @property
    def states(self) -> tuple[StateArray, StateArray]:
        """The two arrays, with the axis that tensor parallelism divides."""
        num_inputs = self.conv_kernel_size - 1 + self.num_draft_tokens
        conv = StateArray((num_inputs, self.conv_channels), self.conv_dtype, "conv state", tp_axis=1)
        recurrent = StateArray(
            (self.num_value_heads, self.key_head_dim, self.value_head_dim),
            self.recurrent_dtype,
            "recurrent state",
            tp_axis=0,
        )
        return conv, recurrent

    def spec(self, block_size: int, cache_format: CacheFormat) -> KVCacheSpec:
        """One page is one state, whatever the cache dtype."""
        return specs.MambaLikeSpec(
            block_size=block_size, states=self.states, num_speculative_blocks=self.num_draft_tokens
        )

    def floor_bytes(self, num_tokens: int, cache_format: CacheFormat) -> int:
        return sum(array.num_bytes for array in self.states)

    def token_bytes_formula(self, cache_format: CacheFormat) -> str:
        conv, recurrent = self.states
        return f"{conv.num_bytes:,} B conv + {recurrent.num_bytes:,} B recurrent a sequence"


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

    states = [page_bytes(cache) for cache in caches if isinstance(cache, StateCache)]
    tokens = [
        page_bytes(cache)
        for cache in caches
        if isinstance(cache, AttentionCache | LatentCache) and cache.part is CachePart.KV
    ]
    if not states or not tokens:
        return None
    return alignment * math.ceil(max(states) / (alignment * min(tokens)))
