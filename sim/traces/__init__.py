"""Request traces: read public formats row by row, reject bad rows with their line, and report what was measured.

Names are imported on first use: a recorded run is read where no trace format's libraries are installed.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .file import TraceFile, open_trace
    from .file import trace_formats as FORMATS
    from .file import trace_formats as trace_formats
    from .trace import SkippedRows, Trace, TraceInfo, TraceRequest, Turn, Window

__all__ = [
    "FORMATS",
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

# Importing file.py fills the registry of formats.
_MODULES = {"TraceFile": "file", "open_trace": "file"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in ("FORMATS", "trace_formats"):
        return import_module(".file", __name__).trace_formats
    return getattr(import_module(f".{_MODULES.get(name, 'trace')}", __name__), name)
