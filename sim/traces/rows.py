"""Rows of a trace: what a format's reader yields, how a bad row is reported, and how rows become requests."""

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from heapq import heappop, heappush
from typing import Any, TypeVar

import attrs

from ...core.errors import InputError
from .trace import TraceInfo, TraceRequest, Turn, Window

# Far above any model's context (10 million tokens is the longest published), far below what would overflow a counter.
MAX_TOKENS = 100_000_000
# The year 2286 in seconds since 1970; a larger timestamp is in another unit than its format says.
MAX_TIMESTAMP_S = 10_000_000_000
MAX_HASH_ID = 2**63 - 1
# A row-by-row trace never says that a session is over. A session that was silent for a day counts as over, so that
# memory holds the sessions of one day and not of the whole trace.
LONGEST_PAUSE_S = 86_400


@attrs.frozen(kw_only=True)
class TurnRecord:
    """What a row says about its session.

    Later rows name this turn by its `key`. All turns of a linear session share one key, which means the latest turn.
    `think_s` are the recorded seconds from those answers to this turn; None: derived from `answered_s` where possible.
    """

    key: Hashable
    after: tuple[Hashable, ...] = ()  # keys of the turns whose answers this one waits for; unknown keys are ignored
    session: str | None = None  # the session's name; None: that of the turn before
    number: int | None = None  # the turn's number from 1; None: one more than the turn before
    think_s: float | None = None
    keeps_own_gap: bool = False  # whether no think time is derived and only the time between the turns is known
    answered_s: float | None = None  # recorded seconds from this turn to its answer
    num_waiting: int | None = None  # how many later turns wait for this one; None where that is not known yet


# A request of a session, and other figures after it; its time in seconds comes first.
AnyTimed = TypeVar("AnyTimed", bound=tuple[Any, ...])

# (place, timestamp in the format's unit, input_length, output_length, hash_ids or None, session or None, priority)
Row = tuple[int, int | float, int, int, tuple[int, ...] | None, TurnRecord | None, int]


@attrs.frozen
class BadRow:
    """One row that cannot be used."""

    place: int  # its line, from 1
    field: str | None
    reason: str  # a short fixed key, by which bad rows are counted
    message: str
    where: str | None = None  # the full place (file, line, entry) if the line of a single file does not identify it


class RowError(Exception):
    """Raised by the parser of one row; the reader turns it into a `BadRow` with its place."""

    def __init__(self, reason: str, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.reason, self.message, self.field = reason, message, field

    def at(self, place: int, where: str | None = None) -> BadRow:
        """The same fault with its line."""
        return BadRow(place, self.field, self.reason, self.message, where)


# Checks of single values.


def shown(value: Any) -> str:
    """A value as an error message shows it, cut to a short length."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:36]}... ({len(text)} characters)"


def as_object(value: Any) -> dict[str, object]:
    """Return `value` if it is a JSON object; else raise `RowError`."""
    if not isinstance(value, dict):
        raise RowError("not_json", "is JSON but not an object with named fields")
    return value


def as_list(value: Any, field: str, items: str) -> list[Any]:
    """Return `value` if it is a list; else raise `RowError`, which says what the list should hold."""
    if not isinstance(value, list):
        raise RowError("not_a_list", f"{shown(value)} is not a list of {items}", field)
    return value


def required(row: Mapping[str, object], field: str) -> Any:
    """The value of a field; raise `RowError` if the row lacks it."""
    try:
        return row[field]
    except KeyError:
        raise RowError("missing_field", "is missing", field) from None


def finite_number(value: Any, field: str) -> int | float:
    """Return `value` if it is a finite number and not negative; else raise `RowError`."""
    if type(value) is not int and type(value) is not float:
        raise RowError("not_a_number", f"{shown(value)} is not a number", field)
    if not isinstance(value, int) and not math.isfinite(value):
        raise RowError("not_finite", f"{value} is not a finite number", field)
    if value < 0:
        raise RowError("negative", f"{shown(value)} is negative", field)
    return value


def optional_seconds(row: Mapping[str, object], field: str) -> float | None:
    """A number of seconds, or None if the row lacks the field."""
    value = row.get(field)
    if value is None:
        return None
    try:
        return float(finite_number(value, field))
    except OverflowError:
        raise RowError("huge", f"{shown(value)} is more seconds than a float holds", field) from None


def whole_number(value: Any, field: str, largest: int) -> int:
    """Return `value` as an int if it is a whole number in [0, largest]; else raise `RowError`. `512.0` is whole."""
    number = finite_number(value, field)
    if number > largest:
        raise RowError("huge", f"{shown(value)} is larger than {largest:,}", field)
    if number != int(number):
        raise RowError("not_whole", f"{shown(value)} is not a whole number", field)
    return int(number)


def num_tokens(value: Any, field: str) -> int:
    """A number of tokens in [0, MAX_TOKENS]."""
    return whole_number(value, field, MAX_TOKENS)


def timestamp(value: Any, field: str, units_per_second: int) -> int | float:
    """A time since the start of the trace or since 1970, in the format's own unit; may be a fraction."""
    number = finite_number(value, field)
    if number > MAX_TIMESTAMP_S * units_per_second:
        raise RowError(
            "huge",
            f"{shown(value)} is beyond the year 2286 at {units_per_second:,} a second: is it in another unit?",
            field,
        )
    return number


def timed_lengths(row: Mapping[str, object], units_per_second: int) -> tuple[int | float, int, int]:
    """The fields `timestamp`, `input_length` and `output_length` of a row."""
    when, num_input, num_output = (
        required(row, "timestamp"),
        required(row, "input_length"),
        required(row, "output_length"),
    )
    when = timestamp(when, "timestamp", units_per_second)
    return when, num_tokens(num_input, "input_length"), num_tokens(num_output, "output_length")


def hash_ids(value: Any, field: str = "hash_ids") -> tuple[int, ...]:
    """A list of block ids, each a whole number in [0, 2**63)."""
    value = as_list(value, field, "block ids")
    are_ints = list(map(type, value)).count(int) == len(value)
    if are_ints and (not value or (min(value) >= 0 and max(value) <= MAX_HASH_ID)):
        return tuple(value)
    return tuple(whole_number(one, f"{field}[{i}]", MAX_HASH_ID) for i, one in enumerate(value))


# From rows to requests: links between turns, and the measurement window.


@attrs.define
class _SentTurn:
    place: int
    when: int | float
    turn: Turn
    num_waiting: int | None


class OpenSessions:
    """Remembers the turns that later turns may wait for; a day of silence closes a session (`LONGEST_PAUSE_S`).

    A turn that says how many others wait for it is remembered until all of them have come.
    """

    def __init__(self, info: TraceInfo, units_per_second: int) -> None:
        self._info = info
        self._units_per_second = units_per_second
        self._sent: OrderedDict[Hashable, _SentTurn] = OrderedDict()
        self._counted: dict[Hashable, _SentTurn] = {}

    def turn(self, place: int, when: int | float, record: TurnRecord) -> Turn:
        """The turn of the row at `place` that was sent at `when` (the trace's unit)."""
        self._close_silent_sessions(when)
        before = [sent for sent in map(self._turn_before, record.after) if sent is not None]
        session, number = record.session, record.number
        if session is None:
            session = before[0].turn.session if before else str(record.key)
        if number is None:
            number = 1 + max((sent.turn.number for sent in before), default=0)
        turn = Turn(
            session,
            number,
            tuple(sent.place for sent in before),
            self._think_s(when, record, before),
            (when - max(sent.when for sent in before)) / self._units_per_second if before else None,
            record.answered_s,
            is_last=record.num_waiting == 0,
        )
        sent = _SentTurn(place, when, turn, record.num_waiting)
        if record.num_waiting is None:
            self._sent[record.key] = sent
            self._sent.move_to_end(record.key)
        elif record.num_waiting:
            self._counted[record.key] = sent
        return turn

    def _turn_before(self, key: Hashable) -> _SentTurn | None:
        """The turn with that key; forget it if no other turn waits for it."""
        sent = self._counted.get(key)
        if sent is None or sent.num_waiting is None:
            return self._sent.get(key)
        sent.num_waiting -= 1
        if not sent.num_waiting:
            del self._counted[key]
        return sent

    def _think_s(self, when: int | float, record: TurnRecord, before: list[_SentTurn]) -> float | None:
        if not before or record.keeps_own_gap:
            return None
        if record.think_s is not None:
            return record.think_s
        waits: list[float] = []
        for sent in before:
            if sent.turn.answered_s is None:
                return None
            waits.append((when - sent.when) / self._units_per_second - sent.turn.answered_s)
        if min(waits) < 0:
            self._info.remark("turns were sent before the answer that they follow; they wait for it in a closed loop")
        return max(0.0, min(waits))

    def _close_silent_sessions(self, when: int | float) -> None:
        oldest = when - LONGEST_PAUSE_S * self._units_per_second
        while self._sent and next(iter(self._sent.values())).when < oldest:
            self._sent.popitem(last=False)


def merge_sessions(
    starts: Iterator[float], open_session: Callable[[int, float], Iterator[AnyTimed]]
) -> Iterator[AnyTimed]:
    """Merge the requests of many sessions in order of arrival. Memory holds the open sessions.

    `starts` says when sessions open, in seconds, not decreasing; `open_session` makes the generator of one session's
    requests from its number (from 0) and its start.
    """
    waiting: list[tuple[float, int, AnyTimed, Iterator[AnyTimed]]] = []

    def push_next(number: int, session: Iterator[AnyTimed]) -> None:
        request = next(session, None)
        if request is not None:
            heappush(waiting, (request[0], number, request, session))

    def pop_first() -> AnyTimed:
        _, number, request, session = heappop(waiting)
        push_next(number, session)
        return request

    for number, start in enumerate(starts):
        while waiting and waiting[0][0] <= start:
            yield pop_first()
        push_next(number, open_session(number, start))
    while waiting:
        yield pop_first()


def check_window(skip_first: int, limit: int | None, rate_scale: float) -> None:
    """Raise `InputError` for a window or a rate that no trace can have."""
    if skip_first < 0:
        raise InputError(f"--skip-first is {skip_first}; it must be 0 or more requests")
    if limit is not None and limit < 1:
        raise InputError(f"--limit is {limit}; it must be 1 request or more")
    if not (math.isfinite(rate_scale) and rate_scale > 0):
        raise InputError(f"--rate-scale is {rate_scale}; it must be a number above 0 (2 doubles the request rate)")


class RowTrace:
    """A `Trace` of the requests that rows give in the window of its info; each pass reads the rows again."""

    def __init__(
        self,
        known: TraceInfo,
        rows: Callable[[TraceInfo], Iterable[Row]],
        units_per_second: int,
        holder: str = "the trace",
        extent: str = "",
    ) -> None:
        """`known` is the info before a pass. `rows` returns the rows of a new pass, in order of arrival, with times in
        `units_per_second`; it may add to the info that it is given. An error about an empty window says that `holder`
        holds so many requests, then `extent`.
        """
        self._known = known
        self._rows = rows
        self._units_per_second = units_per_second
        self._holder, self._extent = holder, extent
        self.info = self.fresh_info()

    def fresh_info(self) -> TraceInfo:
        """The info with all counts at zero."""
        known = self._known
        window = Window(known.window.skip_first, known.window.limit)
        return attrs.evolve(known, window=window, rows_skipped={}, unused_fields=set(), remarks=dict(known.remarks))

    def __iter__(self) -> Iterator[TraceRequest]:
        """The requests of the window. Raises `InputError` if there is none: zero would be no answer."""
        self.info = info = self.fresh_info()
        yield from self._requests(info)
        if info.num_requests:
            return
        place = f"{info.path}: " if info.path else ""
        if info.num_rows_read:
            raise InputError(
                f"{place}--skip-first {info.window.skip_first:,} leaves nothing: {self._holder} holds "
                f"{info.num_rows_read:,} requests{self._extent}"
            )
        if info.rows_skipped:
            first = next(iter(info.rows_skipped.values()))
            raise InputError(
                f"{place}every one of its {info.num_rows_skipped:,} rows is bad; the first: {first.first_message}"
            )
        raise InputError(f"{place}{self._holder} holds no requests{self._extent}")

    def _requests(self, info: TraceInfo) -> Iterator[TraceRequest]:
        """The requests after the first `skip_first` rows, at most `limit`; updates `info` as they are read."""
        window, units_per_second = info.window, self._units_per_second
        scaled_units_per_second = units_per_second * info.rate_scale
        trace_start: int | float = 0
        window_start: int | float = 0
        sessions = OpenSessions(info, units_per_second)
        for place, when, input_length, output_length, hash_ids, record, priority in self._rows(info):
            turn = None if record is None else sessions.turn(place, when, record)
            if info.num_rows_read == 0:
                trace_start = when
            info.num_rows_read += 1
            if info.num_rows_read <= window.skip_first:
                continue
            if info.num_requests == 0:
                window_start = when
                window.first_place = place
                window.start_s = (when - trace_start) / units_per_second
            info.num_requests += 1
            info.input_tokens += input_length
            info.output_tokens += output_length
            info.num_requests_without_hash_ids += hash_ids is None
            window.last_place = place
            window.end_s = (when - trace_start) / units_per_second
            arrival_s = (when - window_start) / scaled_units_per_second
            if turn is not None and info.rate_scale != 1:
                turn = turn.at_rate(info.rate_scale)
            yield TraceRequest(arrival_s, input_length, output_length, hash_ids, place, turn, priority)
            if info.num_requests == window.limit:
                return
