"""What a router knows of one replica: the requests it sent there, and what the replica's events have told since."""

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from ..core.events import (
    BlockCopied,
    BlocksAllocated,
    BlocksCached,
    BlocksFreed,
    BlocksUncached,
    CacheReset,
    Commit,
    Event,
    FreeReason,
    Key,
    PoolCreated,
    RowsAssigned,
    RowsReleased,
    TokensPlaced,
    as_ints,
)
from ..core.types import Request


class ReplicaView:
    """A fold of one engine's commits, each taken note of `delay_ns` after it happened. Never asks the engine.

    Keys are followed in one group: the first that needs a whole prefix, else the first. The same key may stand on
    several blocks, so it is known for as long as one of them carries it.

    Decode steps that the simulator takes in one go are one commit: it counts from the first of them.
    """

    def __init__(self, now_ns: Callable[[], int], delay_ns: int = 0) -> None:
        self._now_ns = now_ns
        self._delay_ns = delay_ns
        self._on_the_way: deque[tuple[int, Commit]] = deque()
        self._group = 0
        self._one_group = True
        self.blocks_with_key: dict[Key, int] = {}
        # Requests sent that hold no row as far as is known, and how many tokens they have to compute.
        self._waiting: dict[str, int] = {}
        self._row_of: dict[str, int] = {}
        self._to_compute = np.zeros(0, dtype=np.int64)
        self._computed = np.zeros(0, dtype=np.int64)

    # -- what the router does ----------------------------------------------------------------------------------------

    def sent(self, request: Request) -> None:
        """The router sent a request here; it knows so at once."""
        self._waiting[request.request_id] = request.num_tokens

    def refused(self, request_id: str) -> None:
        """The replica answered that it can never serve a request."""
        self._waiting.pop(request_id, None)

    # -- what the events tell ----------------------------------------------------------------------------------------

    def apply(self, commit: Commit) -> None:
        """A commit left the replica now."""
        if not self._delay_ns:
            self._fold(commit)
            return
        self.arrive()
        self._on_the_way.append((self._now_ns() + self._delay_ns, commit))

    def arrive(self) -> None:
        """Take note of the commits that have arrived by now."""
        now = self._now_ns()
        while self._on_the_way and self._on_the_way[0][0] <= now:
            self._fold(self._on_the_way.popleft()[1])

    @property
    def num_outstanding_requests(self) -> int:
        """Requests sent here whose end is not known yet."""
        return len(self._waiting) + len(self._row_of)

    def outstanding_prefill_tokens(self) -> int:
        """Tokens that requests sent here still have to compute before their next output, as far as is known."""
        return sum(self._waiting.values()) + int(np.maximum(self._to_compute - self._computed, 0).sum())

    def num_matching(self, keys: Sequence[Key]) -> int:
        """How many keys, from the first one on, stand on blocks of this replica, as far as is known."""
        known = self.blocks_with_key
        for count, key in enumerate(keys):
            if key not in known:
                return count
        return len(keys)

    # -- the fold ----------------------------------------------------------------------------------------------------

    def _fold(self, commit: Commit) -> None:
        was_preempted = False
        for event in commit.events:
            if isinstance(event, TokensPlaced):
                self._tokens_placed(event)
            elif isinstance(event, BlocksFreed):
                was_preempted = event.reason is FreeReason.PREEMPTED
            elif isinstance(event, RowsAssigned | RowsReleased):
                self._rows_changed(event, was_preempted)
            elif isinstance(event, PoolCreated):
                self._pool_created(event)
            else:
                self._keys_changed(event)

    def _pool_created(self, event: PoolCreated) -> None:
        whole = [group for group, kind in enumerate(event.groups) if kind.needs_whole_prefix]
        self._group = whole[0] if whole else 0
        self._one_group = len(event.groups) == 1
        self._to_compute = np.zeros(event.max_num_reqs, dtype=np.int64)
        self._computed = np.zeros(event.max_num_reqs, dtype=np.int64)

    def _tokens_placed(self, event: TokensPlaced) -> None:
        rows, firsts, counts = event.rows, event.first_positions, event.counts
        if isinstance(rows, tuple):
            for row, first, count in zip(rows, as_ints(firsts), as_ints(counts), strict=True):
                self._computed[row] = first + count
        else:
            self._computed[rows] = np.add(firsts, counts)

    def _rows_changed(self, event: RowsAssigned | RowsReleased, was_preempted: bool) -> None:
        for request_id, row in zip(event.requests, as_ints(event.rows), strict=True):
            if type(event) is RowsAssigned:
                self._row_of[request_id] = row
                self._to_compute[row] = self._waiting.pop(request_id, 0)
            else:
                if was_preempted:
                    self._waiting[request_id] = max(self._to_compute.item(row), self._computed.item(row) + 1)
                del self._row_of[request_id]
                self._to_compute[row] = 0
            self._computed[row] = 0

    def _keys_changed(self, event: Event) -> None:
        if type(event) is BlocksCached:
            if event.group == self._group:
                for key in event.keys:
                    self._key_came(key)
        elif type(event) is BlocksAllocated:
            self._keys_went(event.lost_keys, event.lost_groups)
        elif type(event) is BlocksUncached:
            self._keys_went(event.keys, as_ints(event.groups))
        elif type(event) is BlockCopied:
            self._keys_went((event.lost_key,), (event.lost_group,))
        elif type(event) is CacheReset:
            self.blocks_with_key.clear()

    def _keys_went(self, keys: Sequence[Key | None], groups: Sequence[int]) -> None:
        """`groups` may be empty where there is one group only."""
        for place, key in enumerate(keys):
            if key is not None and (self._one_group or groups[place] == self._group):
                self._key_went(key)

    def _key_came(self, key: Key) -> None:
        self.blocks_with_key[key] = self.blocks_with_key.get(key, 0) + 1

    def _key_went(self, key: Key) -> None:
        left = self.blocks_with_key[key] - 1
        if left:
            self.blocks_with_key[key] = left
        else:
            del self.blocks_with_key[key]
