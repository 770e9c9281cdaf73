"""Groups for layouts whose outermost axis is the block: pages of different sizes stand side by side in one block."""

import math
from collections.abc import Mapping, Sequence

import attrs

from .kv_cache_config import KVCacheGroup
from .kv_cache_spec import KVCacheSpec
from .latent_and_state_spec import MambaLikeSpec


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
        """Times that the pattern of pages repeats: the layers of its most frequent page."""
        return max(len(names) for names in self.names_by_page.values())

    @property
    def is_balanced(self) -> bool:
        """Every page occurs equally often, so the bucket is a pattern that can be cut between repeats."""
        return len({len(names) for names in self.names_by_page.values()}) == 1

    @property
    def holds_states(self) -> bool:
        """The bucket's layers are fixed states."""
        return isinstance(next(iter(self.specs.values())), MambaLikeSpec)

    def widest_group_bytes(self, num_groups: int) -> int:
        """Page bytes of the largest of `num_groups` groups."""
        return sum(math.ceil(len(names) / num_groups) * page for page, names in self.names_by_page.items())


def pack_groups(layer_specs: Mapping[str, KVCacheSpec]) -> tuple[KVCacheGroup, ...]:
    """Split layers of different page sizes into groups that fill a block about equally.

    Buckets that mix page sizes evenly are patterns; the largest of them sets how many repeats a group covers, and the
    other even buckets are cut to about that. State buckets are cut further, so that they never widen the block.
    """
    buckets = _same_slots_buckets(layer_specs)
    repeats_per_group = _repeats_per_group(buckets)
    group_counts = [_group_count(bucket, repeats_per_group) for bucket in buckets]
    block_bytes = max(
        bucket.widest_group_bytes(len(bucket.specs) if bucket.holds_states else num_groups)
        for bucket, num_groups in zip(buckets, group_counts, strict=True)
    )
    groups: list[KVCacheGroup] = []
    for bucket, num_groups in zip(buckets, group_counts, strict=True):
        if bucket.holds_states:
            page_bytes = next(iter(bucket.specs.values())).page_size_bytes
            states_per_block = max(block_bytes // page_bytes, 1)
            num_groups = max(num_groups, math.ceil(len(bucket.specs) / states_per_block))
        groups.extend(_split(bucket, num_groups))
    return tuple(groups)


def _same_slots_buckets(layer_specs: Mapping[str, KVCacheSpec]) -> list[_Bucket]:
    buckets: dict[tuple[object, ...], _Bucket] = {}
    for name, spec in layer_specs.items():
        bucket = buckets.setdefault((spec.token_slots_key, spec.block_size), _Bucket({}, {}))
        bucket.specs[name] = spec
        bucket.names_by_page.setdefault(spec.page_size_bytes, []).append(name)
    return list(buckets.values())


def _repeats_per_group(buckets: Sequence[_Bucket]) -> int | None:
    """Pattern repeats that a group covers; None where no bucket mixes page sizes evenly."""
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
    """The size that pads `values` least when each is rounded up to a multiple of it; the largest such size."""
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
