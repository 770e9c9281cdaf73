"""Event logs as arguments of commands: recognised without the libraries that reading them needs."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...backends.sinks.log.manifest import MANIFEST
from ...core.errors import InputError

if TYPE_CHECKING:
    from ...backends.sinks.log.reader import LogReader
    from .recorded import LiveTrace, LoggedTrace


def the_event_log(trace: str | Path | Sequence[str | Path]) -> Path | None:
    """The path that was given for a trace, if it is one directory that holds an event log."""
    given = [trace] if isinstance(trace, str | Path) else trace
    return Path(given[0]) if len(given) == 1 and (Path(given[0]) / MANIFEST).is_file() else None


def open_event_log(directory: str | Path) -> "LogReader":
    """A reader of a log.

    Raises:
        InputError: there is no such directory, or a library is missing; says what to install.
        LogDamagedError: the log is not what was written.
    """
    need_log_libraries()
    from ...backends.sinks.log.reader import LogReader

    return LogReader(directory)


def open_logged_trace(directory: str | Path, **chosen: Any) -> "LoggedTrace | LiveTrace":
    """The trace of a recorded run. `chosen` are the options that pick or change requests; None: not given.

    Raises:
        InputError: one of them is given, since the log holds what they left; or the log is of no such run.
    """
    for name, value in chosen.items():
        if value is not None:
            name = {"trace_format": "format"}.get(name, name)
            raise InputError(
                f"--{name.replace('_', '-')} {value} has no effect on an event log, which holds the requests of one "
                "run as they came; leave it out"
            )
    reader = open_event_log(directory)
    from .recorded import LiveTrace, LoggedTrace, is_live

    return LiveTrace(reader) if is_live(reader) else LoggedTrace(reader)


def need_log_libraries() -> None:
    """Raise `InputError` with what to install unless logs can be read and written."""
    try:
        import pyarrow  # noqa: F401
    except ModuleNotFoundError:
        raise InputError("event logs need pyarrow: pip install 'kvledger[log]'") from None
