"""Eviction orders: which unreferenced block is taken next.

An order is told when blocks leave and enter the pool's free set and, if it `observes_keys`, when blocks become
findable, are adopted or lose their key. Everything that it knows comes from these calls, which the pool makes while
it applies events, so an order's state is a fold of the log like the rest.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from ...errors import InputError
from ...events import Key
from ..free_queue import FreeQueue
from .belady import BeladyOrder
from .ranked import FifoOrder, LengthAwareOrder, LfuOrder
from .s3fifo import S3FifoOrder
from .sieve import SieveOrder


class EvictionOrder(Protocol):
    """The order of the unreferenced blocks. Unkeyed blocks go before keyed ones: they hold nothing to lose.

    (Under LRU a block that loses its key while it is queued keeps its place, which is vLLM's rule.)
    """

    @property
    def name(self) -> str:
        """The name under which `PoolCreated.eviction` records this order."""
        ...

    @property
    def observes_keys(self) -> bool:
        """Whether `on_cached`, `on_adopted` and `on_uncached` are to be called (the default LRU needs none of them)."""
        ...

    def __len__(self) -> int:
        """How many blocks are queued."""
        ...

    def order(self) -> list[int]:
        """Every queued block, the next one to be taken first."""
        ...

    def peek(self, count: int) -> tuple[int, ...]:
        """The next `count <= len` blocks to be taken, in order; changes nothing that `order` shows."""
        ...

    def take(self, blocks: tuple[int, ...]) -> None:
        """These blocks were taken for new content."""
        ...

    def remove(self, blocks: Sequence[int]) -> None:
        """These queued blocks are referenced again, their content intact."""
        ...

    def append(self, blocks: Sequence[int]) -> None:
        """Keyed blocks lost their last reference, in this order."""
        ...

    def prepend(self, blocks: Sequence[int]) -> None:
        """Unkeyed blocks lost their last reference, in this order; the first one is to be taken next."""
        ...

    def on_cached(self, group: int, blocks: Sequence[int], indices: Sequence[int], keys: Sequence[Key]) -> None:
        """Blocks of a group became findable under `keys`; `indices` are their logical indices (their depth)."""
        ...

    def on_adopted(self, blocks: Sequence[int]) -> None:
        """Blocks were found and adopted (called before `remove` for those that were queued), or shared by a fork."""
        ...

    def on_uncached(self, blocks: Sequence[int]) -> None:
        """Blocks lost their key where they stand, queued or not."""
        ...


_MAKERS: dict[str, Callable[[int], EvictionOrder]] = {
    "lru": FreeQueue,
    "fifo": FifoOrder,
    "lfu": LfuOrder,
    "s3fifo": S3FifoOrder,
    "sieve": SieveOrder,
    "length-aware": LengthAwareOrder,
}


def eviction_order_names() -> tuple[str, ...]:
    """The orders that `make_eviction_order` makes by name, the default first. Belady's needs the future as well."""
    return tuple(_MAKERS)


def make_eviction_order(name: str, num_blocks: int) -> EvictionOrder:
    """An empty-pool order by the name that `PoolCreated.eviction` records.

    Raises:
        InputError: no order has this name, or it needs more than its name (Belady needs the future).
    """
    if name == BeladyOrder.name:
        raise InputError(
            "eviction order 'belady' needs the future, which a name does not tell: give "
            "eviction=BeladyOrder(num_blocks, next_use) to the allocator, and a new one like it to a replay of its log"
        )
    if name not in _MAKERS:
        raise InputError(f"no eviction order named {name!r}; there are {', '.join(_MAKERS)}, and belady with a future")
    return _MAKERS[name](num_blocks)
