"""Closed loop: a session's next turn is sent when the one before it has been answered and its client has thought.

The trace stays a stream. Its rows come in recorded order, while the simulated server may be slower or faster than the
recorded one. Slower: rows are read before they are due and wait, one for each turn that is under way. Faster: a turn
may be due before its recorded time, so rows are read ahead of the clock by as much as the simulated answers are ahead
of the recorded ones. Memory is that of the sessions that are open, the rows of that lead, and 16 bytes a request.
"""

from array import array
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

import attrs
import simpy

from ...core.types import Request
from ..traces.trace import TraceRequest, Turn

NANOSECONDS = 1_000_000_000
# Where a trace knows think times but not when answers came, the next turn is looked for this many rows ahead.
MOST_ROWS_AHEAD = 100_000
_PENDING = -1
_UNKNOWN = -2

# Makes the scheduler's request of a row, its place in the order of reading, and the time it is sent, in seconds.
RequestMaker = Callable[[TraceRequest, int, float], Request]


class SubmitTo(Protocol):
    """What requests are handed to."""

    on_ended: Callable[[Request], None] | None

    def submit(self, request: Request) -> bool:
        """Hand a request over now."""
        ...


@attrs.frozen(eq=False)
class _Read:
    """A row that was read and not answered yet; `ordinal` is its place in the order of reading."""

    row: TraceRequest
    ordinal: int


@attrs.define(eq=False)
class _Blocked:
    """A turn that still waits for `num_missing` of the answers that it follows."""

    read: _Read
    facts: Turn
    num_missing: int


class SessionArrivals:
    """Submits the requests of a trace to an engine in a closed loop.

    arrivals = SessionArrivals(env, engine, trace, make_request)
    arrivals.start()
    env.run()
    """

    def __init__(
        self,
        env: simpy.Environment,
        engine: SubmitTo,
        rows: Iterable[TraceRequest],
        make_request: RequestMaker,
        waits_for_unknown_answers: bool = False,
    ) -> None:
        """Read `rows` as they become due.

        Args:
            env: the clock, in nanoseconds.
            engine: where requests go, and who tells when one ended; a refused one counts as answered at once.
            rows: in order of arrival.
            make_request: what a row becomes.
            waits_for_unknown_answers: whether the trace knows think times without knowing when answers came.
        """
        self._env = env
        self._engine = engine
        engine.on_ended = self._ended
        self._rows = iter(rows)
        self._make_request = make_request
        self._looks_ahead = waits_for_unknown_answers
        self._next: TraceRequest | None = next(self._rows, None)
        self._first_place = 0 if self._next is None else self._next.place
        self._num_read = 0
        self._lead_ns = 0
        self._back_at_ns: int | None = None
        # By place: when it was sent and when it ended.
        self._sent_ns = array("q")
        self._ended_ns = array("q")
        self._under_way: dict[str, _Read] = {}
        self._blocked: dict[int, list[_Blocked]] = {}
        self._num_waiting = 0
        self._sought: set[int] = set()
        self._to_end: deque[Request] = deque()
        self._is_ending = False
        self.num_late = 0
        """Turns that were found in the trace only after they were due."""
        self.last_ns = 0
        """When the last request ended. The clock may go on: a time at which to read is not taken back."""

    def start(self) -> None:
        """Begin to read; what follows is driven by the clock and by answers."""
        self._read_due_rows()

    # -- reading -----------------------------------------------------------------------------------------------------

    def _read_due_rows(self) -> None:
        """Read each row once the clock, with its lead, reaches its recorded arrival; come back for the next one."""
        while self._next is not None:
            due_ns = _nanoseconds(self._next.arrival_s) - self._lead_ns
            if due_ns > self._env.now and not (self._sought and self._num_waiting < MOST_ROWS_AHEAD):
                self._come_back_at(due_ns)
                return
            row = self._next
            self._next = next(self._rows, None)
            self._take(_Read(row, self._num_read))

    def _come_back_at(self, due_ns: int) -> None:
        if self._back_at_ns is None or due_ns < self._back_at_ns:
            self._back_at_ns = due_ns
            self._env.timeout(due_ns - self._env.now).callbacks.append(self._came_back)

    def _came_back(self, _: simpy.Event) -> None:
        if self._back_at_ns is not None and self._back_at_ns <= self._env.now:
            self._back_at_ns = None
        self._read_due_rows()

    def _take(self, read: _Read) -> None:
        self._num_read += 1
        row, facts = read.row, read.row.turn
        self._remember(row.place)
        before = [] if facts is None else self._places_before(facts)
        if facts is None or not before:
            self._send_at(read, _nanoseconds(row.arrival_s))
            return
        self._sought.difference_update(before)
        missing = [place for place in before if self._ended_ns[place - self._first_place] == _PENDING]
        if not missing:
            self._send_after(read, facts)
            return
        self._num_waiting += 1
        blocked = _Blocked(read, facts, len(missing))
        for place in missing:
            self._blocked.setdefault(place, []).append(blocked)

    def _remember(self, place: int) -> None:
        """Make room for the times of a place; those between are of rows that are not part of the run."""
        size = place - self._first_place + 1
        for times in (self._sent_ns, self._ended_ns):
            times.extend([_UNKNOWN] * (size - len(times)))
            times[size - 1] = _PENDING

    def _places_before(self, facts: Turn) -> list[int]:
        """The turns it waits for that are part of the run: not those before the window, or left out as bad."""
        first, ended = self._first_place, self._ended_ns
        return [place for place in facts.waits_for if place >= first and ended[place - first] != _UNKNOWN]

    # -- sending -----------------------------------------------------------------------------------------------------

    def _send_after(self, read: _Read, facts: Turn) -> None:
        """All answers are there: send it after its think time, or after its gap where that is not known."""
        indices = [place - self._first_place for place in self._places_before(facts)]
        ended_ns = max(self._ended_ns[index] for index in indices)
        if facts.think_s is not None:
            self._send_at(read, ended_ns + _nanoseconds(facts.think_s))
        else:
            sent_ns = max(self._sent_ns[index] for index in indices)
            self._send_at(read, max(ended_ns, sent_ns + _nanoseconds(facts.gap_s or 0.0)))

    def _send_at(self, read: _Read, due_ns: int) -> None:
        delay_ns = due_ns - self._env.now
        if delay_ns > 0:
            self._num_waiting += 1
            self._env.timeout(delay_ns).callbacks.append(lambda _: self._timer_rang(read))
        else:
            self.num_late += delay_ns < 0
            self._send(read)

    def _timer_rang(self, read: _Read) -> None:
        self._num_waiting -= 1
        self._send(read)

    def _send(self, read: _Read) -> None:
        now = int(self._env.now)
        request = self._make_request(read.row, read.ordinal, now / NANOSECONDS)
        self._sent_ns[read.row.place - self._first_place] = now
        self._under_way[request.request_id] = read
        self._engine.submit(request)

    # -- answers -----------------------------------------------------------------------------------------------------

    def _ended(self, request: Request) -> None:
        """Told by the engine; what follows may end further requests at once, which then wait in line here."""
        self._to_end.append(request)
        if self._is_ending:
            return
        self._is_ending = True
        while self._to_end:
            self._account_for_end(self._to_end.popleft())
        self._is_ending = False

    def _account_for_end(self, request: Request) -> None:
        read = self._under_way.pop(request.request_id, None)
        if read is None:
            return
        self.last_ns = now = int(self._env.now)
        place = read.row.place
        self._ended_ns[place - self._first_place] = now
        self._follow_lead(read.row, now)
        for blocked in self._blocked.pop(place, ()):
            blocked.num_missing -= 1
            if not blocked.num_missing:
                self._num_waiting -= 1
                self._send_after(blocked.read, blocked.facts)
        self._read_due_rows()

    def _follow_lead(self, row: TraceRequest, now: int) -> None:
        """The next turn may be due as much earlier than recorded as this answer, or this request, was."""
        if row.turn is None or row.turn.is_last:
            return
        arrival_ns = _nanoseconds(row.arrival_s)
        lead_ns = arrival_ns - self._sent_ns[row.place - self._first_place]
        if row.turn.answered_s is not None:
            lead_ns = max(lead_ns, arrival_ns + _nanoseconds(row.turn.answered_s) - now)
        elif self._looks_ahead and row.place not in self._blocked:
            self._sought.add(row.place)
        self._lead_ns = max(self._lead_ns, lead_ns)


def _nanoseconds(seconds: float) -> int:
    return round(seconds * NANOSECONDS)
