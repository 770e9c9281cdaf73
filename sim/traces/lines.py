"""The lines of a trace file, gz or plain, one at a time: line endings gone, blank lines left out, numbered from 1."""

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

from ...core.errors import InputError

GZIP_MAGIC = b"\x1f\x8b"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def open_bytes(path: Path) -> BinaryIO:
    """The file's bytes, decompressed where its content (not its name) says gzip."""
    try:
        with open(path, "rb") as file:
            is_gzip = file.read(2) == GZIP_MAGIC
        return cast(BinaryIO, gzip.open(path, "rb") if is_gzip else open(path, "rb"))
    except OSError as error:
        raise InputError(f"{path}: cannot be read as a trace: {error.strerror or error}") from error


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (line number, line). Handles LF and CRLF, a byte order mark and a missing last newline; memory is one line.

    Raises `InputError` with the line reached where the file is cut off or its compression is damaged.
    """
    place = 0
    with open_bytes(path) as file:
        try:
            for place, line in enumerate(file, start=1):
                text = line.strip()
                if place == 1:
                    text = text.removeprefix(BYTE_ORDER_MARK)
                if text:
                    yield place, text
        except (EOFError, zlib.error, OSError) as error:
            raise InputError(
                f"{path}:{place + 1}: the file is damaged or cut off after line {place:,}: {error}. Fetch it again; "
                "no figure is given for half a trace"
            ) from error
