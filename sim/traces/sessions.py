"""Which earlier requests a turn waits for: the links between the rows of a trace, resolved as they are read."""

from collections import OrderedDict
from collections.abc import Hashable

import attrs

from .trace import TraceInfo, Turn

# A row-by-row trace never says that a session is over. One that was silent for a day is taken as over, so that memory
# is that of the sessions of a day and not of the trace.
LONGEST_PAUSE_S = 86_400


@attrs.frozen(kw_only=True)
class TurnRecord:
    """What a row says about its session.

    Attributes:
        key: what later rows call this turn by; the turns of a linear session share one key, the latest stands for it.
        after: keys of the turns whose answers this one waits for; unknown ones count as not there.
        session: the session's name; that of the turn before unless given.
        number: the turn's number from 1; counted on from the turn before unless given.
        think_s: recorded seconds from those answers to this turn, None to derive it from `answered_s` where possible.
        keeps_own_gap: whether no think time is to be derived, only the time between the turns.
        answered_s: recorded seconds from this turn to its answer.
        num_waiting: how many later turns wait for this one, None where that is not known yet.
    """

    key: Hashable
    after: tuple[Hashable, ...] = ()
    session: str | None = None
    number: int | None = None
    think_s: float | None = None
    keeps_own_gap: bool = False
    answered_s: float | None = None
    num_waiting: int | None = None


@attrs.define
class _Sent:
    place: int
    when: int | float
    turn: Turn
    num_waiting: int | None


class OpenSessions:
    """Remembers the turns that others may wait for; a day of silence closes a session (see `LONGEST_PAUSE_S`).

    Turns that say how many others wait for them are remembered for exactly these.
    """

    def __init__(self, info: TraceInfo, units_per_second: int) -> None:
        self._info = info
        self._units_per_second = units_per_second
        self._sent: OrderedDict[Hashable, _Sent] = OrderedDict()
        self._counted: dict[Hashable, _Sent] = {}

    def turn(self, place: int, when: int | float, record: TurnRecord) -> Turn:
        """The turn that a row at `place`, sent at `when` (the trace's unit), is."""
        self._close_silent_sessions(when)
        before = [sent for sent in map(self._answerer, record.after) if sent is not None]
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
        sent = _Sent(place, when, turn, record.num_waiting)
        if record.num_waiting is None:
            self._sent[record.key] = sent
            self._sent.move_to_end(record.key)
        elif record.num_waiting:
            self._counted[record.key] = sent
        return turn

    def _answerer(self, key: Hashable) -> _Sent | None:
        """The turn of that key, forgotten once nobody else waits for it."""
        sent = self._counted.get(key)
        if sent is None or sent.num_waiting is None:
            return self._sent.get(key)
        sent.num_waiting -= 1
        if not sent.num_waiting:
            del self._counted[key]
        return sent

    def _think_s(self, when: int | float, record: TurnRecord, before: list[_Sent]) -> float | None:
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
