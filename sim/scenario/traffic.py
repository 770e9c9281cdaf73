"""The requests of a scenario: a trace file, a recorded run, a built-in or fitted workload, or a benchmark's lengths."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ...core.errors import InputError
from ..traces import Trace, TraceInfo, TraceRequest, open_trace
from ..traces.logged import open_logged_trace, the_event_log
from .scenario import Scenario

# How the rows of a file are read: fields of a scenario that have no effect on a built-in workload.
OF_FILES = ("trace_format", "timestamp_unit", "trace_block_size", "tokenizer", "request_rate")
# Fields that describe a benchmark without a trace, beside its `request_rate`.
BENCHMARK = ("input_len", "output_len", "max_concurrency", "range_ratio", "num_prompts", "prefix_len")


def open_traffic(scenario: Scenario, seed: int | None = None) -> Trace:
    """Open exactly one of trace, workload by name, fitted workload, and benchmark; `seed` replaces the scenario's.

    Raises InputError: none or several are given, an option has no effect on the one that is, or a file cannot be read.
    """
    benchmark = _given(scenario, BENCHMARK)
    sources = (scenario.trace or None, scenario.workload, scenario.fit, benchmark or None)
    given = [source for source in sources if source is not None]
    if len(given) != 1:
        raise InputError(
            "give a trace file, --workload NAME, --fit FILE, or --input-len and --output-len"
            + (", not more than one of them" if given else "; for example --workload conversation")
        )
    seed = scenario.seed if seed is None else seed
    window: dict[str, Any] = {name: getattr(scenario, name) for name in ("skip_first", "limit", "rate_scale")}
    if benchmark:
        return _open_benchmark(scenario, benchmark, seed=seed or 0, **window)
    of_files: dict[str, Any] = {_argument(name): getattr(scenario, name) for name in OF_FILES}
    if scenario.trace:
        return _open_files(scenario, seed, of_files, window)
    if scenario.fit is not None:
        from ..workloads.fitted import open_fitted

        of_files["on_bad_row"] = scenario.on_bad_row or "refuse"
        if scenario.request_rate is not None:
            of_files["seed"] = seed
        return open_fitted(open_trace(scenario.fit, **of_files), seed=seed or 0, **window)
    _refuse(scenario, (*OF_FILES, "on_bad_row"), "a built-in workload")
    from ..workloads.builtin import open_workload
    from ..workloads.mix import is_mix, open_mix

    name = str(scenario.workload)
    return (open_mix if is_mix(name) else open_workload)(name, seed=seed or 0, **window)


class ObservedTrace:
    """A trace that calls `on_request` with the place and the request, from 0 on, before each request is taken."""

    def __init__(self, trace: Trace, on_request: Callable[[int, TraceRequest], None]) -> None:
        self._trace = trace
        self._on_request = on_request

    @property
    def info(self) -> TraceInfo:
        """The trace's own."""
        return self._trace.info

    def __iter__(self) -> Iterator[TraceRequest]:
        for place, request in enumerate(self._trace):
            self._on_request(place, request)
            yield request


def counted(trace: Trace, on_count: Callable[[int], None]) -> ObservedTrace:
    """A trace that reports how many requests were read, every thousandth time."""
    return ObservedTrace(trace, lambda place, _: None if place % 1_000 else on_count(place))


def _open_files(scenario: Scenario, seed: int | None, of_files: dict[str, Any], window: dict[str, Any]) -> Trace:
    if (log := the_event_log(scenario.trace)) is not None:
        changed = {name: value for name, value in window.items() if value not in (0, 1.0)}
        return open_logged_trace(log, on_bad_row=scenario.on_bad_row, **of_files, **changed)
    # Drafts are drawn with the seed, whatever the trace; without them a seed has to have an effect on the trace.
    has_other_use = scenario.draft_acceptance_rate is not None and scenario.request_rate is None
    return open_trace(
        scenario.trace,
        seed=None if has_other_use else seed,
        on_bad_row=scenario.on_bad_row or "refuse",
        **of_files,
        **window,
    )


def _open_benchmark(scenario: Scenario, given: dict[str, Any], **window: Any) -> Trace:
    from ..workloads.benchmark import BenchmarkParameters, open_benchmark

    for name in ("input_len", "output_len"):
        if name not in given:
            there = next(iter(given))
            raise InputError(f"--{there.replace('_', '-')} {given[there]} needs --{name.replace('_', '-')} too")
    of_files = (name for name in OF_FILES if name != "request_rate")
    _refuse(scenario, (*of_files, "on_bad_row", "closed_loop"), "a benchmark with --input-len")
    return open_benchmark(BenchmarkParameters(**given, **_given(scenario, ("request_rate",))), **window)


def _given(scenario: Scenario, names: Iterable[str]) -> dict[str, Any]:
    return {name: value for name in names if (value := getattr(scenario, name)) is not None}


def _refuse(scenario: Scenario, names: Iterable[str], traffic: str) -> None:
    for name, value in _given(scenario, names).items():
        option = _argument(name).replace("_", "-")
        shown = f"--{option} {value}" if not isinstance(value, bool) else "--closed-loop" if value else "--open-loop"
        raise InputError(f"{shown} has no effect on {traffic}; leave it out")


def _argument(name: str) -> str:
    """The name that `open_trace` has for a field."""
    return "format" if name == "trace_format" else name
