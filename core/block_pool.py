"""Who may read, write and evict a block: reference counts, the key index, and the free queue in eviction order."""

from collections.abc import Iterator, Mapping, Sequence

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
    called by one code path only, `LedgerState.apply`. About 29 bytes a block, plus the keys.
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
        keys = tuple(map(self._key_of.__getitem__, blocks))
        return keys if keys.count(None) < len(keys) else ()

    def groups_of(self, blocks: Sequence[int]) -> tuple[int, ...]:
        """The groups that the keys of these blocks belong to."""
        return tuple(map(self._group_of.__getitem__, blocks))

    def num_free_among(self, blocks: Sequence[int]) -> int:
        """How many of these (non-null) blocks are unreferenced: adopting them takes that many from the free queue."""
        # Nothing ever references the null block.
        return list(map(self._ref_cnt.__getitem__, blocks)).count(0) - blocks.count(NULL_BLOCK)

    # -- transitions: loops in C (map, count, slices) wherever a batch is all of one sort, as it usually is -----------

    def take(self, blocks: tuple[int, ...]) -> None:
        """Hand out queued blocks for new content; each loses its key now, not when it was freed."""
        self._check_ids(blocks, "take")
        ref_cnt, key_of = self._ref_cnt, self._key_of
        if any(map(ref_cnt.__getitem__, blocks)):
            block = next(block for block in blocks if ref_cnt[block])
            raise MisuseError(f"block {block} is taken while {ref_cnt[block]} references to it are live")
        self.free_queue.take(blocks)
        for block in blocks:
            ref_cnt[block] = 1
        keys = list(map(key_of.__getitem__, blocks))
        if keys.count(None) == len(keys):
            return
        has_duplicates = any(self._duplicates)
        index, group_of = self._index, self._group_of
        for block, key in zip(blocks, keys, strict=True):
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
        live = [block for block in blocks if block] if NULL_BLOCK in blocks else blocks
        self._check_ids(live, "adopt")
        if self.free_queue.observes_keys:
            self.free_queue.on_adopted(live)
        held = any(map(ref_cnt.__getitem__, live))
        queued = [block for block in live if not ref_cnt[block]] if held else live
        if queued:
            self.free_queue.remove(queued)
        for block in live:
            ref_cnt[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each block, in the order given.

        Those that reach 0 go to the free queue: without a key to its front, with one to its back.

        Raises:
            MisuseError: a block is released more often than it is held (a double free), is the null block, or is
                not a block. The counts are as before the call.
        """
        self._check_ids(blocks, "release")
        ref_cnt = self._ref_cnt
        unheld = blocks
        for done, block in enumerate(blocks):
            if ref_cnt[block] != 1:
                unheld = [*blocks[:done], *self._release_shared(blocks, done)]
                break
            ref_cnt[block] = 0
        keys = list(map(self._key_of.__getitem__, unheld))
        num_unkeyed = keys.count(None)
        if keys[:num_unkeyed].count(None) == num_unkeyed:  # what has no key came first: a request's last block
            unkeyed, keyed = unheld[:num_unkeyed], unheld[num_unkeyed:]
        else:
            unkeyed = [block for block, key in zip(unheld, keys, strict=True) if key is None]
            keyed = [block for block, key in zip(unheld, keys, strict=True) if key is not None]
        if unkeyed:
            self.free_queue.prepend(unkeyed)
        if keyed:
            self.free_queue.append(keyed)

    def _release_shared(self, blocks: Sequence[int], start: int) -> list[int]:
        """`release` from `blocks[start]` on, block by block; returns those that nobody holds any more."""
        ref_cnt = self._ref_cnt
        unheld: list[int] = []
        for done, block in enumerate(blocks[start:], start):
            left = ref_cnt[block] - 1
            ref_cnt[block] = left
            if left == 0:
                unheld.append(block)
            elif left < 0:
                for undone in blocks[: done + 1]:
                    ref_cnt[undone] += 1
                held = ref_cnt[block]
                times = sum(1 for other in blocks if other == block)
                raise MisuseError(
                    f"double free: block {block} is released {times} time(s) in one call but held {held} time(s); "
                    "nothing was released"
                )
        return unheld

    def cache(self, group: int, blocks: Sequence[int], keys: Sequence[Key], indices: Sequence[int]) -> None:
        """Make referenced blocks findable. A key that is indexed already keeps its older block in front."""
        self._check_ids(blocks, "register")
        key_of, group_of, index, ref_cnt = self._key_of, self._group_of, self._index[group], self._ref_cnt
        if self.keys_of(blocks) or not all(map(ref_cnt.__getitem__, blocks)):
            block = next(block for block in blocks if key_of[block] is not None or not ref_cnt[block])
            raise MisuseError(
                f"cannot register block {block}: it has {ref_cnt[block]} references and is findable under "
                f"{key_of[block]!r}; a block is registered once, by a request that holds it"
            )
        for block, key in zip(blocks, keys, strict=True):
            key_of[block] = key
            group_of[block] = group
            if index.setdefault(key, block) != block:
                self._duplicates[group].setdefault(key, []).append(block)
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
        if blocks and (min(blocks) <= NULL_BLOCK or max(blocks) >= self.num_blocks):
            wrong = next(block for block in blocks if not NULL_BLOCK < block < self.num_blocks)
            what = "the null block, a placeholder that is never handed out" if wrong == NULL_BLOCK else "not a block"
            raise MisuseError(f"cannot {doing} block {wrong}: it is {what} (usable: 1 to {self.num_blocks - 1})")
