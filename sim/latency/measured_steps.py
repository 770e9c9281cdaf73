"""The steps that a live engine measured, read from its log: what each computed, and how long it took."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import attrs
import numpy as np
from numpy.typing import NDArray

from ...core.errors import InputError
from ...core.types import LatencyModel, StepLoad

if TYPE_CHECKING:
    from ...backends.sinks.log.reader import LogReader

COLUMNS = StepLoad._fields


@attrs.frozen(eq=False)
class MeasuredSteps:
    """Steps in the order in which they ran.

    Attributes:
        loads: int64 `[num_steps, 6]`, the figures of `StepLoad` in its order.
        seconds: float64 `[num_steps]`, how long each took.
    """

    loads: NDArray[np.int64]
    seconds: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.seconds)

    def __getitem__(self, which: slice | NDArray[np.bool_]) -> "MeasuredSteps":
        return MeasuredSteps(self.loads[which], self.seconds[which])

    def column(self, name: str) -> NDArray[np.int64]:
        """One figure of every step: int64 `[num_steps]`."""
        return self.loads[:, COLUMNS.index(name)]

    def each(self) -> Iterator[tuple[StepLoad, float]]:
        """Load and seconds of one step after the other."""
        for load, seconds in zip(self.loads.tolist(), self.seconds.tolist(), strict=True):
            yield StepLoad(*load), seconds

    def predicted(self, latency: LatencyModel) -> NDArray[np.float64]:
        """What a model says of every step: float64 `[num_steps]`, seconds."""
        return np.array([latency.step_seconds(load) for load, _ in self.each()])

    def kinds(self) -> list[tuple[str, NDArray[np.bool_]]]:
        """The steps by what they compute: a description, and which of them; the smallest steps first."""
        prefill, decode = self.column("num_prefill_tokens"), self.column("num_decode_tokens")
        out: list[tuple[str, NDArray[np.bool_]]] = []
        parts = (("decode", prefill == 0), ("prefill", decode == 0), ("both", (prefill > 0) & (decode > 0)))
        buckets = np.frexp((prefill + decode).astype(np.float64))[1] - 1  # floor(log2)
        for name, is_part in parts:
            for bucket in np.unique(buckets[is_part]).tolist():
                first, last = 1 << bucket, (2 << bucket) - 1
                extent = f"{first:,}" if first == last else f"{first:,} to {last:,}"
                out.append((f"{name}, {extent} tokens", is_part & (buckets == bucket)))
        return out

    def means(self, which: NDArray[np.bool_]) -> tuple[StepLoad, float]:
        """The mean load, rounded, and the median time of some of the steps, which a few outliers do not move."""
        return StepLoad(*np.rint(self.loads[which].mean(axis=0)).astype(int).tolist()), float(
            np.median(self.seconds[which])
        )


def measured_steps(reader: "LogReader", skip_first: int = 0) -> MeasuredSteps:
    """The steps of a live run.

    Args:
        reader: its log.
        skip_first: steps at the beginning to leave out (a device that warms up).

    Raises:
        InputError: the log is of no live run, or holds too few steps.
    """
    from ...backends.sinks.log.rows import StepComputed
    from ..traces.recorded import is_live

    if not is_live(reader):
        raise InputError(f"{reader.directory} holds no measured steps: it is not the log of a live engine")
    if skip_first < 0:
        raise InputError(f"skip_first is {skip_first}; give 0 or more steps to leave out")
    loads: list[Sequence[int]] = []
    nanoseconds: list[int] = []
    for logged in reader.notes():
        if isinstance(logged.note, StepComputed):
            loads.append(tuple(logged.note.load))
            nanoseconds.append(logged.note.nanoseconds)
    if len(loads) - skip_first < 2:
        raise InputError(
            f"{reader.directory} holds {len(loads)} measured steps, of which {skip_first} are left out; at least 2 are "
            "needed to calibrate a model and to test it"
        )
    return MeasuredSteps(
        np.array(loads, dtype=np.int64).reshape(-1, len(COLUMNS))[skip_first:],
        np.array(nanoseconds, dtype=np.float64)[skip_first:] / 1e9,
    )
