"""Measures the memory of a server's start-up: baseline, weights, largest step, graphs, pool, reconciliation.

A profiler goes through its stages in that order, once. Between the profile and the allocation of the pool, core sizes
the pool: a `MemoryLedger` takes the measured rows.

    profiler = MemoryProfiler(open_cuda_device(0), StepLimits(max_num_batched_tokens=8192, max_num_seqs=256))
    profiler.take_baseline()
    model = profiler.load_weights(load)
    measured = profiler.profile(ProfilingStep(model=..., sampler=...))
    measured = profiler.estimate_graphs((GraphCaptures(mode="full", sizes=..., capture=...),), smallest_pool=...)
    available = MemoryLedger(budget=budget, non_kv_rows=measured.rows).available_bytes
    pool = profiler.allocate_pool(allocate, planned_bytes=num_blocks * bytes_per_block)
    graphs = profiler.capture_graphs(capture_all)
    report = profiler.reconcile()
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from enum import IntEnum
from typing import Any, TypeVar

import attrs

from ...core.errors import InputError, MisuseError
from ...core.memory.ledger import LedgerRow, RowRole, RowSource, measured_rows
from ...core.memory.profile import MemoryProfile, MemorySnapshot
from ...core.quantities import format_bytes
from .allocator_settings import SMALLEST_MAX_SPLIT_SIZE_MB, scoped_max_split_size
from .device import DeviceAccess
from .graph_memory import GraphCaptures, GraphMemory, actual_graphs_row, sample_graphs
from .probe import DeviceProbe
from .step import PartPeak, ProfilingStep, StepLimits, run_profiling_step

T = TypeVar("T")


class Stage(IntEnum):
    """The last stage that a profiler has finished."""

    NEW = 0
    BASELINE = 1
    LOADED = 2
    PROFILED = 3
    POOL = 4
    GRAPHS = 5
    RECONCILED = 6


@attrs.frozen(kw_only=True)
class MeasuredMemory:
    """Results of the profiling run."""

    profile: MemoryProfile  # the two readings; its peak is the highest of all parts
    peaks: tuple[PartPeak, ...]  # the peak of each part of the step
    graphs: GraphMemory | None = None  # memory of graphs; None before they are estimated, and where none are captured

    @property
    def graph_bytes(self) -> int:
        """Bytes to reserve for graphs."""
        return 0 if self.graphs is None else self.graphs.row.num_bytes

    @property
    def rows(self) -> tuple[LedgerRow, ...]:
        """The ledger's non-KV rows. The encoder's excess over the peak of the other parts has its own row."""
        rows = measured_rows(self.profile, None if self.graphs is None else self.graphs.row)
        peaks = "; ".join(f"{part.name} {part.peak_bytes:,}" for part in self.peaks)
        out: list[LedgerRow] = []
        for row in rows:
            if row.name != "peak activation":
                out.append(row)
                continue
            encoder = min(self._encoder_bytes, row.num_bytes)
            out.append(_resized(row, row.num_bytes - encoder, f"{row.formula}; peaks: {peaks}"))
            if encoder:
                out.append(
                    attrs.evolve(_resized(row, encoder, "what its peak exceeds the other parts' by"), name="encoder")
                )
        return tuple(out)

    @property
    def _encoder_bytes(self) -> int:
        others = max(part.peak_bytes for part in self.peaks if part.name != "encoder")
        return max((part.peak_bytes - others for part in self.peaks if part.name == "encoder"), default=0)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Reasons to doubt the figures."""
        if self.graphs is None:
            return self.profile.warnings
        stayed = self.graphs.not_returned_bytes
        leftover = (f"{format_bytes(stayed)} stayed taken after the sampled graphs were dropped",) if stayed else ()
        return (*self.profile.warnings, *self.graphs.warnings, *leftover)


@attrs.frozen(kw_only=True)
class Reconciliation:
    """Expected and actual memory after start-up. All rows are measured if the driver can tell this process's memory
    from others'.
    """

    rows: tuple[LedgerRow, ...]  # the non-KV rows with the graphs' actual bytes, and the pool
    # Growth of this process since the baseline that was expected: resident rows, estimated graphs, planned pool.
    expected_bytes: int
    actual_bytes: int  # its actual growth
    graph_estimate_bytes: int  # reserved for graphs
    graph_actual_bytes: int  # that they took
    pool_planned_bytes: int
    pool_actual_bytes: int  # the growth of torch's live tensors
    warnings: tuple[str, ...]  # differences between the two, each with its bytes

    @property
    def unexplained_bytes(self) -> int:
        """Growth of this process that neither the expected rows nor the graphs explain; may be negative."""
        return self.actual_bytes - self.expected_bytes - (self.graph_actual_bytes - self.graph_estimate_bytes)


class MemoryProfiler:
    """Measures one device through the stages of start-up."""

    # Set by the stages, whose order `_enter` enforces.
    _baseline: MemorySnapshot
    _last: MemorySnapshot  # the reading at the end of the stage before
    _weights_bytes: int
    _measured: MeasuredMemory
    _pool: tuple[int, int]  # planned and actual bytes

    def __init__(
        self,
        device: DeviceAccess,
        limits: StepLimits,
        *,
        attribute_process: bool = True,
        strict_profiling: bool = False,
        max_split_size_mb: int = SMALLEST_MAX_SPLIT_SIZE_MB,
    ) -> None:
        """Make a profiler that has read nothing yet.

        Args:
            device: `open_cuda_device(0)`, `HostDevice()`, or a test's script.
            limits: limits of a step's size.
            attribute_process: whether to ask the driver for the bytes of this process.
            strict_profiling: vLLM's rule, see `MemoryProfile`.
            max_split_size_mb: setting of torch's allocator while weights load and the step runs.
        """
        self.device = device
        self.limits = limits
        self.probe = DeviceProbe(device, attribute_process)
        self._strict = strict_profiling
        self._max_split_size_mb = max_split_size_mb
        self._stage = Stage.NEW
        self._graph_actual_bytes = 0

    def take_baseline(self) -> MemorySnapshot:
        """Warm up the matrix libraries, then read: the memory that they keep counts as used before the start.

        Raises:
            MisuseError: the baseline was taken before.
            InputError: the reading cannot be true.
        """
        self._enter(Stage.BASELINE, after=(Stage.NEW,))
        self.device.warm_up()
        self._baseline = self._last = self.probe.read()
        self._stage = Stage.BASELINE
        return self._baseline

    def load_weights(self, load: Callable[[], T]) -> T:
        """Load the model under small splits and measure the growth of torch's live tensors; returns the model.

        Raises:
            MisuseError: no baseline, or loaded before.
            InputError: live tensors shrank, or the reading cannot be true.
        """
        self._enter(Stage.LOADED, after=(Stage.BASELINE,))
        with scoped_max_split_size(self.device, self._max_split_size_mb):
            model = load()
        before, after = self._advance()
        self._weights_bytes = self._growth("loading", before, after)
        self._stage = Stage.LOADED
        return model

    def profile(self, step: ProfilingStep) -> MeasuredMemory:
        """Run the largest step once, under small splits and without gradients, then read the memory.

        Raises:
            MisuseError: no weights, or profiled before.
            InputError: the step lacks a part, or the reading cannot be true.
            MemoryShortfallError: strict profiling, and free memory grew.
        """
        self._enter(Stage.PROFILED, after=(Stage.LOADED,))
        step.check(self.limits)
        with scoped_max_split_size(self.device, self._max_split_size_mb), self.device.inference_mode():
            peaks = run_profiling_step(step, self.limits, self.probe, self.probe.read_as_it_is)
        _, after = self._advance()
        highest = max(after.torch_allocated_bytes, *(part.peak_bytes for part in peaks))
        self._measured = MeasuredMemory(
            profile=MemoryProfile(
                before=self._baseline,
                after=attrs.evolve(after, torch_peak_bytes=highest),
                weights_bytes=self._weights_bytes,
                strict_profiling=self._strict,
            ),
            peaks=peaks,
        )
        self._stage = Stage.PROFILED
        return self._measured

    def estimate_graphs(
        self,
        modes: tuple[GraphCaptures, ...],
        *,
        smallest_pool: Callable[[], AbstractContextManager[Any]] = nullcontext,
        num_captured_sizes: int | None = 2,
    ) -> MeasuredMemory:
        """Estimate the memory of graphs by capturing the largest sizes of every mode over the smallest pool.

        Raises:
            MisuseError: no profile yet, or the pool is already allocated.
            InputError: nothing to capture, or fewer than two sizes a mode.
        """
        self._enter(Stage.PROFILED, after=(Stage.PROFILED,))
        with self.device.inference_mode():
            graphs = sample_graphs(
                modes,
                self.probe.read,
                num_captured_sizes=num_captured_sizes,
                smallest_pool=smallest_pool,
                strict_profiling=self._strict,
            )
        self._measured = attrs.evolve(self._measured, graphs=graphs)
        self._last = self.probe.read()
        return self._measured

    def allocate_pool(self, allocate: Callable[[], T], *, planned_bytes: int) -> T:
        """Allocate the KV cache and check that live tensors grew by it; returns the result of `allocate`.

        Args:
            allocate: allocates the cache. Its result must keep the tensors alive.
            planned_bytes: bytes planned for this rank.

        Raises:
            MisuseError: no profile yet, or allocated before.
            InputError: torch's live tensors grew by less than was planned.
        """
        self._enter(Stage.POOL, after=(Stage.PROFILED,))
        pool = allocate()
        before, after = self._advance()
        actual = self._growth("allocating the pool", before, after)
        if actual < planned_bytes:
            raise InputError(
                f"the pool was planned at {format_bytes(planned_bytes)} and live tensors grew by"
                f" {format_bytes(actual)}: the allocation returned too little, or let go of it, or (on the host) has"
                " not touched it yet"
            )
        self._pool = (planned_bytes, actual)
        self._stage = Stage.POOL
        return pool

    def capture_graphs(self, capture: Callable[[], T]) -> T:
        """Capture every graph over the real pool and measure its memory; returns the result of `capture`.

        Raises:
            MisuseError: no pool yet, or captured before.
            MemoryShortfallError: strict profiling, and free memory grew.
        """
        self._enter(Stage.GRAPHS, after=(Stage.POOL,))
        with self.device.inference_mode():
            graphs = capture()
        before, after = self._advance()
        taken = MemoryProfile(before=before, after=after, weights_bytes=None, strict_profiling=self._strict)
        self._graph_actual_bytes = taken.total_consumed_bytes
        self._stage = Stage.GRAPHS
        return graphs

    def reconcile(self) -> Reconciliation:
        """Read once more and compare the growth of this process with the expected growth.

        Raises:
            MisuseError: no pool yet.
            MemoryShortfallError: strict profiling, and free memory grew.
        """
        self._enter(Stage.RECONCILED, after=(Stage.POOL, Stage.GRAPHS))
        measured, (planned, actual) = self._measured, self._pool
        _, after = self._advance()
        whole = MemoryProfile(before=self._baseline, after=after, weights_bytes=None, strict_profiling=self._strict)
        report = Reconciliation(
            rows=self._final_rows(measured, planned, actual),
            expected_bytes=measured.profile.total_consumed_bytes + measured.graph_bytes + planned,
            actual_bytes=whole.total_consumed_bytes,
            graph_estimate_bytes=measured.graph_bytes,
            graph_actual_bytes=self._graph_actual_bytes,
            pool_planned_bytes=planned,
            pool_actual_bytes=actual,
            warnings=whole.warnings,
        )
        self._stage = Stage.RECONCILED
        return attrs.evolve(report, warnings=(*report.warnings, *_differences(report)))

    # -- keeping track of stages -------------------------------------------------------------------------------------

    def _enter(self, stage: Stage, *, after: tuple[Stage, ...]) -> None:
        if self._stage not in after:
            wanted = " or ".join(earlier.name.lower() for earlier in after)
            raise MisuseError(
                f"stage {stage.name.lower()} follows {wanted}, and this profiler is at {self._stage.name.lower()};"
                " stages go in order, each once"
            )

    def _advance(self) -> tuple[MemorySnapshot, MemorySnapshot]:
        """Read the memory; return the reading of the stage before and the new one."""
        before, self._last = self._last, self.probe.read()
        return before, self._last

    def _growth(self, what: str, before: MemorySnapshot, after: MemorySnapshot) -> int:
        grown = after.torch_allocated_bytes - before.torch_allocated_bytes
        if grown < 0:
            raise InputError(
                f"{self.device.name}: {what} took live tensors from {before.torch_allocated_bytes:,} to"
                f" {after.torch_allocated_bytes:,} bytes; something that was there before was freed in it, so the"
                " difference is not what was loaded"
            )
        return grown

    def _final_rows(self, measured: MeasuredMemory, planned: int, actual: int) -> tuple[LedgerRow, ...]:
        rows = [row for row in measured.rows if row.role is not RowRole.GRAPHS]
        if self._stage is Stage.GRAPHS:
            estimate = None if measured.graphs is None else measured.graphs.row
            rows.append(actual_graphs_row(self._graph_actual_bytes, estimate))
        formula = f"growth of torch's live tensors; {planned:,} were planned"
        return (*rows, LedgerRow("KV cache blocks", actual, RowSource.MEASURED, RowRole.POOL, formula))


def _resized(row: LedgerRow, num_bytes: int, formula: str) -> LedgerRow:
    return attrs.evolve(row, num_bytes=num_bytes, low_bytes=num_bytes, high_bytes=num_bytes, formula=formula)


def _differences(report: Reconciliation) -> tuple[str, ...]:
    """Differences from what was expected, one sentence each."""
    out: list[str] = []
    graphs = report.graph_actual_bytes - report.graph_estimate_bytes
    if graphs:
        side = "more" if graphs > 0 else "less"
        out.append(
            f"graphs took {format_bytes(report.graph_actual_bytes)}, {format_bytes(abs(graphs))} {side} than the"
            f" {format_bytes(report.graph_estimate_bytes)} set aside"
        )
    if report.unexplained_bytes:
        side = "more" if report.unexplained_bytes > 0 else "less"
        out.append(f"{format_bytes(abs(report.unexplained_bytes))} {side} than the rows explain are taken")
    return tuple(out)
