"""Which cached blocks no lookup can reach once a block before them has lost its key (`orphans="drop"`)."""

from collections.abc import Iterable
from typing import Any

from .block_pool import BlockPool
from .cache_kinds import CacheKind
from .events import BlocksCached, Key


class ChainLinks:
    """Remembers, from `BlocksCached` events, which key follows which in groups whose hits are unbroken runs.

    The key of a chain follows one other, or none. One that names content alone may follow several, itself among them.
    """

    def __init__(self, groups: tuple[CacheKind, ...]) -> None:
        self._children: list[dict[Key, set[Key]] | None] = [{} if kind.needs_whole_prefix else None for kind in groups]
        # None among them: it begins a prompt.
        self._parents: list[dict[Key, set[Key | None]]] = [{} for _ in groups]

    def note(self, event: BlocksCached) -> None:
        """Learn the links of newly registered blocks."""
        children, parents = self._children[event.group], self._parents[event.group]
        if children is None:
            return
        start = 0
        for parent, count in zip(event.parents, event.counts, strict=True):
            before = parent
            for key in event.keys[start : start + int(count)]:
                if before is not None:
                    children.setdefault(before, set()).add(key)
                parents.setdefault(key, set()).add(before)
                before = key
            start += int(count)

    def descendants(self, blocks: Iterable[int], pool: BlockPool) -> list[int]:
        """Keyed blocks that become unreachable when `blocks` lose their keys; none of `blocks` among them.

        A key that another block still carries stays reachable, and so does what follows it; so does a key that begins
        a prompt, or that follows another one that stays.
        """
        losing = set(blocks)
        orphans: list[int] = []
        for group, children in enumerate(self._children):
            if children is None:
                continue
            keys = {pool.key_of(block) for block in losing if pool.group_of(block) == group}
            gone = [key for key in keys if losing.issuperset(pool.copies(key, group))]
            while gone:
                before = gone.pop()
                for key in children.pop(before, ()):
                    copies = [block for block in pool.copies(key, group) if block not in losing]
                    if copies and not self._follows_others(key, before, group, losing, pool):
                        losing.update(copies)
                        orphans += copies
                        gone.append(key)
            for links in (children, self._parents[group]):
                self._forget_dead_links(links, pool, group)
        return orphans

    def _follows_others(self, key: Key, before: Key, group: int, losing: set[int], pool: BlockPool) -> bool:
        """Whether a lookup comes to this key without the one before: at a prompt's beginning, or behind a key that
        stays.
        """
        return any(
            parent is None or not losing.issuperset(pool.copies(parent, group))
            for parent in self._parents[group].get(key, ())
            if parent != before
        )

    @staticmethod
    def _forget_dead_links(links: dict[Key, Any], pool: BlockPool, group: int) -> None:
        """Keep the memory in proportion to the cache, not to its history."""
        index = pool.index(group)
        if len(links) > 2 * len(index) + 1024:
            for key in [key for key in links if key not in index]:
                del links[key]
