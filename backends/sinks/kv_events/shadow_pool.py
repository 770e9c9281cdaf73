"""What a stream of KV events says of a pool: which blocks can be found, their copies, what is before them, the tier."""

from collections.abc import Iterable, Iterator
from typing import TypeAlias

import attrs

from .schema import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, KVCacheEvent

GPU = "GPU"
FULL_ATTENTION = "full_attention"

Address: TypeAlias = tuple[int, BlockHash]


@attrs.define
class ShadowBlock:
    """A block that can be found.

    Attributes:
        copies: medium -> blocks of it that carry the hash.
        parent: the hash of the block before it; None at the start, or where the stream does not tell.
        stored: the event that told of it first, and its place in it; only kept where the pool is to be described again.
    """

    copies: dict[str, int]
    parent: BlockHash | None
    stored: BlockStored | None = attrs.field(default=None, repr=False)
    place: int = 0


class ShadowPool:
    """The index of a prefix cache, as its events so far describe it. Takes both wire modes.

    A hash that is stored twice is gone only after two removals, and one that is removed comes back only by being
    stored again. What cannot be so is counted, never guessed at.

    Attributes:
        blocks: (group, hash) -> block.
        num_copies: blocks that can be found, duplicates included.
        num_orphans: blocks stored behind a block that was not there (the stream began later, or was cut). In groups
            of full attention only: a window's first block stands behind one that is gone by design.
        num_unknown_removals: removals of blocks that were not there.
        num_stored: blocks ever stored.
        num_removed: blocks ever removed, by removal or by clearing.
    """

    def __init__(self, describes_itself: bool = False) -> None:
        """`describes_itself`: keep what is needed to tell the pool again as events (token ids, extra keys)."""
        self._describes_itself = describes_itself
        self.blocks: dict[Address, ShadowBlock] = {}
        self.num_copies = 0
        self.num_orphans = 0
        self.num_unknown_removals = 0
        self.num_stored = 0
        self.num_removed = 0

    def apply(self, events: Iterable[KVCacheEvent]) -> None:
        """Take in the events of one batch, in order."""
        for event in events:
            if isinstance(event, BlockStored):
                self._store(event)
            elif isinstance(event, BlockRemoved):
                self._remove(event)
            else:
                self.clear()

    def clear(self) -> None:
        """Forget every block."""
        self.num_removed += self.num_copies
        self.blocks.clear()
        self.num_copies = 0

    def num_copies_of(self, hashed: BlockHash, group: int = 0, medium: str | None = None) -> int:
        """How many blocks carry a hash, in one medium or in all."""
        block = self.blocks.get((group, hashed))
        if block is None:
            return 0
        return sum(block.copies.values()) if medium is None else block.copies.get(medium, 0)

    def by_copies(self) -> dict[Address, int]:
        """(group, hash) -> copies, for comparison with a pool."""
        return {address: sum(block.copies.values()) for address, block in self.blocks.items()}

    def depth(self, hashed: BlockHash | None, group: int = 0) -> int:
        """How many blocks stand in a row up to this one, as far as they are there."""
        count = 0
        # A stream may be wrong in any way; a chain that bites its tail must not be followed for ever.
        while hashed is not None and count < len(self.blocks):
            block = self.blocks.get((group, hashed))
            if block is None:
                break
            count += 1
            hashed = block.parent
        return count

    def describe(self) -> Iterator[KVCacheEvent]:
        """Events that lead an empty pool to this one: everything cleared, then each block behind its parent."""
        yield AllBlocksCleared()
        done: set[Address] = set()
        for address in self.blocks:
            for each in reversed(self._not_yet_told(address, done)):
                done.add(each)
                yield from self._told(each)

    # -- events ------------------------------------------------------------------------------------------------------

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
            # Between hashes that need not be neighbours, the one before says nothing.
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

    # -- the pool told again -----------------------------------------------------------------------------------------

    def _not_yet_told(self, address: Address, done: set[Address]) -> list[Address]:
        """The block and those before it that have not been told of, last one first."""
        chain: dict[Address, None] = {}
        at: Address | None = address
        while at is not None and at not in done and at not in chain and at in self.blocks:
            chain[at] = None
            parent = self.blocks[at].parent
            at = None if parent is None else (at[0], parent)
        return list(chain)

    def _told(self, address: Address) -> Iterator[BlockStored]:
        group, hashed = address
        block = self.blocks[address]
        stored = block.stored
        for medium, count in block.copies.items():
            for _ in range(count):
                yield BlockStored(
                    [hashed],
                    block.parent,
                    _tokens_of(stored, block.place),
                    stored.block_size if stored else 0,
                    lora_id=stored.lora_id if stored else None,
                    medium=medium,
                    lora_name=stored.lora_name if stored else None,
                    extra_keys=[stored.extra_keys[block.place]] if stored and stored.extra_keys else None,
                    group_idx=group,
                    kv_cache_spec_kind=stored.kv_cache_spec_kind if stored else None,
                    kv_cache_spec_sliding_window=stored.kv_cache_spec_sliding_window if stored else None,
                )


def _tokens_of(stored: BlockStored | None, place: int) -> list[int]:
    """The block's own tokens, where the event says which those are."""
    if stored is None or not stored.is_dense:
        return []
    return stored.token_ids[place * stored.block_size : (place + 1) * stored.block_size]
