"""The interface of an eviction policy, and the registry of all policies that can be chosen by name."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import filterfalse
from typing import TypeVar

from ...registry import Registry

T = TypeVar("T")


class EvictionPolicy(ABC):
    """Decides which cached block loses its content next.

    A policy sees the cached blocks: those whose content a lookup can find. A cached block is held while a running
    request uses it (`is_held`) and free otherwise; only free blocks can be victims. The ledger drives a policy through
    `PolicyOrder`, the capacity curve (sim/cache) through a bare loop; both call the methods in the same order, so both
    count the same hits. Methods take several blocks at once and may keep none of the sequences they get.

    A policy strands a block if it evicts what precedes the block in its request: the block stays cached, but no lookup
    finds it until its predecessor is cached again. Each policy states whether it can.

    Attributes:
        is_held: one byte per block id, 1 while a request uses the block. The caller keeps it up to date for all methods
            but `admit` and `release`, whose blocks it may mark later.
    """

    def __init__(self, num_blocks: int) -> None:
        """Start with no block cached. Block ids are `1 .. num_blocks - 1`; 0 is the null block."""
        self.is_held = bytearray(num_blocks)
        self.is_held[0] = 1

    @abstractmethod
    def admit(self, group: int, blocks: Sequence[int], indices: Sequence[int], keys: Sequence[Hashable]) -> None:
        """Note that held blocks became cached: their cache group, logical index in their request (depth), and key."""

    def use(self, blocks: Sequence[int]) -> None:  # noqa: B027  (most policies ignore some of the events)
        """Note that a request found these cached blocks, or shares them through a fork. They are held by now."""

    def hold(self, blocks: Sequence[int]) -> None:  # noqa: B027
        """Note that these free blocks are held again; `use` follows."""

    def release(self, blocks: Sequence[int]) -> None:  # noqa: B027
        """Note that these held blocks became free, in this order: a request gives its deepest block back first."""

    @abstractmethod
    def victims(self, count: int) -> list[int]:
        """Return the next `count` free blocks to evict, in order; there are that many. Must not change any answer."""

    def evict(self, blocks: Sequence[int]) -> None:
        """Drop these blocks, which are evicted.

        They are `victims(len(blocks))` in any order, or (where several cache groups share one order) other free blocks.
        The very list that `victims` returned comes back with no event in between.
        """
        self.forget(blocks)

    @abstractmethod
    def forget(self, blocks: Sequence[int]) -> None:
        """Drop these blocks, held or free, which lost their content for another reason than an eviction."""

    def free_among(self, blocks: Iterable[int]) -> Iterator[int]:
        """The blocks of a queue that are free, in its order."""
        return filterfalse(self.is_held.__getitem__, blocks)

    @staticmethod
    def deepest_first(blocks: Sequence[T], indices: Sequence[int]) -> Sequence[T]:
        """Sort blocks (or what belongs to them) by falling logical index; equally deep ones stay as given."""
        if isinstance(indices, range):  # one request's blocks, by rising index
            return blocks[::-1]
        return [blocks[place] for place in sorted(range(len(blocks)), key=indices.__getitem__, reverse=True)]


# Each entry makes a policy for a number of blocks, usually the class itself.
eviction_policies: Registry[Callable[[int], EvictionPolicy]] = Registry("eviction policy", "kvledger.eviction_policies")
