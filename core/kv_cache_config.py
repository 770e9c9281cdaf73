"""What a plan hands to an engine: block-table groups, where each layer lies in the raw buffer, and how many blocks."""

import attrs

from .cache_dtype import ScaleStorage
from .kv_cache_layout import KVCacheLayout
from .kv_cache_spec import AttentionSpec, KVCacheSpec
from .latent_and_state_spec import CompressedStateSpec, MambaLikeSpec, MLASpec


@attrs.frozen
class KVCacheGroup:
    """Layers that share one block table: a block id names one page in each of them.

    Attributes:
        layer_names: the layers, in the order in which they lie in memory.
        layer_specs: the spec of each of them; both are empty on a rank that holds none of the group's layers.
        spec: what the block table sees: block size, and the blocks that a request needs.
        is_uniform_type: the layers are of one kind but their pages may differ; the group's page is the sum of theirs.
    """

    layer_names: tuple[str, ...]
    layer_specs: tuple[KVCacheSpec, ...]
    spec: KVCacheSpec
    is_uniform_type: bool = False

    @property
    def kind(self) -> str:
        """`uniform_type`, or the kind of the one spec that all layers share."""
        return "uniform_type" if self.is_uniform_type else self.spec.kind

    @property
    def block_size(self) -> int:
        """Tokens that one block of this group covers on one rank."""
        return self.spec.block_size

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block: of one layer, or of all layers together where their pages may differ."""
        return self.bytes_per_block if self.is_uniform_type else self.spec.page_size_bytes

    @property
    def bytes_per_block(self) -> int:
        """Bytes that one block of this group takes in all its layers."""
        return sum(spec.page_size_bytes for spec in self.layer_specs)

    def tokens_per_block(self, decode_context_parallel_size: int) -> int:
        """Tokens of a request that one block id stands for: DCP spreads attention over ranks, but never a state."""
        if isinstance(self.spec, MambaLikeSpec):
            return self.block_size
        return self.block_size * decode_context_parallel_size

    def on_rank(self, layer_names: frozenset[str]) -> "KVCacheGroup":
        """The same group with only the layers that one rank holds (none is a group like any other)."""
        held = [index for index, name in enumerate(self.layer_names) if name in layer_names]
        return attrs.evolve(
            self,
            layer_names=tuple(self.layer_names[index] for index in held),
            layer_specs=tuple(self.layer_specs[index] for index in held),
        )


@attrs.frozen
class KVCacheTensor:
    """Where a run of equal layers lies: layer `l`, block `b` starts at offset + l * layer_stride + b * block_stride.

    All tensors of a rank alias one buffer of `size_bytes`; groups overlay each other, which is sound since a block
    belongs to one group at a time.
    """

    size_bytes: int
    layers: tuple[str, ...]
    layer_stride_bytes: int
    block_stride_bytes: int
    offset_bytes: int


@attrs.frozen
class KVCacheConfig:
    """The KV cache of one rank.

    Attributes:
        num_blocks: blocks of the pool, the null block (block 0) included; equal on all ranks.
        groups: the rank's block-table groups, in the same order on all ranks.
        tensors: where the layers lie in the rank's buffer.
        layout: physical order of the axes.
        size_bytes: bytes of the rank's one buffer.
    """

    num_blocks: int
    groups: tuple[KVCacheGroup, ...]
    tensors: tuple[KVCacheTensor, ...]
    layout: KVCacheLayout
    size_bytes: int

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that requests can hold: all but the null block."""
        return self.num_blocks - 1


def needs_zeroing(groups: tuple[KVCacheGroup, ...]) -> bool:
    """Whether a taken block must be zeroed before use.

    State layers read their state before they have written all of it; groups of different precision would read each
    other's left-over bytes as NaN.
    """
    specs = [spec for group in groups for spec in (*group.layer_specs, group.spec)]
    if any(isinstance(spec, MambaLikeSpec) for spec in specs):
        return True
    return len({_precision(spec) for spec in specs}) > 1


def _precision(spec: KVCacheSpec) -> tuple[str, ScaleStorage | None]:
    if isinstance(spec, AttentionSpec | MLASpec | CompressedStateSpec):
        return spec.dtype, spec.scales
    return "uint8", None
