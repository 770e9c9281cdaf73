"""Who may read, write and evict a block: reference counts, the key index, and the free queue in eviction order."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NoReturn

from .errors import MisuseError
from .events import Key
from .eviction import EvictionOrder
from .free_queue import FreeQueue

NULL_BLOCK = 0


class BlockPool:
    """Blocks `1 .. num_blocks - 1`, each referenced (ref_cnt > 0) or queued for reuse, each with at most one key.

    Block 0 is the null block: a placeholder in tables, never handed out, never counted. The rules are those of
    vLLM V1's pool (golden/ops): taking removes from the head of the free queue and only then drops the key; releasing
    sends blocks without a key to the front and blocks with one to the back, in visiting order; several blocks may
    carry one key and the one registered earliest is found.

    Methods that change state check first and raise `MisuseError` before anything has changed. In a ledger they are
    called by one code path only, `LedgerState.apply`. 62 bytes a block, plus the keys.
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
        self._group_of = bytearray(num_blocks)
        self._several_groups = num_groups > 1
        self._index: list[dict[Key, int]] = [{} for _ in range(num_groups)]
        # Further blocks under a key that is indexed already, in order of registration. Rare, so it stands apart.
        self._duplicates: list[dict[Key, list[int]]] = [{} for _ in range(num_groups)]

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
        return self._group_of[self._checked(block)]

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
        """The keys of blocks that are about to be taken; empty when none of them has one."""
        key_of = self._key_of
        keys = [key_of[block] for block in blocks]
        for key in keys:
            if key is not None:
                return tuple(keys)
        return ()

    def groups_of(self, blocks: Sequence[int]) -> tuple[int, ...]:
        """The groups that the keys of these blocks belong to."""
        return tuple(map(self._group_of.__getitem__, blocks))

    def num_free_among(self, blocks: Sequence[int]) -> int:
        """How many of these (non-null) blocks are unreferenced: adopting them takes that many from the free queue."""
        # Nothing ever references the null block.
        return list(map(self._ref_cnt.__getitem__, blocks)).count(0) - blocks.count(NULL_BLOCK)

    # -- transitions: one loop to check, one to change, because a pass costs a batch of usual size more than its work -

    def take(self, blocks: tuple[int, ...]) -> None:
        """Hand out queued blocks for new content; each loses its key now, not when it was freed."""
        ref_cnt, key_of = self._ref_cnt, self._key_of
        try:
            for block in blocks:
                if ref_cnt[block] or block < 1:
                    self._refuse_to_take(blocks)
        except IndexError:
            self._refuse_to_take(blocks)
        self.free_queue.take(blocks)
        index, group_of = self._index, self._group_of
        has_duplicates = any(self._duplicates)
        for block in blocks:
            ref_cnt[block] = 1
            key = key_of[block]
            if key is None:
                continue
            if has_duplicates:
                self._forget(block)
            else:
                del index[group_of[block]][key]
                key_of[block] = None

    def adopt(self, blocks: Sequence[int]) -> None:
        """Add one reference to each (non-null) block; unreferenced ones leave the free queue."""
        ref_cnt = self._ref_cnt
        live = blocks if all(blocks) else [block for block in blocks if block]
        try:
            counts = [ref_cnt[block] for block in live]
        except IndexError:
            counts = []
        if not counts or min(live) < 1:
            self._check_ids(live, "adopt")
        if self.free_queue.observes_keys:
            self.free_queue.on_adopted(live)
        if not any(counts):
            self.free_queue.remove(live)
            for block in live:
                ref_cnt[block] = 1
            return
        if not all(counts):
            self.free_queue.remove([block for block, count in zip(live, counts, strict=True) if not count])
        for block in live:
            ref_cnt[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each block, in the order given.

        Those that reach 0 go to the free queue: without a key to its front, with one to its back.

        Raises:
            MisuseError: a block is released more often than it is held (a double free), is the null block, or is
                not a block. The counts are as before the call.
        """
        ref_cnt, key_of = self._ref_cnt, self._key_of
        unkeyed: list[int] = []
        keyed: list[int] = []
        to_come = iter(blocks)
        try:
            for block in to_come:
                left = ref_cnt[block] - 1
                if not left and block > 0:
                    ref_cnt[block] = 0
                    if key_of[block] is None:
                        unkeyed.append(block)
                    else:
                        keyed.append(block)
                elif left > 0 and block > 0:
                    ref_cnt[block] = left
                else:
                    self._refuse_to_release(blocks, len(blocks) - len(list(to_come)) - 1)
        except IndexError:
            self._refuse_to_release(blocks, len(blocks) - len(list(to_come)) - 1)
        if unkeyed:
            self.free_queue.prepend(unkeyed)
        if keyed:
            self.free_queue.append(keyed)

    def cache(self, group: int, blocks: Sequence[int], keys: Sequence[Key], indices: Sequence[int]) -> None:
        """Make referenced blocks findable. A key that is indexed already keeps its older block in front."""
        key_of, group_of, index, ref_cnt = self._key_of, self._group_of, self._index[group], self._ref_cnt
        try:
            for block in blocks:
                if key_of[block] is not None or not ref_cnt[block] or block < 1:
                    self._refuse_to_register(blocks)
        except IndexError:
            self._refuse_to_register(blocks)
        for block, key in zip(blocks, keys, strict=True):
            key_of[block] = key
            if index.setdefault(key, block) != block:
                self._duplicates[group].setdefault(key, []).append(block)
        if self._several_groups:
            for block in blocks:
                group_of[block] = group
        if self.free_queue.observes_keys:
            self.free_queue.on_cached(group, blocks, indices, keys)

    def uncache(self, blocks: Sequence[int]) -> None:
        """Drop the keys of blocks where they stand: reference counts and queue positions stay."""
        for block in blocks:
            if self._key_of[block] is not None:
                self._forget(block)
        if self.free_queue.observes_keys:
            self.free_queue.on_uncached(blocks)

    def reset(self) -> None:
        """Drop every key. The free queue keeps its order. The caller made sure that nothing is referenced."""
        keyed = [block for block, _ in self.keyed_blocks()]
        self._key_of = [None] * self.num_blocks
        for index, duplicates in zip(self._index, self._duplicates, strict=True):
            index.clear()
            duplicates.clear()
        if self.free_queue.observes_keys:
            self.free_queue.on_uncached(keyed)

    def _forget(self, block: int) -> None:
        key = self._key_of[block]
        self._key_of[block] = None
        group = self._group_of[block]
        index, duplicates = self._index[group], self._duplicates[group]
        others = duplicates.get(key) if duplicates else None
        if others is None:
            del index[key]
            return
        if index[key] == block:
            index[key] = others.pop(0)
        else:
            others.remove(block)
        if not others:
            del duplicates[key]

    # -- checks at the edge ------------------------------------------------------------------------------------------

    def _checked(self, block: int) -> int:
        if not 0 <= block < self.num_blocks:
            raise MisuseError(f"no block {block}: this pool has blocks 0 to {self.num_blocks - 1}")
        return block

    def _check_ids(self, blocks: Sequence[int], doing: str) -> None:
        wrong = next((block for block in blocks if not NULL_BLOCK < block < self.num_blocks), None)
        if wrong is not None:
            what = "the null block, a placeholder that is never handed out" if wrong == NULL_BLOCK else "not a block"
            raise MisuseError(f"cannot {doing} block {wrong}: it is {what} (usable: 1 to {self.num_blocks - 1})")

    def _refuse_to_take(self, blocks: Sequence[int]) -> NoReturn:
        self._check_ids(blocks, "take")
        block = next(block for block in blocks if self._ref_cnt[block])
        raise MisuseError(f"block {block} is taken while {self._ref_cnt[block]} references to it are live")

    def _refuse_to_release(self, blocks: Sequence[int], num_released: int) -> NoReturn:
        """Undo the releases that came before the one that is wrong."""
        for undone in blocks[:num_released]:
            self._ref_cnt[undone] += 1
        self._check_ids(blocks, "release")
        block = blocks[num_released]
        times = sum(1 for other in blocks if other == block)
        raise MisuseError(
            f"double free: block {block} is released {times} time(s) in one call but held {self._ref_cnt[block]} "
            "time(s); nothing was released"
        )

    def _refuse_to_register(self, blocks: Sequence[int]) -> NoReturn:
        self._check_ids(blocks, "register")
        block = next(block for block in blocks if self._key_of[block] is not None or not self._ref_cnt[block])
        raise MisuseError(
            f"cannot register block {block}: it has {self._ref_cnt[block]} references and is findable under "
            f"{self._key_of[block]!r}; a block is registered once, by a request that holds it"
        )
