"""Many sessions at once: each is a generator of its own requests, and they are merged in order of arrival."""

from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from typing import TypeVar

from .traces.sessions import TurnRecord

# (arrival in seconds, input_length, output_length, hash_ids or None)
SessionRequest = tuple[float, int, int, tuple[int, ...] | None]
# The same, and what is known of the session.
TurnRequest = tuple[float, int, int, tuple[int, ...] | None, TurnRecord | None]
AnyRequest = TypeVar("AnyRequest", SessionRequest, TurnRequest)


def merge_sessions(
    starts: Iterator[float], open_session: Callable[[float], Iterator[AnyRequest]]
) -> Iterator[AnyRequest]:
    """Requests of all sessions in order of arrival; sessions open at `starts` (s, rising), memory is the open ones."""
    waiting: list[tuple[float, int, AnyRequest, Iterator[AnyRequest]]] = []
    for number, start in enumerate(starts):
        while waiting and waiting[0][0] <= start:
            yield from _serve_first(waiting)
        _push_next(waiting, number, open_session(start))
    while waiting:
        yield from _serve_first(waiting)


def _serve_first(
    waiting: list[tuple[float, int, AnyRequest, Iterator[AnyRequest]]],
) -> Iterator[AnyRequest]:
    _, number, request, session = heappop(waiting)
    _push_next(waiting, number, session)
    yield request


def _push_next(waiting: list, number: int, session: Iterator[AnyRequest]) -> None:
    request = next(session, None)
    if request is not None:
        heappush(waiting, (request[0], number, request, session))


class BlockIds:
    """Hands out block ids that nobody else has, from 0."""

    def __init__(self) -> None:
        self._next = 0

    def new(self, count: int) -> list[int]:
        """The next `count` ids."""
        first = self._next
        self._next += count
        return list(range(first, self._next))

    def grown(self, ids: list[int], shared_tokens: int, num_tokens: int, block_size: int) -> list[int]:
        """Ids of a prompt of `num_tokens` whose first `shared_tokens` are those of the prompt that has `ids`.

        Only blocks that both prompts fill keep their id; a partial block's content depends on where it ends.
        """
        kept = min(shared_tokens, num_tokens) // block_size
        return ids[:kept] + self.new(-(-num_tokens // block_size) - kept)
