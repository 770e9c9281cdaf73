"""How the rows of a trace become requests and reach an engine: block keys, open loop, closed loop."""

import time
from array import array
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import partial
from typing import Any

import attrs
import simpy

from ...core.errors import InputError, KVLedgerError
from ...core.types import Request
from ..traces.derived import names_in_full_blocks
from ..traces.trace import Trace, TraceRequest, Turn

NANOSECONDS = 1_000_000_000
# If a trace records think times without the times of answers, the next turn is sought at most this many rows ahead.
MOST_ROWS_AHEAD = 100_000
_PENDING = -1
_UNKNOWN = -2
OPEN_LOOP = "open loop: requests come at their recorded times, whatever the engine does"
CLOSED_LOOP = (
    "closed loop: a turn is sent its think time after the answer before it (where none is recorded: its recorded gap "
    "after the turn before, and not before the answer); a refused turn counts as answered"
)

AT_MOST = "at most {:,} requests under way: where there are as many, a request is sent when another one ends"

# Makes the scheduler's request of a row, its place in the order of reading, and the time it is sent, in seconds.
RequestMaker = Callable[[TraceRequest, int, float], Request]


class TraceKeySource:
    """Block hashes of one traced request: engine blocks of `block_size` tokens, ids of `trace_block_size` tokens.

    Engine blocks are named as in `ReblockedTrace`. Two prompts that diverge inside a trace block have different ids for
    it, so what they share of it is not found: at most `trace_block_size - 1` tokens a request.

    * The last trace block of a prompt may be partial. Engine blocks that end in it include its length in their hash, so
      that they match the same partial block only.
    * Blocks that reach into the output, and prompts without ids, are unique to their request (`ordinal`).

    Hashes are ints: non-negative in full trace blocks, negative and odd in partial ones, negative and even if unique.

    With `looks_ahead` a hash also covers the token behind its block (vLLM 0.33 with EAGLE or MTP). That token is known
    by the trace block that it lies in; where it is an output, the hash is unique.
    """

    __slots__ = ("_hash_ids", "_input_length", "_looks_ahead", "_ordinal", "_prompt_keys", "_sizes")

    def __init__(
        self,
        hash_ids: Sequence[int] | None,
        input_length: int,
        ordinal: int,
        block_size: int,
        trace_block_size: int | None,
        looks_ahead: bool = False,
    ) -> None:
        self._looks_ahead = looks_ahead
        self._hash_ids = hash_ids
        self._input_length = input_length
        self._ordinal = ordinal
        self._sizes = (block_size, trace_block_size)
        self._prompt_keys: Sequence[int] | None = None

    def keys(self, start: int, stop: int) -> Sequence[int]:
        """Block hashes of the complete engine blocks `start <= i < stop`."""
        prompt_keys = self._prompt_keys
        if prompt_keys is None:
            prompt_keys = self._derive_prompt_keys()
            if self._looks_ahead:
                prompt_keys = self._with_next_blocks(prompt_keys)
            self._prompt_keys = prompt_keys
        known = len(prompt_keys)
        if stop <= known:
            return prompt_keys[start:stop]
        unique = -2 - (self._ordinal << 41)
        return [*prompt_keys[start:known], *(unique - 2 * index for index in range(max(start, known), stop))]

    def _with_next_blocks(self, keys: Sequence[int]) -> Sequence[int]:
        """Hashes of blocks at the end of a trace block, with the id of the next one in them."""
        block_size, trace_block_size = self._sizes
        ids = self._hash_ids
        if ids is None or trace_block_size is None:
            return keys
        out: list[int] = []
        for index, key in enumerate(keys):
            next_block, inside = divmod((index + 1) * block_size, trace_block_size)
            if not inside:
                if next_block >= len(ids) or (index + 1) * block_size >= self._input_length:
                    break
                key = -2 * ids[next_block] * trace_block_size * trace_block_size - 1
            out.append(key)
        return out

    def _derive_prompt_keys(self) -> Sequence[int]:
        block_size, trace_block_size = self._sizes
        ids = self._hash_ids
        if ids is None or trace_block_size is None:
            return ()
        num_full, tail_length = divmod(self._input_length, trace_block_size)
        if block_size == trace_block_size:
            return ids[:num_full]
        keys = names_in_full_blocks(ids[:num_full], trace_block_size, block_size)
        # A trace that names full blocks only has no id for the tail: what ends in it is unique to its request.
        if tail_length and len(ids) > num_full:
            partial = (ids[num_full] * trace_block_size + tail_length) * trace_block_size
            ends = range((len(keys) + 1) * block_size, self._input_length + 1, block_size)
            keys.extend(-2 * (partial + end - num_full * trace_block_size) - 1 for end in ends)
        return keys


class TraceArrivals:
    """Sends the requests of a trace at their recorded times, or each turn after the answer before it (closed loop).

    If the trace limits the requests under way (`max_concurrency` of its info), each waits until one of them has ended.
    """

    def __init__(
        self,
        env: simpy.Environment,
        send: Callable[[Request, str | None], object],
        block_size: int,
        trace_block_size: int | None,
        looks_ahead: bool = False,
        http_ns: int = 0,
    ) -> None:
        """`send` is called with each request, whose block hashes are of `block_size` tokens, and with its session.

        That is `http_ns` after the client sent it, which is when it arrived.
        """
        self._env = env
        self._http_ns = http_ns
        self._send_to = send
        self._make_request = partial(
            traced_request, block_size=block_size, trace_block_size=trace_block_size, looks_ahead=looks_ahead
        )
        self._next_ns = float("inf")
        self._sessions: SessionArrivals | None = None
        self._places: simpy.Container | None = None  # how many more requests may be under way
        self._num_sent = self._num_ended = 0
        self.last_ended_ns = 0

    def run(
        self,
        trace: Iterable[TraceRequest],
        closed_loop: bool | None,
        on_progress: Callable[[int], None] | None = None,
    ) -> float:
        """Serve every request of the trace to its end; return the wall seconds that it took.

        Args:
            trace: in order of arrival.
            closed_loop: whether a session's next turn waits for the answer before it, or comes at its recorded time.
                None: closed if the trace records think times (its `info` says so), else open.
            on_progress: called with the number of requests sent so far.

        Raises:
            InputError: a closed loop is asked of a trace that links no turns.
            KVLedgerError: the engines stopped before every request had ended, which is a fault of theirs.
        """
        started = time.perf_counter()
        self._start(trace, closed_loop, on_progress or (lambda count: None))
        self._env.run()
        if self._num_ended < self._num_sent:
            raise KVLedgerError(
                f"{self._num_sent - self._num_ended:,} of {self._num_sent:,} requests were never answered: the engine "
                "stopped with work left. Please report this with the command and the trace"
            )
        return time.perf_counter() - started

    def _start(
        self, trace: Iterable[TraceRequest], closed_loop: bool | None, on_progress: Callable[[int], None]
    ) -> None:
        info = trace.info if isinstance(trace, Trace) else None
        if closed_loop and info is not None and not info.links_turns:
            raise InputError(
                f"--closed-loop has no effect on {info.name}: it does not say which requests are turns of one session; "
                "leave it out"
            )
        records_think_times = info is not None and info.records_think_times
        if info is not None and info.max_concurrency is not None:
            self._places = simpy.Container(self._env, capacity=info.max_concurrency, init=info.max_concurrency)
        if not (records_think_times if closed_loop is None else closed_loop):
            self._env.process(self._open_loop(trace, on_progress))
            return

        def send(request: Request, session: str | None) -> None:
            on_progress(self._num_sent + 1)
            self._send_by_http(request, session)

        unknown = info is None or records_think_times
        self._sessions = SessionArrivals(self._env, send, trace, self._make_request, waits_for_unknown_answers=unknown)
        self._sessions.start()

    def ended(self, request: Request) -> None:
        """A request was answered or refused."""
        self.last_ended_ns = int(self._env.now)
        self._num_ended += 1
        if self._places is not None:
            self._places.put(1)
        if self._sessions is not None:
            self._sessions.ended(request)

    def next_arrival_ns(self) -> float:
        """The earliest time of the next request. In a closed loop, any engine's step may cause one."""
        return self._env.peek() if self.is_closed_loop else self._next_ns

    @property
    def is_closed_loop(self) -> bool:
        """Whether requests wait for answers."""
        return self._sessions is not None or self._places is not None

    def assumptions(self) -> dict[str, object]:
        """Open or closed loop, for the report."""
        late = 0 if self._sessions is None else self._sessions.num_late
        most = None if self._places is None else AT_MOST.format(int(self._places.capacity))
        return {
            "arrivals": most or (OPEN_LOOP if self._sessions is None else CLOSED_LOOP),
            **({"turns_sent_late": late} if late else {}),
        }

    def _send(self, request: Request, session: str | None) -> None:
        self._num_sent += 1
        self._send_to(request, session)

    def _send_by_http(self, request: Request, session: str | None) -> None:
        if not self._http_ns:
            self._send(request, session)
            return
        self._env.timeout(self._http_ns).callbacks.append(lambda _: self._send(request, session))

    def _open_loop(
        self, trace: Iterable[TraceRequest], on_progress: Callable[[int], None]
    ) -> Generator[simpy.Event, Any, None]:
        env, places = self._env, self._places
        for ordinal, row in enumerate(trace):
            session = None if row.turn is None else row.turn.session
            due_ns = _nanoseconds(row.arrival_s) + (0 if places else self._http_ns)
            if due_ns > env.now:
                self._next_ns = due_ns
                yield env.timeout(due_ns - env.now)
            if places is None:
                self._send(self._make_request(row, ordinal, row.arrival_s), session)
            else:
                place = places.get(1)
                if not place.triggered:
                    yield place
                self._send_by_http(self._make_request(row, ordinal, env.now / NANOSECONDS), session)
            on_progress(ordinal + 1)
        self._next_ns = float("inf")


def traced_request(
    row: TraceRequest,
    ordinal: int,
    arrival_s: float,
    block_size: int,
    trace_block_size: int | None,
    looks_ahead: bool = False,
) -> Request:
    """The scheduler's request of one row; `ordinal` makes blocks that are not shared unique to the row."""
    return Request(
        request_id=str(row.place),
        num_prompt_tokens=row.input_length,
        # Computing a prompt produces one token, even if the row has no output.
        max_tokens=max(row.output_length, 1),
        keys=TraceKeySource(row.hash_ids, row.input_length, ordinal, block_size, trace_block_size, looks_ahead),
        priority=row.priority,
        arrival=arrival_s,
    )


# A row that was read but not answered, and its number in the order of reading.
_Read = tuple[TraceRequest, int]


@attrs.define(eq=False)
class _Blocked:
    """A turn that waits for `num_missing` answers."""

    read: _Read
    turn: Turn
    num_missing: int


class SessionArrivals:
    """Closed loop: sends a session's next turn when the turn before it was answered and its client has thought.

    The trace stays a stream. Its rows come in recorded order, while the simulated server may be slower or faster than
    the recorded one. If it is slower, rows are read before they are due and wait, one for each turn in progress. If it
    is faster, a turn may be due before its recorded time, so rows are read ahead of the clock by as much as simulated
    answers are ahead of recorded ones. Memory: the open sessions, the rows that are read ahead, and 16 bytes a request.

        arrivals = SessionArrivals(env, send, trace, make_request)
        engine.on_ended = arrivals.ended
        arrivals.start()
        env.run()
    """

    def __init__(
        self,
        env: simpy.Environment,
        send: Callable[[Request, str | None], object],
        rows: Iterable[TraceRequest],
        make_request: RequestMaker,
        waits_for_unknown_answers: bool = False,
    ) -> None:
        """Read `rows` as they become due; a refused request counts as answered immediately.

        `waits_for_unknown_answers`: whether the trace records think times without the times of answers.
        """
        self._env = env
        self._send_to = send
        self._rows = iter(rows)
        self._make_request = make_request
        self._looks_ahead = waits_for_unknown_answers
        self._next: TraceRequest | None = next(self._rows, None)
        self._first_place = 0 if self._next is None else self._next.place
        self._num_read = 0
        self._lead_ns = 0
        self._back_at_ns: int | None = None
        # By place: when the request was sent and when it ended.
        self._sent_ns = array("q")
        self._ended_ns = array("q")
        self._under_way: dict[str, _Read] = {}
        self._blocked: dict[int, list[_Blocked]] = {}
        self._num_waiting = 0
        self._sought: set[int] = set()
        self._to_end: deque[Request] = deque()
        self._is_ending = False
        self.num_late = 0  # Turns that were read from the trace only after they were due
        self.last_ns = 0
        """When the last request ended. The clock may run longer: a scheduled time to read is not cancelled."""

    def start(self) -> None:
        """Begin to read; the clock and the answers drive everything that follows."""
        self._read_due_rows()

    # -- reading -----------------------------------------------------------------------------------------------------

    def _read_due_rows(self) -> None:
        """Read each row when the clock plus the lead reaches its recorded arrival; schedule the time of the next."""
        while self._next is not None:
            due_ns = _nanoseconds(self._next.arrival_s) - self._lead_ns
            if due_ns > self._env.now and not (self._sought and self._num_waiting < MOST_ROWS_AHEAD):
                self._come_back_at(due_ns)
                return
            row = self._next
            self._next = next(self._rows, None)
            self._take((row, self._num_read))

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
        row, _ = read
        turn = row.turn
        self._make_room(row.place)
        before = [] if turn is None else self._places_before(turn)
        if turn is None or not before:
            self._send_at(read, _nanoseconds(row.arrival_s))
            return
        self._sought.difference_update(before)
        missing = [place for place in before if self._ended_ns[place - self._first_place] == _PENDING]
        if not missing:
            self._send_after(read, turn)
            return
        self._num_waiting += 1
        blocked = _Blocked(read, turn, len(missing))
        for place in missing:
            self._blocked.setdefault(place, []).append(blocked)

    def _make_room(self, place: int) -> None:
        """Extend the times up to a place; places in between belong to rows that are not part of the run."""
        size = place - self._first_place + 1
        for times in (self._sent_ns, self._ended_ns):
            times.extend([_UNKNOWN] * (size - len(times)))
            times[size - 1] = _PENDING

    def _places_before(self, turn: Turn) -> list[int]:
        """The turns that it waits for and that are part of the run: not before the window, not skipped as bad."""
        first, ended = self._first_place, self._ended_ns
        return [place for place in turn.waits_for if place >= first and ended[place - first] != _UNKNOWN]

    # -- sending -----------------------------------------------------------------------------------------------------

    def _send_after(self, read: _Read, turn: Turn) -> None:
        """All answers have come: send the turn after its think time, or after its gap if that is unknown."""
        indices = [place - self._first_place for place in self._places_before(turn)]
        ended_ns = max(self._ended_ns[index] for index in indices)
        if turn.think_s is not None:
            self._send_at(read, ended_ns + _nanoseconds(turn.think_s))
        else:
            sent_ns = max(self._sent_ns[index] for index in indices)
            self._send_at(read, max(ended_ns, sent_ns + _nanoseconds(turn.gap_s or 0.0)))

    def _send_at(self, read: _Read, due_ns: int) -> None:
        delay_ns = due_ns - self._env.now
        if delay_ns > 0:
            self._num_waiting += 1
            self._env.timeout(delay_ns).callbacks.append(lambda _: self._send_due(read))
        else:
            self.num_late += delay_ns < 0
            self._send(read)

    def _send_due(self, read: _Read) -> None:
        self._num_waiting -= 1
        self._send(read)

    def _send(self, read: _Read) -> None:
        now = int(self._env.now)
        row, ordinal = read
        request = self._make_request(row, ordinal, now / NANOSECONDS)
        self._sent_ns[row.place - self._first_place] = now
        self._under_way[request.request_id] = read
        self._send_to(request, None if row.turn is None else row.turn.session)

    # -- answers -----------------------------------------------------------------------------------------------------

    def ended(self, request: Request) -> None:
        """A request was answered or refused. Handling one end may end further requests, which then queue here."""
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
        row, _ = read
        place = row.place
        self._ended_ns[place - self._first_place] = now
        self._follow_lead(row, now)
        for blocked in self._blocked.pop(place, ()):
            blocked.num_missing -= 1
            if not blocked.num_missing:
                self._num_waiting -= 1
                self._send_after(blocked.read, blocked.turn)
        self._read_due_rows()

    def _follow_lead(self, row: TraceRequest, now: int) -> None:
        """The next turn may be due earlier than recorded, by as much as this answer or this request was."""
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
