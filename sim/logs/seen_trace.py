"""Writes the requests seen in a stream as a Mooncake trace, whose blocks all have one size but a request's last."""

import json
from contextlib import AbstractContextManager
from pathlib import Path

from ...backends.sinks.kv_events.schema import BlockHash
from ...core.errors import InputError
from ..figures import Document
from .stream_requests import SeenRequest


class SeenTrace(AbstractContextManager["SeenTrace"]):
    """A trace of the requests in a stream, in the order in which they end.

    The first request of several blocks fixes the trace's block size. A request that cannot be written in blocks of that
    size is left out and counted: its blocks have several sizes (but for a shorter last one), or the stream does not
    tell their tokens (field report E08).
    """

    def __init__(self, path: str) -> None:
        """Open a new file. Raises InputError if it exists."""
        try:
            self._file = Path(path).open("x")  # noqa: SIM115
        except FileExistsError:
            raise InputError(f"{path} exists already; give another name") from None
        self._numbers: dict[BlockHash, int] = {}
        self._fixed: int | None = None
        self._largest_single = 0
        self.num_rows = 0
        self.num_left_out = 0

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @property
    def block_size(self) -> int | None:
        """Tokens per block of the trace; None before the first row."""
        return self._fixed or self._largest_single or None

    def write(self, request: SeenRequest, start_s: float) -> None:
        """Write one request, or count it as left out. `start_s`: the time that becomes 0."""
        if not self._fits(request.tokens):
            self.num_left_out += 1
            return
        self.num_rows += 1
        self._file.write(json.dumps(request.row(self._numbers, start_s)) + "\n")

    def to_json(self) -> Document:
        """Counts, and the block size to read the trace with."""
        return {"rows": self.num_rows, "left_out": self.num_left_out, "block_size": self.block_size}

    def _fits(self, tokens: list[int | None]) -> bool:
        *whole, last = tokens
        if last is None:
            return False
        size = self._fixed
        if size is None and whole and whole[0] is not None and whole[0] >= self._largest_single:
            size = whole[0]
        if whole and (size is None or any(each != size for each in whole)):
            return False
        if size is not None and last > size:
            return False
        if whole:
            self._fixed = size
        elif size is None:
            self._largest_single = max(self._largest_single, last)
        return True
