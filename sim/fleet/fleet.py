"""Several engines under one clock, each with its own ledger, and a router in front of them."""

import time
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import partial
from typing import Any

import attrs
import simpy

from ...core.allocator.config import AllocatorConfig
from ...core.errors import InputError
from ...core.events import Key
from ...core.types import Request
from ..engine.arrivals import CLOSED_LOOP, OPEN_LOOP, SessionArrivals, decided_loop, traced_request
from ..engine.engine import NANOSECONDS
from ..engine.replay import ReplayReport
from ..traces.trace import Trace, TraceRequest
from .engine import EngineName, EngineParts, engine_names, fleet_report, start_engine
from .routing import ReplicaView, Routed, Router

__all__ = ["EngineName", "EngineParts", "Fleet", "FleetShape", "replay_fleet"]


class FleetArrivals:
    """Sends the requests of a trace to `route`, at their recorded times or each turn after the answer before it."""

    def __init__(
        self,
        env: simpy.Environment,
        route: Callable[[Request, str | None], None],
        block_size: int,
        trace_block_size: int | None,
    ) -> None:
        """Prepare; nothing is read before `start`.

        Args:
            env: the fleet's clock.
            route: called with each request and the session that it is a turn of.
            block_size: tokens per block hash of the requests.
            trace_block_size: tokens that an id of the trace represents; None if it has no ids.
        """
        self._env = env
        self._route = route
        self._make_request = partial(traced_request, block_size=block_size, trace_block_size=trace_block_size)
        self._next_ns = float("inf")
        self._session_of: dict[str, str] = {}
        self._sessions: SessionArrivals | None = None
        self.on_ended: Callable[[Request], None] | None = None
        """Callback for each answered or refused request."""
        self.last_ended_ns = 0

    def start(
        self,
        trace: Iterable[TraceRequest],
        closed_loop: bool | None,
        on_progress: Callable[[int], None] | None = None,
    ) -> None:
        """Begin to read; the clock and the answers drive everything that follows.

        Raises:
            InputError: a closed loop is asked of a trace that links no turns.
        """
        on_progress = on_progress or (lambda count: None)
        if not decided_loop(trace, closed_loop):
            self._env.process(self._open_loop(trace, on_progress))
            return
        num_sent = 0

        def make(row: TraceRequest, ordinal: int, arrival_s: float) -> Request:
            nonlocal num_sent
            request = self._make_request(row, ordinal, arrival_s)
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
        """A request was answered or refused."""
        self.last_ended_ns = int(self._env.now)
        if self.on_ended is not None:
            self.on_ended(request)

    def next_arrival_ns(self) -> float:
        """The earliest time of the next request. In a closed loop, any engine's step may cause one."""
        return self._next_ns if self._sessions is None else self._env.peek()

    @property
    def is_closed_loop(self) -> bool:
        """Whether turns wait for answers."""
        return self._sessions is not None

    def assumptions(self) -> dict[str, object]:
        """Open or closed loop, for the report."""
        late = 0 if self._sessions is None else self._sessions.num_late
        return {
            "arrivals": OPEN_LOOP if self._sessions is None else CLOSED_LOOP,
            **({"turns_sent_late": late} if late else {}),
        }

    def _open_loop(
        self, trace: Iterable[TraceRequest], on_progress: Callable[[int], None]
    ) -> Generator[simpy.Event, Any, None]:
        env = self._env
        for ordinal, row in enumerate(trace):
            arrival_ns = round(row.arrival_s * NANOSECONDS)
            if arrival_ns > env.now:
                self._next_ns = arrival_ns
                yield env.timeout(arrival_ns - env.now)
            request = self._make_request(row, ordinal, row.arrival_s)
            self._route(request, None if row.turn is None else row.turn.session)
            on_progress(ordinal + 1)
        self._next_ns = float("inf")


def _at_least_one(_: object, attribute: "attrs.Attribute[int]", value: int) -> None:
    if value < 1:
        raise InputError(f"{attribute.name} is {value}; it must be at least 1")


def _not_negative(_: object, attribute: "attrs.Attribute[float]", value: float) -> None:
    if not 0 <= value < float("inf"):
        raise InputError(f"{attribute.name} is {value}; it must be a number of seconds, 0 or more")


@attrs.frozen(kw_only=True)
class FleetShape:
    """The number of engines, and the delay of the events that a router sees.

    Attributes:
        num_replicas: servers.
        data_parallel_size: ranks of each server, each with its own ledger. The router sees ranks, as KV events name
            them (`data_parallel_rank`), and sends requests to ranks.
        event_delay_s: time from a commit of an engine until the router knows of it.
    """

    num_replicas: int = attrs.field(validator=_at_least_one)
    data_parallel_size: int = attrs.field(default=1, validator=_at_least_one)
    event_delay_s: float = attrs.field(default=0.0, validator=_not_negative)

    @property
    def engine_names(self) -> list[EngineName]:
        """Names of all engines, by index."""
        return engine_names(self.num_replicas, self.data_parallel_size)


class Fleet:
    """Engines as SimPy processes in one environment, and a router that arrivals pass through."""

    def __init__(self, shape: FleetShape, parts: EngineParts, router: Router, trace_block_size: int | None) -> None:
        self.env = simpy.Environment()
        self.arrivals = FleetArrivals(self.env, self._route, parts.allocator.hash_block_size, trace_block_size)
        self._dispatcher = Dispatcher(router, parts.allocator)
        self.engines = [
            start_engine(
                self.env,
                parts,
                index,
                name,
                event_delay_s=shape.event_delay_s,
                next_reached_ns=self.arrivals.next_arrival_ns,
                on_ended=self.arrivals.ended,
            )
            for index, name in enumerate(shape.engine_names)
        ]
        self.views: list[ReplicaView] = [engine.view for engine in self.engines]

    def run(
        self,
        trace: Iterable[TraceRequest],
        on_progress: Callable[[int], None] | None = None,
        closed_loop: bool | None = False,
    ) -> None:
        """Serve every request of the trace to its end."""
        self.arrivals.start(trace, closed_loop, on_progress)
        self.env.run()

    def _route(self, request: Request, session: str | None) -> None:
        chosen = self._dispatcher.choose(request, session, self.views)
        # A router that counts what it sent knows of the request before the replica has answered.
        self.views[chosen].sent(request)
        self.engines[chosen].engine.submit(request)


class Dispatcher:
    """Asks a router for an engine, with the block hashes of the prompt in the group that replica views follow."""

    def __init__(self, router: Router, allocator: AllocatorConfig) -> None:
        whole = [kind for kind in allocator.groups if kind.needs_whole_prefix]
        self._router = router
        self._block_size = (whole or list(allocator.groups))[0].block_size
        self._per_block = self._block_size // allocator.hash_block_size
        self._enabled = allocator.enable_caching

    def choose(self, request: Request, session: str | None, views: Sequence[ReplicaView]) -> int:
        """The index of the engine that gets the request, after the views took in all events that have arrived."""
        for view in views:
            view.arrive()
        keys = self._keys(request)
        routed = Routed(request=request, keys=keys, block_size=self._block_size, session=session)
        return self._router.choose(routed, views)

    def _keys(self, request: Request) -> Sequence[Key]:
        """Hashes of the complete prompt blocks that a hit could cover: at least one token is always computed."""
        if request.keys is None or not self._enabled:
            return ()
        num_blocks = (request.num_prompt_tokens - 1) // self._block_size
        keys = request.keys.keys(0, num_blocks * self._per_block)
        return keys if self._per_block == 1 else keys[self._per_block - 1 :: self._per_block]


def replay_fleet(
    trace: Iterable[TraceRequest],
    *,
    shape: FleetShape,
    parts: EngineParts,
    router: Router,
    trace_block_size: int | None,
    closed_loop: bool | None = False,
    on_progress: Callable[[int], None] | None = None,
) -> ReplayReport:
    """Run every request of a trace through a router and the engines behind it, until each has ended.

    The figures are those of `replay`, over all engines; `report.replicas` holds those of each engine.

    Args:
        trace: rows in order of arrival; read once and not kept.
        shape: the number of engines.
        parts: what each engine is built from.
        router: chooses an engine for each request.
        trace_block_size: tokens that an id of the trace represents; None if it has no ids.
        closed_loop: whether a session's next turn waits for the answer before it, or comes at its recorded time. None:
            closed if the trace records think times.
        on_progress: called with the number of requests routed so far.

    Raises:
        InputError: a closed loop is asked of a trace that links no turns.
    """
    fleet = Fleet(shape, parts, router, trace_block_size)
    started = time.perf_counter()
    fleet.run(trace, on_progress, closed_loop)
    wall_seconds = time.perf_counter() - started
    assumptions = {
        "num_replicas": shape.num_replicas,
        "data_parallel_size": shape.data_parallel_size,
        **router.assumptions(),
        "event_delay_s": shape.event_delay_s,
        **parts.assumptions(),
        **fleet.arrivals.assumptions(),
        **parts.latency.assumptions(),
    }
    return fleet_report(fleet.engines, assumptions, fleet.arrivals.last_ended_ns / NANOSECONDS, wall_seconds)
