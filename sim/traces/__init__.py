"""Request traces: read public formats row by row, refuse what is wrong with its place, and say what was measured."""

from .file import TraceFile, open_trace
from .registry import FORMATS
from .trace import SkippedRows, Trace, TraceInfo, TraceRequest, Turn, Window

__all__ = ["FORMATS", "SkippedRows", "Trace", "TraceFile", "TraceInfo", "TraceRequest", "Turn", "Window", "open_trace"]
