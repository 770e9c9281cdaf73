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
    from .baselines import compare_allocators
    from .capacity_curve import CapacityCurve, capacity_curve
    from .draft_acceptance import DraftAcceptance
    from .latency import LinearLatency
    from .latency_table import TableLatency
    from .reblocking import ReblockedTrace
    from .replay import ReplayReport, replay
    from .roofline import RooflineLatency
    from .sampling import BeamSearch, DraftTree, ParallelSampling
    from .sampling_run import run_sampling
    from .swap_latency import SwapLatency
    from .traces import TraceRequest, Turn, open_trace
    from .workload import open_workload
    from .workload_fitting import fit_workload
    from .workload_mix import MixPart, mix_workloads

# Name -> the module that it is imported from when it is first asked for.
_ON_FIRST_USE = {
    "BeamSearch": "sampling",
    "CapacityCurve": "capacity_curve",
    "DraftAcceptance": "draft_acceptance",
    "DraftTree": "sampling",
    "LinearLatency": "latency",
    "MixPart": "workload_mix",
    "ParallelSampling": "sampling",
    "ReblockedTrace": "reblocking",
    "ReplayReport": "replay",
    "RooflineLatency": "roofline",
    "SwapLatency": "swap_latency",
    "TableLatency": "latency_table",
    "TraceRequest": "traces",
    "Turn": "traces",
    "capacity_curve": "capacity_curve",
    "compare_allocators": "baselines",
    "fit_workload": "workload_fitting",
    "mix_workloads": "workload_mix",
    "open_trace": "traces",
    "open_workload": "workload",
    "replay": "replay",
    "run_sampling": "sampling_run",
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
