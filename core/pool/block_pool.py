"""The block pool: ref counts, the index of block hashes, and the free queue in eviction order.

It decides which blocks may be read, written and evicted.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter

from ..cache_kinds import NULL_BLOCK
from ..errors import MisuseError
from ..events import IntColumn, Key, as_ints
from .eviction_order import EvictionOrder
from .free_queue import FreeQueue

__all__ = ["NULL_BLOCK", "BlockPool"]


class BlockPool:
    """Blocks `1 .. num_blocks - 1`, each referenced (ref_cnt > 0) or queued for reuse, each with at most one key.

    Block 0 is the null block: a placeholder in tables, never handed out, never counted. The rules are those of vLLM
    V1's pool (golden/ops). Taking removes blocks from the head of the free queue and drops their keys only then.
    Releasing sends blocks without a key to the front of the queue and blocks with one to its back, in the order given.
    Several blocks may have the same key; a lookup finds the one that was registered first.

    Each transition exists twice. `take`, `adopt`, `release` and `cache` check first and raise `MisuseError` before
    anything has changed. The `apply_...` methods trust their arguments: only `LedgerState.apply` calls them, with an
    event that the allocator decided or that a replay has checked by the `check_...` methods. Their loops are bare: for
    a batch of usual size the interpreter reads and writes lists faster in a loop than by a call into C for each block.

    The pool takes 64 bytes a block, plus the keys.
    """

    def __init__(self, num_blocks: int, num_groups: int = 1, eviction: EvictionOrder | None = None) -> None:
        if num_blocks < 2:
            raise MisuseError(
                f"a pool of {num_blocks} blocks has no usable block: block 0 is reserved; give at least 2"
            )
        self.num_blocks = num_blocks
        self.free_queue: EvictionOrder = FreeQueue(num_blocks) if eviction is None else eviction
        # A list: its entries are read and written three times as fast as those of a compact array.
        self._ref_cnt = [0] * num_blocks
        self._key_of: list[Key | None] = [None] * num_blocks
        # The group of each block's key; empty where there is one group.
        self._group_of = bytearray(num_blocks if num_groups > 1 else 0)
        self._index: list[dict[Key, int]] = [{} for _ in range(num_groups)]
        # More blocks under a key that is in the index already, in order of registration. Rare, so kept apart.
        self._duplicates: list[dict[Key, list[int]]] = [{} for _ in range(num_groups)]
        self._num_keys_with_duplicates = 0

    # -- questions ---------------------------------------------------------------------------------------------------

    @property
    def num_usable_blocks(self) -> int:
        """Count all blocks but the null block."""
        return self.num_blocks - 1

    @property
    def num_free_blocks(self) -> int:
        """Count the unreferenced blocks: clean ones and those that still hold reusable content."""
        return len(self.free_queue)

    @property
    def num_held_blocks(self) -> int:
        """Count the referenced blocks."""
        return self.num_blocks - 1 - len(self.free_queue)

    @property
    def usage(self) -> float:
        """Return referenced over usable blocks, 0..1. Reusable content does not count as used (field report C04)."""
        return self.num_held_blocks / self.num_usable_blocks

    def num_evictable_blocks(self) -> int:
        """Count the unreferenced blocks that still have a key. O(free)."""
        key_of = self._key_of
        return sum(key_of[block] is not None for block in self.free_queue.order())

    def ref_cnt(self, block: int) -> int:
        """Return the ref count of a block: how many entries of block tables name it."""
        return self._ref_cnt[self._checked(block)]

    def ref_cnts(self) -> Sequence[int]:
        """Return the ref count of every block, by id (a copy)."""
        return self._ref_cnt.copy()

    def key_of(self, block: int) -> Key | None:
        """Return the key under which lookups find the block, or None."""
        return self._key_of[self._checked(block)]

    def group_of(self, block: int) -> int:
        """Return the group of the block's key (meaningless while it has none)."""
        self._checked(block)
        return self._group_of[block] if self._group_of else 0

    def find(self, key: Key, group: int = 0) -> int | None:
        """Return the first registered block that still has the key, or None."""
        return self._index[group].get(key)

    def index(self, group: int = 0) -> Mapping[Key, int]:
        """Return the index of one group, key -> block. It is live: read it, never change it."""
        return self._index[group]

    def copies(self, key: Key, group: int = 0) -> tuple[int, ...]:
        """Return every block that has the key, in order of registration."""
        first = self._index[group].get(key)
        return () if first is None else (first, *self._duplicates[group].get(key, ()))

    @property
    def num_keyed_blocks(self) -> int:
        """Count the blocks that have a key."""
        duplicates = sum([len(others) for of_group in self._duplicates for others in of_group.values()])
        return sum(map(len, self._index)) + duplicates

    def keyed_blocks(self) -> Iterator[tuple[int, Key]]:
        """Iterate over the blocks that have a key, by id, each with its key."""
        return ((block, key) for block, key in enumerate(self._key_of) if key is not None)

    def keys_of(self, blocks: Sequence[int]) -> tuple[Key | None, ...]:
        """Return the keys of several blocks; an empty tuple when none of them has one."""
        if len(blocks) == 1:
            key = self._key_of[blocks[0]]
            return () if key is None else (key,)
        if not blocks:
            return ()
        keys: tuple[Key | None, ...] = itemgetter(*blocks)(self._key_of)
        for key in keys:
            if key is not None:
                return keys
        return ()

    def groups_of(self, blocks: Sequence[int]) -> tuple[int, ...]:
        """Return the groups of the keys of these blocks."""
        return tuple([self._group_of[block] for block in blocks]) if self._group_of else (0,) * len(blocks)

    def num_free_among(self, blocks: Sequence[int]) -> int:
        """Count the unreferenced among these blocks: adopting them takes that many from the free queue.

        The null block does not count. A block that is named several times (keys that repeat in a prompt) counts each
        time, so that a request never needs fewer blocks with the hit than it would if the hit were lost.
        """
        # The null block's ref count is always 0.
        ref_cnt = self._ref_cnt
        return [ref_cnt[block] for block in blocks].count(0) - blocks.count(NULL_BLOCK)

    # -- checked transitions -----------------------------------------------------------------------------------------

    def take(self, blocks: tuple[int, ...]) -> None:
        """Hand out queued blocks for new content. Each loses its key now, not when it was freed.

        Raises:
            MisuseError: a block is referenced, or is not a block.
        """
        lost_keys = self.keys_of(blocks)
        self.check_take(blocks, lost_keys)
        self.apply_take(blocks, lost_keys)

    def adopt(self, blocks: Sequence[int]) -> None:
        """Add one reference to each (non-null) block (vLLM: touch); unreferenced ones leave the free queue.

        Raises:
            MisuseError: a block is neither referenced nor findable by a key, or is not a block.
        """
        self.check_adopt(blocks)
        self.apply_adopt(blocks)

    def release(self, blocks: Sequence[int]) -> None:
        """Decrement each ref count, in the order given.

        Blocks that reach 0 go to the free queue: without a key to its front, with one to its back.

        Raises:
            MisuseError: a block is released more often than it is referenced (a double free), is the null block, or
                is not a block.
        """
        self.check_release(blocks)
        self.apply_release(blocks)

    def cache(self, group: int, blocks: Sequence[int], keys: Sequence[Key], indices: Sequence[int]) -> None:
        """Make referenced blocks findable. If a key is in the index already, lookups keep finding its older block.

        Raises:
            MisuseError: a block is unreferenced, has a key already, or is not a block.
        """
        self.check_cache(blocks)
        self.apply_cache(group, blocks, keys, tuple(indices))

    # -- checks ------------------------------------------------------------------------------------------------------

    def check_take(self, blocks: Sequence[int], lost_keys: Sequence[Key | None]) -> None:
        """Raise `MisuseError` unless each block is queued and named once, and `lost_keys` are the blocks' keys."""
        self.check_ids(blocks, "take")
        ref_cnt = self._ref_cnt
        if any(ref_cnt[block] for block in blocks) or not _are_distinct(blocks):
            for block, times in Counter(blocks).items():
                if ref_cnt[block]:
                    raise MisuseError(f"block {block} is taken while {ref_cnt[block]} references to it are live")
                if times > 1:
                    raise MisuseError(f"block {block} is taken {times} times in one call")
        keys = tuple([self._key_of[block] for block in blocks])
        claimed = tuple(lost_keys) or (None,) * len(blocks)
        if keys != claimed:
            raise MisuseError(f"blocks {tuple(blocks)} lose the keys {keys} by being taken, not {claimed}")

    def check_adopt(self, blocks: Sequence[int]) -> None:
        """Raise `MisuseError` unless each block is the null block, is referenced, or has a key."""
        live = [block for block in blocks if block != NULL_BLOCK]
        self.check_ids(live, "adopt")
        for block in live:
            if not self._ref_cnt[block] and self._key_of[block] is None:
                raise MisuseError(f"cannot adopt block {block}: no request holds it, and it has no key")

    def check_release(self, blocks: Sequence[int]) -> None:
        """Raise `MisuseError` if a block is released more often than it is referenced."""
        self.check_ids(blocks, "release")
        ref_cnt = self._ref_cnt
        if all(ref_cnt[block] for block in blocks) and _are_distinct(blocks):
            return
        for block, times in Counter(blocks).items():
            if times > ref_cnt[block]:
                raise MisuseError(
                    f"double free: block {block} is released {times} time(s) in one call but held "
                    f"{ref_cnt[block]} time(s); nothing was released"
                )

    def check_cache(self, blocks: Sequence[int]) -> None:
        """Raise `MisuseError` unless each block is referenced, has no key yet, and is named once."""
        self.check_ids(blocks, "register")
        is_held = all(self._ref_cnt[block] for block in blocks)
        if is_held and not self.keys_of(blocks) and _are_distinct(blocks):
            return
        for block, times in Counter(blocks).items():
            if self._key_of[block] is not None or not self._ref_cnt[block] or times > 1:
                raise MisuseError(
                    f"cannot register block {block} {times} time(s): it has {self._ref_cnt[block]} references and is "
                    f"findable under {self._key_of[block]!r}; a block is registered once, by a request that holds it"
                )

    def check_ids(self, blocks: Sequence[int], doing: str) -> None:
        """Raise `MisuseError` unless each id is that of a block that can be handed out."""
        if not blocks or (min(blocks) > NULL_BLOCK and max(blocks) < self.num_blocks):
            return
        wrong = next(block for block in blocks if not NULL_BLOCK < block < self.num_blocks)
        what = "the null block, a placeholder that is never handed out" if wrong == NULL_BLOCK else "not a block"
        raise MisuseError(f"cannot {doing} block {wrong}: it is {what} (usable: 1 to {self.num_blocks - 1})")

    def _checked(self, block: int) -> int:
        if not 0 <= block < self.num_blocks:
            raise MisuseError(f"no block {block}: this pool has blocks 0 to {self.num_blocks - 1}")
        return block

    # -- transitions without checks ----------------------------------------------------------------------------------

    def apply_take(self, blocks: tuple[int, ...], lost_keys: tuple[Key | None, ...]) -> None:
        """`take` without checks; `lost_keys` are the keys of the blocks, as `BlocksAllocated` has them."""
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
        """`adopt` without checks. A block may be named several times: a request whose keys repeat finds it twice."""
        ref_cnt = self._ref_cnt
        live = blocks if all(blocks) else list(filter(None, blocks))
        queued: list[int] = []
        for block in live:
            count = ref_cnt[block]
            if not count:
                queued.append(block)
            ref_cnt[block] = count + 1
        if queued:
            self.free_queue.remove(queued)
        if self.free_queue.observes_keys:
            self.free_queue.on_adopted(live)

    def apply_release(self, blocks: Sequence[int]) -> None:
        """`release` without checks."""
        ref_cnt, key_of = self._ref_cnt, self._key_of
        freed: Sequence[int] = blocks
        num_unkeyed = 0
        to_come = iter(blocks)
        for block in to_come:
            if ref_cnt[block] != 1:
                shared = (block, *to_come)
                freed = [*blocks[: -len(shared)], *self._release_shared(shared)]
                num_unkeyed = len(self._split_by_key(freed)[0])
                break
            ref_cnt[block] = 0
            if key_of[block] is None:
                num_unkeyed += 1
        # A request gives its last blocks back first, and those are usually the ones without a key.
        unkeyed, keyed = freed[:num_unkeyed], freed[num_unkeyed:]
        for block in unkeyed:
            if key_of[block] is not None:
                unkeyed, keyed = self._split_by_key(freed)
                break
        if unkeyed:
            self.free_queue.prepend(unkeyed)
        if keyed:
            self.free_queue.append(keyed)

    def _split_by_key(self, blocks: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the blocks without a key, and those with one."""
        parts: tuple[list[int], list[int]] = ([], [])
        for block in blocks:
            parts[self._key_of[block] is not None].append(block)
        return parts

    def _release_shared(self, blocks: Sequence[int]) -> list[int]:
        """Decrement each ref count; return the blocks that reached 0, in order."""
        ref_cnt = self._ref_cnt
        freed: list[int] = []
        for block in blocks:
            left = ref_cnt[block] - 1
            ref_cnt[block] = left
            if not left:
                freed.append(block)
        return freed

    def apply_cache(self, group: int, blocks: Sequence[int], keys: Sequence[Key], indices: IntColumn) -> None:
        """`cache` without checks."""
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
        """Drop the keys of blocks; their ref counts and queue positions stay."""
        for block in blocks:
            if self._key_of[block] is not None:
                self._forget(block)
        if self.free_queue.observes_keys:
            self.free_queue.on_uncached(blocks)

    def apply_reset(self) -> None:
        """Drop every key. The free queue keeps its order."""
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


def _are_distinct(blocks: Sequence[int]) -> bool:
    return len(set(blocks)) == len(blocks)
