"""Routers: which replica serves a request, decided from the events that a router can see.

A router is a class in the registry; `--routing` takes its name. docs/extending.md shows one.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Protocol

import attrs
import numpy as np

from ...core import events
from ...core.errors import InputError
from ...core.events import Commit, Event, Key, PoolCreated, RowsAssigned, RowsReleased, TokensPlaced, as_ints
from ...core.registry import Registry
from ...core.types import Request


class ReplicaView:
    """A router's knowledge of one replica: the requests it sent there, and the replica's events since then.

    It folds one engine's commits, each `delay_ns` after it happened, and never asks the engine. Block hashes are
    followed in one group: the first that needs a whole prefix, else the first. Several blocks may have one hash, so it
    is known as long as one of them has it.

    Decode steps that the simulator takes at once are one commit, which counts from the first of them.
    """

    def __init__(self, now_ns: Callable[[], int], delay_ns: int = 0) -> None:
        self._now_ns, self._delay_ns = now_ns, delay_ns
        self._on_the_way: deque[tuple[int, Commit]] = deque()
        self._group = 0
        self._one_group = True
        self.blocks_with_key: dict[Key, int] = {}
        # Requests sent that have no row according to the events, and the tokens that they have to compute.
        self._waiting: dict[str, int] = {}
        self._row_of: dict[str, int] = {}
        self._to_compute = np.zeros(0, dtype=np.int64)
        self._computed = np.zeros(0, dtype=np.int64)

    # -- the router's own actions ------------------------------------------------------------------------------------

    def sent(self, request: Request) -> None:
        """The router sent a request here, which it knows immediately."""
        self._waiting[request.request_id] = request.num_tokens

    def refused(self, request_id: str) -> None:
        """The replica rejected a request that it can never serve."""
        self._waiting.pop(request_id, None)

    # -- events ------------------------------------------------------------------------------------------------------

    def apply(self, commit: Commit) -> None:
        """A commit left the replica now."""
        if not self._delay_ns:
            self._fold(commit)
            return
        self.arrive()
        self._on_the_way.append((self._now_ns() + self._delay_ns, commit))

    def arrive(self) -> None:
        """Fold the commits that have arrived by now."""
        now = self._now_ns()
        while self._on_the_way and self._on_the_way[0][0] <= now:
            self._fold(self._on_the_way.popleft()[1])

    @property
    def num_outstanding_requests(self) -> int:
        """Requests sent here whose end is not known yet."""
        return len(self._waiting) + len(self._row_of)

    def outstanding_prefill_tokens(self) -> int:
        """Tokens that requests sent here still have to compute before their next output, according to the events."""
        return sum(self._waiting.values()) + int(np.maximum(self._to_compute - self._computed, 0).sum())

    def num_matching(self, keys: Sequence[Key]) -> int:
        """How many block hashes, from the first on, this replica has cached, according to the events."""
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
            elif isinstance(event, events.BlocksFreed):
                was_preempted = event.reason is events.FreeReason.PREEMPTED
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
        if type(event) is events.BlocksCached:
            if event.group == self._group:
                for key in event.keys:
                    self.blocks_with_key[key] = self.blocks_with_key.get(key, 0) + 1
        elif type(event) is events.BlocksAllocated:
            self._keys_went(event.lost_keys, event.lost_groups)
        elif type(event) is events.BlocksUncached:
            self._keys_went(event.keys, as_ints(event.groups))
        elif type(event) is events.BlockCopied:
            self._keys_went((event.lost_key,), (event.lost_group,))
        elif type(event) is events.CacheReset:
            self.blocks_with_key.clear()

    def _keys_went(self, keys: Sequence[Key | None], groups: Sequence[int]) -> None:
        """`groups` may be empty if there is only one group."""
        for place, key in enumerate(keys):
            if key is not None and (self._one_group or groups[place] == self._group):
                left = self.blocks_with_key[key] - 1
                if left:
                    self.blocks_with_key[key] = left
                else:
                    del self.blocks_with_key[key]


# Conversations that are remembered; the one that was silent longest is dropped first.
MAX_CONVERSATIONS = 1 << 20


@attrs.frozen(kw_only=True)
class Routed:
    """A request as a router sees it."""

    request: Request
    keys: Sequence[Key]  # hashes of the complete blocks of its prompt, in the group that the views follow
    block_size: int  # tokens in such a block
    session: str | None = None  # the session that it is a turn of, if the trace records it


class Router(Protocol):
    """Chooses a replica for each request, in order of arrival."""

    def choose(self, routed: Routed, replicas: Sequence[ReplicaView]) -> int:
        """The index of the replica that gets the request."""
        ...

    def assumptions(self) -> dict[str, object]:
        """Its name and parameters, for the report."""
        ...


routers: Registry[Callable[..., Router]] = Registry("router", "kvledger.routers")


def make_router(name: str, load_weight: float | None = None) -> Router:
    """A router by its name in `routers`.

    `load_weight` is for routers with `takes_load_weight` only; None: the router's default. Raises `InputError` for an
    unknown name, or a weight that has no effect.
    """
    make = routers.get(name)
    if load_weight is None:
        return make()
    if not getattr(make, "takes_load_weight", False):
        raise InputError(f"--routing-load-weight {load_weight} has no effect on --routing {name}; leave it out")
    return make(load_weight)


@routers.register("round-robin")
class RoundRobin:
    """Chooses one replica after the other."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, routed: Routed, replicas: Sequence[ReplicaView]) -> int:
        index = self._next % len(replicas)
        self._next = index + 1
        return index

    def assumptions(self) -> dict[str, object]:
        return {"routing": "round-robin"}


@routers.register("least-outstanding-work")
class LeastOutstandingWork:
    """Chooses the replica with the fewest prompt tokens to compute, then fewest requests, then longest unused."""

    def __init__(self) -> None:
        self._last_used: dict[int, int] = {}
        self._num_chosen = 0

    def choose(self, routed: Routed, replicas: Sequence[ReplicaView]) -> int:
        return self.cheapest([float(view.outstanding_prefill_tokens()) for view in replicas], replicas)

    def cheapest(self, costs: Sequence[float], replicas: Sequence[ReplicaView]) -> int:
        """The replica with the least cost; ties are broken by requests, then by the last use."""

        def rank(index: int) -> tuple[float, int, int]:
            return costs[index], replicas[index].num_outstanding_requests, self._last_used.get(index, 0)

        chosen = min(range(len(replicas)), key=rank)
        self.used(chosen)
        return chosen

    def used(self, index: int) -> None:
        """A replica got a request."""
        self._num_chosen += 1
        self._last_used[index] = self._num_chosen

    def assumptions(self) -> dict[str, object]:
        return {
            "routing": "least-outstanding-work",
            "outstanding_work": "prompt tokens sent and not yet computed, as far as the events have told",
        }


@routers.register("sticky")
class Sticky:
    """Keeps a conversation where it started; a new one goes to the replica with the least outstanding work.

    If the trace records no sessions, a request is the next turn of the conversation with the longest latest prompt
    (its complete blocks) that the request's prompt extends. Only one turn follows another, so that a system prompt
    shared by many conversations does not merge them.
    """

    def __init__(self) -> None:
        self._fallback = LeastOutstandingWork()
        # Keyed by session, or by the last complete block of a conversation's latest prompt.
        self._replica_of: OrderedDict[Key, int] = OrderedDict()

    def choose(self, routed: Routed, replicas: Sequence[ReplicaView]) -> int:
        chosen = self._known(routed)
        if chosen is None:
            chosen = self._fallback.choose(routed, replicas)
        else:
            self._fallback.used(chosen)
        name: Key = routed.session
        if name is None and routed.keys:
            name = routed.keys[-1]
        if name is not None:
            self._replica_of[name] = chosen
            self._replica_of.move_to_end(name)
            if len(self._replica_of) > MAX_CONVERSATIONS:
                self._replica_of.popitem(last=False)
        return chosen

    def _known(self, routed: Routed) -> int | None:
        if routed.session is not None:
            return self._replica_of.get(routed.session)
        for key in reversed(routed.keys[:-1]):
            if key in self._replica_of:
                return self._replica_of.pop(key)
        return None

    def assumptions(self) -> dict[str, object]:
        return {
            "routing": "sticky",
            "conversation": "the trace's session; without one, the longest latest prompt that a request goes beyond",
        }


@routers.register("prefix-aware")
class PrefixAware:
    """Chooses the replica that computes the fewest tokens before the first output: its queue plus uncached tokens.

        cost = prompt tokens - tokens of the longest known prefix + load_weight * outstanding prompt tokens

    `load_weight` 0 considers only the cache; 1 minimizes the prompt tokens computed before the first output token.
    """

    takes_load_weight = True

    def __init__(self, load_weight: float = 1.0) -> None:
        if not 0 <= load_weight < float("inf"):
            raise InputError(f"--routing-load-weight is {load_weight}; it must be 0 or more")
        self._load_weight = load_weight
        self._ties = LeastOutstandingWork()

    def choose(self, routed: Routed, replicas: Sequence[ReplicaView]) -> int:
        prompt, size, weight = routed.request.num_prompt_tokens, routed.block_size, self._load_weight
        costs = [
            prompt - view.num_matching(routed.keys) * size + weight * view.outstanding_prefill_tokens()
            for view in replicas
        ]
        return self._ties.cheapest(costs, replicas)

    def assumptions(self) -> dict[str, object]:
        return {
            "routing": "prefix-aware",
            "routing_load_weight": self._load_weight,
            "outstanding_work": "prompt tokens sent and not yet computed, as far as the events have told",
        }
