"""What a prefill engine measures: requests that go on elsewhere have not finished when they leave it."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ..core.events import Commit, RowsReleased
from ..core.types import Request
from .metrics import Recorder, RequestTimes
from .request_record import RequestRecord
from .run_histograms import RunHistograms


class PrefillRecorder(Recorder):
    """Hands on the clocks of each request that goes on, instead of counting its end."""

    def __init__(
        self,
        now_ns: Callable[[], int],
        num_rows: int,
        histograms: RunHistograms | None,
        on_finished: Callable[[RequestRecord], None] | None,
        *,
        goes_on: Callable[[Request], bool],
        hand_over: Callable[[Request, RequestTimes], None],
        counts_tokens: bool,
    ) -> None:
        """Watch a run.

        Args:
            now_ns: the clock to ask.
            num_rows: rows of the block tables.
            histograms: where samples are counted besides; None: nowhere.
            on_finished: given the record of each request that ends here.
            goes_on: whether a request that has its token goes on elsewhere.
            hand_over: given the clocks of such a request.
            counts_tokens: whether the client gets the token.
        """
        super().__init__(now_ns, num_rows, histograms, on_finished)
        self._goes_on = goes_on
        self._hand_over = hand_over
        self._counts_tokens = counts_tokens
        # Gone on elsewhere; their blocks, and so their rows, are kept here until they were read.
        self._gone_on: set[str] = set()

    def apply(self, commit: Commit) -> None:
        """As `Recorder`; a row that was kept for what went on elsewhere is nobody's now."""
        super().apply(commit)
        for event in commit.events:
            if type(event) is RowsReleased:
                for request_id in self._gone_on.intersection(event.requests):
                    self._gone_on.remove(request_id)
                    del self._away[request_id]

    def _tokens_produced(self, rows: NDArray[np.int64], now: int) -> None:
        if self._counts_tokens:
            super()._tokens_produced(rows, now)

    def _finished(self, row: int, request: Request, now: int) -> None:
        if not self._goes_on(request):
            super()._finished(row, request, now)
            return
        self._gone_on.add(request.request_id)
        self._hand_over(request, RequestTimes(*self._times_in(row)))
