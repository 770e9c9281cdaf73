"""How the requests of a trace reach a fleet: at their recorded times, or each turn after the answer before it."""

from collections.abc import Callable, Generator, Iterable
from typing import Any

import simpy

from ...core.types import Request
from ..engine.engine import NANOSECONDS
from ..engine.replay import CLOSED_LOOP, OPEN_LOOP, decided_loop
from ..engine.session_arrivals import SessionArrivals
from ..traces.trace import Trace, TraceRequest

# Makes the scheduler's request of a row, its place in the order of reading, and the time it is sent, in seconds.
RequestMaker = Callable[[TraceRequest, int, float], Request]


class FleetArrivals:
    """Hands each request, with the session that it is a turn of, to `route`; the fleet tells which have `ended`."""

    def __init__(self, env: simpy.Environment, route: Callable[[Request, str | None], None]) -> None:
        self._env = env
        self._route = route
        self._next_ns = float("inf")
        self._session_of: dict[str, str] = {}
        self._sessions: SessionArrivals | None = None
        self.on_ended: Callable[[Request], None] | None = None
        """Who waits for answers."""
        self.last_ended_ns = 0

    def start(
        self,
        trace: Iterable[TraceRequest],
        make_request: RequestMaker,
        closed_loop: bool | None,
        on_progress: Callable[[int], None],
    ) -> None:
        """Begin; what follows is driven by the clock and by answers.

        Raises:
            InputError: a closed loop asked of a trace that links no turns.
        """
        if not decided_loop(trace, closed_loop):
            self._env.process(self._open_loop(trace, make_request, on_progress))
            return
        num_sent = 0

        def make(row: TraceRequest, ordinal: int, arrival_s: float) -> Request:
            nonlocal num_sent
            request = make_request(row, ordinal, arrival_s)
            if row.turn is not None:
                self._session_of[request.request_id] = row.turn.session
            num_sent += 1
            on_progress(num_sent)
            return request

        unknown = not isinstance(trace, Trace) or trace.info.records_think_times
        self._sessions = SessionArrivals(self._env, self, trace, make, waits_for_unknown_answers=unknown)
        self._sessions.start()

    def submit(self, request: Request) -> bool:
        """A session sends its next turn."""
        self._route(request, self._session_of.pop(request.request_id, None))
        return True

    def ended(self, request: Request) -> None:
        """A request was answered, or refused."""
        self.last_ended_ns = int(self._env.now)
        if self.on_ended is not None:
            self.on_ended(request)

    def next_arrival_ns(self) -> float:
        """No request comes before. In a closed loop any engine's step may bring about the next one."""
        return self._next_ns if self._sessions is None else self._env.peek()

    @property
    def is_closed_loop(self) -> bool:
        """Whether turns wait for answers."""
        return self._sessions is not None

    def assumptions(self) -> dict[str, Any]:
        """For the report."""
        late = 0 if self._sessions is None else self._sessions.num_late
        return {
            "arrivals": OPEN_LOOP if self._sessions is None else CLOSED_LOOP,
            **({"turns_sent_late": late} if late else {}),
        }

    def _open_loop(
        self, trace: Iterable[TraceRequest], make_request: RequestMaker, on_progress: Callable[[int], None]
    ) -> Generator[simpy.Event, Any, None]:
        env = self._env
        for ordinal, row in enumerate(trace):
            arrival_ns = round(row.arrival_s * NANOSECONDS)
            if arrival_ns > env.now:
                self._next_ns = arrival_ns
                yield env.timeout(arrival_ns - env.now)
            request = make_request(row, ordinal, row.arrival_s)
            self._route(request, None if row.turn is None else row.turn.session)
            on_progress(ordinal + 1)
        self._next_ns = float("inf")
