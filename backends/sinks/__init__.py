"""Listeners to commits: the durable log, KV events on the wire, and their readers.

Each name is imported when it is first used, since each needs a library of its own (extras `log` and `events`).
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .durable_log import Clock, DurableLog
    from .errors import LogDamagedError, LogInUseError, LogWriteError
    from .flush_policy import FlushPolicy
    from .log_reader import LogReader
    from .log_rows import LoggedCommit, LoggedNote, RequestArrived, RunEnded

_MODULES = {
    "Clock": "durable_log",
    "DurableLog": "durable_log",
    "FlushPolicy": "flush_policy",
    "LogDamagedError": "errors",
    "LogInUseError": "errors",
    "LogReader": "log_reader",
    "LogWriteError": "errors",
    "LoggedCommit": "log_rows",
    "LoggedNote": "log_rows",
    "RequestArrived": "log_rows",
    "RunEnded": "log_rows",
}

__all__ = [
    "Clock",
    "DurableLog",
    "FlushPolicy",
    "LogDamagedError",
    "LogInUseError",
    "LogReader",
    "LogWriteError",
    "LoggedCommit",
    "LoggedNote",
    "RequestArrived",
    "RunEnded",
]


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{module}", __name__), name)
