"""What other threads ask of the engine's thread: requests to take in, requests to end, and to stop."""

import threading
from collections import deque
from collections.abc import Sequence
from typing import TypeAlias

import attrs

from ....core.errors import InputError
from ..errors import EngineStoppedError, QueueFullError
from .generation import Generation


@attrs.frozen(eq=False)
class Submission:
    """A new request, or several that continue one prompt."""

    generations: tuple[Generation, ...]


@attrs.frozen
class Cancellation:
    """A request that is to end."""

    request_id: str


Order: TypeAlias = Submission | Cancellation


class Inbox:
    """Orders in their order, and the bound on requests that wait for their first step.

    Methods may be called from any thread; those under "the engine" from its thread only.
    """

    def __init__(self, max_queued_requests: int) -> None:
        """`max_queued_requests`: requests that may wait for their first step at the same time."""
        if max_queued_requests < 1:
            raise InputError(f"max_queued_requests is {max_queued_requests}; it must be at least 1")
        self.max_queued_requests = max_queued_requests
        self._changed = threading.Condition()
        self._orders: deque[Order] = deque()
        self._unended: set[str] = set()
        self._num_queued = 0
        self._refusal: Exception | None = None

    # -- anybody -----------------------------------------------------------------------------------------------------

    @property
    def num_queued(self) -> int:
        """Requests that wait for their first step."""
        return self._num_queued

    @property
    def num_unended(self) -> int:
        """Requests that were submitted and have not ended."""
        return len(self._unended)

    def submit(self, generations: Sequence[Generation]) -> None:
        """Add requests that continue one prompt, or none of them.

        Raises:
            QueueFullError: too many wait already.
            InputError: more than may ever wait, or a request of one of these ids has not ended yet.
            EngineStoppedError, EngineFailedError: nothing is taken any more.
        """
        request_ids = [generation.request.request_id for generation in generations]
        if len(generations) > self.max_queued_requests:
            raise InputError(
                f"{len(generations)} outputs of one prompt are more than the {self.max_queued_requests} requests that "
                "may wait at once (max_queued_requests); ask for fewer"
            )
        with self._changed:
            self.raise_refusal()
            for place, request_id in enumerate(request_ids):
                if request_id in self._unended or request_id in request_ids[:place]:
                    raise InputError(f"a request {request_id!r} is still being served; give each one an id of its own")
            if self._num_queued + len(generations) > self.max_queued_requests:
                raise QueueFullError(
                    f"{self._num_queued} requests wait for their first step, and with {len(generations)} more they are "
                    f"more than max_queued_requests {self.max_queued_requests} allows; try again later"
                )
            self._num_queued += len(generations)
            self._unended.update(request_ids)
            self._orders.append(Submission(tuple(generations)))
            self._changed.notify_all()

    def cancel(self, request_id: str) -> None:
        """Ask for a request's end; nothing happens to one that has ended."""
        with self._changed:
            if request_id in self._unended:
                self._orders.append(Cancellation(request_id))
                self._changed.notify_all()

    def cancel_all(self) -> None:
        """Ask for the end of every request."""
        with self._changed:
            self._orders.extend([Cancellation(request_id) for request_id in sorted(self._unended)])
            self._changed.notify_all()

    def close(self, refusal: Exception | None = None) -> None:
        """Take no more requests; the first refusal is what later ones are told."""
        with self._changed:
            if self._refusal is None:
                self._refusal = refusal or EngineStoppedError(
                    "the engine has been shut down; it takes no more requests"
                )
            self._changed.notify_all()

    @property
    def is_closed(self) -> bool:
        """Whether no more requests are taken."""
        return self._refusal is not None

    def raise_refusal(self) -> None:
        """Raise why no more requests are taken, if that is so."""
        if self._refusal is not None:
            raise self._refusal

    def wait_until_all_ended(self, timeout_s: float | None) -> bool:
        """Wait until no submitted request is left; False if some are when the time is up."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._unended, timeout_s)

    # -- the engine --------------------------------------------------------------------------------------------------

    def take(self) -> list[Order]:
        """The orders that have gathered."""
        if not self._orders:  # the common case between two steps needs no lock
            return []
        with self._changed:
            orders = list(self._orders)
            self._orders.clear()
            return orders

    def wait_for_orders(self) -> bool:
        """Wait until there is one; False if none can come any more."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._orders) or (self.is_closed and not self._unended))
            return bool(self._orders)

    def started(self) -> None:
        """A request begins its first step."""
        with self._changed:
            self._num_queued -= 1

    def ended(self, request_id: str, had_started: bool) -> None:
        """A request has ended."""
        with self._changed:
            self._unended.discard(request_id)
            if not had_started:
                self._num_queued -= 1
            self._changed.notify_all()
