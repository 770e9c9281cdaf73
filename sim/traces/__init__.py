"""Request traces: read public formats row by row, refuse what is wrong with its place, and say what was measured."""

from .formats import FORMATS
from .trace import SkippedRows, Trace, TraceInfo, TraceRequest, Turn, Window
from .trace_file import TraceFile, open_trace

__all__ = ["FORMATS", "SkippedRows", "Trace", "TraceFile", "TraceInfo", "TraceRequest", "Turn", "Window", "open_trace"]
