"""Finds the cached blocks that no lookup can reach once a block before them has lost its key (`orphans="drop"`)."""

from collections.abc import Iterable

from ..cache_kinds import CacheKind
from ..events import BlocksCached, Key
from ..pool.block_pool import BlockPool


class ChainLinks:
    """Remembers from `BlocksCached` events which key follows which, in groups whose hits are unbroken runs.

    A chained hash follows one other key or none. A key that names content alone may follow several keys, itself among
    them; where such keys follow each other in a circle, each counts as a way to reach the next. The memory grows with
    the cache, not with its history.
    """

    def __init__(self, groups: tuple[CacheKind, ...]) -> None:
        self._links = [_Links() if kind.needs_whole_prefix else None for kind in groups]

    def note(self, event: BlocksCached, pool: BlockPool) -> None:
        """Add the links of newly registered blocks."""
        links = self._links[event.group]
        if links is None:
            return
        start = 0
        for parent, count in zip(event.parents, event.counts, strict=True):
            before = parent
            for key in event.keys[start : start + int(count)]:
                links.add(before, key)
                before = key
            start += int(count)
        links.forget_dead(pool, event.group)

    def descendants(self, blocks: Iterable[int], pool: BlockPool) -> list[int]:
        """Return the keyed blocks, beyond `blocks`, that become unreachable when `blocks` lose their keys.

        A key stays reachable, with all that follows it, if another block still has it, if it begins a prompt, or if it
        also follows a key that stays.
        """
        losing = set(blocks)
        orphans: list[int] = []
        for group, links in enumerate(self._links):
            if links is None:
                continue
            before = list({pool.key_of(block) for block in losing if pool.group_of(block) == group})
            while before:
                for key in links.after(before.pop()):
                    copies = [block for block in pool.copies(key, group) if block not in losing]
                    if copies and not _is_reached(key, links.before(key), group, losing, pool):
                        losing.update(copies)
                        orphans += copies
                        before.append(key)
        return orphans


def _is_reached(key: Key, parents: Iterable[Key | None], group: int, losing: set[int], pool: BlockPool) -> bool:
    """Whether a lookup still reaches a key: at the start of a prompt, or behind another key that a block still has."""
    return any(
        parent is None or (parent != key and not losing.issuperset(pool.copies(parent, group))) for parent in parents
    )


class _Links:
    """The links of one group: which key follows which. None precedes the first block of a prompt."""

    def __init__(self) -> None:
        self._children: dict[Key | None, set[Key]] = {}
        self._parents: dict[Key, set[Key | None]] = {}
        self._num_links = 0
        self._capacity = 1024

    def add(self, parent: Key | None, key: Key) -> None:
        parents = self._parents.setdefault(key, set())
        if parent not in parents:
            parents.add(parent)
            self._num_links += 1
            if parent is not None:
                self._children.setdefault(parent, set()).add(key)

    def after(self, key: Key) -> Iterable[Key]:
        return self._children.get(key, ())

    def before(self, key: Key) -> Iterable[Key | None]:
        return self._parents.get(key, ())

    def forget_dead(self, pool: BlockPool, group: int) -> None:
        """Forget the links to keys that no block has any more, once the links have doubled since the last time.

        Also forget the links from such keys to a key that has other parents. An only parent is kept: it may come back.
        """
        if self._num_links <= self._capacity:
            return
        index = pool.index(group)
        links = self._parents
        self._children, self._parents, self._num_links = {}, {}, 0
        for key, parents in links.items():
            if key in index:
                for parent in parents:
                    if parent is None or parent in index or len(parents) == 1:
                        self.add(parent, key)
        self._capacity = 2 * self._num_links + 1024
