"""Which replica serves a request: four policies over what a router can know."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Protocol

import attrs

from ..core.errors import InputError
from ..core.events import Key
from ..core.types import Request
from .replica_view import ReplicaView

# Conversations that are remembered; the one that was silent longest is forgotten first.
MAX_CONVERSATIONS = 1 << 20


@attrs.frozen(kw_only=True)
class Routed:
    """A request as a router sees it.

    Attributes:
        request: what is to be served.
        keys: of the complete blocks of its prompt, one a block of the group whose keys the views follow.
        block_size: tokens in such a block.
        session: whose turn it is, where the trace says so.
    """

    request: Request
    keys: Sequence[Key]
    block_size: int
    session: str | None = None


class Router(Protocol):
    """Chooses a replica for each request, in order of arrival."""

    def choose(self, routed: Routed, replicas: Sequence[ReplicaView]) -> int:
        """The index of the replica that gets the request."""
        ...

    def assumptions(self) -> dict[str, Any]:
        """Its name and parameters, for the report."""
        ...


class RoundRobin:
    """One after the other, whatever they do."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, routed: Routed, replicas: Sequence[ReplicaView]) -> int:
        """The replica after the one before."""
        index = self._next % len(replicas)
        self._next = index + 1
        return index

    def assumptions(self) -> dict[str, Any]:
        """No parameters."""
        return {"routing": "round-robin"}


class LeastOutstandingWork:
    """The replica with the fewest prompt tokens still to compute; then the fewest requests; then the longest unused."""

    def __init__(self) -> None:
        self._last_used: dict[int, int] = {}
        self._num_chosen = 0

    def choose(self, routed: Routed, replicas: Sequence[ReplicaView]) -> int:
        """The least loaded replica."""
        return self.cheapest([float(view.outstanding_prefill_tokens()) for view in replicas], replicas)

    def cheapest(self, costs: Sequence[float], replicas: Sequence[ReplicaView]) -> int:
        """The replica of least cost, ties broken by requests and then by the last use."""

        def rank(index: int) -> tuple[float, int, int]:
            return costs[index], replicas[index].num_outstanding_requests, self._last_used.get(index, 0)

        chosen = min(range(len(replicas)), key=rank)
        self.used(chosen)
        return chosen

    def used(self, index: int) -> None:
        """A replica got a request."""
        self._num_chosen += 1
        self._last_used[index] = self._num_chosen

    def assumptions(self) -> dict[str, Any]:
        """What work is."""
        return {
            "routing": "least-outstanding-work",
            "outstanding_work": "prompt tokens sent and not yet computed, as far as the events have told",
        }


class Sticky:
    """A conversation stays where it started; a new one goes to the least outstanding work.

    Where the trace names no sessions, a request is the next turn of the conversation with the longest latest prompt
    (its complete blocks) that it starts with and goes beyond. Each turn is followed by one other, so that a system
    prompt shared by many conversations does not make one of them all.
    """

    def __init__(self) -> None:
        self._fallback = LeastOutstandingWork()
        # By session, or by the last complete block of a conversation's latest prompt.
        self._replica_of: OrderedDict[Key, int] = OrderedDict()

    def choose(self, routed: Routed, replicas: Sequence[ReplicaView]) -> int:
        """Where the conversation is, or where a new one fits best."""
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

    def assumptions(self) -> dict[str, Any]:
        """What a conversation is."""
        return {
            "routing": "sticky",
            "conversation": "the trace's session; without one, the longest latest prompt that a request goes beyond",
        }


class PrefixAware:
    """The replica that would compute the fewest tokens before the first output: its queue and what it has not cached.

        cost = prompt tokens - tokens of the longest known prefix + load_weight * outstanding prompt tokens

    `load_weight` 0 looks at the cache alone; 1 minimises the prompt tokens computed up to the first output token.
    """

    def __init__(self, load_weight: float = 1.0) -> None:
        if not 0 <= load_weight < float("inf"):
            raise InputError(f"--routing-load-weight is {load_weight}; it must be 0 or more")
        self._load_weight = load_weight
        self._ties = LeastOutstandingWork()

    def choose(self, routed: Routed, replicas: Sequence[ReplicaView]) -> int:
        """The replica of least cost."""
        prompt, size, weight = routed.request.num_prompt_tokens, routed.block_size, self._load_weight
        costs = [
            prompt - view.num_matching(routed.keys) * size + weight * view.outstanding_prefill_tokens()
            for view in replicas
        ]
        return self._ties.cheapest(costs, replicas)

    def assumptions(self) -> dict[str, Any]:
        """The weight of the load."""
        return {
            "routing": "prefix-aware",
            "routing_load_weight": self._load_weight,
            "outstanding_work": "prompt tokens sent and not yet computed, as far as the events have told",
        }


ROUTINGS = ("round-robin", "least-outstanding-work", "sticky", "prefix-aware")


def make_router(name: str, load_weight: float | None = None) -> Router:
    """A router by name.

    Args:
        name: one of `ROUTINGS`.
        load_weight: of prefix-aware routing only; 1 unless given.

    Raises:
        InputError: an unknown name, or a weight where it has no effect.
    """
    if name == "prefix-aware":
        return PrefixAware(1.0 if load_weight is None else load_weight)
    if load_weight is not None:
        raise InputError(f"--routing-load-weight {load_weight} has no effect on --routing {name}; leave it out")
    if name == "round-robin":
        return RoundRobin()
    if name == "least-outstanding-work":
        return LeastOutstandingWork()
    if name == "sticky":
        return Sticky()
    raise InputError(f"--routing is {name!r}; it is one of {', '.join(ROUTINGS)}")
