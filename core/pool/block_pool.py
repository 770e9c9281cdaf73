"""Who may read, write and evict a block: reference counts, the key index, and the free queue in eviction order."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from ..errors import MisuseError
from ..events import IntColumn, Key, as_ints
from .eviction_order import EvictionOrder
from .free_queue import FreeQueue

# What each block is doing: reference counts, keys and the free queue, and the transitions that events make of them.


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


NULL_BLOCK = 0


class BlockPool(PoolState):
    """Blocks `1 .. num_blocks - 1`, each referenced (ref_cnt > 0) or queued for reuse, each with at most one key.

    Block 0 is the null block: a placeholder in tables, never handed out, never counted. The rules are those of
    vLLM V1's pool (golden/ops): taking removes from the head of the free queue and only then drops the key; releasing
    sends blocks without a key to the front and blocks with one to the back, in visiting order; several blocks may
    carry one key and the one registered earliest is found.

    The transitions here check first and raise `MisuseError` before anything has changed; so does a ledger that replays
    a log, by the `check_...` methods. A ledger that decides knows that its decisions are sound and calls those of
    `PoolState`. 64 bytes a block, plus the keys.
    """

    def __init__(self, num_blocks: int, num_groups: int = 1, eviction: EvictionOrder | None = None) -> None:
        if num_blocks < 2:
            raise MisuseError(
                f"a pool of {num_blocks} blocks has no usable block: block 0 is reserved; give at least 2"
            )
        super().__init__(num_blocks, num_groups, eviction)

    # -- questions ---------------------------------------------------------------------------------------------------

    @property
    def num_usable_blocks(self) -> int:
        """All blocks but the null block."""
        return self.num_blocks - 1

    @property
    def num_free_blocks(self) -> int:
        """Unreferenced blocks: clean ones and those that still hold reusable content."""
        return len(self.free_queue)

    @property
    def num_held_blocks(self) -> int:
        """Referenced blocks."""
        return self.num_blocks - 1 - len(self.free_queue)

    @property
    def usage(self) -> float:
        """Referenced blocks over usable blocks, 0..1. Reusable content does not count (field report C04)."""
        return self.num_held_blocks / self.num_usable_blocks

    def num_evictable_blocks(self) -> int:
        """Unreferenced blocks that still carry a key. O(free)."""
        key_of = self._key_of
        return sum(key_of[block] is not None for block in self.free_queue.order())

    def ref_cnt(self, block: int) -> int:
        """How many table slots hold the block."""
        return self._ref_cnt[self._checked(block)]

    def ref_cnts(self) -> Sequence[int]:
        """The reference count of every block, by id (a copy)."""
        return self._ref_cnt.copy()

    def key_of(self, block: int) -> Key | None:
        """The key under which the block is found, or None."""
        return self._key_of[self._checked(block)]

    def group_of(self, block: int) -> int:
        """The group that the block's key belongs to (meaningless while it has none)."""
        self._checked(block)
        return self._group_of[block] if self._group_of else 0

    def find(self, key: Key, group: int = 0) -> int | None:
        """The earliest registered block that still carries the key, or None."""
        return self._index[group].get(key)

    def index(self, group: int = 0) -> Mapping[Key, int]:
        """Key -> the block found under it, of one group. A live view: read it, never change it."""
        return self._index[group]

    def copies(self, key: Key, group: int = 0) -> tuple[int, ...]:
        """Every block that carries the key, in order of registration."""
        first = self._index[group].get(key)
        return () if first is None else (first, *self._duplicates[group].get(key, ()))

    def keyed_blocks(self) -> Iterator[tuple[int, Key]]:
        """Every block that carries a key, by id."""
        return ((block, key) for block, key in enumerate(self._key_of) if key is not None)

    def keys_of(self, blocks: Sequence[int]) -> tuple[Key | None, ...]:
        """The keys of several blocks; empty when none of them has one."""
        key_of = self._key_of
        keys = tuple([key_of[block] for block in blocks])
        for key in keys:
            if key is not None:
                return keys
        return ()

    def groups_of(self, blocks: Sequence[int]) -> tuple[int, ...]:
        """The groups that the keys of these blocks belong to."""
        return tuple([self._group_of[block] for block in blocks]) if self._group_of else (0,) * len(blocks)

    def num_free_among(self, blocks: Sequence[int]) -> int:
        """How many of these (non-null) blocks are unreferenced: adopting them takes that many from the free queue.

        A block that is named several times, as a hit by keys of content alone may, counts each time: what a request
        needs is then never less than what it would need if the hit were lost.
        """
        # Nothing ever references the null block.
        ref_cnt = self._ref_cnt
        return [ref_cnt[block] for block in blocks].count(0) - blocks.count(NULL_BLOCK)

    # -- transitions, checked ----------------------------------------------------------------------------------------

    def take(self, blocks: tuple[int, ...]) -> None:
        """Hand out queued blocks for new content; each loses its key now, not when it was freed.

        Raises:
            MisuseError: a block is referenced, or is not a block.
        """
        lost_keys = self.keys_of(blocks)
        self.check_take(blocks, lost_keys)
        self.apply_take(blocks, lost_keys)

    def adopt(self, blocks: Sequence[int]) -> None:
        """Add one reference to each (non-null) block; unreferenced ones leave the free queue.

        Raises:
            MisuseError: a block is neither referenced nor findable by a key, or is not a block.
        """
        self.check_adopt(blocks)
        self.apply_adopt(blocks)

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each block, in the order given.

        Those that reach 0 go to the free queue: without a key to its front, with one to its back.

        Raises:
            MisuseError: a block is released more often than it is held (a double free), is the null block, or is
                not a block.
        """
        self.check_release(blocks)
        self.apply_release(blocks)

    def cache(self, group: int, blocks: Sequence[int], keys: Sequence[Key], indices: Sequence[int]) -> None:
        """Make referenced blocks findable. A key that is indexed already keeps its older block in front.

        Raises:
            MisuseError: a block is unreferenced, has a key already, or is not a block.
        """
        self.check_cache(blocks)
        self.apply_cache(group, blocks, keys, tuple(indices))

    def uncache(self, blocks: Sequence[int]) -> None:
        """Drop the keys of blocks where they stand: reference counts and queue positions stay.

        Raises:
            MisuseError: a block is the null block, or is not a block.
        """
        self.check_ids(blocks, "drop the key of")
        self.apply_uncache(blocks)

    def reset(self) -> None:
        """Drop every key. The free queue keeps its order.

        Raises:
            MisuseError: a block is referenced (field report B10).
        """
        self.check_reset()
        self.apply_reset()

    # -- checks at the edge ------------------------------------------------------------------------------------------

    def check_take(self, blocks: Sequence[int], lost_keys: Sequence[Key | None]) -> None:
        """That each of these blocks is queued, and named once, and that these are the keys that they lose."""
        self.check_ids(blocks, "take")
        ref_cnt = self._ref_cnt
        if any(ref_cnt[block] for block in blocks) or not _are_distinct(blocks):
            for block, times in Counter(blocks).items():
                if ref_cnt[block]:
                    raise MisuseError(f"block {block} is taken while {ref_cnt[block]} references to it are live")
                if times > 1:
                    raise MisuseError(f"block {block} is taken {times} times in one call")
        keys = tuple([self._key_of[block] for block in blocks])
        said = tuple(lost_keys) or (None,) * len(blocks)
        if keys != said:
            raise MisuseError(f"blocks {tuple(blocks)} lose the keys {keys} by being taken, not {said}")

    def check_adopt(self, blocks: Sequence[int]) -> None:
        """That each of these is the null block, or a block that is referenced or has a key to be found by."""
        live = [block for block in blocks if block != NULL_BLOCK]
        self.check_ids(live, "adopt")
        for block in live:
            if not self._ref_cnt[block] and self._key_of[block] is None:
                raise MisuseError(f"cannot adopt block {block}: nobody holds it, and no key names its content")

    def check_release(self, blocks: Sequence[int]) -> None:
        """That each of these blocks is held at least as often as it is named."""
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
        """That each of these blocks is referenced, has no key yet, and is named once."""
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

    def check_reset(self) -> None:
        """That no block is referenced."""
        if self.num_held_blocks:
            raise MisuseError(f"cannot drop every key: {self.num_held_blocks} blocks are referenced")

    def check_ids(self, blocks: Sequence[int], doing: str) -> None:
        """That each of these is a block that can be handed out."""
        if not blocks or (min(blocks) > NULL_BLOCK and max(blocks) < self.num_blocks):
            return
        wrong = next(block for block in blocks if not NULL_BLOCK < block < self.num_blocks)
        what = "the null block, a placeholder that is never handed out" if wrong == NULL_BLOCK else "not a block"
        raise MisuseError(f"cannot {doing} block {wrong}: it is {what} (usable: 1 to {self.num_blocks - 1})")

    def _checked(self, block: int) -> int:
        if not 0 <= block < self.num_blocks:
            raise MisuseError(f"no block {block}: this pool has blocks 0 to {self.num_blocks - 1}")
        return block


def _are_distinct(blocks: Sequence[int]) -> bool:
    return len(set(blocks)) == len(blocks)
