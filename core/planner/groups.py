"""Which layers share a block table, and how pages of different sizes share one pool.

The rules are vLLM 0.32's, fixed by the `groups` of the recorded planning cases. In order: layers whose specs merge, or
that are of one kind with one block size, form one group. Otherwise a block-outermost layout puts pages of different
sizes side by side in a block; any other layout makes all pages equal and splits the layers into groups of one size.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import attrs

from ..cache_kinds import CacheKind, ChunkedLocal, CompressedState, FullAttention, SequenceState, SlidingWindow
from ..errors import InputError
from .layout import KVCacheConfig, KVCacheGroup, KVCacheLayout
from .specs import (
    AttentionSpec,
    ChunkedLocalSpec,
    CompressedStateSpec,
    FullAttentionSpec,
    KVCacheSpec,
    LatentSpec,
    MambaLikeSpec,
    SlidingWindowSpec,
)

LayerSpecs: TypeAlias = Mapping[str, KVCacheSpec]
"""Layer name -> spec, in registration order."""


def group_layers(
    layer_specs: LayerSpecs, layout: KVCacheLayout, disable_hybrid_kv_cache_manager: bool
) -> tuple[KVCacheGroup, ...]:
    """Split layers (in registration order) into block-table groups.

    Raises:
        InputError: the layers cannot share one pool: pages that can be neither scaled nor padded to one size, or, with
            hybrid allocation off, layers that cannot all be sized like full attention.
    """
    if disable_hybrid_kv_cache_manager:
        layer_specs = _size_like_full_attention(layer_specs)
    if group := _one_group(layer_specs):
        return (group,)
    if layout.is_block_outermost and len({spec.page_size_bytes for spec in layer_specs.values()}) > 1:
        return _pack_groups(layer_specs)
    equalised = _equalise_page_sizes(layer_specs)
    if equalised is None:
        return (_all_sized_like_full(layer_specs),)
    return _groups_of_one_size(equalised)


def _one_group(layer_specs: LayerSpecs) -> KVCacheGroup | None:
    """All layers in one group if their specs merge or always need the same number of slots; otherwise None."""
    specs = list(layer_specs.values())
    names = tuple(layer_specs)
    if merged := merge_specs(specs):
        return KVCacheGroup(names, (merged,) * len(names), merged)
    if len({(spec.token_slots_key, spec.block_size) for spec in specs}) == 1:
        return KVCacheGroup(names, tuple(specs), specs[0], is_uniform_type=True)
    return None


def merge_specs(specs: Sequence[KVCacheSpec]) -> KVCacheSpec | None:
    """The one spec that describes all layers, or None.

    Specs merge if they are equal, or if they are full attention and differ only in the window or chunk of a layer that
    is sized like a full one (at most one such size in all).
    """
    first = specs[0]
    if all(spec == first for spec in specs):
        return first
    full_specs = [spec for spec in specs if isinstance(spec, FullAttentionSpec)]
    if len(full_specs) < len(specs):
        return None
    windows = {spec.sliding_window for spec in full_specs} - {None}
    chunks = {spec.attention_chunk_size for spec in full_specs} - {None}
    plain = {attrs.evolve(spec, sliding_window=None, attention_chunk_size=None) for spec in full_specs}
    if len(plain) > 1 or len(windows) + len(chunks) > 1:
        return None
    return attrs.evolve(
        plain.pop(), sliding_window=next(iter(windows), None), attention_chunk_size=next(iter(chunks), None)
    )


def _size_like_full_attention(layer_specs: LayerSpecs) -> LayerSpecs:
    """Size windowed and chunked layers like the full layers beside them (hybrid allocation is off).

    Only the allocation changes; a layer still attends within its window.

    Raises:
        InputError: there is no full-attention layer to size them like, or there are layers of yet another kind.
    """
    promoted = _promoted(layer_specs)
    if _one_group(promoted) is None:
        kinds = ", ".join(sorted({spec.kind for spec in layer_specs.values()}))
        raise InputError(
            f"hybrid allocation is off, but layers of kinds {kinds} cannot all be sized like full attention; "
            "leave hybrid allocation on"
        )
    return promoted


def _promoted(layer_specs: LayerSpecs) -> LayerSpecs:
    """Windowed and chunked layers made full, in blocks of the full layers; unchanged if there are no full layers."""
    full_block_sizes = {
        spec.block_size for spec in layer_specs.values() if isinstance(spec, FullAttentionSpec | LatentSpec)
    }
    if _one_group(layer_specs) or not full_block_sizes:
        return layer_specs
    block_size = full_block_sizes.pop() if len(full_block_sizes) == 1 else None
    return {name: _promote(spec, block_size or spec.block_size) for name, spec in layer_specs.items()}


def _promote(spec: KVCacheSpec, block_size: int) -> KVCacheSpec:
    if not isinstance(spec, SlidingWindowSpec | ChunkedLocalSpec):
        return spec
    promoted = FullAttentionSpec(
        block_size=block_size,
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        head_size_v=spec.head_size_v,
        dtype=spec.dtype,
        scales=spec.scales,
        packed=spec.packed,
        sliding_window=spec.sliding_window if isinstance(spec, SlidingWindowSpec) else None,
        attention_chunk_size=spec.attention_chunk_size if isinstance(spec, ChunkedLocalSpec) else None,
    )
    if spec.page_size_padded is None:
        return promoted
    return promoted.with_page_size(max(spec.page_size_padded, promoted.unpadded_page_size_bytes))


def _equalise_page_sizes(layer_specs: LayerSpecs) -> LayerSpecs | None:
    """Make every page as large as the largest; None if a page can be neither scaled nor padded.

    A smaller page gets more tokens if it divides the largest page; otherwise it is padded. States are always padded,
    because their size does not depend on the block size. Latents are never padded, because kernels index them in whole
    token rows.
    """
    largest_bytes = max(spec.page_size_bytes for spec in layer_specs.values())
    equalised: dict[str, KVCacheSpec] = {}
    for name, spec in layer_specs.items():
        page_bytes = spec.page_size_bytes
        if page_bytes == largest_bytes:
            equalised[name] = spec
        elif not isinstance(spec, MambaLikeSpec) and largest_bytes % page_bytes == 0:
            equalised[name] = spec.with_block_size(spec.block_size * (largest_bytes // page_bytes))
        elif isinstance(spec, AttentionSpec | MambaLikeSpec):
            equalised[name] = spec.with_page_size(largest_bytes)
        else:
            return None
    return equalised


def _all_sized_like_full(layer_specs: LayerSpecs) -> KVCacheGroup:
    """One group in which windowed layers are sized like full ones, for latents whose page fits no other page."""
    kinds = {type(spec) for spec in layer_specs.values()}
    of_latents = any(isinstance(spec, SlidingWindowSpec) and not spec.head_size_v for spec in layer_specs.values())
    if SlidingWindowSpec in kinds and ChunkedLocalSpec not in kinds and not of_latents:
        group = _one_group(_promoted(layer_specs))
        if group is not None:
            return group
    pages = ", ".join(f"{spec.kind} {spec.page_size_bytes:,} B" for spec in dict.fromkeys(layer_specs.values()))
    raise InputError(
        f"pages of different sizes ({pages}) cannot share one pool: a latent's page can be scaled but not padded; "
        "choose block sizes whose pages divide the largest, or a block-outermost layout (BLNHC, BLHNC)"
    )


def _groups_of_one_size(layer_specs: LayerSpecs) -> tuple[KVCacheGroup, ...]:
    """Split each bucket of mergeable specs into groups of about the same number of layers."""
    buckets = _mergeable_buckets(layer_specs)
    group_size = layers_per_group([len(names) for names, _ in buckets])
    groups: list[KVCacheGroup] = []
    for names, spec in buckets:
        num_groups = math.ceil(len(names) / group_size)
        # Stride instead of slice: with pipeline parallelism every stage then holds about the same number of layers of
        # each group, and no group of a stage is empty.
        for index in range(num_groups):
            members = tuple(names[index::num_groups])
            groups.append(KVCacheGroup(members, (spec,) * len(members), spec))
    return tuple(groups)


def _mergeable_buckets(layer_specs: LayerSpecs) -> list[tuple[list[str], KVCacheSpec]]:
    names_by_spec: dict[KVCacheSpec, list[str]] = {}
    for name, spec in layer_specs.items():
        names_by_spec.setdefault(spec, []).append(name)
    buckets: list[tuple[list[str], KVCacheSpec]] = []
    for spec, names in names_by_spec.items():
        for index, (bucket_names, bucket_spec) in enumerate(buckets):
            if merged := merge_specs([bucket_spec, spec]):
                buckets[index] = ([*bucket_names, *names], merged)
                break
        else:
            buckets.append((names, spec))
    return buckets


def layers_per_group(bucket_sizes: Sequence[int]) -> int:
    """Number of layers in one group: the smallest bucket, or the largest if it is less than 1.5 times as large.

    The exception keeps 12 + 13 layers from becoming 12 + 12 + 1 (golden uneven.* cases).
    """
    smallest, largest = min(bucket_sizes), max(bucket_sizes)
    return largest if largest < smallest * 1.5 else smallest


@attrs.frozen
class _Bucket:
    """Layers of one kind and block size.

    Attributes:
        specs: layer name -> spec, in registration order.
        names_by_page: page bytes -> the layers of that page, in order of first appearance.
    """

    specs: dict[str, KVCacheSpec]
    names_by_page: dict[int, list[str]]

    @property
    def num_repeats(self) -> int:
        """How often the pattern of pages repeats: the number of layers with its most frequent page."""
        return max(len(names) for names in self.names_by_page.values())

    @property
    def is_balanced(self) -> bool:
        """Whether every page occurs equally often, so that the bucket is a pattern that can be cut between repeats."""
        return len({len(names) for names in self.names_by_page.values()}) == 1

    def is_cut_to_fit(self, repeats_per_group: int | None) -> bool:
        """Whether its groups are made as narrow as a block needs.

        So are states, and windows of one page size where no pattern repeats.
        """
        spec = next(iter(self.specs.values()))
        is_window = isinstance(spec, SlidingWindowSpec) and len(self.names_by_page) == 1
        return isinstance(spec, MambaLikeSpec) or (is_window and repeats_per_group is None)

    def widest_group_bytes(self, num_groups: int) -> int:
        """Page bytes of the largest of `num_groups` groups."""
        return sum(math.ceil(len(names) / num_groups) * page for page, names in self.names_by_page.items())


def _pack_groups(layer_specs: LayerSpecs) -> tuple[KVCacheGroup, ...]:
    """Split layers of different page sizes into groups that fill a block about equally.

    Buckets that mix page sizes evenly are patterns. The largest pattern decides how many repeats a group covers, and
    the other even buckets are cut to about that. Buckets of states, and of windows where there is no pattern, are cut
    further, so that they never widen the block (DeepSeek V4's windows beside its compressed states).
    """
    buckets = _same_slots_buckets(layer_specs)
    repeats_per_group = _repeats_per_group(buckets)
    group_counts = [_group_count(bucket, repeats_per_group) for bucket in buckets]
    block_bytes = max(
        bucket.widest_group_bytes(len(bucket.specs) if bucket.is_cut_to_fit(repeats_per_group) else num_groups)
        for bucket, num_groups in zip(buckets, group_counts, strict=True)
    )
    groups: list[KVCacheGroup] = []
    for bucket, num_groups in zip(buckets, group_counts, strict=True):
        if bucket.is_cut_to_fit(repeats_per_group):
            page_bytes = next(iter(bucket.specs.values())).page_size_bytes
            states_per_block = max(block_bytes // page_bytes, 1)
            num_groups = max(num_groups, math.ceil(len(bucket.specs) / states_per_block))
        groups.extend(_split(bucket, num_groups))
    return tuple(groups)


def _same_slots_buckets(layer_specs: LayerSpecs) -> list[_Bucket]:
    buckets: dict[tuple[object, ...], _Bucket] = {}
    for name, spec in layer_specs.items():
        bucket = buckets.setdefault((spec.token_slots_key, spec.block_size), _Bucket({}, {}))
        bucket.specs[name] = spec
        bucket.names_by_page.setdefault(spec.page_size_bytes, []).append(name)
    return list(buckets.values())


def _repeats_per_group(buckets: Sequence[_Bucket]) -> int | None:
    """Pattern repeats that a group covers; None if no bucket mixes page sizes evenly."""
    patterns = [bucket.num_repeats for bucket in buckets if bucket.is_balanced and len(bucket.names_by_page) > 1]
    if not patterns:
        return None
    repeats = [bucket.num_repeats for bucket in buckets if bucket.is_balanced]
    return least_padding_divisor(repeats, lower_bound=max(patterns))


def _group_count(bucket: _Bucket, repeats_per_group: int | None) -> int:
    if repeats_per_group is None or not bucket.is_balanced:
        return 1
    return math.ceil(bucket.num_repeats / repeats_per_group)


def least_padding_divisor(values: Sequence[int], lower_bound: int) -> int:
    """The size that pads `values` least when each is rounded up to a multiple of it; the largest if several do."""
    candidates = range(lower_bound, max(max(values), lower_bound) + 1)
    return min(candidates, key=lambda size: (sum(-value % size for value in values), -size))


def _split(bucket: _Bucket, num_groups: int) -> list[KVCacheGroup]:
    if num_groups == 1:
        return [_uniform_group(bucket, list(bucket.specs))]
    repeats = list(zip(*bucket.names_by_page.values(), strict=True))
    return [
        _uniform_group(bucket, [name for repeat in repeats[index::num_groups] for name in repeat])
        for index in range(num_groups)
    ]


def _uniform_group(bucket: _Bucket, names: Sequence[str]) -> KVCacheGroup:
    specs = tuple(bucket.specs[name] for name in names)
    return KVCacheGroup(tuple(names), specs, specs[0], is_uniform_type=True)


def allocator_groups(config: KVCacheConfig, decode_context_parallel_size: int = 1) -> tuple[CacheKind, ...]:
    """One cache kind for each planned group, in the planner's order: the `groups` of an `AllocatorConfig`.

    Under decode context parallelism a block id stands for a block on each of the ranks, so it covers that many times
    the tokens.

    Raises:
        InputError: a group has no lifetime rules (cross attention is allocated by encoder input, not by position).
    """
    return tuple(
        attrs.evolve(_cache_kind(group.spec), block_size=group.tokens_per_block(decode_context_parallel_size))
        for group in config.groups
    )


def _cache_kind(spec: KVCacheSpec) -> CacheKind:
    """The lifetime rules of a spec."""
    match spec:
        case SlidingWindowSpec():
            return SlidingWindow(spec.block_size, spec.sliding_window)
        case ChunkedLocalSpec():
            return ChunkedLocal(spec.block_size, spec.attention_chunk_size)
        case CompressedStateSpec():
            return CompressedState(spec.block_size, spec.tokens_per_state)
        case MambaLikeSpec():
            return SequenceState(spec.block_size)
        case LatentSpec() | FullAttentionSpec():
            return FullAttention(spec.block_size)
        case _:
            name = type(spec).__name__
            raise InputError(f"{name} has no lifetime rules for the allocator; it can be planned, not replayed")
