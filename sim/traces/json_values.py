"""JSON values one after the other out of a file of any size: a value a line, values across lines, or one big array."""

import codecs
import json
from collections.abc import Iterator
from io import BufferedIOBase
from pathlib import Path
from typing import Any

from ...core.errors import InputError
from .bad_rows import BadRow
from .lines import open_bytes, reading_errors

CHUNK_BYTES = 1 << 16
_DECODER = json.JSONDecoder()
_SPACE = " \t\r\n"
# A literal or an escape may be cut off this close to the end of what has been read.
_LONGEST_CUT = 16


def read_json_values(path: Path, chunk_bytes: int = CHUNK_BYTES) -> Iterator[tuple[int, Any]]:
    """Yield (line on which it begins, value) for every top-level value, or for every element of one top-level array.

    A value that is no JSON is yielded as a `BadRow`, and reading goes on with the next line; inside an array there is
    no telling where the next one begins, so that it is an `InputError` there. Memory is one value.
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
                raise self._broken_array(self._line, f"{character!r} stands where a comma or ] is due")
        self._move(1)
        if self._next_character():
            raise self._broken_array(self._line, "something follows the end of the array")

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
        """The value at hand; reads on, twice as much every time, while it may only be cut off."""
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                cut_off = error.msg.startswith("Unterminated string") or error.pos >= len(self._text) - _LONGEST_CUT
                if not cut_off or not self._read_more(len(self._text) - self._at):
                    raise
            else:
                # A number at the very end may go on.
                if end < len(self._text) or isinstance(value, dict | list | str) or not self._read_more(0):
                    self._move(end - self._at)
                    return value

    def _next_character(self) -> str:
        """The next character that is not white space, unread; empty at the end of the file."""
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
        """Append to the text, dropping what is read; False at the end of the file."""
        if self._is_complete:
            return False
        with reading_errors(self._path, lambda: self._line):
            data = self._file.read(max(self._chunk_bytes, at_least))
        self._is_complete = not data
        self._text = self._text[self._at :] + self._decode(data, self._is_complete)
        self._at = 0
        return bool(data) or bool(self._text)
