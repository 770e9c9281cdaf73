"""Request traces: read public formats row by row, reject bad rows with their line, and report what was measured.

Names of file.py are imported on first use: a recorded run is read where no trace format's libraries are installed.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .trace import SkippedRows, Trace, TraceInfo, TraceRequest, Turn, Window

if TYPE_CHECKING:
    from .file import TraceFile, open_trace, trace_formats

__all__ = [
    "SkippedRows",
    "Trace",
    "TraceFile",
    "TraceInfo",
    "TraceRequest",
    "Turn",
    "Window",
    "open_trace",
    "trace_formats",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(".file", __name__), name)
