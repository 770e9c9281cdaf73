"""Request traces: read public formats row by row, refuse what is wrong with its place, and say what was measured."""

from .trace import SkippedRows, Trace, TraceInfo, TraceRequest, Window
from .trace_file import FORMATS, TraceFile, open_trace

__all__ = ["FORMATS", "SkippedRows", "Trace", "TraceFile", "TraceInfo", "TraceRequest", "Window", "open_trace"]
