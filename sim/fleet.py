"""Several engines under one clock: each with its own ledger, a router in front of them."""

import time
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

import attrs
import simpy

from ..backends.sim_backend import SimBackend
from ..core.allocator import KVCacheAllocator
from ..core.allocator_config import AllocatorConfig
from ..core.errors import InputError
from ..core.scheduler import Scheduler
from ..core.scheduler_config import SchedulerConfig
from ..core.types import DraftModel, EventSink, LatencyModel, Request
from .async_engine import AsyncSchedulingEngine
from .engine import NANOSECONDS, SimulatedEngine
from .fleet_report import ReplicaRun, fleet_report
from .metrics import Recorder
from .replay import OPEN_LOOP, ReplayReport, traced_request
from .replica_view import ReplicaView
from .request_record import RequestRecord
from .routing import Routed, Router
from .tiers import Tier, TieredLatency, TierStore
from .traces.trace import TraceRequest


def _at_least_one(_: object, attribute: "attrs.Attribute[int]", value: int) -> None:
    if value < 1:
        raise InputError(f"{attribute.name} is {value}; it must be at least 1")


def _not_negative(_: object, attribute: "attrs.Attribute[float]", value: float) -> None:
    if not 0 <= value < float("inf"):
        raise InputError(f"{attribute.name} is {value}; it must be a number of seconds, 0 or more")


@attrs.frozen(kw_only=True)
class FleetShape:
    """How many engines there are, and how late a router hears of them.

    Attributes:
        num_replicas: servers.
        data_parallel_size: ranks of each server, every one with a ledger of its own. The router sees each rank, as KV
            events name it (`data_parallel_rank`), and sends requests to ranks.
        event_delay_s: from an engine's commit to the router's knowing of it.
    """

    num_replicas: int = attrs.field(validator=_at_least_one)
    data_parallel_size: int = attrs.field(default=1, validator=_at_least_one)
    event_delay_s: float = attrs.field(default=0.0, validator=_not_negative)

    @property
    def num_engines(self) -> int:
        """Ledgers: ranks of all replicas."""
        return self.num_replicas * self.data_parallel_size


@attrs.frozen(kw_only=True)
class EngineParts:
    """What every engine of the fleet is made of.

    `drafts_of` and `sinks_of` are asked with the engine's index; `on_finished` is given the record of each request of
    any engine as it finishes. `tiers` stand behind every pool, each engine with its own; `tier_bytes_per_block` is what
    a block's copy moves.
    """

    allocator: AllocatorConfig
    scheduler: SchedulerConfig
    latency: LatencyModel
    drafts_of: Callable[[int], DraftModel | None] = lambda index: None
    sinks_of: Callable[[int], Iterable[EventSink]] = lambda index: ()
    on_finished: Callable[[RequestRecord], None] | None = None
    async_scheduling: bool = False
    macro_steps: bool = True
    tiers: tuple[Tier, ...] = ()
    tier_bytes_per_block: float | None = None


class Fleet:
    """Engines as SimPy processes in one environment, and the process that routes arrivals to them."""

    def __init__(self, shape: FleetShape, parts: EngineParts, router: Router, trace_block_size: int | None) -> None:
        self.shape = shape
        self.router = router
        self.env = simpy.Environment()
        self._parts = parts
        self._trace_block_size = trace_block_size
        self._next_arrival_ns = float("inf")
        self.views: list[ReplicaView] = []
        self._engines: list[SimulatedEngine] = []
        self.runs: list[ReplicaRun] = []
        groups = parts.allocator.groups
        whole = [kind for kind in groups if kind.needs_whole_prefix]
        self._block_size = (whole or list(groups))[0].block_size
        for index in range(shape.num_engines):
            self._add_engine(index)

    def run(self, trace: Iterable[TraceRequest], on_progress: Callable[[int], None] | None = None) -> None:
        """Serve every request of the trace to its end."""
        self.env.process(self._arrivals(trace, on_progress or (lambda count: None)))
        self.env.run()

    def _add_engine(self, index: int) -> None:
        parts, env = self._parts, self.env
        recorder = Recorder(lambda: int(env.now), parts.allocator.max_num_reqs, on_finished=parts.on_finished)
        tiers: TierStore | None = None
        latency = parts.latency
        if parts.tiers:
            tiers = TierStore(parts.tiers, parts.allocator, parts.tier_bytes_per_block)
            latency = TieredLatency(latency, tiers)
        backend = SimBackend(latency, parts.drafts_of(index))
        view = ReplicaView(lambda: int(env.now), round(self.shape.event_delay_s * NANOSECONDS))
        stores = [] if tiers is None else [tiers]
        ledger = KVCacheAllocator(parts.allocator, sinks=[backend, recorder, view, *stores, *parts.sinks_of(index)])
        scheduler = Scheduler(parts.scheduler, ledger, tiers)
        # The copies of a macro-step's evictions would all be charged to the step after it.
        macro_steps = parts.macro_steps and not (tiers is not None and tiers.takes_time)
        engine_class = AsyncSchedulingEngine if parts.async_scheduling else SimulatedEngine
        engine = engine_class(env, scheduler, backend, recorder, macro_steps, lambda: self._next_arrival_ns)

        def ended(request: Request) -> None:
            if not request.num_output_tokens:  # refused; that a request finished is for the events to tell
                view.refused(request.request_id)

        engine.on_ended = ended
        self.views.append(view)
        self._engines.append(engine)
        replica, rank = divmod(index, self.shape.data_parallel_size)
        self.runs.append(ReplicaRun(replica, rank, scheduler, recorder, engine.rejections, tiers))

    def _arrivals(
        self, trace: Iterable[TraceRequest], on_progress: Callable[[int], None]
    ) -> Generator[simpy.Event, Any, None]:
        env, hash_block_size = self.env, self._parts.allocator.hash_block_size
        for ordinal, row in enumerate(trace):
            arrival_ns = round(row.arrival_s * NANOSECONDS)
            if arrival_ns > env.now:
                self._next_arrival_ns = arrival_ns
                yield env.timeout(arrival_ns - env.now)
            request = traced_request(row, ordinal, row.arrival_s, hash_block_size, self._trace_block_size)
            self._route(request, None if row.turn is None else row.turn.session)
            on_progress(ordinal + 1)
        self._next_arrival_ns = float("inf")

    def _route(self, request: Request, session: str | None) -> None:
        for view in self.views:
            view.arrive()
        keys = self._prompt_keys(request)
        routed = Routed(request=request, keys=keys, block_size=self._block_size, session=session)
        chosen = self.router.choose(routed, self.views)
        # A router that keeps its own books knows of what it sent before the replica has answered.
        self.views[chosen].sent(request)
        self._engines[chosen].submit(request)

    def _prompt_keys(self, request: Request) -> Sequence[Any]:
        """Keys of the complete prompt blocks that a hit could cover: at least one token is always computed."""
        if request.keys is None or not self._parts.allocator.enable_caching:
            return ()
        per_block = self._block_size // self._parts.allocator.hash_block_size
        num_blocks = (request.num_prompt_tokens - 1) // self._block_size
        keys = request.keys.keys(0, num_blocks * per_block)
        return keys if per_block == 1 else keys[per_block - 1 :: per_block]


def replay_fleet(
    trace: Iterable[TraceRequest],
    *,
    shape: FleetShape,
    parts: EngineParts,
    router: Router,
    trace_block_size: int | None,
    on_progress: Callable[[int], None] | None = None,
) -> ReplayReport:
    """Run every request of a trace through a router and the engines behind it, until each has ended.

    Requests come at their recorded times (an open loop). The figures are those of `replay`, over all engines;
    `report.replicas` holds each engine's own.

    Args:
        trace: rows in order of arrival; read once, never held.
        shape: how many engines.
        parts: what each is made of.
        router: chooses an engine for each request.
        trace_block_size: tokens an id of the trace stands for; None where it has none.
        on_progress: called with the number of requests routed so far.
    """
    fleet = Fleet(shape, parts, router, trace_block_size)
    started = time.perf_counter()
    fleet.run(trace, on_progress)
    wall_seconds = time.perf_counter() - started
    drafts = parts.drafts_of(0)
    assumptions = {
        "num_replicas": shape.num_replicas,
        "data_parallel_size": shape.data_parallel_size,
        **router.assumptions(),
        "event_delay_s": shape.event_delay_s,
        **_tier_assumptions(parts),
        "async_scheduling": parts.async_scheduling,
        "arrivals": OPEN_LOOP,
        **parts.latency.assumptions(),
        **(drafts.assumptions() if drafts is not None else {}),
    }
    return fleet_report(fleet.runs, assumptions, fleet.env.now / NANOSECONDS, wall_seconds)


def _tier_assumptions(parts: EngineParts) -> dict[str, Any]:
    if not parts.tiers:
        return {}
    return {
        "tiers": [
            f"{tier.name}: {tier.num_blocks:,} blocks, "
            + (
                "copies take no time"
                if tier.bytes_per_s == float("inf")
                else f"{tier.bytes_per_s / 1e9:g} GB/s each way"
            )
            for tier in parts.tiers
        ],
        "tier_bytes_per_block": parts.tier_bytes_per_block,
        "tier_copies": "a step waits for what it promotes and for the write-back of what it overwrites, side by side; "
        "copies between tiers delay nothing",
    }
