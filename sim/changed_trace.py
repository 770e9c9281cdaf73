"""A trace whose traffic is heavier or lighter than recorded."""

from collections.abc import Iterator

import attrs

from .traces.trace import Trace, TraceInfo, TraceRequest


class ChangedTrace:
    """A trace whose arrivals come `rate` times as fast, and whose outputs are `output` times as long."""

    def __init__(self, trace: Trace, rate: float = 1.0, output: float = 1.0) -> None:
        self._trace, self._rate, self._output = trace, rate, output

    @property
    def info(self) -> TraceInfo:
        """That of the trace behind it."""
        return self._trace.info

    def __iter__(self) -> Iterator[TraceRequest]:
        """The requests, changed."""
        for row in self._trace:
            output_length = max(1, round(row.output_length * self._output))
            turn = None if row.turn is None else row.turn.at_rate(self._rate)
            yield attrs.evolve(row, arrival_s=row.arrival_s / self._rate, output_length=output_length, turn=turn)
