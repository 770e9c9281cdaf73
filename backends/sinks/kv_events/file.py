"""Records a stream of KV events in a file: every message unchanged, each with a checksum."""

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

from ....core.errors import InputError
from ..errors import LogDamagedError

TITLE: Final = b"kvledger kv events 1\n"
# sequence number, bytes of the payload, CRC-32 of both and the payload
_HEAD: Final = struct.Struct(">qII")


class KVEventFileWriter:
    """Appends messages to a new file."""

    def __init__(self, path: str | Path) -> None:
        """Start a file. Raises InputError if it exists."""
        try:
            self._file: BinaryIO = Path(path).open("xb")  # noqa: SIM115
        except FileExistsError:
            raise InputError(f"{path} exists already; give a name that is free") from None
        self._file.write(TITLE)

    def write(self, sequence: int, payload: bytes) -> None:
        """Append one message and hand it to the operating system at once."""
        self._file.write(_HEAD.pack(sequence, len(payload), _crc(sequence, payload)) + payload)
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def is_kv_event_file(path: str | Path) -> bool:
    """Return whether a path is such a file."""
    candidate = Path(path)
    if not candidate.is_file():
        return False
    with candidate.open("rb") as file:
        return file.read(len(TITLE)) == TITLE


def read_kv_event_file(path: str | Path) -> Iterator[tuple[int, bytes]]:
    """Yield (sequence number, payload) of every complete message; an incomplete last one is left out.

    Raises:
        InputError: this is no such file.
        LogDamagedError: a message is not what was written; those before it have been yielded.
    """
    if not is_kv_event_file(path):
        raise InputError(f"{path} is no recorded stream of KV events")
    with Path(path).open("rb") as file:
        file.seek(len(TITLE))
        while True:
            offset = file.tell()
            head = file.read(_HEAD.size)
            if len(head) < _HEAD.size:
                return
            sequence, size, crc = _HEAD.unpack(head)
            payload = file.read(size)
            if len(payload) < size:
                return
            if crc != _crc(sequence, payload):
                raise LogDamagedError(Path(path), f"message {sequence} does not match its checksum", offset)
            yield sequence, payload


def _crc(sequence: int, payload: bytes) -> int:
    return zlib.crc32(payload, zlib.crc32(struct.pack(">qI", sequence, len(payload))))
