"""Which cached blocks no lookup can reach once a block before them has lost its key (`orphans="drop"`)."""

from collections.abc import Iterable

from .block_pool import BlockPool
from .cache_kinds import CacheKind
from .events import BlocksCached, Key


class ChainLinks:
    """Remembers, from `BlocksCached` events, which key follows which in groups whose hits are unbroken runs."""

    def __init__(self, groups: tuple[CacheKind, ...]) -> None:
        self._children: list[dict[Key, set[Key]] | None] = [{} if kind.needs_whole_prefix else None for kind in groups]

    def note(self, event: BlocksCached) -> None:
        """Learn the links of newly registered blocks."""
        children = self._children[event.group]
        if children is None:
            return
        start = 0
        for parent, count in zip(event.parents, event.counts, strict=True):
            before = parent
            for key in event.keys[start : start + int(count)]:
                if before is not None:
                    children.setdefault(before, set()).add(key)
                before = key
            start += int(count)

    def descendants(self, blocks: Iterable[int], pool: BlockPool) -> list[int]:
        """Keyed blocks that become unreachable when `blocks` lose their keys; none of `blocks` among them.

        A key that another block still carries stays reachable, and so does what follows it.
        """
        losing = set(blocks)
        orphans: list[int] = []
        for group, children in enumerate(self._children):
            if children is None:
                continue
            keys = {pool.key_of(block) for block in losing if pool.group_of(block) == group}
            gone = [key for key in keys if losing.issuperset(pool.copies(key, group))]
            while gone:
                for key in children.pop(gone.pop(), ()):
                    copies = [block for block in pool.copies(key, group) if block not in losing]
                    if copies:
                        losing.update(copies)
                        orphans += copies
                        gone.append(key)
            self._forget_dead_links(children, pool, group)
        return orphans

    @staticmethod
    def _forget_dead_links(children: dict[Key, set[Key]], pool: BlockPool, group: int) -> None:
        """Keep the memory in proportion to the cache, not to its history."""
        index = pool.index(group)
        if len(children) > 2 * len(index) + 1024:
            for key in [key for key in children if key not in index]:
                del children[key]
