"""A few figures over time, thinned out as a run grows so that the memory stays constant."""

from collections.abc import Sequence

from ..core.errors import InputError

MAX_POINTS = 2048


class TimeSeries:
    """Samples of several named figures. Holds at most 2,048 points: when full, every second one is dropped."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.times_s: list[float] = []
        self.values: list[tuple[float, ...]] = []
        self._stride = 1
        self._seen = 0

    def passes_over(self) -> bool:
        """Whether the next sample would be dropped; it counts as offered then, and need not be made."""
        is_dropped = self._seen % self._stride != 0
        self._seen += is_dropped
        return is_dropped

    def add(self, time_s: float, values: Sequence[float]) -> None:
        """Offer a sample; one in `stride` is kept."""
        if len(values) != len(self.names):
            raise InputError(f"a sample of {len(values)} figures for {len(self.names)} names")
        if self._seen % self._stride == 0:
            self.times_s.append(time_s)
            self.values.append(tuple(values))
            if len(self.times_s) >= MAX_POINTS:
                del self.times_s[1::2]
                del self.values[1::2]
                self._stride *= 2
        self._seen += 1

    def columns(self) -> dict[str, list[float]]:
        """`time_s` and one column a name."""
        columns = zip(*self.values, strict=True) if self.values else [()] * len(self.names)
        return {"time_s": list(self.times_s), **{n: list(c) for n, c in zip(self.names, columns, strict=True)}}
