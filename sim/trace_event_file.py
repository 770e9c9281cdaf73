"""The Trace Event Format (JSON) that Perfetto and chrome://tracing open, written event by event."""

import gzip
import json
from collections.abc import Mapping
from typing import Any, BinaryIO, cast

from .output_file import OutputFile

# Compressing harder makes the file a tenth smaller and takes several times as long.
_COMPRESSION_LEVEL = 3


def microseconds(nanoseconds: int) -> str:
    """The JSON number, exact to the nanosecond: 1234567 -> "1234.567"."""
    whole, rest = divmod(nanoseconds, 1000)
    return f"{whole}.{rest:03d}" if rest else str(whole)


class TraceEventFile:
    """A JSON object with the list `traceEvents`; compressed if the name ends in .gz. Same events, same bytes."""

    def __init__(self, file: OutputFile) -> None:
        """Begin the document."""
        self._compressed: gzip.GzipFile | None = None
        self._stream = cast(BinaryIO, file.stream)
        if file.path.suffix == ".gz":
            # No name and no time of writing: they would differ from run to run.
            self._compressed = gzip.GzipFile("", "wb", _COMPRESSION_LEVEL, self._stream, mtime=0)
            self._stream = cast(BinaryIO, self._compressed)
        self._separator = b"\n"
        self._stream.write(b'{"displayTimeUnit":"ms","traceEvents":[')

    def write(self, at_ns: int, phase: str, fields: str, args: Mapping[str, Any] | None = None) -> None:
        """Add one event.

        Args:
            at_ns: when, nanoseconds from the start of the run.
            phase: the format's letter for what kind of event it is.
            fields: the event's own fields as JSON without braces.
            args: what is shown when it is clicked.
        """
        shown = "" if args is None else ',"args":' + json.dumps(args, separators=(",", ":"), ensure_ascii=False)
        event = f'{{"ph":"{phase}","ts":{microseconds(at_ns)},{fields}{shown}}}'
        self._stream.write(self._separator + event.encode())
        self._separator = b",\n"

    def finish(self) -> None:
        """End the document; the file itself is closed by its owner."""
        self._stream.write(b"\n]}\n")
        if self._compressed is not None:
            self._compressed.close()
