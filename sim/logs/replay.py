"""Runs a recorded run again, with the same options or with changed ones ("what if")."""

from collections.abc import Mapping
from typing import Any

from ...backends.sinks.log.reader import LogReader
from ...core.errors import InputError
from ..scenario.scenario import Scenario
from ..search.jobs import REPLAY, RERUN
from ..traces.logged import is_live

FIXED = "arrivals, prompt and output lengths, prompt block ids, priorities and turns"
# Options of output, which headers of version 1 also recorded.
_OUTPUT = frozenset(["traces", "json", "log", "log_flush", "plots"])


def recorded_scenario(reader: LogReader) -> Scenario:
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
            f"{reader.directory} was written by {command or 'an unknown program'}; only logs of "
            "kvledger replay --log and kvledger serve --log can run again"
        )
    options = {name: value for name, value in header["options"].items() if not _is_of_output(name)}
    for name, value in options.items():
        if name not in REPLAY:
            raise InputError(
                f"{reader.directory} was written with --{name.replace('_', '-')} {value}; this version lacks it"
            )
    kept = {name: value for name, value in options.items() if name in RERUN}
    return Scenario.from_dict({**kept, "trace": trace})


def check_changes(changes: Mapping[str, Any]) -> None:
    """Raise InputError for an option that chooses requests, which the log fixes."""
    for name, value in changes.items():
        if name not in RERUN:
            option = "format" if name == "trace_format" else name.replace("_", "-")
            raise InputError(
                f"--{option} {value} has no effect on an event log, which fixes its requests; leave it out"
            )


def what_changed(recorded: Scenario, changes: Mapping[str, Any]) -> str:
    """One line with the changed options and their recorded values."""
    changed = ", ".join(
        f"--{name.replace('_', '-')} {value} (was {getattr(recorded, name)})" for name, value in changes.items()
    )
    return f"running again with {changed}; fixed: {FIXED}"


def _is_of_output(option: str) -> bool:
    return option in _OUTPUT or option.endswith("_out") or option.startswith("openmetrics_")
