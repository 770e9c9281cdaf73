"""Which cached blocks no lookup can reach once a block before them has lost its key (`orphans="drop"`)."""

from collections.abc import Iterable

from ..cache_kinds import CacheKind
from ..events import BlocksCached, Key
from ..pool.block_pool import BlockPool


class ChainLinks:
    """Remembers, from `BlocksCached` events, which key follows which in groups whose hits are unbroken runs.

    The key of a chain follows one other, or none. One that names content alone may follow several, itself among them;
    where such keys follow each other in a circle, each counts as a way to the next. The memory is in proportion to the
    cache, not to its history.
    """

    def __init__(self, groups: tuple[CacheKind, ...]) -> None:
        self._links = [_Links() if kind.needs_whole_prefix else None for kind in groups]

    def note(self, event: BlocksCached, pool: BlockPool) -> None:
        """Learn the links of newly registered blocks."""
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
        """Keyed blocks that become unreachable when `blocks` lose their keys; none of `blocks` among them.

        A key that another block still carries stays reachable, and so does what follows it; so does a key that begins
        a prompt, or that follows another one that stays.
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
    """Whether a lookup still comes to a key: at a prompt's beginning, or behind another key that is still carried."""
    return any(
        parent is None or (parent != key and not losing.issuperset(pool.copies(parent, group))) for parent in parents
    )


class _Links:
    """Which key follows which, in one group. Before the first block of a prompt stands None."""

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
        """Forget the links to keys that no block carries any more, once there are twice as many as there were left.

        And those from such keys, where a key has others: its only one may come back before it.
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
