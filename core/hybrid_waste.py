"""What it costs to size every layer like full attention in a model whose layers have windows or chunks (A16)."""

from collections.abc import Mapping

import attrs

from .kv_cache_spec import CrossAttentionSpec, KVCacheSpec


@attrs.frozen
class HybridWaste:
    """Bytes of one sequence, before rounding to blocks.

    Attributes:
        num_tokens: length of the sequence.
        full_bytes: every layer keeps every token.
        floor_bytes: every layer keeps what it reads again.
    """

    num_tokens: int
    full_bytes: int
    floor_bytes: int

    @property
    def wasted_share(self) -> float:
        """Share of the memory that is never read when every layer is sized like full attention."""
        return 1 - self.floor_bytes / self.full_bytes if self.full_bytes else 0.0


def hybrid_waste(layer_specs: Mapping[str, KVCacheSpec], num_tokens: int) -> HybridWaste:
    """Compare full sizing with window-aware sizing for one sequence of `num_tokens` tokens.

    Cross-attention layers are left out: they keep encoder tokens, to which no window applies.
    """
    specs = [spec for spec in layer_specs.values() if not isinstance(spec, CrossAttentionSpec)]
    floor_bytes = [spec.floor_bytes(num_tokens) for spec in specs]
    full_bytes = [
        max(int(spec.bytes_per_token * num_tokens), floor) for spec, floor in zip(specs, floor_bytes, strict=True)
    ]
    return HybridWaste(num_tokens, sum(full_bytes), sum(floor_bytes))
