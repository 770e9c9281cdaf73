"""Rebuilds the index of a pool from its KV events: cached blocks, their copies, parents, sizes and media."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

import attrs

from .schema import GPU, AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, KVCacheEvent, UnknownEvent

Address: TypeAlias = tuple[int, BlockHash]


@attrs.define
class ShadowBlock:
    """A cached block."""

    copies: dict[str, int]  # medium -> number of its blocks that carry the hash
    parent: BlockHash | None = (
        None  # the hash of the block before it; None at the start, or if the stream does not tell
    )
    num_tokens: int | None = None  # its tokens; None if the stream does not tell
    # The event that first reported the block; kept only if the pool describes itself.
    stored: BlockStored | None = attrs.field(default=None, repr=False)
    place: int = 0  # the block's position in that event


class ShadowPool:
    """The index of a prefix cache, as its events so far describe it. Takes both wire modes.

    A hash that is stored twice is gone only after two removals, and a removed hash returns only when it is stored
    again. Impossible events are counted; nothing is guessed.

    Attributes:
        blocks: (group, hash) -> block, whichever media hold it.
        copies_in: medium -> cached blocks, duplicates included.
        unknown_events: type -> events of it that could not be read.
        num_orphans: GPU blocks stored after a block that the GPU did not cache (the stream began later, or was cut).
            Counted only in groups whose hits need every block before them: the parent of a window's first block is gone
            by design.
        num_unknown_removals: removals of blocks that were not cached.
        num_stored: GPU blocks ever stored.
        num_removed: GPU blocks ever removed, by removal or by clearing.
    """

    def __init__(self, describes_itself: bool = False, reports_reuse: bool = False) -> None:
        """Start empty.

        Args:
            describes_itself: keep what `describe` needs (token ids, extra keys).
            reports_reuse: the server also sends a `BlockStored` for the blocks that a request found, from its first
                block on (vLLM's `kv_cache_report_mode` "full"). Such an event adds no copies (field report E07).
        """
        self._describes_itself = describes_itself
        self._reports_reuse = reports_reuse
        self.blocks: dict[Address, ShadowBlock] = {}
        self.copies_in: Counter[str] = Counter()
        self.unknown_events: Counter[str] = Counter()
        self.num_orphans = 0
        self._largest: dict[int, int] = {}  # the tokens of a whole block, by group, as far as the stream tells
        self.num_unknown_removals = 0
        self.num_stored = 0
        self.num_removed = 0

    @property
    def num_copies(self) -> int:
        """Cached blocks of all media, duplicates included."""
        return self.copies_in.total()

    def apply(self, events: Iterable[KVCacheEvent | UnknownEvent]) -> None:
        """Apply the events of one batch, in order."""
        for event in events:
            if isinstance(event, BlockStored):
                self._store(event)
            elif isinstance(event, BlockRemoved):
                self._remove(event)
            elif isinstance(event, UnknownEvent):
                self.unknown_events[event.tag] += 1
                if event.may_remove:
                    self.clear()
            else:
                self.clear()

    def clear(self) -> None:
        """Remove every block."""
        self.num_removed += self.copies_in[GPU]
        self.blocks.clear()
        self.copies_in.clear()

    def gained(self, event: BlockStored) -> Sequence[BlockHash]:
        """Return the blocks of an event that gain a copy when it is applied.

        These are all of them, unless the event may report reuse: it begins at a first block, on the GPU. Then blocks
        that are cached gain none. In a group that skips blocks (windows, states) the report also names blocks that are
        not cached; it is told by its last block, which always is.
        """
        if not self._reports_reuse or event.parent_block_hash is not None or event.on_medium != GPU:
            return event.block_hashes
        group = event.group_idx or 0
        unknown = [hashed for hashed in event.block_hashes if not self.num_copies_of(hashed, group, GPU)]
        if not event.needs_whole_prefix and event.block_hashes[-1:] != unknown[-1:]:
            return []
        return unknown

    def is_end_of_prompt(self, event: BlockStored) -> bool:
        """Whether an event stores the end of a prompt inside a block, at a place that the stream does not tell.

        vLLM publishes it as one block of the size that its keys have, behind the key before it, which no block has
        unless the end lies right behind a whole block.
        """
        group, parent = event.group_idx or 0, event.parent_block_hash
        is_part = len(event.block_hashes) == 1 and 0 < event.block_size < self._largest.get(group, 0)
        return is_part and parent is not None and not self.num_copies_of(parent, group, GPU)

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
        group, medium, parent = event.group_idx or 0, event.on_medium, event.parent_block_hash
        needs_parent = medium == GPU and event.needs_whole_prefix and not self.is_end_of_prompt(event)
        if needs_parent and parent is not None and not self.num_copies_of(parent, group, GPU):
            self.num_orphans += len(event.block_hashes)
        self._largest[group] = max(self._largest.get(group, 0), event.block_size)
        sizes = event.tokens_per_block()
        gained = self.gained(event)
        is_gained = None if gained is event.block_hashes else set(gained)
        for place, hashed in enumerate(event.block_hashes):
            if is_gained is None or hashed in is_gained:
                block = self.blocks.get((group, hashed))
                if block is None:
                    block = self.blocks[group, hashed] = ShadowBlock({})
                # The GPU's event describes the block; those of other media may lack its parent and its tokens.
                if not block.copies or (medium == GPU and GPU not in block.copies):
                    block.parent, block.num_tokens = parent, None if sizes is None else sizes[place]
                    if self._describes_itself:
                        block.stored, block.place = event, place
                block.copies[medium] = block.copies.get(medium, 0) + 1
            # If hashes need not be neighbours, the previous one is not the parent.
            parent = hashed if sizes is not None and event.token_ids else None
        self.copies_in[medium] += len(gained)
        if medium == GPU:
            self.num_stored += len(gained)

    def _remove(self, event: BlockRemoved) -> None:
        group, medium = event.group_idx or 0, event.on_medium
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
            self.copies_in[medium] -= 1
            if medium == GPU:
                self.num_removed += 1

    def _as_events(self, address: Address) -> Iterator[BlockStored]:
        """Yield one event for each copy of a block, with its own tokens if the original event tells which those are."""
        group, hashed = address
        block = self.blocks[address]
        stored = block.stored or BlockStored([], None, [], 0)
        tokens: list[int] = []
        if stored.token_ids and stored.tokens_per_block() is not None:
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
