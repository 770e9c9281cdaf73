"""What can be found, as the events alone tell it: the keys that they name as stored and as lost.

Replaying a log rebuilds the keys by the same code that keeps them live, so that a key which an event leaves out is
missed only by those who read events and nothing else: publishers of KV events, and whoever follows them.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any, TypeAlias

Address: TypeAlias = tuple[int, Hashable]


class KeyFold:
    """A sink. Keys are token prefixes (`PrefixKeys`), so a parent can be told right from wrong.

    Attributes:
        copies: (group, key) -> blocks that carry it.
        wrong_parents: what was stored behind a key that is not the prefix before it.
    """

    def __init__(self, block_sizes: Sequence[int]) -> None:
        self._block_sizes = block_sizes
        self.copies: Counter[Address] = Counter()
        self.wrong_parents: list[str] = []

    def apply(self, commit: Any) -> None:
        """Fold one commit."""
        for event in commit.events:
            match type(event).__name__:  # a copy of the core with a fault in it has classes of its own
                case "BlocksCached":
                    self.copies.update([(event.group, key) for key in event.keys])
                    self._check_parents(event)
                case "BlocksAllocated":
                    self._lose(event.lost_keys, event.lost_groups)
                case "BlockCopied":
                    self._lose((event.lost_key,), (event.lost_group,))
                case "BlocksUncached":
                    self._lose(event.keys, event.groups)
                case "CacheReset":
                    self.copies.clear()
                case _:
                    pass

    def findable(self) -> dict[Address, int]:
        """Blocks that carry each key, keys without any left out."""
        return {address: count for address, count in self.copies.items() if count}

    def _lose(self, keys: Sequence[Any], groups: Sequence[int]) -> None:
        pairs = zip(groups if len(groups) else (0,) * len(keys), keys, strict=True)
        self.copies.subtract([(int(group), key) for group, key in pairs if key is not None])

    def _check_parents(self, event: Any) -> None:
        begin = 0
        for start, count, parent in zip(event.starts, event.counts, event.parents, strict=True):
            if count:
                before = event.keys[begin][: int(start) * self._block_sizes[event.group]] or None
                if parent != before:
                    self.wrong_parents.append(f"{parent} before {event.keys[begin]} in group {event.group}")
            begin += int(count)
