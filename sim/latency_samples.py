"""The latencies of a run: sketches for the report and, where they are wanted, the histograms of vLLM's metrics."""

from collections import defaultdict

from .quantile_sketch import QuantileSketch
from .run_histograms import FinishedRequest, RunHistograms

# Samples that wait to be counted, of each kind: many at once cost a fraction of as many one by one.
MAX_PENDING = 1024


class LatencySamples:
    """Takes samples as they come and counts them when there are many, or when it is asked for what they make.

    Attributes:
        gaps: nanoseconds between successive tokens of a request: how many times each, since they were last counted.
        steps: tokens of an engine step: how many steps each, since they were last counted.
    """

    def __init__(self, histograms: RunHistograms | None) -> None:
        """`histograms` are counted besides the sketches; None: nothing is."""
        self._histograms = histograms
        self._ttft_ns = QuantileSketch()
        self._itl_ns = QuantileSketch()
        self._tpot_ns = QuantileSketch()
        self._e2e_ns = QuantileSketch()
        self.gaps: defaultdict[int, int] = defaultdict(int)
        self.steps: defaultdict[int, int] = defaultdict(int)
        self._first_tokens: list[int] = []
        self._finished: list[FinishedRequest] = []

    def first_token(self, ttft_ns: int) -> None:
        """A request got its first token so long after its arrival."""
        self._first_tokens.append(ttft_ns)

    def finished(self, request: FinishedRequest) -> None:
        """A request ended."""
        self._finished.append(request)

    def count_when_many(self) -> None:
        """Keep what waits to be counted within bounds. To be called now and then."""
        pending = (self.gaps, self.steps, self._first_tokens, self._finished)
        if max(map(len, pending)) >= MAX_PENDING:
            self._count()

    @property
    def histograms(self) -> RunHistograms | None:
        """Those that were given, up to now."""
        self._count()
        return self._histograms

    @property
    def ttft_ns(self) -> QuantileSketch:
        """From arrival to the first token."""
        self._count()
        return self._ttft_ns

    @property
    def itl_ns(self) -> QuantileSketch:
        """Between successive tokens."""
        self._count()
        return self._itl_ns

    @property
    def tpot_ns(self) -> QuantileSketch:
        """Per output token after the first, a sample a request."""
        self._count()
        return self._tpot_ns

    @property
    def e2e_ns(self) -> QuantileSketch:
        """From arrival to the last token."""
        self._count()
        return self._e2e_ns

    def _count(self) -> None:
        gaps, steps, first_tokens, finished = self.gaps, self.steps, self._first_tokens, self._finished
        if not (gaps or steps or first_tokens or finished):
            return
        for nanoseconds, times in gaps.items():
            self._itl_ns.add(nanoseconds, times)
        self._ttft_ns.add_all(first_tokens)
        self._tpot_ns.add_all([one.tpot_ns for one in finished if one.tpot_ns is not None])
        self._e2e_ns.add_all([one.last_ns - one.arrival_ns for one in finished])
        histograms = self._histograms
        if histograms is not None:
            for nanoseconds, times in gaps.items():
                histograms.itl_ns.add(nanoseconds, times)
            for num_tokens, times in steps.items():
                histograms.step_tokens.add(num_tokens, times)
            histograms.ttft_ns.add_all(first_tokens)
            histograms.count_finished(finished)
        for pending in (gaps, steps, first_tokens, finished):
            pending.clear()
