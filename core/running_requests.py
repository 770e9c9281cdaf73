"""Requests that run: which rows they hold, in the order of their admission, and how far each has come."""

import numpy as np
from numpy.typing import NDArray

from .errors import MisuseError
from .types import Request


class RunningRequests:
    """Who holds blocks and computes.

    Attributes:
        known: by row, int64 `[num_rows]`: tokens known (prompt and outputs).
        remaining: by row, int64 `[num_rows]`: outputs still to come.
        computed: by row, int64 `[num_rows]`: tokens computed, those of the step in flight included and rejected drafts
            taken back.
        all_decode: that every one lacks only its newest token is certain; where it is not, ask the columns.
    """

    def __init__(self, num_rows: int) -> None:
        self._rows: NDArray[np.int64] = np.empty(num_rows, dtype=np.int64)
        self._count = 0
        self._request_in: list[Request | None] = [None] * num_rows
        self.known: NDArray[np.int64] = np.zeros(num_rows, dtype=np.int64)
        self.remaining: NDArray[np.int64] = np.zeros(num_rows, dtype=np.int64)
        self.computed: NDArray[np.int64] = np.zeros(num_rows, dtype=np.int64)
        self.all_decode = False

    def __len__(self) -> int:
        """How many there are."""
        return self._count

    @property
    def rows(self) -> NDArray[np.int64]:
        """Their rows in the order of their admission: int64 `[num_running]`, a view until one enters or leaves."""
        return self._rows[: self._count]

    def holds(self, row: int) -> bool:
        """Whether a running request holds the row."""
        return self._request_in[row] is not None

    def request_in(self, row: int) -> Request:
        """The request in a row.

        Raises:
            MisuseError: no running request holds it.
        """
        request = self._request_in[row]
        if request is None:
            raise MisuseError(f"row {row} holds no running request")
        return request

    def enter(self, request: Request, row: int, num_computed_tokens: int) -> None:
        """A request runs from here on, behind all others."""
        self._rows[self._count] = row
        self._count += 1
        self._request_in[row] = request
        self.known[row] = request.num_tokens
        self.remaining[row] = request.max_tokens - request.num_output_tokens
        self.computed[row] = num_computed_tokens
        self.all_decode = False

    def leave(self, rows: list[int]) -> None:
        """Requests end or lose their blocks; rows that hold none are passed over."""
        leaving = np.zeros(len(self._rows), dtype=np.bool_)
        leaving[rows] = True
        running = self.rows
        kept = running[~leaving[running]]
        self._count = len(kept)
        self._rows[: len(kept)] = kept
        for row in rows:
            self._request_in[row] = None

    def note_outputs(self, row: int) -> Request:
        """Write the outputs known so far on the request in a row, which is about to leave."""
        request = self.request_in(row)
        request.num_output_tokens = self.known.item(row) - request.num_prompt_tokens
        return request
