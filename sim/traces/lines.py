"""The lines of a trace file, gz or plain, one at a time: line endings gone, blank lines left out, numbered from 1."""

import gzip
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import DEFAULT_BUFFER_SIZE, BufferedIOBase
from itertools import islice
from pathlib import Path

from ...core.errors import InputError

GZIP_MAGIC = b"\x1f\x8b"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def open_bytes(path: Path) -> BufferedIOBase:
    """The file's bytes, decompressed where its content (not its name) says gzip."""
    try:
        with open(path, "rb") as file:
            is_gzip = file.read(2) == GZIP_MAGIC
        return gzip.open(path, "rb") if is_gzip else open(path, "rb")
    except OSError as error:
        raise InputError(f"{path}: cannot be read as a trace: {error.strerror or error}") from error


@contextmanager
def reading_errors(path: Path, last_line: Callable[[], int]) -> Iterator[None]:
    """Turn what damaged or cut off files raise into `InputError` with the last line that was reached."""
    try:
        yield
    except (EOFError, zlib.error, OSError) as error:
        place = last_line()
        raise InputError(
            f"{path}:{place + 1}: the file is damaged or cut off after line {place:,}: {error}. Fetch it again; "
            "no figure is given for half a trace"
        ) from error


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (line number, line). Handles LF and CRLF, a byte order mark and a missing last newline; memory is one line.

    Raises `InputError` with the line reached where the file is cut off or its compression is damaged.
    """
    place = 0
    with open_bytes(path) as file, reading_errors(path, lambda: place):
        for place, line in enumerate(_lines(file), start=1):
            text = line.strip()
            if place == 1:
                text = text.removeprefix(BYTE_ORDER_MARK)
            if text:
                yield place, text


def _lines(file: BufferedIOBase) -> Iterator[bytes]:
    """The lines of a file without their ends: what iterating over it gives, but for a call in Python a line."""
    pieces: list[bytes] = []
    while block := file.read1(DEFAULT_BUFFER_SIZE):
        first, *others = block.split(b"\n")
        pieces.append(first)
        if others:
            yield b"".join(pieces)
            yield from others[:-1]
            pieces = others[-1:]
    yield b"".join(pieces)


def first_lines(path: Path, at_most: int, num_bytes: int) -> list[tuple[int, bytes]]:
    """The first lines that are not blank, out of the first `num_bytes`; the last one may be cut off."""
    place = 0
    with open_bytes(path) as file, reading_errors(path, lambda: place):
        head = file.read(num_bytes)
    lines = ((place, line.strip()) for place, line in enumerate(head.removeprefix(BYTE_ORDER_MARK).split(b"\n"), 1))
    return list(islice(((place, line) for place, line in lines if line), at_most))
