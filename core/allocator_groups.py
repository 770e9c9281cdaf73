"""From the planner to the allocator: what each planned group of layers means for block lifetimes."""

from collections.abc import Callable
from typing import Any

import attrs

from .cache_kinds import CacheKind, ChunkedLocal, CompressedState, FullAttention, SequenceState, SlidingWindow
from .errors import InputError
from .kv_cache_config import KVCacheConfig
from .kv_cache_spec import ChunkedLocalSpec, FullAttentionSpec, KVCacheSpec, SlidingWindowSpec
from .latent_and_state_spec import CompressedStateSpec, MambaLikeSpec, MLASpec, OpaqueSpec


def _full(spec: Any) -> CacheKind:
    return FullAttention(spec.block_size)


def _sliding(spec: SlidingWindowSpec) -> CacheKind:
    return SlidingWindow(spec.block_size, spec.sliding_window)


def _chunked(spec: ChunkedLocalSpec) -> CacheKind:
    return ChunkedLocal(spec.block_size, spec.attention_chunk_size)


def _compressed(spec: CompressedStateSpec) -> CacheKind:
    return CompressedState(spec.block_size, spec.tokens_per_state)


def _state(spec: MambaLikeSpec) -> CacheKind:
    return SequenceState(spec.block_size)


# The first entry whose class the spec is an instance of, so subclasses stand before their bases.
_KINDS: tuple[tuple[type[KVCacheSpec], Callable[[Any], CacheKind]], ...] = (
    (SlidingWindowSpec, _sliding),
    (ChunkedLocalSpec, _chunked),
    (CompressedStateSpec, _compressed),
    (MambaLikeSpec, _state),
    (MLASpec, _full),
    (OpaqueSpec, _full),
    (FullAttentionSpec, _full),
)


def cache_kind(spec: KVCacheSpec) -> CacheKind:
    """The lifetime rules of a spec.

    Raises:
        InputError: no kind is known for it (cross attention is allocated by encoder input, not by position).
    """
    for spec_class, make in _KINDS:
        if isinstance(spec, spec_class):
            return make(spec)
    raise InputError(f"{type(spec).__name__} has no lifetime rules for the allocator; it can be planned, not replayed")


def allocator_groups(config: KVCacheConfig, decode_context_parallel_size: int = 1) -> tuple[CacheKind, ...]:
    """One cache kind for each planned group, in the planner's order: the `groups` of an `AllocatorConfig`.

    Under decode context parallelism a block id stands for a block on each of the ranks, so it covers that many times
    the tokens.
    """
    return tuple(
        attrs.evolve(cache_kind(group.spec), block_size=group.tokens_per_block(decode_context_parallel_size))
        for group in config.groups
    )
