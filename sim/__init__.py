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

# Module -> the names that are imported from it when they are first used.
_ON_FIRST_USE = {
    "baselines.baselines": ("compare_allocators",),
    "cache.capacity_curve": ("CapacityCurve", "capacity_curve"),
    "engine.replay": ("ReplayReport", "replay"),
    "engine.sampling": ("BeamSearch", "DraftAcceptance", "DraftTree", "ParallelSampling", "run_sampling"),
    "latency.linear": ("LinearLatency", "SwapLatency"),
    "latency.roofline": ("RooflineLatency",),
    "latency.table": ("TableLatency",),
    "scenario.compare": ("CompareOptions", "CompareResult", "compare_scenario"),
    "scenario.curve": ("CurveResult",),
    "scenario.fleet": ("FleetOptions",),
    "scenario.plan": ("PlanOptions", "PlanResult"),
    "scenario.replay": ("ReplayResult",),
    "scenario.results": ("Table",),
    "scenario.scenario": ("Scenario",),
    "search.ab": ("AbQuestion", "ab_document"),
    "search.optimum": ("Worth", "optimum_worth"),
    "search.size_question": ("SizeOptions",),
    "search.size_search": ("SizeStudy",),
    "search.sweep": ("Sweep", "SweepQuestion"),
    "study.study": ("Study",),
    "traces": ("TraceRequest", "Turn", "open_trace"),
    "traces.derived": ("ReblockedTrace",),
    "workloads.builtin": ("open_workload",),
    "workloads.fitted": ("fit_workload",),
    "workloads.mix": ("MixPart", "mix_workloads"),
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
    module = next((module for module, names in _ON_FIRST_USE.items() if name in names), None)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{module}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
