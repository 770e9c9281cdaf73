"""`kvledger replay`: what happens to a trace on given hardware."""

from typing import TYPE_CHECKING

from ..exports.run_exports import ExportOptions
from ..scenario.scenario import Scenario
from ..search.jobs import REPLAY
from .declare import Json, LogOptions, Plots, command

if TYPE_CHECKING:
    from ..logs.run_log import RunLog
    from ..traces import Trace


@command(scenario=REPLAY)
def replay(
    scenario: Scenario, exports: ExportOptions, recording: LogOptions, plots: Plots = None, json: Json = False
) -> None:
    """Replay a trace through allocator, scheduler and latency model: latency, hits, preemptions, occupancy.

    Example: kvledger replay --workload conversation --num-gpu-blocks-override 50000 --block-size 512
    Example: kvledger replay --workload conversation --model llama-3.1-8b --gpu H100
    """
    run_replay(scenario, exports, recording, plots=plots, json=json)


def run_replay(
    scenario: Scenario, exports: ExportOptions, recording: LogOptions, *, plots: str | None = None, json: bool = False
) -> None:
    """Replay, write the files that were asked for, and print the report."""
    from contextlib import ExitStack
    from pathlib import Path

    from ..exports.run_exports import RunExports
    from ..report.console import Bar, print_result
    from ..report.plot_files import write_plots
    from ..report.plots import replay_plots
    from ..report.replay import print_replay
    from ..scenario.engine import engine_of
    from ..scenario.replay import latency_distributions, replay_scenario, sampled_traffic

    engine = engine_of(scenario)
    source = sampled_traffic(scenario)
    files = RunExports(exports, engine.pool.allocator, engine.pool.facts, inputs=input_files(scenario))
    recorder = None if recording.log is None else _recorder(recording, scenario, source)
    bar = Bar("Replaying")
    if bar.is_shown:  # the requests are counted first, for an estimate of the time left
        bar.update(total=sum(1 for _ in source))
    with ExitStack() as opened:
        for part in (files, bar, *([] if recorder is None else [recorder])):
            opened.enter_context(part)
        result = replay_scenario(
            scenario,
            engine=engine,
            trace=source if recorder is None else recorder.trace,
            listeners=[*files.listeners, *([] if recorder is None else [recorder])],
            on_finished=files.on_finished,
            macro_steps=files.macro_steps,
            on_progress=bar.count if bar.is_shown else None,
        )
        files.publish(result.report)
    document = result.to_dict()
    if plots is not None:
        write_plots(replay_plots(document, latency_distributions(result.report.snapshot or {})), Path(plots))
    print_result(document, print_replay, json)


def input_files(scenario: Scenario) -> list[str]:
    """The files that a run reads, which no output may replace."""
    return [
        *scenario.trace,
        *(name for name in (scenario.latency_table, scenario.calibration, scenario.model) if name is not None),
    ]


def _recorder(recording: LogOptions, scenario: Scenario, source: "Trace") -> "RunLog":
    """The log that a replay writes: a listener, and the trace that it notes as it is read."""
    from ...backends.sinks.log.flush_policy import FlushPolicy
    from ..logs.run_log import RunLog

    flush = FlushPolicy.parse(recording.log_flush or "50ms")
    return RunLog(str(recording.log), command="replay", options=scenario.to_dict(), trace=source, flush=flush)
