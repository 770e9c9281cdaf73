"""Who is admitted next: first come first served, or by priority."""

import heapq
from collections import deque
from collections.abc import Iterator
from typing import Protocol
from weakref import WeakKeyDictionary

from ..errors import MisuseError
from ..types import Request


class WaitingQueue(Protocol):
    """Requests without blocks. A preempted request goes ahead of every request that never started."""

    def __len__(self) -> int:
        """How many wait."""
        ...

    def __iter__(self) -> Iterator[Request]:
        """The waiting requests, the next one first."""
        ...

    def add(self, request: Request) -> None:
        """A new request arrives."""
        ...

    def add_preempted(self, request: Request) -> None:
        """A request lost its blocks and wants them back."""
        ...

    def head(self) -> Request:
        """The next one; the queue is not empty."""
        ...

    def pop(self) -> Request:
        """Remove and return the next one."""
        ...

    def remove(self, request: Request) -> None:
        """Remove a request from wherever it stands."""
        ...


class FcfsQueue:
    """In the order of arrival; preempted requests at the head."""

    def __init__(self) -> None:
        self._queue: deque[Request] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._queue)

    def add(self, request: Request) -> None:
        """To the end."""
        self._queue.append(request)

    def add_preempted(self, request: Request) -> None:
        """To the head."""
        self._queue.appendleft(request)

    def head(self) -> Request:
        """The oldest."""
        return self._queue[0]

    def pop(self) -> Request:
        """Remove the oldest."""
        return self._queue.popleft()

    def remove(self, request: Request) -> None:
        """O(length)."""
        self._queue.remove(request)


class PriorityQueue:
    """The lowest priority value first, then the earliest arrival, then the order of submission."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, float, int, Request]] = []
        # Forgotten with the request itself, so that an engine may serve any number of them.
        self._order_of: WeakKeyDictionary[Request, int] = WeakKeyDictionary()
        self._next_order = 0

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Request]:
        return (request for *_, request in sorted(self._heap, key=lambda entry: entry[:3]))

    def add(self, request: Request) -> None:
        """By priority and arrival. A request that comes back keeps its place among equals."""
        order = self._order_of.setdefault(request, self._next_order)
        self._next_order += 1
        heapq.heappush(self._heap, (request.priority, request.arrival, order, request))

    def add_preempted(self, request: Request) -> None:
        """By priority and arrival too: it started, so among equals it arrived earlier."""
        self.add(request)

    def head(self) -> Request:
        """The most urgent."""
        return self._heap[0][3]

    def pop(self) -> Request:
        """Remove the most urgent."""
        return heapq.heappop(self._heap)[3]

    def remove(self, request: Request) -> None:
        """O(length)."""
        kept = [entry for entry in self._heap if entry[3] is not request]
        if len(kept) == len(self._heap):
            raise MisuseError(f"request {request.request_id!r} does not wait")
        self._heap = kept
        heapq.heapify(self._heap)


def make_waiting_queue(policy: str) -> WaitingQueue:
    """The queue of a scheduling policy, "fcfs" or "priority"."""
    return PriorityQueue() if policy == "priority" else FcfsQueue()
