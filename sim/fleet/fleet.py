"""Several engines under one clock, each with its own ledger, and a router in front of them."""

from collections.abc import Callable, Iterable, Sequence

import attrs
import simpy

from ...core.allocator.config import AllocatorConfig
from ...core.events import Key
from ...core.types import Request
from ..engine.arrivals import TraceArrivals
from ..engine.engine import NANOSECONDS
from ..engine.replay import ReplayReport
from ..traces.trace import TraceRequest
from ..validators import at_least_one, not_negative
from .engine import EngineName, EngineParts, engine_names, fleet_report, start_engine
from .routing import ReplicaView, Routed, Router


@attrs.frozen(kw_only=True)
class FleetShape:
    """The number of engines, and the delay of the events that a router sees.

    A replica is a server with `data_parallel_size` ranks, each with its own ledger. The router sees ranks, as KV events
    name them (`data_parallel_rank`), and sends requests to ranks; it knows of a commit `event_delay_s` after it.
    """

    num_replicas: int = attrs.field(validator=at_least_one)
    data_parallel_size: int = attrs.field(default=1, validator=at_least_one)
    event_delay_s: float = attrs.field(default=0.0, validator=not_negative)

    @property
    def engine_names(self) -> list[EngineName]:
        """Names of all engines, by index."""
        return engine_names(self.num_replicas, self.data_parallel_size)


class Fleet:
    """Engines as SimPy processes in one environment, and a router that arrivals pass through."""

    def __init__(self, shape: FleetShape, parts: EngineParts, router: Router, trace_block_size: int | None) -> None:
        self.env = simpy.Environment()
        self.arrivals = TraceArrivals(self.env, self._route, parts.allocator.hash_block_size, trace_block_size)
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
    ) -> float:
        """Serve every request of the trace to its end; return the wall seconds that it took."""
        return self.arrivals.run(trace, closed_loop, on_progress)

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

    The figures are those of `replay`, over all engines; `report.replicas` holds those of each engine. The trace is read
    once and not kept. `trace_block_size`, `closed_loop` and `on_progress` are as for `replay`; the errors too.
    """
    fleet = Fleet(shape, parts, router, trace_block_size)
    wall_seconds = fleet.run(trace, on_progress, closed_loop)
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
