"""Clocks, traces, latency models and studies on top of kvledger.core. Needs the `sim` extra.

    from kvledger.sim import Scenario

    scenario = Scenario(model="llama-3.1-8b", gpu="H100", tensor_parallel_size=4, block_size=64)
    scenario.plan()
    scenario.curve("trace.jsonl").to_frame()
    scenario.replay("trace.jsonl").requests.to_frame()

Names are imported on first use, so that the command line starts quickly.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .baselines.baselines import compare_allocators
    from .cache.capacity_curve import CapacityCurve, capacity_curve
    from .engine.replay import ReplayReport, replay
    from .engine.sampling import BeamSearch, DraftAcceptance, DraftTree, ParallelSampling, run_sampling
    from .latency.linear import LinearLatency, SwapLatency
    from .latency.roofline import RooflineLatency
    from .latency.table import TableLatency
    from .scenario.compare import CompareOptions, CompareResult, compare_scenario
    from .scenario.curve import CurveResult
    from .scenario.fleet import FleetOptions
    from .scenario.plan import PlanOptions, PlanResult
    from .scenario.replay import ReplayResult
    from .scenario.results import Table
    from .scenario.scenario import Scenario
    from .search.ab import AbQuestion, ab_document
    from .search.optimum import Worth, optimum_worth
    from .search.size_question import SizeOptions
    from .search.size_search import SizeStudy
    from .search.sweep import Sweep, SweepQuestion
    from .study.study import Study
    from .traces import TraceRequest, Turn, open_trace
    from .traces.derived import ReblockedTrace
    from .workloads.builtin import open_workload
    from .workloads.fitted import fit_workload
    from .workloads.mix import MixPart, mix_workloads

# Name -> the module that it is imported from when it is first used.
_ON_FIRST_USE = {
    "AbQuestion": "search.ab",
    "BeamSearch": "engine.sampling",
    "CapacityCurve": "cache.capacity_curve",
    "CompareOptions": "scenario.compare",
    "CompareResult": "scenario.compare",
    "CurveResult": "scenario.curve",
    "DraftAcceptance": "engine.sampling",
    "DraftTree": "engine.sampling",
    "FleetOptions": "scenario.fleet",
    "LinearLatency": "latency.linear",
    "MixPart": "workloads.mix",
    "ParallelSampling": "engine.sampling",
    "PlanOptions": "scenario.plan",
    "PlanResult": "scenario.plan",
    "ReblockedTrace": "traces.derived",
    "ReplayReport": "engine.replay",
    "ReplayResult": "scenario.replay",
    "RooflineLatency": "latency.roofline",
    "Scenario": "scenario.scenario",
    "SizeOptions": "search.size_question",
    "SizeStudy": "search.size_search",
    "Study": "study.study",
    "SwapLatency": "latency.linear",
    "Sweep": "search.sweep",
    "SweepQuestion": "search.sweep",
    "Table": "scenario.results",
    "TableLatency": "latency.table",
    "TraceRequest": "traces",
    "Turn": "traces",
    "Worth": "search.optimum",
    "ab_document": "search.ab",
    "capacity_curve": "cache.capacity_curve",
    "compare_allocators": "baselines.baselines",
    "compare_scenario": "scenario.compare",
    "fit_workload": "workloads.fitted",
    "mix_workloads": "workloads.mix",
    "open_trace": "traces",
    "open_workload": "workloads.builtin",
    "optimum_worth": "search.optimum",
    "replay": "engine.replay",
    "run_sampling": "engine.sampling",
}

__all__ = [
    "AbQuestion",
    "BeamSearch",
    "CapacityCurve",
    "CompareOptions",
    "CompareResult",
    "CurveResult",
    "DraftAcceptance",
    "DraftTree",
    "FleetOptions",
    "LinearLatency",
    "MixPart",
    "ParallelSampling",
    "PlanOptions",
    "PlanResult",
    "ReblockedTrace",
    "ReplayReport",
    "ReplayResult",
    "RooflineLatency",
    "Scenario",
    "SizeOptions",
    "SizeStudy",
    "Study",
    "SwapLatency",
    "Sweep",
    "SweepQuestion",
    "Table",
    "TableLatency",
    "TraceRequest",
    "Turn",
    "Worth",
    "ab_document",
    "capacity_curve",
    "compare_allocators",
    "compare_scenario",
    "fit_workload",
    "mix_workloads",
    "open_trace",
    "open_workload",
    "optimum_worth",
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


def __dir__() -> list[str]:
    return __all__
