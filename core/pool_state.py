"""What each block is doing: reference counts, keys and the free queue, and the transitions that events make of them."""

from collections.abc import Sequence

from .events import IntColumn, Key, as_ints
from .eviction import EvictionOrder
from .free_queue import FreeQueue


class PoolState:
    """Blocks `1 .. num_blocks - 1`, each referenced (ref_cnt > 0) or queued for reuse, each with at most one key.

    The transitions trust what they are given: a decision of the allocator, or what `BlockPool` or `EventChecks` has
    checked. In a ledger they are called by one code path only, `LedgerState.apply`. Their loops are bare: for a batch
    of usual size the interpreter reads and writes lists in a loop of its own faster than by a call into C for each
    block.
    """

    def __init__(self, num_blocks: int, num_groups: int, eviction: EvictionOrder | None) -> None:
        self.num_blocks = num_blocks
        self.free_queue: EvictionOrder = FreeQueue(num_blocks) if eviction is None else eviction
        # A list: its entries are read and written three times as fast as those of a compact array.
        self._ref_cnt = [0] * num_blocks
        self._key_of: list[Key | None] = [None] * num_blocks
        # Of the block's key; empty where there is one group.
        self._group_of = bytearray(num_blocks if num_groups > 1 else 0)
        self._index: list[dict[Key, int]] = [{} for _ in range(num_groups)]
        # Further blocks under a key that is indexed already, in order of registration. Rare, so it stands apart.
        self._duplicates: list[dict[Key, list[int]]] = [{} for _ in range(num_groups)]
        self._num_keys_with_duplicates = 0

    def apply_take(self, blocks: tuple[int, ...], lost_keys: tuple[Key | None, ...]) -> None:
        """Hand out queued blocks for new content; each loses its key now, not when it was freed.

        `lost_keys` are the keys of the blocks, as `BlocksAllocated` holds them.
        """
        self.free_queue.take(blocks)
        ref_cnt, key_of = self._ref_cnt, self._key_of
        if not lost_keys:
            for block in blocks:
                ref_cnt[block] = 1
            return
        index = self._index[0]
        is_plain = not (self._group_of or self._num_keys_with_duplicates)
        for block in blocks:
            ref_cnt[block] = 1
            key = key_of[block]
            if key is None:
                continue
            if is_plain:
                key_of[block] = None
                del index[key]
            else:
                self._forget(block)

    def apply_adopt(self, blocks: Sequence[int]) -> None:
        """Add one reference to each block but the null block; unreferenced ones leave the free queue.

        A block is named as often as it is to be referenced: a request whose keys repeat finds one block twice.
        """
        ref_cnt = self._ref_cnt
        live = blocks if all(blocks) else list(filter(None, blocks))
        if self.free_queue.observes_keys:
            self.free_queue.on_adopted(live)
        queued: list[int] = []
        for block in live:
            count = ref_cnt[block]
            if not count:
                queued.append(block)
            ref_cnt[block] = count + 1
        if queued:
            self.free_queue.remove(queued)

    def apply_release(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each block, in the order given.

        Those that reach 0 go to the free queue: without a key to its front, with one to its back.
        """
        ref_cnt, key_of = self._ref_cnt, self._key_of
        freed: Sequence[int] = blocks
        num_unkeyed = 0
        to_come = iter(blocks)
        for block in to_come:
            if ref_cnt[block] != 1:
                shared = (block, *to_come)
                freed = [*blocks[: -len(shared)], *self._freed_of_shared(shared)]
                num_unkeyed = len(self._parted_by_key(freed)[0])
                break
            ref_cnt[block] = 0
            if key_of[block] is None:
                num_unkeyed += 1
        # A request's last blocks, which it gives back first, are the ones without a key.
        unkeyed, keyed = freed[:num_unkeyed], freed[num_unkeyed:]
        for block in unkeyed:
            if key_of[block] is not None:
                unkeyed, keyed = self._parted_by_key(freed)
                break
        if unkeyed:
            self.free_queue.prepend(unkeyed)
        if keyed:
            self.free_queue.append(keyed)

    def _parted_by_key(self, blocks: Sequence[int]) -> tuple[list[int], list[int]]:
        """The blocks without a key, and those with one."""
        parts: tuple[list[int], list[int]] = ([], [])
        for block in blocks:
            parts[self._key_of[block] is not None].append(block)
        return parts

    def _freed_of_shared(self, blocks: Sequence[int]) -> list[int]:
        """Drop one reference to each block; those that reach 0, in the order in which they do."""
        ref_cnt = self._ref_cnt
        freed: list[int] = []
        for block in blocks:
            left = ref_cnt[block] - 1
            ref_cnt[block] = left
            if not left:
                freed.append(block)
        return freed

    def apply_cache(self, group: int, blocks: Sequence[int], keys: Sequence[Key], indices: IntColumn) -> None:
        """Make referenced blocks findable. A key that is indexed already keeps its older block in front."""
        key_of, index = self._key_of, self._index[group]
        for block, key in zip(blocks, keys, strict=True):
            key_of[block] = key
            if key in index:
                self._add_duplicate(group, key, block)
            else:
                index[key] = block
        if self._group_of:
            for block in blocks:
                self._group_of[block] = group
        if self.free_queue.observes_keys:
            self.free_queue.on_cached(group, blocks, as_ints(indices), keys)

    def apply_uncache(self, blocks: Sequence[int]) -> None:
        """Drop the keys of blocks where they stand: reference counts and queue positions stay."""
        for block in blocks:
            if self._key_of[block] is not None:
                self._forget(block)
        if self.free_queue.observes_keys:
            self.free_queue.on_uncached(blocks)

    def apply_reset(self) -> None:
        """Drop every key. The free queue keeps its order. Nothing is referenced."""
        keyed = [block for block, key in enumerate(self._key_of) if key is not None]
        self._key_of = [None] * self.num_blocks
        for index, duplicates in zip(self._index, self._duplicates, strict=True):
            index.clear()
            duplicates.clear()
        self._num_keys_with_duplicates = 0
        if self.free_queue.observes_keys:
            self.free_queue.on_uncached(keyed)

    def _add_duplicate(self, group: int, key: Key, block: int) -> None:
        others = self._duplicates[group].setdefault(key, [])
        self._num_keys_with_duplicates += not others
        others.append(block)

    def _forget(self, block: int) -> None:
        key = self._key_of[block]
        self._key_of[block] = None
        group = self._group_of[block] if self._group_of else 0
        index, duplicates = self._index[group], self._duplicates[group]
        others = duplicates.get(key)
        if others is None:
            del index[key]
            return
        if index[key] == block:
            index[key] = others.pop(0)
        else:
            others.remove(block)
        if not others:
            del duplicates[key]
            self._num_keys_with_duplicates -= 1
