"""Estimates the memory of CUDA graphs by capturing a few of them over the smallest pool, before the pool is sized."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import attrs

from ...core.errors import InputError
from ...core.memory.ledger import LedgerRow, RowRole, RowSource
from ...core.memory.profile import MemoryProfile, MemorySnapshot

# The driver allocates memory in steps of this size, so a graph whose reading shows none still takes part of a step.
LEAST_GRAPH_BYTES = 1 << 20


def _largest_first(sizes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(set(sizes), reverse=True))


@attrs.frozen(kw_only=True)
class GraphCaptures:
    """The user's way to capture graphs of one mode."""

    mode: str  # name of the mode, for the report (`full`, `piecewise`)
    # Batch sizes. The largest is captured first, so that smaller graphs reuse its memory.
    sizes: tuple[int, ...] = attrs.field(converter=_largest_first)
    # Captures one size, warmed up before, into the memory pool that all sizes share and returns the graph.
    capture: Callable[[int], Any]

    def __attrs_post_init__(self) -> None:
        if not self.sizes or self.sizes[-1] < 1:
            raise InputError(f"graphs of mode {self.mode!r}: sizes {self.sizes}; give at least one, all above 0")


@attrs.frozen(kw_only=True)
class GraphSample:
    """Bytes that capturing one size took."""

    mode: str
    size: int
    num_bytes: int


@attrs.frozen(kw_only=True)
class GraphMemory:
    """Memory of the graphs."""

    samples: tuple[GraphSample, ...]  # the captured sizes, in the order of their capture
    num_uncaptured: tuple[tuple[str, int], ...]  # for each mode, the number of sizes that were not captured
    not_returned_bytes: int = 0  # bytes still in use after the sampled graphs were dropped
    warnings: tuple[str, ...] = ()  # disturbances of the readings

    @property
    def captured_bytes(self) -> int:
        """Bytes of all captured sizes together."""
        return sum(sample.num_bytes for sample in self.samples)

    @property
    def row(self) -> LedgerRow:
        """The ledger's row: measured if every size was captured, else an estimate.

        The estimate gives an uncaptured size the bytes of the last captured size of its mode, at least 1 MiB. Its range
        starts at the captured bytes alone and ends with every uncaptured size as large as the largest captured one
        after the first (the first holds the memory that all share).
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
        """Bytes of each captured size of a mode after the first (of the first if there is no other)."""
        sizes = [sample.num_bytes for sample in self.samples if sample.mode == mode]
        return [max(num_bytes, LEAST_GRAPH_BYTES) for num_bytes in sizes[1:] or sizes]


def _graphs_row(num_bytes: int, source: RowSource, formula: str) -> LedgerRow:
    return LedgerRow("CUDA graphs", num_bytes, source, RowRole.GRAPHS, formula)


def actual_graphs_row(num_bytes: int, estimate: LedgerRow | None) -> LedgerRow:
    """Make the ledger's row of the graphs once all are captured over the real pool."""
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
    """Capture the largest sizes of every mode, keep all graphs until the last is captured, then drop them.

    Args:
        modes: the graphs to capture.
        read: reads the device's memory.
        num_captured_sizes: sizes of each mode to capture; None: all, which takes as long as the real capture.
        smallest_pool: context that holds the smallest KV cache that the model can run over.
        strict_profiling: raise if free memory grew, as in a profile.

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
