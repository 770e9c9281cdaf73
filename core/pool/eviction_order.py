"""Eviction orders: which unreferenced block of a pool is taken next.

The pool tells its order when blocks leave and enter the free set and, if the order `observes_keys`, when blocks become
findable, are adopted or lose their key. An order knows nothing else, and the pool makes these calls while it applies
events, so an order's state is a fold of the log like the rest of the ledger.
"""

from collections.abc import Hashable, Sequence
from typing import Protocol

from ..errors import InputError
from .free_queue import FreeQueue
from .policies.policy import EvictionPolicy, eviction_policies

BELADY = "belady"


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
        """Whether the pool must call `on_cached`, `on_adopted` and `on_uncached` (the default LRU needs none)."""
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
        """These blocks were taken for new content: the next ones, or (where groups share them out) some of those."""
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

    def on_cached(self, group: int, blocks: Sequence[int], indices: Sequence[int], keys: Sequence[Hashable]) -> None:
        """Blocks of a group became findable under `keys`; `indices` are their logical indices (their depth)."""
        ...

    def on_adopted(self, blocks: Sequence[int]) -> None:
        """Blocks were found and adopted (called after `remove` for those that were queued), or shared by a fork."""
        ...

    def on_uncached(self, blocks: Sequence[int]) -> None:
        """Blocks lost their key where they are, queued or not."""
        ...


class PolicyOrder:
    """The eviction order of a pool under an `EvictionPolicy`: turns the pool's calls into the policy's events.

    Unkeyed blocks go first, as vLLM's stack; the policy orders the keyed ones. A queued block that loses its key goes
    behind the other unkeyed ones. Of several that lose theirs together, the one that the policy would have evicted
    first comes first, so a reset leaves `order` as it was. Costs O(k) per call of k blocks and 13 bytes per block, plus
    the policy's own.
    """

    observes_keys = True

    def __init__(self, name: str, policy: EvictionPolicy) -> None:
        num_blocks = len(policy.is_held)
        self.name = name
        self._policy = policy
        self._is_held = policy.is_held
        self._unkeyed = FreeQueue(num_blocks)
        self._is_keyed = bytearray(num_blocks)
        self._num_keyed = 0  # queued ones

    def __len__(self) -> int:
        return len(self._unkeyed) + self._num_keyed

    def order(self) -> list[int]:
        """Every queued block, the next one to be taken first."""
        return self._unkeyed.order() + self._policy.victims(self._num_keyed)

    def peek(self, count: int) -> tuple[int, ...]:
        """The next `count <= len` blocks to be taken, in order; changes nothing that `order` shows."""
        num_unkeyed = min(count, len(self._unkeyed))
        head = self._unkeyed.peek(num_unkeyed)
        return head if num_unkeyed == count else (*head, *self._policy.victims(count - num_unkeyed))

    def take(self, blocks: tuple[int, ...]) -> None:
        """These blocks were taken for new content: the next ones, or (where groups share them out) some of those."""
        keyed, unkeyed = self._by_key(blocks)
        if unkeyed:
            self._unkeyed.take(unkeyed)
        if keyed:
            self._policy.evict(keyed)
            for block in keyed:
                self._is_keyed[block] = 0
            self._num_keyed -= len(keyed)

    def remove(self, blocks: Sequence[int]) -> None:
        """These queued blocks are referenced again, their content intact."""
        keyed, unkeyed = self._by_key(blocks)
        if unkeyed:
            self._unkeyed.remove(unkeyed)
        for block in keyed:
            self._is_held[block] = 1
        self._num_keyed -= len(keyed)
        self._policy.hold(keyed)

    def append(self, blocks: Sequence[int]) -> None:
        """Keyed blocks lost their last reference, in this order."""
        for block in blocks:
            self._is_held[block] = 0
        self._num_keyed += len(blocks)
        self._policy.release(blocks)

    def prepend(self, blocks: Sequence[int]) -> None:
        """Unkeyed blocks lost their last reference, in this order; the first one is to be taken next."""
        self._unkeyed.prepend(blocks)

    def on_cached(self, group: int, blocks: Sequence[int], indices: Sequence[int], keys: Sequence[Hashable]) -> None:
        """Blocks of a group became findable under `keys`; `indices` are their logical indices (their depth)."""
        for block in blocks:
            self._is_keyed[block] = self._is_held[block] = 1
        self._policy.admit(group, blocks, indices, keys)

    def on_adopted(self, blocks: Sequence[int]) -> None:
        """Blocks were found and adopted, or shared by a fork, which may give away unkeyed ones too."""
        self._policy.use(self._by_key(blocks)[0])

    def on_uncached(self, blocks: Sequence[int]) -> None:
        """Blocks lost their key where they are, queued or not. O(order) if several of them are queued."""
        keyed, _ = self._by_key(blocks)
        queued = [block for block in keyed if not self._is_held[block]]
        if len(queued) > 1:
            chosen = set(queued)
            queued = [block for block in self._policy.victims(self._num_keyed) if block in chosen]
        self._policy.forget(keyed)
        for block in keyed:
            self._is_keyed[block] = 0
        self._num_keyed -= len(queued)
        self._unkeyed.append(queued)

    def _by_key(self, blocks: Sequence[int]) -> tuple[list[int], tuple[int, ...]]:
        is_keyed = self._is_keyed
        keyed = [block for block in blocks if is_keyed[block]]
        unkeyed = () if len(keyed) == len(blocks) else tuple([block for block in blocks if not is_keyed[block]])
        return keyed, unkeyed


def eviction_order_names() -> tuple[str, ...]:
    """The orders that `make_eviction_order` makes by name, the default first. Belady's needs the future as well."""
    return eviction_policies.names()


def make_eviction_order(name: str, num_blocks: int) -> EvictionOrder:
    """Make the order of an empty pool by the name that `PoolCreated.eviction` records.

    Raises:
        InputError: no eviction policy has this name, or it needs more than its name (Belady needs the future).
    """
    if name == BELADY:
        raise InputError(
            "eviction policy 'belady' needs the future, which a name does not tell: give "
            "eviction=BeladyOrder(num_blocks, next_use) to the allocator, and a new one like it to a replay of its log"
        )
    if name == FreeQueue.name:
        return FreeQueue(num_blocks)
    return PolicyOrder(name, eviction_policies.get(name)(num_blocks))
