"""What happens to a trace on given hardware: the whole engine, replayed under a simulated clock."""

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import attrs
import simpy

from ...backends.sim_backend import SimBackend
from ...core.allocator.allocator import KVCacheAllocator
from ...core.allocator.config import AllocatorConfig
from ...core.errors import InputError
from ...core.scheduler.config import SchedulerConfig
from ...core.scheduler.scheduler import Scheduler
from ...core.types import Backend, DraftModel, EventSink, LatencyModel, Request
from ..traces.trace import Trace, TraceRequest
from .distributions import RELATIVE_ERROR, RunHistograms
from .engine import NANOSECONDS, AsyncSchedulingEngine, SimulatedEngine
from .listener import Broadcast, RunListener
from .metrics import Recorder, RequestRecord
from .session_arrivals import SessionArrivals
from .trace_keys import TraceKeySource
from .vllm_metrics import (
    Snapshot,
    preemption_figures,
    prefix_cache_figures,
    request_figures,
    take_snapshot,
    throughput_figures,
    timing_figures,
)

MAX_REJECTIONS_SHOWN = 5
OPEN_LOOP = "open loop: requests come at their recorded times, whatever the engine does"
CLOSED_LOOP = (
    "closed loop: a turn is sent its think time after the answer before it (where none is recorded: its recorded gap "
    "after the turn before, and not before the answer); a refused turn counts as answered"
)


@attrs.define
class ReplayReport:
    """The figures of one replay. `to_json` gives them under the names of the command line's `--json`."""

    requests: dict[str, int]
    prefix_cache: dict[str, Any]
    preemptions: dict[str, Any]
    kv_cache_usage: dict[str, float]
    latencies: dict[str, dict[str, Any]]
    throughput: dict[str, float]
    simulated_seconds: float
    steps: int
    assumptions: dict[str, Any]
    rejections: list[str]
    series: dict[str, list[float]]
    timing: dict[str, float]
    snapshot: Snapshot | None = None
    """The final state under the names of vLLM's metrics, where histograms were counted; not part of `to_json`."""
    engine_snapshots: list[Snapshot] = attrs.field(factory=list)
    """Of a fleet: that of each engine."""
    replicas: list[dict[str, Any]] = attrs.field(factory=list)
    """Of a fleet: the figures of each engine."""
    kv_transfer: dict[str, Any] | None = None
    """Of a fleet that prefills on some engines and decodes on others: what was copied between them, and how long."""

    def to_json(self) -> dict[str, Any]:
        """Plain values; all but `timing` is the same from run to run."""
        return {
            "requests": self.requests,
            "prefix_cache": self.prefix_cache,
            "preemptions": self.preemptions,
            "kv_cache_usage": self.kv_cache_usage,
            **self.latencies,
            "throughput": self.throughput,
            "simulated_seconds": self.simulated_seconds,
            "steps": self.steps,
            "assumptions": self.assumptions,
            "rejections": self.rejections,
            "series": self.series,
            **({"kv_transfer": self.kv_transfer} if self.kv_transfer is not None else {}),
            **({"replicas": self.replicas} if self.replicas else {}),
            "timing": self.timing,
        }


def traced_requests(
    trace: Iterable[TraceRequest], block_size: int, trace_block_size: Callable[[], int | None]
) -> Iterator[Request]:
    """Requests for the scheduler, one a row of the trace, in its order.

    `trace_block_size` is asked when the first row is there: a reader may learn it from the file.
    """
    for ordinal, row in enumerate(trace):
        yield traced_request(row, ordinal, row.arrival_s, block_size, trace_block_size())


def traced_request(
    row: TraceRequest, ordinal: int, arrival_s: float, block_size: int, trace_block_size: int | None
) -> Request:
    """The scheduler's request of one row; `ordinal` tells apart what rows share with nobody."""
    return Request(
        request_id=str(row.place),
        num_prompt_tokens=row.input_length,
        # A row without output still computes its prompt, which produces one token.
        max_tokens=max(row.output_length, 1),
        keys=TraceKeySource(row.hash_ids, row.input_length, ordinal, block_size, trace_block_size),
        priority=row.priority,
        arrival=arrival_s,
    )


def replay(
    trace: Iterable[TraceRequest],
    *,
    allocator: AllocatorConfig,
    scheduler: SchedulerConfig,
    latency: LatencyModel | None = None,
    backend: Backend | None = None,
    trace_block_size: int | None,
    sinks: Iterable[EventSink] = (),
    listeners: Iterable[RunListener] = (),
    on_finished: Callable[[RequestRecord], None] | None = None,
    on_progress: Callable[[int], None] | None = None,
    macro_steps: bool = True,
    drafts: DraftModel | None = None,
    async_scheduling: bool = False,
    closed_loop: bool | None = None,
) -> ReplayReport:
    """Run every request of a trace through allocator, scheduler and latency model, until each has ended.

    Args:
        trace: rows in order of arrival; read once, never held.
        allocator: pool, groups and limits; prefix keys are taken at `hash_block_size`.
        scheduler: batch limits and policies.
        latency: how long a step takes in simulated memory.
        backend: computes and times the steps in place of simulated memory; give it or a latency model.
        trace_block_size: tokens an id of the trace stands for; None where it has none (then nothing is shared).
        sinks: further listeners to every commit (a log, metrics).
        listeners: told of requests, commits and steps as the run goes on (a time series, a trace of the engine).
        on_finished: given the record of each request as it finishes; none is kept.
        on_progress: called with the number of requests submitted so far.
        drafts: how many drafts are accepted; needed with `num_speculative_tokens`.
        closed_loop: whether a session's next turn waits for the answer before it, or comes at its recorded time. None:
            closed where the trace says that it records think times (its `info`), else open.
        async_scheduling: whether each step is decided while the one before it runs.
        macro_steps: whether identical decode steps are taken in one go; the figures are the same either way.

    Raises:
        InputError: limits that contradict each other, a closed loop asked of a trace that links no turns, or not
            exactly one of a latency model and a backend.
    """
    if (latency is None) == (backend is None):
        raise InputError(
            "give replay a latency model for simulated memory, or a backend that times its steps, and not both"
        )
    if backend is not None and drafts is not None:
        raise InputError("a backend verifies its own drafts; a draft model works with a latency model only")
    closed_loop = decided_loop(trace, closed_loop)
    env = simpy.Environment()
    histograms = RunHistograms(allocator.max_model_len)
    recorder = Recorder(lambda: int(env.now), allocator.max_num_reqs, histograms, on_finished)
    watcher = Broadcast(lambda: int(env.now), recorder, tuple(listeners)) if listeners else recorder
    if backend is None:
        backend = SimBackend(latency, drafts)
    ledger = KVCacheAllocator(allocator, sinks=[backend, watcher, *sinks])
    batcher = Scheduler(scheduler, ledger)
    engine_class = AsyncSchedulingEngine if async_scheduling else SimulatedEngine
    engine = engine_class(env, batcher, backend, watcher, macro_steps)
    rows = _counted(trace, on_progress) if on_progress else trace
    block_size = allocator.hash_block_size
    started = time.perf_counter()
    arrivals: SessionArrivals | None = None
    if closed_loop:
        arrivals = SessionArrivals(
            env,
            engine,
            rows,
            lambda row, ordinal, now: traced_request(row, ordinal, now, block_size, trace_block_size),
            waits_for_unknown_answers=not isinstance(trace, Trace) or trace.info.records_think_times,
        )
        arrivals.start()
    else:
        env.process(engine.arrivals(traced_requests(rows, block_size, lambda: trace_block_size)))
    env.run()
    wall_seconds = time.perf_counter() - started
    ended_ns = env.now if arrivals is None else arrivals.last_ns
    assumptions = {
        "async_scheduling": async_scheduling,
        "arrivals": OPEN_LOOP if arrivals is None else CLOSED_LOOP,
        **({"turns_sent_late": arrivals.num_late} if arrivals is not None and arrivals.num_late else {}),
        **(latency.assumptions() if latency is not None else {"backend": type(backend).__name__}),
        **(drafts.assumptions() if drafts is not None else {}),
    }
    return replay_report(batcher, recorder, engine.rejections, assumptions, ended_ns / NANOSECONDS, wall_seconds)


def decided_loop(trace: Iterable[TraceRequest], closed_loop: bool | None) -> bool:
    """Whether to close the loop. Raises `InputError` where the trace says that none of its requests are turns."""
    if not isinstance(trace, Trace):
        return bool(closed_loop)
    if closed_loop and not trace.info.links_turns:
        raise InputError(
            f"--closed-loop has no effect on {trace.info.name}: it does not say which requests are turns of one "
            "session; leave it out"
        )
    return trace.info.records_think_times if closed_loop is None else closed_loop


def _counted(rows: Iterable[TraceRequest], on_progress: Callable[[int], None]) -> Iterator[TraceRequest]:
    for count, row in enumerate(rows, 1):
        yield row
        on_progress(count)


def replay_report(
    scheduler: Scheduler,
    recorder: Recorder,
    rejections: list[str],
    assumptions: dict[str, Any],
    simulated_seconds: float,
    wall_seconds: float,
) -> ReplayReport:
    """The figures of one engine after its run."""
    stats, config = scheduler.stats, scheduler.allocator.config
    span = simulated_seconds or 1.0
    return ReplayReport(
        requests=request_figures(stats),
        prefix_cache=prefix_cache_figures(stats),
        preemptions=preemption_figures(stats),
        kv_cache_usage={
            "mean": recorder.mean_held_blocks() / (config.num_blocks - 1),
            "max": recorder.max_held_blocks / (config.num_blocks - 1),
        },
        latencies={
            "ttft_s": recorder.ttft_ns.summary(NANOSECONDS),
            "tpot_s": recorder.tpot_ns.summary(NANOSECONDS),
            "itl_s": recorder.itl_ns.summary(NANOSECONDS),
            "e2e_s": recorder.e2e_ns.summary(NANOSECONDS),
        },
        throughput=throughput_figures(stats, recorder.num_output_tokens, span),
        simulated_seconds=simulated_seconds,
        steps=recorder.num_steps,
        assumptions={
            "num_blocks": config.num_blocks,
            "usable_blocks": config.num_blocks - 1,
            "groups": [str(kind) for kind in config.groups],
            "max_model_len": config.max_model_len,
            "enable_prefix_caching": config.enable_caching,
            "eviction": config.eviction,
            **attrs.asdict(scheduler.config),
            **assumptions,
            "percentiles": f"nearest rank, from a sketch with {RELATIVE_ERROR * 100:g} % relative error",
            "ttft": "from arrival, queueing included; model time only, no HTTP server",
        },
        rejections=rejections[:MAX_REJECTIONS_SHOWN],
        series=recorder.series.columns(),
        snapshot=take_snapshot(scheduler, recorder) if recorder.histograms is not None else None,
        timing=timing_figures(wall_seconds, recorder.num_steps),
    )
