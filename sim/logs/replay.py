"""Running a recorded run again: as it was, which must give the same history, or under other options ("what if")."""

import sys
from typing import Any

import attrs
import typer

from ...backends.sinks.log.reader import LogReader
from ...core.errors import InputError
from ..traces.recorded import is_live

FIXED = "arrivals, prompt and output lengths, prompt block ids, priorities and turns are the log's"
# What chose the requests when the run was recorded, of which the log holds the outcome, and where output went.
NOT_OF_THE_RUN = frozenset(
    [
        *("trace", "traces", "workload", "fit", "trace_format", "trace_block_size", "timestamp_unit", "tokenizer"),
        *("request_rate", "on_bad_row", "skip_first", "limit", "rate_scale", "json", "log", "log_flush"),
    ]
)


@attrs.frozen
class RecordedRun:
    """What was run.

    Attributes:
        command: its name.
        options: its options by parameter name, without those that chose the requests.
    """

    command: str
    options: dict[str, Any]


def recorded_run(reader: LogReader) -> RecordedRun:
    """What a log says about the run that it recorded.

    Raises:
        InputError: it says nothing, or names a command that cannot be run again.
    """
    header = reader.manifest.header
    command = header.get("command")
    if command != "replay":
        raise InputError(
            f"{reader.directory} was written by {command or 'something that did not say what it is'}; only the logs of "
            "kvledger replay --log and kvledger serve --log can be run again"
        )
    options = header["options"].items()
    return RecordedRun(
        command, {name: value for name, value in options if name not in NOT_OF_THE_RUN and not _is_of_output(name)}
    )


def _is_of_output(option: str) -> bool:
    return option.endswith("_out") or option.startswith("openmetrics_")


def run_again(reader: LogReader, given: list[str], as_json: bool) -> None:
    """Run a recorded run again and print its report, as the command itself does.

    Args:
        reader: the log.
        given: options of the command that are to differ, as on its command line.
        as_json: whether to print the JSON document instead of the tables.

    A live run's requests are simulated under the given options; a run on a trace keeps those that are not given.

    Raises:
        InputError: the log is of no run, or was written with an option that this version does not have.
    """
    from ..cli import build_app

    run = RecordedRun("replay", {}) if is_live(reader) else recorded_run(reader)
    app: Any = typer.main.get_command(build_app())  # a group, of typer's own copy of click in some versions
    command = app.commands[run.command]
    arguments = [str(reader.directory), *given, *(["--json"] if as_json else [])]
    with command.make_context(f"kvledger {run.command}", arguments) as context:
        changed: list[str] = []
        for name, value in run.options.items():
            if name not in context.params:
                raise InputError(
                    f"{reader.directory} was written with {_option(name)} {value}, an option that this kvledger does "
                    "not have"
                )
            if context.get_parameter_source(name).name == "COMMANDLINE":
                changed.append(f"{_option(name)} {context.params[name]} (was {value})")
            else:
                context.params[name] = value
        if changed:
            print(f"kvledger: running again with {', '.join(changed)}; fixed: {FIXED}", file=sys.stderr)
        command.invoke(context)


def _option(parameter: str) -> str:
    return "--" + parameter.replace("_", "-")
