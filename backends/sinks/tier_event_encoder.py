"""From tier commits to KV events: what a server with offloading publishes beside its GPU's events."""

from collections.abc import Callable, Mapping
from typing import Final

from ...core.errors import MisuseError
from ...core.events import Key
from ...core.tier_events import POOL, TierCommit, TiersCreated
from .kv_event_encoder import block_hash
from .kv_events import BlockHash, BlockRemoved, BlockStored, KVCacheEvent

# vLLM's offloading connector says "CPU" of host memory.
MEDIA: Final[Mapping[str, str]] = {"host": "CPU", "ssd": "SSD"}


class TierEventEncoder:
    """Follows the commits of one engine's tiers: `BlockStored` and `BlockRemoved` with the tier as `medium`.

    As vLLM's offloading connector has it, stored blocks come without tokens and without a parent: who wants those knows
    them from the GPU's event of the same hashes. What the pool itself gains or loses is said by its own encoder.
    """

    def __init__(
        self, as_hash: Callable[[Key], BlockHash] = block_hash, media: Mapping[str, str] = MEDIA, group_idx: int = 0
    ) -> None:
        """Start before the first commit.

        Args:
            as_hash: what a key becomes: `block_hash` or `block_hash_low64`.
            media: the medium of each tier by its name; a tier that is not named here is its own medium.
            group_idx: the group whose blocks are kept.
        """
        self._as_hash = as_hash
        self._names = media
        self._group = group_idx
        self._created: TiersCreated | None = None

    def encode(self, commit: TierCommit) -> list[KVCacheEvent]:
        """The events of one commit: in the order of the moves, each content's old place before its new one."""
        out: list[KVCacheEvent] = []
        for event in commit.events:
            if isinstance(event, TiersCreated):
                self._created = event
                continue
            hashes = [self._as_hash(key) for key in event.keys]
            if event.from_tier != POOL:
                out.append(BlockRemoved(hashes, self._medium(event.from_tier), self._group))
            if event.to_tier is not None and event.to_tier != POOL:
                out.append(self._stored(hashes, event.to_tier))
        return out

    def _stored(self, hashes: list[BlockHash], tier: int) -> BlockStored:
        return BlockStored(
            block_hashes=hashes,
            parent_block_hash=None,
            token_ids=[],
            block_size=self._tiers().block_size,
            medium=self._medium(tier),
            group_idx=self._group,
        )

    def _medium(self, tier: int) -> str:
        name = self._tiers().names[tier - 1]
        return self._names.get(name, name)

    def _tiers(self) -> TiersCreated:
        if self._created is None:
            raise MisuseError("blocks moved between tiers that no TiersCreated has named: the encoder came too late")
        return self._created
