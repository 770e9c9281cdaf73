"""Device time by CUDA events: contenders in turn, sources rotated past the L2 cache, medians, and one table.

Nothing here makes up a figure: a `Timing` comes from a clock, and the only clock outside the tests needs a card.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import attrs

# Bytes moved before a source is read again, as a multiple of the L2 cache: once would leave the tail of it there.
L2_MULTIPLE = 2
MIN_SAMPLES = 20
# Clock cycles that the device spins before a measured run, so that everything measured is queued when it begins.
SPIN_CYCLES = 1_000_000
# Clock cycles that it spins before all of them: an idle card runs at a fraction of its clock rate for a while.
WAKE_UP_CYCLES = 300_000_000

Run = Callable[[], None]


class Clock(Protocol):
    """Times runs on a device."""

    def elapsed_us(self, runs: Sequence[Run]) -> list[float]:
        """Microseconds that the device took for each run, one after the other."""
        ...


@attrs.frozen
class Timing:
    """Device times of one contender, in microseconds."""

    samples_us: tuple[float, ...] = attrs.field(converter=tuple)

    def __attrs_post_init__(self) -> None:
        if len(self.samples_us) < MIN_SAMPLES:
            raise ValueError(f"{len(self.samples_us)} samples; a median needs at least {MIN_SAMPLES}")
        if min(self.samples_us) <= 0:
            raise ValueError(f"a run took {min(self.samples_us)} us: the clock did not see it")

    @property
    def median_us(self) -> float:
        return statistics.median(self.samples_us)

    @property
    def quartiles_us(self) -> tuple[float, float]:
        low, _, high = statistics.quantiles(self.samples_us, n=4, method="inclusive")
        return low, high

    def gigabytes_per_second(self, num_bytes: int) -> float:
        """Rate at which `num_bytes` (read and written) were moved at the median."""
        return num_bytes / self.median_us / 1e3


def num_rotations(run_bytes: int, source_bytes: int, l2_bytes: int) -> int:
    """How many sets of sources to take in turn, so that none is still in the L2 cache when it is read again.

    Between two reads of one source every other byte of all sets is read: `n * run_bytes - source_bytes`, which must be
    at least `L2_MULTIPLE` caches.

    Args:
        run_bytes: sources that one run reads.
        source_bytes: the one of them that is read again (a layer's).
        l2_bytes: of the card.
    """
    if not 0 < source_bytes <= run_bytes or l2_bytes < 0:
        raise ValueError(f"a run of {run_bytes} bytes with a source of {source_bytes} and a cache of {l2_bytes}")
    return -(-(L2_MULTIPLE * l2_bytes + source_bytes) // run_bytes)


def time_in_turn(
    clock: Clock, contenders: Mapping[str, Sequence[Run]], *, rounds: int, warm_up_rounds: int = 3
) -> dict[str, Timing]:
    """Every contender once a round, in the order given; round r takes its variant r modulo their number.

    Args:
        clock: what times them.
        contenders: name -> variants that do the same work on different sources.
        rounds: samples of each.
        warm_up_rounds: rounds that are run and not counted.
    """
    order = [
        (name, variants[number % len(variants)])
        for number in range(warm_up_rounds + rounds)
        for name, variants in contenders.items()
    ]
    elapsed = clock.elapsed_us([run for _, run in order])
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    for (name, _), value in zip(order, elapsed, strict=True):
        samples[name].append(value)
    return {name: Timing(tuple(values[warm_up_rounds:])) for name, values in samples.items()}


def fraction_of_copy(timing: Timing, num_bytes: int, copy: Timing, copy_bytes: int) -> float:
    """Rate of a contender over the rate of the copy that ran beside it."""
    return timing.gigabytes_per_second(num_bytes) / copy.gigabytes_per_second(copy_bytes)


class CudaClock:
    """CUDA events around each run. A spin before them keeps the host's launch time out of the device's."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch

    def elapsed_us(self, runs: Sequence[Run]) -> list[float]:
        cuda = self._torch.cuda
        pairs = [(cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)) for _ in runs]
        cuda._sleep(WAKE_UP_CYCLES)
        cuda.synchronize()
        for run, (begin, end) in zip(runs, pairs, strict=True):
            cuda._sleep(SPIN_CYCLES)
            begin.record()
            run()
            end.record()
        cuda.synchronize()
        return [begin.elapsed_time(end) * 1e3 for begin, end in pairs]


def capture(torch: Any, run: Run) -> Run:
    """`run` as a CUDA graph: warmed up on a stream of its own, captured, and replayed at every call."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


@attrs.frozen(kw_only=True)
class Row:
    """One line of the table.

    Attributes:
        what: the work.
        timing: of it.
        num_bytes: read and written; None where bytes are not the point.
        figure: what it is judged by, in words with its unit (`0.93 of the copy`).
        required: the bound, in words; empty where it is shown for comparison only.
        holds: whether the bound is met; None where there is none.
    """

    what: str
    timing: Timing
    num_bytes: int | None = None
    figure: str = ""
    required: str = ""
    holds: bool | None = None

    @property
    def cells(self) -> tuple[str, ...]:
        low, high = self.timing.quartiles_us
        rate = "" if self.num_bytes is None else f"{self.timing.gigabytes_per_second(self.num_bytes):,.0f}"
        verdict = {None: "", True: "yes", False: "NO"}[self.holds]
        return (
            self.what,
            f"{self.timing.median_us:,.1f}",
            f"{low:,.1f} to {high:,.1f}",
            rate,
            self.figure,
            self.required,
            verdict,
        )


HEADINGS = ("device time", "median us", "quartiles us", "GB/s", "figure", "required", "holds")


def format_table(title: str, rows: Sequence[Row]) -> str:
    """The rows under the card's name."""
    lines = [HEADINGS, *(row.cells for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADINGS))]
    numeric = (1, 2, 3)
    text = [
        "  ".join(
            cell.rjust(width) if column in numeric else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    return "\n".join([title, text[0], "-" * len(text[0]), *text[1:]])
