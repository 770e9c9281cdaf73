"""`kvledger log`: look into the event log of a run, prove it, compare it, run it again."""

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...core.errors import InputError
from ..report.console import Bar, print_json, print_result
from ..scenario.scenario import Scenario
from ..search.jobs import REPLAY, RERUN
from ..traces.logged import is_live, need_log_libraries, open_event_log
from .declare import Changes, Json, PanelCommand, command

if TYPE_CHECKING:
    from ...backends.sinks.log.reader import LogReader

FIXED = "arrivals, prompt and output lengths, prompt block ids, priorities and turns"
# Options of output, which headers of version 1 also recorded.
OF_OUTPUT = frozenset(["traces", "json", "log", "log_flush", "plots"])

Directory = Annotated[str, typer.Argument(metavar="LOG", help="Directory of an event log.")]


def build_log_app() -> typer.Typer:
    """The group `kvledger log` with its sub-commands."""
    app = typer.Typer(
        help="Look into the event log of a run: show, verify, diff, at, stats, steps, convert, replay.",
        no_args_is_help=True,
        rich_markup_mode=None,
    )
    for function in (show, verify, diff, at, stats, steps, convert):
        app.command(function.__name__)(_with_log_libraries(function))
    app.command("replay", cls=PanelCommand)(_with_log_libraries(replay))
    return app


def _with_log_libraries(function: Callable[..., None]) -> Callable[..., None]:
    """The command, which says what to install where logs cannot be read, before it imports what reads them."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> None:
        need_log_libraries()
        function(*args, **kwargs)

    return run


def show(
    log: Directory,
    first_commit: Annotated[int, typer.Option(help="First commit to show.")] = 0,
    last_commit: Annotated[int | None, typer.Option(help="Last commit to show; damage behind it is not met.")] = None,
    limit: Annotated[int | None, typer.Option(help="At most this many commits and notes.")] = None,
    request: Annotated[str | None, typer.Option(help="Only commits that touch this request.")] = None,
    block: Annotated[int | None, typer.Option(help="Only commits that name this block.")] = None,
    event: Annotated[str | None, typer.Option(help="Only commits with this event, such as BlocksFreed.")] = None,
    json: Json = False,
) -> None:
    """Show commits, one line an event.

    Example: kvledger log show run.log --request 17
    """
    from itertools import islice

    from ..logs.text import described, plain_record, select

    reader = open_event_log(log)
    # Who holds which row is known only from the start.
    start = 0 if request is not None else first_commit
    records = reader.records(start, None if last_commit is None else last_commit + 1)
    wanted = (each for each in select(records, request, block, event) if _number(each) >= first_commit)
    shown = islice(wanted, limit)
    if json:
        from json import dumps

        print('{"records": [', end="")
        for place, record in enumerate(shown):
            print(",\n" if place else "\n", dumps(plain_record(record), ensure_ascii=False), sep="", end="")
        print("\n]}")
        return
    _print_lines(line for record in shown for line in described(record))
    if reader.torn is not None:
        print(f"({reader.torn.describe()})")


def verify(
    log: Directory,
    checked_every: Annotated[
        int | None,
        typer.Option(help="Check the invariants after every n-th commit; unless given, n is an eighth of the blocks."),
    ] = None,
    json: Json = False,
) -> None:
    """Check every byte, replay every commit, hold every invariant; exit 1 and name the first bad commit if one fails.

    Example: kvledger log verify run.log --checked-every 1
    """
    import time

    from ..logs.verification import verify_log

    if checked_every is not None and checked_every < 1:
        raise InputError(f"--checked-every is {checked_every}; it must be 1 commit or more")
    started = time.perf_counter()
    with Bar("Verifying") as bar:
        found = verify_log(open_event_log(log), checked_every, bar.count)
    seconds = time.perf_counter() - started
    if json:
        print_json({"log": log, **found.to_json(), "timing": {"wall_seconds": seconds}})
    else:
        _print_lines(found.describe())
        print(f"took {seconds:.1f} s")
    if not found.is_sound:
        raise typer.Exit(1)


def diff(
    one: Directory,
    other: Annotated[str, typer.Argument(metavar="OTHER", help="Directory of the other one.")],
    ignore_times: Annotated[bool, typer.Option(help="Compare events only, not when they happened.")] = False,
    json: Json = False,
) -> None:
    """Find the first commit in which two logs differ, with the state before it; exit 1 if there is one.

    Example: kvledger log diff before.log after.log --ignore-times
    """
    from ..logs.verification import describe_divergence, divergence_as_dict, first_divergence

    first = open_event_log(one)
    divergence = first_divergence(first, open_event_log(other), ignore_times)
    answer = divergence_as_dict(divergence, first)
    if json:
        print_json(answer)
    elif divergence is None:
        print("the logs are equal")
    else:
        _print_lines(describe_divergence(divergence))
        print(f"state before: {answer['first_divergence']['state_before']}")
    if divergence is not None:
        raise typer.Exit(1)


def at(
    log: Directory,
    commit: Annotated[int | None, typer.Option(help="The state after this commit.")] = None,
    time: Annotated[float | None, typer.Option(help="The state at this time, seconds on the log's clock.")] = None,
    json: Json = False,
) -> None:
    """Show the state after a commit or at a time: occupancy, block tables, free queue.

    Example: kvledger log at run.log --time 12.5
    """
    from ..logs.text import state_as_dict
    from ..report.logs import print_state

    if (commit is None) == (time is None):
        raise InputError("give --commit N or --time SECONDS, one of them")
    reader = open_event_log(log)
    stop = commit + 1 if commit is not None else reader.commits_until(round((time or 0.0) * 1e9))
    if not stop:
        raise InputError(f"nothing had happened at {time} s: the pool was not there yet")
    state = state_as_dict(reader.state(stop))
    print_result({"log": log, "commit": stop - 1, **state}, print_state, json)


def stats(log: Directory, json: Json = False) -> None:
    """Count what is in a log: events by kind, bytes an event, the span of time, the run that it records.

    Example: kvledger log stats run.log
    """
    from ..logs.text import log_stats
    from ..report.logs import print_stats

    counted = log_stats(open_event_log(log))
    print_result({"log": log, **counted}, print_stats, json)


def steps(
    log: Directory,
    model: Annotated[
        str | None, typer.Option("--model", "--config", help="Model name or config.json, for the roofline; with --gpu.")
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(help="Device preset, such as H200, for the roofline; with --model.")
    ] = None,
    weights_dtype: Annotated[str, typer.Option(help="Of the weights that were served; with --model.")] = "auto",
    skip_first: Annotated[int, typer.Option(help="Leave out so many steps at the beginning (warming up).")] = 0,
    json: Json = False,
) -> None:
    """Put predicted and measured step times of a live run side by side, and calibrate latency models from them.

    Example: kvledger log steps run.log --model llama-3.1-8b --gpu H200
    """
    from ..latency.fitted import measured_steps
    from ..logs.live_report import live_report, served_roofline
    from ..report.logs import print_live_report

    if (model is None) != (gpu is None):
        raise InputError("--model and --gpu go together: a roofline needs both")
    if model is None and weights_dtype != "auto":
        raise InputError(f"--weights-dtype {weights_dtype} has no effect without --model; leave it out")
    reader = open_event_log(log)
    measured = measured_steps(reader, skip_first)
    roofline = None if model is None or gpu is None else served_roofline(reader, model, gpu, weights_dtype)
    report = live_report(measured, roofline)
    if json:
        print_json({"log": log, **report.to_json()})
    else:
        print_live_report(report)


def convert(
    log: Directory,
    output: Annotated[str, typer.Argument(help="File to write; it must not exist yet.")],
    to: Annotated[
        str,
        typer.Option(help="parquet (one file), jsonl (a row a line), trace (its requests) or kv-events (a stream)."),
    ],
    wire: Annotated[str | None, typer.Option(help="Of KV events: vllm (unless given) or strict.")] = None,
    json: Json = False,
) -> None:
    """Write a log as one Parquet file, as JSON lines, its requests as a trace, or as the KV events of its run.

    Example: kvledger log convert run.log requests.jsonl --to trace
    """
    from ..logs.convert import convert_log

    count = convert_log(open_event_log(log), to, output, wire)
    unit = {"trace": "requests", "kv-events": "batches"}.get(to, "rows")
    document = {"log": log, "output": output, "to": to, "count": count}
    print_result(document, lambda _: print(f"{output}: {count:,} {unit}"), json)


@command(changes=[name for name in REPLAY if name != "trace"])
def replay(context: typer.Context, log: Directory, changes: Changes, json: Json = False) -> None:
    """Run a recorded run again: the same report, or with options of `kvledger replay` given, what they would change.

    Fixed are arrivals, lengths, prompt blocks, priorities and turns; everything else follows the options. A live run
    is decided again step by step, which must give the same commits, block tables and slots (exit 1 if not); with
    options, its requests are simulated under them.

    Example: kvledger log replay run.log --num-gpu-blocks-override 2000 --eviction s3fifo
    """
    import sys

    from ..exports.run_exports import ExportOptions
    from .declare import LogOptions
    from .replay import run_replay

    for name, value in changes.items():
        if name not in RERUN:  # it chooses requests, which the log fixes
            option = "format" if name == "trace_format" else name.replace("_", "-")
            raise InputError(
                f"--{option} {value} has no effect on an event log, which fixes its requests; leave it out"
            )
    reader = open_event_log(log)
    if is_live(reader) and not changes:
        _decide_again(reader, log, json)
        return
    recorded = _recorded_scenario(reader)
    if changes and not is_live(reader):
        changed = [
            f"--{name.replace('_', '-')} {value} (was {getattr(recorded, name)})" for name, value in changes.items()
        ]
        print(f"kvledger: running again with {', '.join(changed)}; fixed: {FIXED}", file=sys.stderr)
    run_replay(recorded.evolve(**changes), ExportOptions(), LogOptions(), json=json)


def _recorded_scenario(reader: "LogReader") -> Scenario:
    """The scenario of a recorded run, with the log as its trace; for a live run, only the trace.

    Raises InputError: the log does not record its run, or has an option that this version does not have.
    """
    trace = (str(reader.directory),)
    if is_live(reader):
        return Scenario(trace=trace)
    header = reader.manifest.header
    command = header.get("command")
    if command != "replay":
        raise InputError(
            f"{reader.directory} was written by {command or 'an unknown program'}; only logs of kvledger replay --log "
            "and kvledger serve --log, and recordings of vLLM, can run again"
        )
    options = header["options"]
    for name, value in options.items():
        is_of_output = name in OF_OUTPUT or name.endswith("_out") or name.startswith("openmetrics_")
        if name not in REPLAY and not is_of_output:
            raise InputError(
                f"{reader.directory} was written with --{name.replace('_', '-')} {value}; this version lacks it"
            )
    kept = {name: value for name, value in options.items() if name in RERUN}
    return Scenario.from_dict({**kept, "trace": trace})


def _decide_again(reader: "LogReader", log: str, json: bool) -> None:
    from ...backends.serving.engine.recording import RECORDED_VLLM
    from ..logs.engine_rerun import run_engine_again
    from ..logs.live_rerun import run_live_again

    is_vllm = reader.manifest.header["command"] == RECORDED_VLLM
    with Bar("Deciding again") as bar:
        found = run_engine_again(reader, bar.count) if is_vllm else run_live_again(reader, bar.count)
    print_result({"log": log, **found.to_json()}, lambda _: _print_lines(found.describe()), json)
    if not found.is_equal:
        raise typer.Exit(1)


def _print_lines(lines: Iterable[str]) -> None:
    for line in lines:
        print(line)


def _number(record) -> int:
    return record.commit.sequence if hasattr(record, "commit") else record.next_commit
