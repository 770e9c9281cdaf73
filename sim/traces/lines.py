"""Read a trace file, plain or gz: lines, JSON values of any size, JSON objects per line."""

import codecs
import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import DEFAULT_BUFFER_SIZE, BufferedIOBase
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from ...core.errors import InputError
from .rows import BadRow, Row, RowError, as_object

if TYPE_CHECKING:
    from .format import TraceSource

GZIP_MAGIC = b"\x1f\x8b"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def open_bytes(path: Path) -> BufferedIOBase:
    """Open the file's bytes; decompress them if the content (not the name) is gzip."""
    try:
        with open(path, "rb") as file:
            is_gzip = file.read(2) == GZIP_MAGIC
        return gzip.open(path, "rb") if is_gzip else open(path, "rb")
    except OSError as error:
        raise InputError(f"{path}: cannot be read as a trace: {error.strerror or error}") from error


@contextmanager
def reading_errors(path: Path, last_line: Callable[[], int]) -> Iterator[None]:
    """Raise `InputError` with the last line that was reached if the file is damaged or cut off."""
    try:
        yield
    except (EOFError, zlib.error, OSError) as error:
        place = last_line()
        raise InputError(
            f"{path}:{place + 1}: the file is damaged or cut off after line {place:,}: {error}. Fetch it again; "
            "no figure is given for half a trace"
        ) from error


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (line number from 1, line) of every line that is not blank, holding one line in memory.

    Line ends (LF or CRLF) and a byte order mark are stripped. Raises `InputError` with the line reached if the file is
    cut off or its compression is damaged.
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
    """The lines of a file without their ends. Iterating over the file would make a Python call per line."""
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
    """(line number, line) of the first lines that are not blank in the first `num_bytes`; the last may be cut off."""
    place = 0
    with open_bytes(path) as file, reading_errors(path, lambda: place):
        head = file.read(num_bytes)
    lines = ((place, line.strip()) for place, line in enumerate(head.removeprefix(BYTE_ORDER_MARK).split(b"\n"), 1))
    return list(islice(((place, line) for place, line in lines if line), at_most))


# JSON values from a file of any size: one value per line, values across lines, or one big array.

CHUNK_BYTES = 1 << 16
_DECODER = json.JSONDecoder()
_SPACE = " \t\r\n"
# A literal or an escape may be cut off this close to the end of what has been read.
_LONGEST_CUT = 16


def read_json_values(path: Path, chunk_bytes: int = CHUNK_BYTES) -> Iterator[tuple[int, Any]]:
    """Yield (line on which it begins, value) for every top-level value, or for every element of one top-level array.

    A value that is not JSON is yielded as a `BadRow` and reading continues with the next line. Inside an array the next
    value cannot be found, so there it raises `InputError`. Memory is one value.
    """
    with open_bytes(path) as file:
        yield from _Values(path, file, chunk_bytes).read()


class _Values:
    def __init__(self, path: Path, file: BufferedIOBase, chunk_bytes: int) -> None:
        self._path = path
        self._file = file
        self._chunk_bytes = chunk_bytes
        self._decode = codecs.getincrementaldecoder("utf-8-sig")(errors="replace").decode
        self._text = ""
        self._at = 0
        self._line = 1
        self._is_complete = False

    def read(self) -> Iterator[tuple[int, Any]]:
        if self._next_character() == "[":
            yield from self._elements()
            return
        while self._next_character():
            yield self._value_or_bad_row()

    def _elements(self) -> Iterator[tuple[int, Any]]:
        self._move(1)
        while (character := self._next_character()) != "]":
            line = self._line
            try:
                yield line, self._value()
            except (ValueError, RecursionError) as error:
                raise self._broken_array(line, str(error)) from error
            character = self._next_character()
            if character == ",":
                self._move(1)
            elif character != "]":
                raise self._broken_array(self._line, f"{character!r} instead of a comma or ]")
        self._move(1)
        if self._next_character():
            raise self._broken_array(self._line, "there is text after the end of the array")

    def _broken_array(self, line: int, fault: str) -> InputError:
        return InputError(
            f"{self._path}:{line}: the array is broken here, and what comes after cannot be told apart: {fault}. Mend "
            "or fetch it again; no figure is given for half a trace"
        )

    def _value_or_bad_row(self) -> tuple[int, Any]:
        line = self._line
        try:
            return line, self._value()
        except (ValueError, RecursionError) as error:
            self._skip_line()
            return line, BadRow(line, None, "not_json", f"is not JSON ({error})")

    def _value(self) -> Any:
        """Decode the next value; read more, twice as much every time, while the value may only be cut off."""
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                cut_off = error.msg.startswith("Unterminated string") or error.pos >= len(self._text) - _LONGEST_CUT
                if not cut_off or not self._read_more(len(self._text) - self._at):
                    raise
            else:
                # A number at the very end of the text may continue.
                if end < len(self._text) or isinstance(value, dict | list | str) or not self._read_more(0):
                    self._move(end - self._at)
                    return value

    def _next_character(self) -> str:
        """Peek at the next character that is not white space; empty at the end of the file."""
        while True:
            text, at = self._text, self._at
            while at < len(text) and text[at] in _SPACE:
                at += 1
            self._move(at - self._at)
            if at < len(text):
                return text[at]
            if not self._read_more(0):
                return ""

    def _skip_line(self) -> None:
        while True:
            end = self._text.find("\n", self._at)
            if end >= 0:
                self._move(end + 1 - self._at)
                return
            self._move(len(self._text) - self._at)
            if not self._read_more(0):
                return

    def _move(self, num_characters: int) -> None:
        end = self._at + num_characters
        self._line += self._text.count("\n", self._at, end)
        self._at = end

    def _read_more(self, at_least: int) -> bool:
        """Append to the text and drop what was read; False at the end of the file."""
        if self._is_complete:
            return False
        with reading_errors(self._path, lambda: self._line):
            data = self._file.read(max(self._chunk_bytes, at_least))
        self._is_complete = not data
        self._text = self._text[self._at :] + self._decode(data, self._is_complete)
        self._at = 0
        return bool(data) or bool(self._text)


# One JSON object per line.


def read_objects(
    source: "TraceSource", fields: frozenset[str], parse: Callable[[int, dict[str, object]], Row]
) -> Iterator[Row | BadRow]:
    """Yield `parse(place, object)` for every line; fields outside `fields` are noted as not read.

    Python's `json` defines what a line means. orjson is several times as fast and agrees on everything that it accepts,
    except integers beyond 64 bits: it turns them into floats of that size. No reader accepts such a float as an
    integer, and as a number of seconds only where the integer would become the same float. So a row that `parse` makes
    from orjson's object is right, and every other line is read again by `json`. (Fields that are not read may be nested
    deeper than `json` can follow.)
    """
    unused_fields = source.info.unused_fields

    def row_of(place: int, value: Any) -> Row:
        row = as_object(value)
        if len(row) > len(fields) or not row.keys() <= fields:
            unused_fields.update(row.keys() - fields)
        return parse(place, row)

    for place, line in read_lines(source.path):
        try:
            yield row_of(place, orjson.loads(line))
        except (orjson.JSONDecodeError, RowError, RecursionError):
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:
                yield BadRow(place, None, "not_json", f"is not JSON ({error})")
                continue
            try:
                yield row_of(place, value)
            except RowError as error:
                yield error.at(place)
