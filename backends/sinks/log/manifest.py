"""The manifest: what a log is and which segments it has, replaced whole under a checksum of its own."""

import json
import zlib
from pathlib import Path
from typing import Any, Final

import attrs

from ..errors import LogDamagedError
from .names import MANIFEST
from .parquet import ClosedSegment
from .rows import LAYOUT_VERSION
from .stream import write_whole

_FORMAT: Final = "kvledger event log"


@attrs.frozen
class Manifest:
    """What is known of a log without opening a segment.

    Attributes:
        header: what the run is, as its command wrote it down (plain JSON values).
        clock: what `time_ns` counts from: "simulated" (the start of the run), "unix", or None without times.
        closed: the closed segments, in order.
        open_segment: the number of the open one, None once the log was closed.
        next_commit: the first commit of the open segment, or of the one that would come next.
    """

    header: dict[str, Any]
    clock: str | None
    closed: tuple[ClosedSegment, ...] = ()
    open_segment: int | None = None
    next_commit: int = 0

    def save(self, directory: Path) -> None:
        """Replace the manifest of a directory."""
        plain = {"format": _FORMAT, "layout_version": LAYOUT_VERSION, **attrs.asdict(self)}
        write_whole(directory / MANIFEST, (json.dumps({**plain, "crc32": _crc32(plain)}, indent=1) + "\n").encode())

    @classmethod
    def load(cls, directory: Path) -> "Manifest":
        """Read the manifest of a directory.

        Raises:
            LogDamagedError: it is missing, does not match its checksum, or is of another version.
        """
        path = directory / MANIFEST
        try:
            plain = json.loads(path.read_bytes())
        except OSError as error:
            reason = f"there is no manifest to read ({error.strerror}), so this is no event log, or not a whole one"
            raise LogDamagedError(path, reason) from None
        except ValueError as error:
            raise LogDamagedError(path, f"the manifest is no JSON: {error}") from None
        if not isinstance(plain, dict) or plain.pop("format", None) != _FORMAT:
            raise LogDamagedError(path, "this is not the manifest of an event log")
        version = plain.pop("layout_version", None)
        crc32 = plain.pop("crc32", None)
        if crc32 != _crc32({"format": _FORMAT, "layout_version": version, **plain}):
            raise LogDamagedError(path, "the manifest does not match its checksum")
        if version != LAYOUT_VERSION:
            raise LogDamagedError(path, f"the log has layout version {version}; this kvledger reads {LAYOUT_VERSION}")
        closed = tuple([ClosedSegment(**each) for each in plain.pop("closed")])
        return cls(closed=closed, **plain)


def _crc32(plain: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(plain, sort_keys=True).encode()):08x}"
