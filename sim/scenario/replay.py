"""Replay a scenario: what happens to its traffic on one engine."""

from collections.abc import Callable, Iterable
from typing import Any

import attrs

from ...core.errors import DoesNotFitError
from ..engine.engine import RunListener
from ..engine.metrics import RequestRecord
from ..engine.replay import ReplayReport, replay
from ..engine.vllm_metrics import HistogramCounts, Snapshot
from ..figures import Document, seconds
from ..traces import Trace
from ..traces.derived import SampledTrace
from .engine import Engine, engine_of
from .results import Table, trace_as_dict
from .scenario import Scenario
from .traffic import open_traffic

HISTOGRAMS = {
    "ttft_s": "vllm:time_to_first_token_seconds",
    "itl_s": "vllm:inter_token_latency_seconds",
    "tpot_s": "vllm:request_time_per_output_token_seconds",
    "e2e_s": "vllm:e2e_request_latency_seconds",
}


@attrs.frozen(kw_only=True)
class ReplayResult:
    """A replay of one engine or of a fleet.

    `requests` has a row for each finished request, in the order in which they finished, where they were kept.
    """

    report: ReplayReport
    trace: Document
    requests: Table

    def to_dict(self) -> Document:
        """The document of `kvledger replay --json`."""
        return {"trace": self.trace, **self.report.to_json()}

    def to_frame(self) -> Any:
        """A data frame with a row for each latency: TTFT, ITL, TPOT and E2E in seconds."""
        rows = [{"latency": name, **figures} for name, figures in self.report.latencies.items()]
        return Table.of_rows(rows).to_frame()

    def __repr__(self) -> str:
        """The outcome in one line."""
        requests, ttft = self.report.requests, self.report.latencies["ttft_s"]
        done = f"{requests['finished']:,} of {requests['total']:,} finished"
        return f"<ReplayResult: {done}, TTFT p99 {seconds(ttft['p99'])}>"


def sampled_traffic(scenario: Scenario, seed: int | None = None) -> Trace:
    """The scenario's traffic, every request `n` times."""
    source = open_traffic(scenario, seed)
    return source if scenario.n == 1 else SampledTrace(source, scenario.n)


def replay_scenario(
    scenario: Scenario,
    *,
    engine: Engine | None = None,
    trace: Trace | None = None,
    keep_requests: bool = False,
    listeners: Iterable[RunListener] = (),
    on_finished: Callable[[RequestRecord], None] | None = None,
    on_progress: Callable[[int], None] | None = None,
    macro_steps: bool = True,
) -> ReplayResult:
    """Replay a scenario's traffic, or `trace`, through allocator, scheduler and latency model.

    The engine is made from the scenario unless given. Listeners, `on_finished` (called with each finished request) and
    `macro_steps` (several identical decode steps may be simulated at once) are those of `replay`. `on_progress` is
    called with the number of requests submitted so far. The result holds the finished requests if `keep_requests`.

    Raises:
        InputError: something is missing, unknown or contradictory, or the trace is wrong.
        DoesNotFitError: the planner's answer is no, or none of the requests fits.
    """
    engine = engine or engine_of(scenario)
    source = sampled_traffic(scenario) if trace is None else trace
    kept: list[RequestRecord] = []

    def finished(record: RequestRecord) -> None:
        kept.append(record)
        if on_finished is not None:
            on_finished(record)

    report = replay(
        source,
        allocator=engine.parts.allocator,
        scheduler=engine.parts.scheduler,
        latency=engine.parts.latency,
        drafts=engine.parts.drafts_of(0),
        async_scheduling=engine.parts.async_scheduling,
        http_s=engine.parts.http_s,
        trace_block_size=source.info.trace_block_size,
        closed_loop=scenario.closed_loop,
        listeners=listeners,
        on_finished=finished if keep_requests else on_finished,
        macro_steps=macro_steps,
        on_progress=on_progress,
    )
    refuse_if_none_finished(report)
    report.assumptions = {**engine.pool.facts, **report.assumptions}
    names = [field.name for field in attrs.fields(RequestRecord)]
    requests = Table({name: [getattr(record, name) for record in kept] for name in names})
    return ReplayResult(report=report, trace=trace_as_dict(source.info), requests=requests)


def refuse_if_none_finished(report: ReplayReport) -> None:
    """Raise DoesNotFitError if every request was refused: such a replay has no figures."""
    requests = report.requests
    if requests["total"] and not requests["finished"]:
        first = f"; the first: {report.rejections[0]}" if report.rejections else ""
        raise DoesNotFitError(f"none of the {requests['total']:,} requests was served{first}")


def latency_distributions(snapshot: Snapshot) -> dict[str, dict[str, list[float]]]:
    """By latency: `up_to_s`, boundaries in seconds, and `share`, the part of all samples within each."""
    out: dict[str, dict[str, list[float]]] = {}
    for name, metric in HISTOGRAMS.items():
        counts: HistogramCounts | None = snapshot.get(metric)
        if counts is None or not counts.buckets[-1][1]:
            continue
        *finite, (_, num_samples) = counts.buckets
        out[name] = {
            "up_to_s": [boundary for boundary, _ in finite],
            "share": [within / num_samples for _, within in finite],
        }
    return out
