"""Blocks to be copied before the next step writes (copy on write), in rounds that can each run in parallel."""

import attrs
import numpy as np
from numpy.typing import NDArray


@attrs.frozen(eq=False)
class CopyRound:
    """Copies of one group that do not touch each other's blocks: no target is another's source or target.

    Attributes:
        group: whose layers.
        sources: int64 `[num_copies]`.
        targets: int64 `[num_copies]`.
    """

    group: int
    sources: NDArray[np.int64]
    targets: NDArray[np.int64]


class PendingCopies:
    """Copies in the order in which they were decided.

    A step may hold several commands, so a target may be given back and taken again, or be copied in its turn, before
    the step runs. The order then matters, and all copies of one launch run at once; so each copy that depends on an
    earlier one starts a new round. Blocks are of the pool: groups share their bytes, so a round has one group.
    """

    def __init__(self) -> None:
        self._rounds: list[tuple[int, list[tuple[int, int]]]] = []
        self._read: set[int] = set()
        self._written: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._rounds)

    def add(self, group: int, source: int, target: int) -> None:
        """One more copy, after all that were added before."""
        depends = source in self._written or target in self._written or target in self._read
        if not self._rounds or self._rounds[-1][0] != group or depends:
            self._rounds.append((group, []))
            self._read, self._written = set(), set()
        self._rounds[-1][1].append((source, target))
        self._read.add(source)
        self._written.add(target)

    def take(self) -> list[CopyRound]:
        """The rounds, to be run one after the other; nothing is pending after this."""
        rounds, self._rounds = self._rounds, []
        self._read, self._written = set(), set()
        return [CopyRound(group, *np.array(pairs, dtype=np.int64).T.copy()) for group, pairs in rounds]
