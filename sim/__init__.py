"""Clocks, traces, latency models and studies on top of kvledger.core. Needs the `sim` extra.

    from kvledger.core import AllocatorConfig, FullAttention, SchedulerConfig
    from kvledger.sim import LinearLatency, open_workload, replay

    trace = open_workload("conversation", limit=200)
    report = replay(
        trace,
        allocator=AllocatorConfig(num_blocks=5859, groups=[FullAttention(512)], max_model_len=1 << 20),
        scheduler=SchedulerConfig(),
        latency=LinearLatency(),
        trace_block_size=trace.info.trace_block_size,
    )
    print(report.prefix_cache["hit_rate"], report.latencies["ttft_s"]["p99"])

Names are imported on first use, so that the command line starts quickly.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .baselines.baselines import compare_allocators
    from .cache.capacity_curve import CapacityCurve, capacity_curve
    from .engine.drafts import DraftAcceptance
    from .engine.replay import ReplayReport, replay
    from .engine.sampling import BeamSearch, DraftTree, ParallelSampling, run_sampling
    from .latency.linear import LinearLatency, SwapLatency
    from .latency.roofline import RooflineLatency
    from .latency.table import TableLatency
    from .traces import TraceRequest, Turn, open_trace
    from .traces.reblocking import ReblockedTrace
    from .workloads.builtin import open_workload
    from .workloads.fitting import fit_workload
    from .workloads.mix import MixPart, mix_workloads

# Name -> the module that it is imported from when it is first asked for.
_ON_FIRST_USE = {
    "BeamSearch": "engine.sampling",
    "CapacityCurve": "cache.capacity_curve",
    "DraftAcceptance": "engine.drafts",
    "DraftTree": "engine.sampling",
    "LinearLatency": "latency.linear",
    "MixPart": "workloads.mix",
    "ParallelSampling": "engine.sampling",
    "ReblockedTrace": "traces.reblocking",
    "ReplayReport": "engine.replay",
    "RooflineLatency": "latency.roofline",
    "SwapLatency": "latency.linear",
    "TableLatency": "latency.table",
    "TraceRequest": "traces",
    "Turn": "traces",
    "capacity_curve": "cache.capacity_curve",
    "compare_allocators": "baselines.baselines",
    "fit_workload": "workloads.fitting",
    "mix_workloads": "workloads.mix",
    "open_trace": "traces",
    "open_workload": "workloads.builtin",
    "replay": "engine.replay",
    "run_sampling": "engine.sampling",
}

__all__ = [
    "BeamSearch",
    "CapacityCurve",
    "DraftAcceptance",
    "DraftTree",
    "LinearLatency",
    "MixPart",
    "ParallelSampling",
    "ReblockedTrace",
    "ReplayReport",
    "RooflineLatency",
    "SwapLatency",
    "TableLatency",
    "TraceRequest",
    "Turn",
    "capacity_curve",
    "compare_allocators",
    "fit_workload",
    "mix_workloads",
    "open_trace",
    "open_workload",
    "replay",
    "run_sampling",
]


def __getattr__(name: str) -> Any:
    module = _ON_FIRST_USE.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{module}", __name__), name)
    globals()[name] = value
    return value
