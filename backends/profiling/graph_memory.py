"""What CUDA graphs will take, from capturing a few of them over the smallest pool before the real pool is sized."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import attrs

from ...core.errors import InputError
from ...core.memory.ledger import LedgerRow, RowRole, RowSource
from ...core.memory.profile import MemoryProfile, MemorySnapshot

# The driver hands out memory in steps of this size, so a graph that shows none still takes a share of one.
LEAST_GRAPH_BYTES = 1 << 20


def _largest_first(sizes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(set(sizes), reverse=True))


@attrs.frozen(kw_only=True)
class GraphCaptures:
    """How the user captures graphs of one mode.

    Attributes:
        mode: name of the mode, for the report (`full`, `piecewise`).
        sizes: batch sizes to be captured. They are captured largest first, so that smaller graphs reuse its memory.
        capture: captures one size into the memory pool that all of them share and returns the graph. It must warm up
            before it captures.
    """

    mode: str
    sizes: tuple[int, ...] = attrs.field(converter=_largest_first)
    capture: Callable[[int], Any]

    def __attrs_post_init__(self) -> None:
        if not self.sizes or self.sizes[-1] < 1:
            raise InputError(f"graphs of mode {self.mode!r}: sizes {self.sizes}; give at least one, all above 0")


@attrs.frozen(kw_only=True)
class GraphSample:
    """What capturing one size took, in bytes."""

    mode: str
    size: int
    num_bytes: int


@attrs.frozen(kw_only=True)
class GraphMemory:
    """What the graphs take.

    Attributes:
        samples: what was captured, in that order.
        num_uncaptured: sizes of each mode that were not.
        not_returned_bytes: what stayed taken after the sampled graphs were dropped.
        warnings: what disturbed the readings.
    """

    samples: tuple[GraphSample, ...]
    num_uncaptured: tuple[tuple[str, int], ...]
    not_returned_bytes: int = 0
    warnings: tuple[str, ...] = ()

    @property
    def captured_bytes(self) -> int:
        """What the captured ones took together."""
        return sum(sample.num_bytes for sample in self.samples)

    @property
    def row(self) -> LedgerRow:
        """The ledger's row: measured where every size was captured, else an estimate.

        A size that was not captured is taken for as large as the last one of its mode that was, at least 1 MiB. The
        range runs from nothing more than was seen to every further one as large as the largest after the first (the
        first holds what all of them share).
        """
        shown = " + ".join(f"{sample.num_bytes:,} ({sample.mode} {sample.size})" for sample in self.samples)
        missing = [(mode, count) for mode, count in self.num_uncaptured if count]
        if not missing:
            return _graphs_row(self.captured_bytes, RowSource.MEASURED, f"captured: {shown}")
        likely = sum(count * self._further(mode)[-1] for mode, count in missing)
        most = sum(count * max(self._further(mode)) for mode, count in missing)
        terms = "".join(f" + {count} more ({mode}) x {self._further(mode)[-1]:,}" for mode, count in missing)
        row = _graphs_row(
            self.captured_bytes + likely, RowSource.ESTIMATE, f"captured over the smallest pool: {shown}{terms}"
        )
        return attrs.evolve(row, low_bytes=self.captured_bytes, high_bytes=self.captured_bytes + most)

    def _further(self, mode: str) -> list[int]:
        """Bytes of each captured size after the first of a mode (of the first, if it is the only one)."""
        sizes = [sample.num_bytes for sample in self.samples if sample.mode == mode]
        return [max(num_bytes, LEAST_GRAPH_BYTES) for num_bytes in sizes[1:] or sizes]


def _graphs_row(num_bytes: int, source: RowSource, formula: str) -> LedgerRow:
    return LedgerRow(name="CUDA graphs", num_bytes=num_bytes, source=source, role=RowRole.GRAPHS, formula=formula)


def actual_graphs_row(num_bytes: int, estimate: LedgerRow | None) -> LedgerRow:
    """The row once all graphs are captured over the real pool."""
    formula = "measured around the capture"
    if estimate is not None:
        formula += f"; {estimate.num_bytes:,} were set aside"
    return _graphs_row(num_bytes, RowSource.MEASURED, formula)


def sample_graphs(
    modes: tuple[GraphCaptures, ...],
    read: Callable[[], MemorySnapshot],
    *,
    num_captured_sizes: int | None,
    smallest_pool: Callable[[], AbstractContextManager[Any]] = nullcontext,
    strict_profiling: bool = False,
) -> GraphMemory:
    """Capture the largest sizes of every mode, all kept until the last is done, then drop them.

    Args:
        modes: what is captured.
        read: a reading of the device.
        num_captured_sizes: how many sizes of each mode; None: all of them, which takes as long as the real capture.
        smallest_pool: holds the smallest KV cache that the model can run over for the time of the captures.
        strict_profiling: free memory that grew is an error, as in a profile.

    Raises:
        InputError: no modes, or fewer than two sizes of a mode that has two.
        MemoryShortfallError: `strict_profiling`, and free memory grew during a capture.
    """
    if not modes:
        raise InputError("no graphs to capture; an engine without graphs needs no estimate")
    if num_captured_sizes is not None and num_captured_sizes < 2:
        raise InputError(
            f"num_captured_sizes is {num_captured_sizes}: the first graph holds what all share, so two at least are"
            " needed to tell it from what each of them takes; None captures all"
        )
    samples: list[GraphSample] = []
    warnings: list[str] = []
    first = last = read()
    with smallest_pool():
        graphs: list[Any] = []
        before = read()
        for mode in modes:
            for size in mode.sizes[:num_captured_sizes]:
                graphs.append(mode.capture(size))
                after = read()
                taken = MemoryProfile(before=before, after=after, weights_bytes=None, strict_profiling=strict_profiling)
                samples.append(GraphSample(mode=mode.mode, size=size, num_bytes=taken.total_consumed_bytes))
                warnings += [f"{mode.mode} {size}: {text}" for text in taken.warnings if taken.unexplained_bytes]
                before = after
        graphs.clear()
    last = read()
    stayed = MemoryProfile(before=first, after=last, weights_bytes=None)
    counts = tuple((mode.mode, len(mode.sizes) - sum(sample.mode == mode.mode for sample in samples)) for mode in modes)
    return GraphMemory(
        samples=tuple(samples),
        num_uncaptured=counts,
        not_returned_bytes=stayed.total_consumed_bytes,
        warnings=tuple(warnings),
    )
