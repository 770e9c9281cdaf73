"""Several engines under one clock, each with its own ledger, a router in front of them, and their figures."""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence

import attrs
import simpy

from ...backends.sim_backend import SimBackend
from ...core.allocator.allocator import KVCacheAllocator
from ...core.allocator.config import AllocatorConfig
from ...core.events import Key
from ...core.scheduler.config import SchedulerConfig, SchedulerStats
from ...core.scheduler.scheduler import Scheduler
from ...core.types import DraftModel, EventSink, LatencyModel, RemoteTokens, Request
from ..engine.arrivals import TraceArrivals
from ..engine.distributions import LatencySketches, RunHistograms
from ..engine.engine import NANOSECONDS, AsyncSchedulingEngine, RunListener, SimulatedEngine
from ..engine.metrics import Recorder, RequestRecord
from ..engine.replay import ReplayReport, counted_figures, replay_report, request_figures, share, timing_figures
from ..engine.vllm_metrics import take_snapshot
from ..figures import at_least_one, not_negative
from ..traces.trace import TraceRequest
from .routing import ReplicaView, Routed, Router
from .tiers import Tier, TieredLatency, TierSink, TierStore

MAX_SERIES_POINTS = 1024


@attrs.frozen
class EngineName:
    """Identifies one engine of a fleet."""

    replica: int  # the server, from 0 in its pool
    data_parallel_rank: int = 0  # the rank within the server
    pool: str = ""  # "prefill" or "decode" in a disaggregated fleet, else empty

    def __str__(self) -> str:
        """`prefill 1.3`; the rank is shown only if it is not the first."""
        number = f"{self.replica}.{self.data_parallel_rank}" if self.data_parallel_rank else f"{self.replica}"
        return f"{self.pool} {number}" if self.pool else number

    def labels(self) -> dict[str, str]:
        """The labels of a Prometheus server that scrapes all servers: the rank is vLLM's label `engine`."""
        return {"engine": str(self.data_parallel_rank), "instance": f"{self.pool or 'replica'}-{self.replica}"}


def engine_names(num_replicas: int, data_parallel_size: int, pool: str = "") -> list[EngineName]:
    """The names of every rank of every server, in order."""
    ranks = range(data_parallel_size)
    return [EngineName(replica, rank, pool) for replica in range(num_replicas) for rank in ranks]


@attrs.frozen(kw_only=True)
class EngineParts:
    """The parts that every engine of a fleet is built from; functions named `..._of` take the index of an engine."""

    allocator: AllocatorConfig
    scheduler: SchedulerConfig
    latency: LatencyModel
    drafts_of: Callable[[int], DraftModel | None] = lambda index: None
    sinks_of: Callable[[int], Iterable[EventSink]] = lambda index: ()
    tier_sinks_of: Callable[[int], Iterable[TierSink]] = lambda index: ()
    listeners_of: Callable[[int], Iterable[RunListener]] = lambda index: ()
    on_finished: Callable[[RequestRecord], None] | None = None  # gets each finished request of any engine
    on_finished_on: Callable[[int, RequestRecord], None] | None = None  # the same, with the engine's index first
    async_scheduling: bool = False
    http_s: float = 0.0  # between a client and an engine, per request
    macro_steps: bool = True
    histograms: bool = False  # whether each engine counts the histograms of vLLM's metrics
    tiers: tuple[Tier, ...] = ()  # behind every pool; each engine has its own
    tier_bytes_per_block: float | None = None  # bytes that the copy of one block moves

    def finished_on(self, index: int) -> Callable[[RequestRecord], None] | None:
        """The callback for each finished request of an engine, or None."""
        on_finished, on_finished_on = self.on_finished, self.on_finished_on
        if on_finished_on is None:
            return on_finished

        def call_both(record: RequestRecord) -> None:
            if on_finished is not None:
                on_finished(record)
            on_finished_on(index, record)

        return call_both

    def assumptions(self) -> dict[str, object]:
        """The assumptions that every engine shares, without those of the latency model."""
        drafts = self.drafts_of(0)
        tiers = {
            "tiers": [str(tier) for tier in self.tiers],
            "tier_bytes_per_block": self.tier_bytes_per_block,
            "tier_copies": "a step waits for what it promotes and for the write-back of what it overwrites, side by "
            "side; copies between tiers delay nothing",
        }
        return {
            **(tiers if self.tiers else {}),
            "async_scheduling": self.async_scheduling,
            "http_ms": self.http_s * 1e3,
            **(drafts.assumptions() if drafts is not None else {}),
        }


@attrs.frozen(eq=False)
class FleetEngine:
    """One engine of a fleet and its parts."""

    name: EngineName
    engine: SimulatedEngine
    scheduler: Scheduler
    recorder: Recorder
    view: ReplicaView
    tiers: TierStore | None


def start_engine(
    env: simpy.Environment,
    parts: EngineParts,
    index: int,
    name: EngineName,
    *,
    event_delay_s: float,
    next_reached_ns: Callable[[], float],
    on_ended: Callable[[Request], None],
    remote: RemoteTokens | None = None,
    keeps_blocks_of: Callable[[Request], bool] | None = None,
    make_recorder: Callable[..., Recorder] = Recorder,
) -> FleetEngine:
    """Build an engine and start its process.

    `index` is its number among all engines. The router knows of its commits `event_delay_s` later. `next_reached_ns`
    returns the earliest time at which a request may reach it or its router may read its state, and `on_ended` is called
    for each request that finished on it or that it refused. `remote` says where a decode engine's tokens come from, and
    `keeps_blocks_of` whether a prefill engine keeps the blocks of a finished request until they are read.
    `make_recorder` takes the arguments of `Recorder`.
    """

    def now_ns() -> int:
        return int(env.now)

    allocator = parts.allocator
    histograms = RunHistograms(allocator.max_model_len) if parts.histograms else None
    on_finished, listeners = parts.finished_on(index), parts.listeners_of(index)
    http_ns = round(parts.http_s * NANOSECONDS)
    recorder = make_recorder(now_ns, allocator.max_num_reqs, histograms, on_finished, listeners, http_ns)
    tiers: TierStore | None = None
    if parts.tiers:
        tiers = TierStore(parts.tiers, allocator, parts.tier_bytes_per_block, parts.tier_sinks_of(index))
    latency = parts.latency if tiers is None else TieredLatency(parts.latency, tiers)
    backend = SimBackend(latency, parts.drafts_of(index))
    view = ReplicaView(now_ns, round(event_delay_s * NANOSECONDS))
    stores = [] if tiers is None else [tiers]
    ledger = KVCacheAllocator(allocator, sinks=[backend, recorder, view, *stores, *parts.sinks_of(index)])
    scheduler = Scheduler(parts.scheduler, ledger, tiers, remote, keeps_blocks_of)
    # The copies of a macro-step's evictions would all be charged to the step after it.
    macro_steps = parts.macro_steps and not (tiers is not None and tiers.takes_time)
    engine_class = AsyncSchedulingEngine if parts.async_scheduling else SimulatedEngine
    engine = engine_class(env, scheduler, backend, recorder, macro_steps, next_reached_ns)

    def ended(request: Request) -> None:
        if not request.num_output_tokens:  # refused; the view learns of finished requests from events
            view.refused(request.request_id)
        on_ended(request)

    engine.on_ended = ended
    return FleetEngine(name, engine, scheduler, recorder, view, tiers)


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
        self.arrivals = TraceArrivals(
            self.env,
            self._route,
            parts.allocator.hash_block_size,
            trace_block_size,
            looks_ahead=parts.allocator.num_lookahead_tokens > 0,
            http_ns=round(parts.http_s * NANOSECONDS),
        )
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


def fleet_report(
    engines: Sequence[FleetEngine],
    assumptions: dict[str, object],
    simulated_seconds: float,
    wall_seconds: float,
    stats: SchedulerStats | None = None,
) -> ReplayReport:
    """Sums, merged distributions and means over engines; `replicas` holds the figures of each engine.

    Occupancy is the mean over engines and time, and the maximum of any engine; running and waiting requests over time
    are summed. `stats` replaces the sum of the engines' counters, for requests that two engines served.
    """
    first, recorders = engines[0], [engine.recorder for engine in engines]
    rejections = [reason for engine in engines for reason in engine.engine.rejections]
    report = replay_report(first.scheduler, first.recorder, rejections, assumptions, simulated_seconds, wall_seconds)
    stats = stats or summed_stats([engine.scheduler.stats for engine in engines])
    usable_blocks = first.scheduler.allocator.config.num_blocks - 1
    num_steps = sum(recorder.num_steps for recorder in recorders)
    span = simulated_seconds or 1.0
    held_block_ns = sum(recorder.held_block_ns for recorder in recorders)
    latencies = LatencySketches()
    for recorder in recorders:
        latencies.merge(recorder.latencies)
    counted = counted_figures(stats, sum(recorder.num_output_tokens for recorder in recorders), span)
    if first.tiers is not None:
        found = stats.prefix_hits_tokens + stats.external_hits_tokens
        with_tiers = share(found, stats.prefix_queries_tokens)
        counted["prefix_cache"].update(external_hits_tokens=stats.external_hits_tokens, hit_rate_with_tiers=with_tiers)
    snapshots = [take_snapshot(engine.scheduler, engine.recorder) for engine in engines if engine.recorder.histograms]
    return attrs.evolve(
        report,
        **counted,
        kv_cache_usage={
            "mean": held_block_ns / (span * NANOSECONDS * usable_blocks * len(engines)),
            "max": max(recorder.max_held_blocks for recorder in recorders) / usable_blocks,
        },
        latencies=latencies.summaries(),
        steps=num_steps,
        series=_series(engines),
        snapshot=None,
        engine_snapshots=snapshots,
        replicas=[_engine_figures(engine, simulated_seconds) for engine in engines],
        timing=timing_figures(wall_seconds, num_steps),
    )


def _engine_figures(engine: FleetEngine, simulated_seconds: float) -> dict[str, object]:
    """The figures of one engine that differ between engines."""
    stats, recorder, name = engine.scheduler.stats, engine.recorder, engine.name
    usable_blocks = engine.scheduler.allocator.config.num_blocks - 1
    span_ns = (simulated_seconds or 1.0) * NANOSECONDS
    latencies = recorder.latencies
    return {
        **({"pool": name.pool} if name.pool else {}),
        "replica": name.replica,
        "data_parallel_rank": name.data_parallel_rank,
        "requests": request_figures(stats),
        "prefix_cache_hit_rate": share(stats.prefix_hits_tokens, stats.prefix_queries_tokens),
        "queries_tokens": stats.prefix_queries_tokens,
        "hits_tokens": stats.prefix_hits_tokens,
        "preemptions": stats.num_preemptions,
        "kv_cache_usage": {
            "mean": recorder.held_block_ns / (span_ns * usable_blocks),
            "max": recorder.max_held_blocks / usable_blocks,
        },
        "busy_share": recorder.busy_ns / span_ns,
        "output_tokens": recorder.num_output_tokens,
        "steps": recorder.num_steps,
        "ttft_s": latencies.ttft_ns.summary(NANOSECONDS),
        "tpot_s": latencies.tpot_ns.summary(NANOSECONDS),
        **({} if engine.tiers is None else {"tiers": engine.tiers.figures()}),
    }


def summed_stats(parts: Sequence[SchedulerStats]) -> SchedulerStats:
    """Sum the counters of several engines; the most preemptions of one request are a maximum."""
    total = {field.name: sum(getattr(stats, field.name) for stats in parts) for field in attrs.fields(SchedulerStats)}
    total["max_preemptions_per_request"] = max(stats.max_preemptions_per_request for stats in parts)
    return SchedulerStats(**total)


def _series(engines: Sequence[FleetEngine]) -> dict[str, list[float]]:
    """Mean usage, and sums of running and waiting requests, at up to 1,024 of the times that engines sampled."""
    columns = [engine.recorder.series.columns() for engine in engines]
    names = [name for name in columns[0] if name != "time_s"]
    times = sorted({time for engine in columns for time in engine["time_s"]})
    stride = -(-len(times) // MAX_SERIES_POINTS) or 1
    times = times[::stride]
    out: dict[str, list[float]] = {"time_s": times}
    for name in names:
        sums = [sum(_at(engine["time_s"], engine[name], time) for engine in columns) for time in times]
        out[name] = [value / len(engines) for value in sums] if name == "kv_cache_usage" else sums
    return out


def _at(times: Sequence[float], values: Sequence[float], time: float) -> float:
    """The value of a step function at a time; 0 before its first sample."""
    place = bisect_right(times, time)
    return values[place - 1] if place else 0.0
