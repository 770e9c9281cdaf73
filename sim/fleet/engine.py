"""One engine of a fleet: ledger, scheduler, clock, and what the router knows of it."""

from collections.abc import Callable, Iterable

import attrs
import simpy

from ...backends.sim_backend import SimBackend
from ...core.allocator.allocator import KVCacheAllocator
from ...core.allocator.config import AllocatorConfig
from ...core.scheduler.config import SchedulerConfig
from ...core.scheduler.scheduler import Scheduler
from ...core.types import DraftModel, EventSink, LatencyModel, RemoteTokens, Request
from ..engine.distributions import RunHistograms
from ..engine.engine import NANOSECONDS, AsyncSchedulingEngine, SimulatedEngine
from ..engine.listener import Broadcast, RunListener
from ..engine.metrics import Recorder, RequestRecord
from .report import ReplicaRun
from .routing import ReplicaView
from .tiers import Tier, TieredLatency, TierSink, TierStore


@attrs.frozen(kw_only=True)
class EngineParts:
    """What every engine of the fleet is made of.

    What ends in `_of` is asked with the engine's index. `on_finished` is given the record of each request of any engine
    as it finishes, `on_finished_on` the engine's index too. `tiers` stand behind every pool, each engine with its own;
    `tier_bytes_per_block` is what a block's copy moves. With `histograms` each engine counts those of vLLM's metrics.
    """

    allocator: AllocatorConfig
    scheduler: SchedulerConfig
    latency: LatencyModel
    drafts_of: Callable[[int], DraftModel | None] = lambda index: None
    sinks_of: Callable[[int], Iterable[EventSink]] = lambda index: ()
    tier_sinks_of: Callable[[int], Iterable[TierSink]] = lambda index: ()
    listeners_of: Callable[[int], Iterable[RunListener]] = lambda index: ()
    on_finished: Callable[[RequestRecord], None] | None = None
    on_finished_on: Callable[[int, RequestRecord], None] | None = None
    async_scheduling: bool = False
    macro_steps: bool = True
    histograms: bool = False
    tiers: tuple[Tier, ...] = ()
    tier_bytes_per_block: float | None = None

    def finished_on(self, index: int) -> Callable[[RequestRecord], None] | None:
        """Whom an engine tells of each request that finishes; None: nobody wants to know."""
        everywhere, there = self.on_finished, self.on_finished_on
        if there is None:
            return everywhere

        def tell(record: RequestRecord) -> None:
            if everywhere is not None:
                everywhere(record)
            there(index, record)

        return tell


@attrs.frozen(kw_only=True)
class EngineRole:
    """What sets an engine apart from the others of its fleet.

    Attributes:
        index: among all engines.
        replica: the server it belongs to.
        data_parallel_rank: which of the server's ranks it is.
        pool: "prefill" or "decode" in a disaggregated fleet, else empty.
        remote: where a decode engine's tokens come from.
        keeps_blocks_of: whether a prefill engine's finished request waits for its blocks to be read.
        make_recorder: who measures it; None: a `Recorder`.
    """

    index: int
    replica: int
    data_parallel_rank: int
    pool: str = ""
    remote: RemoteTokens | None = None
    keeps_blocks_of: Callable[[Request], bool] | None = None
    make_recorder: Callable[[Callable[[], int], int, RunHistograms | None], Recorder] | None = None


@attrs.frozen(eq=False)
class FleetEngine:
    """One engine, and its parts that others ask."""

    engine: SimulatedEngine
    scheduler: Scheduler
    recorder: Recorder
    view: ReplicaView
    run: ReplicaRun


def start_engine(
    env: simpy.Environment,
    parts: EngineParts,
    role: EngineRole,
    *,
    event_delay_s: float,
    next_reached_ns: Callable[[], float],
    on_ended: Callable[[Request], None],
) -> FleetEngine:
    """Build an engine and start its process.

    Args:
        env: the fleet's clock.
        parts: what it is made of.
        role: what it does.
        event_delay_s: from its commits to the router's knowing of them.
        next_reached_ns: when something may next be handed to it, or asked of its router.
        on_ended: told of each request that finished on it or that it refused.
    """

    def now_ns() -> int:
        return int(env.now)

    allocator = parts.allocator
    histograms = RunHistograms(allocator.max_model_len) if parts.histograms else None
    if role.make_recorder is None:
        recorder = Recorder(now_ns, allocator.max_num_reqs, histograms, parts.finished_on(role.index))
    else:
        recorder = role.make_recorder(now_ns, allocator.max_num_reqs, histograms)
    listeners = tuple(parts.listeners_of(role.index))
    watcher = Broadcast(now_ns, recorder, listeners) if listeners else recorder
    tiers: TierStore | None = None
    if parts.tiers:
        tiers = TierStore(parts.tiers, allocator, parts.tier_bytes_per_block, parts.tier_sinks_of(role.index))
    latency = parts.latency if tiers is None else TieredLatency(parts.latency, tiers)
    backend = SimBackend(latency, parts.drafts_of(role.index))
    view = ReplicaView(now_ns, round(event_delay_s * NANOSECONDS))
    stores = [] if tiers is None else [tiers]
    ledger = KVCacheAllocator(allocator, sinks=[backend, watcher, view, *stores, *parts.sinks_of(role.index)])
    scheduler = Scheduler(parts.scheduler, ledger, tiers, role.remote, role.keeps_blocks_of)
    # The copies of a macro-step's evictions would all be charged to the step after it.
    macro_steps = parts.macro_steps and not (tiers is not None and tiers.takes_time)
    engine_class = AsyncSchedulingEngine if parts.async_scheduling else SimulatedEngine
    engine = engine_class(env, scheduler, backend, watcher, macro_steps, next_reached_ns)

    def ended(request: Request) -> None:
        if not request.num_output_tokens:  # refused; that a request finished is for the events to tell
            view.refused(request.request_id)
        on_ended(request)

    engine.on_ended = ended
    run = ReplicaRun(
        role.replica, role.data_parallel_rank, scheduler, recorder, engine.rejections, tiers, pool=role.pool
    )
    return FleetEngine(engine, scheduler, recorder, view, run)
