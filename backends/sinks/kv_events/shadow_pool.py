"""Rebuilds the index of a pool from its KV events: cached blocks, their copies, parents and tiers."""

from collections.abc import Iterable, Iterator
from typing import TypeAlias

import attrs

from .schema import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, KVCacheEvent

GPU = "GPU"
FULL_ATTENTION = "full_attention"

Address: TypeAlias = tuple[int, BlockHash]


@attrs.define
class ShadowBlock:
    """A cached block."""

    copies: dict[str, int]  # medium -> number of its blocks that carry the hash
    parent: BlockHash | None  # the hash of the block before it; None at the start, or if the stream does not tell
    # The event that first reported the block; kept only if the pool describes itself.
    stored: BlockStored | None = attrs.field(default=None, repr=False)
    place: int = 0  # the block's position in that event


class ShadowPool:
    """The index of a prefix cache, as its events so far describe it. Takes both wire modes.

    A hash that is stored twice is gone only after two removals, and a removed hash returns only when it is stored
    again. Impossible events are counted; nothing is guessed.

    Attributes:
        blocks: (group, hash) -> block.
        num_copies: cached blocks, duplicates included.
        num_orphans: blocks stored after a block that was not cached (the stream began later, or was cut). Counted only
            in groups of full attention: the parent of a window's first block is gone by design.
        num_unknown_removals: removals of blocks that were not cached.
        num_stored: blocks ever stored.
        num_removed: blocks ever removed, by removal or by clearing.
    """

    def __init__(self, describes_itself: bool = False) -> None:
        """Start empty. `describes_itself`: keep what `describe` needs (token ids, extra keys)."""
        self._describes_itself = describes_itself
        self.blocks: dict[Address, ShadowBlock] = {}
        self.num_copies = 0
        self.num_orphans = 0
        self.num_unknown_removals = 0
        self.num_stored = 0
        self.num_removed = 0

    def apply(self, events: Iterable[KVCacheEvent]) -> None:
        """Apply the events of one batch, in order."""
        for event in events:
            if isinstance(event, BlockStored):
                self._store(event)
            elif isinstance(event, BlockRemoved):
                self._remove(event)
            else:
                self.clear()

    def clear(self) -> None:
        """Remove every block."""
        self.num_removed += self.num_copies
        self.blocks.clear()
        self.num_copies = 0

    def num_copies_of(self, hashed: BlockHash, group: int = 0, medium: str | None = None) -> int:
        """Return how many blocks carry a hash, in one medium or in all."""
        block = self.blocks.get((group, hashed))
        if block is None:
            return 0
        return sum(block.copies.values()) if medium is None else block.copies.get(medium, 0)

    def by_copies(self) -> dict[Address, int]:
        """Return (group, hash) -> copies, for comparison with a pool."""
        return {address: sum(block.copies.values()) for address, block in self.blocks.items()}

    def depth(self, hashed: BlockHash | None, group: int = 0) -> int:
        """Return the length of the chain of cached blocks that ends with this one."""
        count = 0
        # A stream may be wrong in any way, so the chain may be a circle.
        while hashed is not None and count < len(self.blocks):
            block = self.blocks.get((group, hashed))
            if block is None:
                break
            count += 1
            hashed = block.parent
        return count

    def describe(self) -> Iterator[KVCacheEvent]:
        """Yield events that rebuild this pool from an empty one: clear everything, then each block after its parent."""
        yield AllBlocksCleared()
        done: set[Address] = set()
        for address in self.blocks:
            chain: dict[Address, None] = {}
            at: Address | None = address
            while at is not None and at not in done and at not in chain and at in self.blocks:
                chain[at] = None
                parent = self.blocks[at].parent
                at = None if parent is None else (at[0], parent)
            for each in reversed(chain):
                done.add(each)
                yield from self._as_events(each)

    def _store(self, event: BlockStored) -> None:
        group, medium = event.group_idx or 0, event.medium or GPU
        parent = event.parent_block_hash
        is_windowed = event.kv_cache_spec_kind not in (None, FULL_ATTENTION)
        if parent is not None and not is_windowed and (group, parent) not in self.blocks:
            self.num_orphans += len(event.block_hashes)
        is_dense = event.is_dense
        for place, hashed in enumerate(event.block_hashes):
            block = self.blocks.get((group, hashed))
            if block is None:
                block = self.blocks[group, hashed] = ShadowBlock({}, parent)
                if self._describes_itself:
                    block.stored, block.place = event, place
            block.copies[medium] = block.copies.get(medium, 0) + 1
            # If hashes need not be neighbours, the previous one is not the parent.
            parent = hashed if is_dense else None
        self.num_copies += len(event.block_hashes)
        self.num_stored += len(event.block_hashes)

    def _remove(self, event: BlockRemoved) -> None:
        group, medium = event.group_idx or 0, event.medium or GPU
        for hashed in event.block_hashes:
            block = self.blocks.get((group, hashed))
            if block is None or medium not in block.copies:
                self.num_unknown_removals += 1
                continue
            block.copies[medium] -= 1
            if not block.copies[medium]:
                del block.copies[medium]
                if not block.copies:
                    del self.blocks[group, hashed]
            self.num_copies -= 1
            self.num_removed += 1

    def _as_events(self, address: Address) -> Iterator[BlockStored]:
        """Yield one event for each copy of a block, with its own tokens if the original event tells which those are."""
        group, hashed = address
        block = self.blocks[address]
        stored = block.stored or BlockStored([], None, [], 0)
        tokens: list[int] = []
        if stored.is_dense:
            tokens = stored.token_ids[block.place * stored.block_size : (block.place + 1) * stored.block_size]
        extra_keys = [stored.extra_keys[block.place]] if stored.extra_keys else None
        for medium, count in block.copies.items():
            for _ in range(count):
                yield BlockStored(
                    [hashed],
                    block.parent,
                    tokens,
                    stored.block_size,
                    lora_id=stored.lora_id,
                    medium=medium,
                    lora_name=stored.lora_name,
                    extra_keys=extra_keys,
                    group_idx=group,
                    kv_cache_spec_kind=stored.kv_cache_spec_kind,
                    kv_cache_spec_sliding_window=stored.kv_cache_spec_sliding_window,
                )
