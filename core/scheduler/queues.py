"""Requests that wait: for blocks (by arrival or by priority), or for content that another engine sends."""

import heapq
from collections import deque
from collections.abc import Iterator
from typing import TypeAlias
from weakref import WeakKeyDictionary

import attrs

from ..errors import MisuseError
from ..types import Request


class FcfsQueue(deque[Request]):
    """Waiting requests in order of arrival, preempted ones at the head. `remove` is O(length)."""

    def add(self, request: Request) -> None:
        """Append a new request."""
        self.append(request)

    def add_preempted(self, request: Request) -> None:
        """Put a request that lost its blocks at the head, before every request that never started."""
        self.appendleft(request)

    def head(self) -> Request:
        """Return the oldest request."""
        return self[0]

    def pop_head(self) -> Request:
        """Remove and return the oldest request."""
        return self.popleft()


class PriorityQueue:
    """Waiting requests: the lowest priority value first, then the earliest arrival, then the order of submission."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, float, int, Request]] = []
        # An entry disappears with its request, so memory stays bounded however many requests an engine serves.
        self._order_of: WeakKeyDictionary[Request, int] = WeakKeyDictionary()
        self._next_order = 0

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Request]:
        return (request for *_, request in sorted(self._heap, key=lambda entry: entry[:3]))

    def add(self, request: Request) -> None:
        """Insert a request by priority and arrival. A request that comes back keeps its place among equals."""
        order = self._order_of.setdefault(request, self._next_order)
        self._next_order += 1
        heapq.heappush(self._heap, (request.priority, request.arrival, order, request))

    # A preempted request started once, so it goes ahead of equals that arrived later without further rules.
    add_preempted = add

    def head(self) -> Request:
        """Return the most urgent request."""
        return self._heap[0][3]

    def pop_head(self) -> Request:
        """Remove and return the most urgent request."""
        return heapq.heappop(self._heap)[3]

    def remove(self, request: Request) -> None:
        """Remove a request in O(length).

        Raises:
            MisuseError: the request does not wait.
        """
        kept = [entry for entry in self._heap if entry[3] is not request]
        if len(kept) == len(self._heap):
            raise MisuseError(f"request {request.request_id!r} does not wait")
        self._heap = kept
        heapq.heapify(self._heap)


WaitingQueue: TypeAlias = FcfsQueue | PriorityQueue
"""Requests without blocks. A preempted request goes ahead of every equal request that never started."""


@attrs.frozen(eq=False)
class IncomingTransfer:
    """A request that waits for content from another engine.

    Attributes:
        request: the request.
        row: its row of the block tables; it holds its blocks already.
        num_found_tokens: tokens found here and tokens copied in: the request continues behind them.
    """

    request: Request
    row: int
    num_found_tokens: int


@attrs.frozen
class Lease:
    """Blocks that stay held because a copy writes or reads them (field reports C07 to C09).

    Attributes:
        request_id: whose blocks.
        state: "receiving" (the request waits for its content), "aborted" (nobody waits any more, but a late write must
            not reach another request's blocks) or "sending" (the request has finished and another engine reads them).
        since_step: how many steps the scheduler had decided when the lease reached this state.
        blocks: the blocks, by group and logical index.
    """

    request_id: str
    state: str
    since_step: int
    blocks: tuple[tuple[int, ...], ...]


class Transfers:
    """Copies between this engine and others. Blocks that a copy writes or reads stay held, after an abort too.

    Attributes:
        ready: requests whose content has arrived and that can run, in order of arrival.
        held: request id -> (state, since step) of every lease.
    """

    def __init__(self) -> None:
        self._copying: dict[str, IncomingTransfer] = {}
        self.ready: deque[IncomingTransfer] = deque()
        self.held: dict[str, tuple[str, int]] = {}

    def __contains__(self, request_id: str) -> bool:
        """Whether a copy writes or reads blocks of a request, aborted or not."""
        return request_id in self.held

    @property
    def num_expected(self) -> int:
        """Number of requests that will run: their copy is under way, or has ended."""
        return len(self._copying) + len(self.ready)

    def begin(self, transfer: IncomingTransfer, step: int) -> None:
        """Note that the copy of a request has begun."""
        request_id = transfer.request.request_id
        self._copying[request_id] = transfer
        self.held[request_id] = "receiving", step

    def keep(self, request_id: str, step: int) -> None:
        """Note that another engine reads the blocks of a finished request."""
        self.held[request_id] = "sending", step

    def end(self, request_id: str, direction: str) -> bool:
        """Note that a copy has ended. Returns whether the request waits for it: it can run now.

        Raises:
            MisuseError: there is no such copy; perhaps its end was told before (C07).
        """
        state = self.held.get(request_id, ("", 0))[0]
        if not state or (state == "sending") != (direction == "sent"):
            raise MisuseError(
                f"no copy of request {request_id!r} is under way that could have been {direction}: its end was told "
                f"before, or it never began; under way: {dict(self.held) or 'none'}"
            )
        del self.held[request_id]
        if state != "receiving":
            return False
        self.ready.append(self._copying.pop(request_id))
        return True

    def abort(self, request_id: str, step: int) -> bool:
        """Remove an aborted request. Returns True if its blocks have to stay until its copy has ended."""
        if self._copying.pop(request_id, None) is not None:
            self.held[request_id] = "aborted", step
            return True
        self.ready = deque(one for one in self.ready if one.request.request_id != request_id)
        return False
