"""The memory ledger of a device: rows with a name, bytes and a source, which add up to the device's total.

total -> requested -> weights, non-torch, sampler and workspace, encoder, activation peak, CUDA graphs -> available
for the KV cache -> blocks -> remainder. A row is *measured* (from a profile), *given* (by the user) or an *estimate*
(by a formula that the row quotes). Rules: golden/memory.jsonl, field reports A11 to A15.
"""

import math
from enum import StrEnum

import attrs

from ..errors import InputError
from ..quantities import MIB
from .budget import BudgetSemantics, check_utilization, requested_bytes
from .profile import MemoryProfile

SUGGESTION_MARGIN_BYTES = 150 * MIB  # what vLLM keeps back from the size that it suggests


class RowSource(StrEnum):
    """Where a row's bytes come from."""

    MEASURED = "measured"
    GIVEN = "given"
    ESTIMATE = "estimate"
    DERIVED = "derived"  # arithmetic on the other rows


class RowRole(StrEnum):
    """How long a row's bytes are needed; budget semantics differ in which roles they count."""

    RESIDENT = "resident"  # from loading to the end: weights, libraries, workspaces
    TRANSIENT = "transient"  # only inside a step: activations, the encoder's too
    GRAPHS = "graphs"  # CUDA graphs, captured after the pool has been sized
    BUDGET = "budget"  # not this engine's: left outside the request, or held for it by another process
    POOL = "pool"  # the KV cache and what is left of it


@attrs.frozen
class LedgerRow:
    """One line of the ledger."""

    name: str  # what the bytes are for
    num_bytes: int  # on one device; negative only if other processes gave memory back
    source: RowSource  # measured, given, estimate or derived
    role: RowRole  # how long the bytes are needed
    formula: str  # how the bytes are computed, with the numbers substituted
    # The range of an estimate; equal to `num_bytes` for every other source.
    low_bytes: int = attrs.field(default=attrs.Factory(lambda self: self.num_bytes, takes_self=True))
    high_bytes: int = attrs.field(default=attrs.Factory(lambda self: self.num_bytes, takes_self=True))

    def __attrs_post_init__(self) -> None:
        if not self.low_bytes <= self.num_bytes <= self.high_bytes:
            raise InputError(
                f"ledger row {self.name!r}: {self.num_bytes:,} bytes lie outside the row's own range"
                f" {self.low_bytes:,} to {self.high_bytes:,}"
            )


def given_row(name: str, num_bytes: int, role: RowRole) -> LedgerRow:
    """Build a row whose bytes the user gave.

    Raises:
        InputError: negative.
    """
    if num_bytes < 0:
        raise InputError(f"{name}: {num_bytes} bytes; give 0 or more")
    return LedgerRow(name, num_bytes, RowSource.GIVEN, role, "as given")


def measured_rows(
    profile: MemoryProfile, cudagraph_row: LedgerRow | None, weights_row: LedgerRow | None = None
) -> tuple[LedgerRow, ...]:
    """Build the rows of one profile; those before the activation peak add up to `profile.total_consumed_bytes`.

    Negative differences are clamped to 0 (a pluggable allocator may report negative reserved bytes). What the clamps
    and other processes' memory leave over gets a row of its own, so that the rows still add up.

    Args:
        profile: two readings.
        cudagraph_row: the graph memory, measured or estimated; None: none is reserved.
        weights_row: the weights, if the profile did not measure them.

    Raises:
        InputError: neither the profile nor `weights_row` tells what the weights take.
    """
    source = RowSource.MEASURED if profile.strict_profiling or profile.is_attributed else RowSource.ESTIMATE
    if profile.weights_bytes is not None:
        measured = profile.weights_bytes
        weights_row = LedgerRow("weights", measured, RowSource.MEASURED, RowRole.RESIDENT, "measured around loading")
    if weights_row is None:
        raise InputError("the profile did not measure the weights; give them as a row")
    consumed, weights = profile.total_consumed_bytes, weights_row.num_bytes
    non_torch = max(consumed - max(profile.torch_increase_bytes, weights), 0)
    formula = f"consumed {consumed:,} - held by torch {profile.torch_increase_bytes:,}, at least 0"
    rows = [weights_row, LedgerRow("non-torch", non_torch, source, RowRole.RESIDENT, formula)]
    other = consumed - weights - non_torch
    if other:
        name = "sampler and workspace" if other > 0 else "freed by other processes"
        formula = f"consumed {consumed:,} - weights {weights:,} - non-torch {non_torch:,}"
        rows.append(LedgerRow(name, other, source, RowRole.RESIDENT, formula))
    peak, kept = profile.after.torch_peak_bytes, profile.after.torch_allocated_bytes
    formula = f"torch peak {peak:,} - torch allocated after the step {kept:,}, at least 0"
    headroom = profile.transient_headroom_bytes
    rows.append(LedgerRow("peak activation", headroom, RowSource.MEASURED, RowRole.TRANSIENT, formula))
    return (*rows, cudagraph_row) if cudagraph_row is not None else tuple(rows)


@attrs.frozen(kw_only=True)
class MemoryBudget:
    """What one engine may use of one device. Total and free bytes are those before this engine loaded anything."""

    total_bytes: int
    free_bytes: int
    # `gpu_memory_utilization`, or the option of another engine that `semantics` names.
    fraction: float
    semantics: BudgetSemantics = BudgetSemantics.OF_TOTAL  # what the fraction is a fraction of
    externally_held_bytes: int = 0  # weights that another process holds for this engine on the same device

    def __attrs_post_init__(self) -> None:
        check_utilization(self.fraction)

    @property
    def requested_bytes(self) -> int:
        """`ceil(total * fraction)` less what is held externally; of what is free under `of_free`."""
        if self.semantics is BudgetSemantics.OF_FREE:
            return self.free_bytes
        return requested_bytes(self.total_bytes, self.fraction) - self.externally_held_bytes

    def available_for_kv_bytes(self, rows: tuple[LedgerRow, ...]) -> int:
        """Bytes that the rows leave for the KV cache; may be negative."""
        if self.semantics is BudgetSemantics.OF_FREE:
            return math.floor((self.free_bytes - sum_bytes(rows)) * self.fraction)
        if self.semantics is BudgetSemantics.STATIC_FRACTION:
            return self.requested_bytes - sum_bytes(rows, RowRole.RESIDENT)
        return self.requested_bytes - sum_bytes(rows)

    def formula(self, rows: tuple[LedgerRow, ...]) -> str:
        """How `available_for_kv_bytes` is computed, with the numbers substituted."""
        if self.semantics is BudgetSemantics.OF_FREE:
            return f"floor((free {self.free_bytes:,} - everything else {sum_bytes(rows):,}) x {self.fraction:g})"
        held = f" - held externally {self.externally_held_bytes:,}" if self.externally_held_bytes else ""
        requested = f"ceil(total {self.total_bytes:,} x {self.fraction:g}){held}"
        if self.semantics is BudgetSemantics.STATIC_FRACTION:
            resident = sum_bytes(rows, RowRole.RESIDENT)
            return f"{requested} - resident {resident:,} (activations and graphs live outside)"
        return f"{requested} - everything else {sum_bytes(rows):,}"


def sum_bytes(rows: tuple[LedgerRow, ...], role: RowRole | None = None) -> int:
    """Sum the bytes of all rows, or of the rows of one role."""
    return sum(row.num_bytes for row in rows if role is None or row.role is role)


@attrs.frozen(kw_only=True)
class KVBytesSuggestion:
    """Two values of `kv_cache_memory_bytes`: up to the request, and up to all that is free on the device."""

    to_requested_limit_bytes: int
    to_gpu_limit_bytes: int


@attrs.frozen(kw_only=True)
class MemoryLedger:
    """The memory account of one device (one rank).

    Attributes:
        budget: what this engine may use.
        non_kv_rows: everything that this engine needs beside the pool.
        kv_cache_memory_bytes: the pinned size of the pool, which replaces the utilization; None: not pinned.
        frontend_reservation_bytes: taken off the pool for multimodal inputs passed between processes on the device.
    """

    budget: MemoryBudget
    non_kv_rows: tuple[LedgerRow, ...] = attrs.field(converter=tuple)
    kv_cache_memory_bytes: int | None = None
    frontend_reservation_bytes: int = 0

    @property
    def non_kv_bytes(self) -> int:
        """Bytes of everything that this engine needs beside the pool."""
        return sum_bytes(self.non_kv_rows)

    @property
    def available_bytes(self) -> int:
        """Bytes that the KV cache may take; may be negative."""
        if self.kv_cache_memory_bytes is not None:
            return self.kv_cache_memory_bytes - self.frontend_reservation_bytes
        return self.budget.available_for_kv_bytes(self.non_kv_rows) - self.frontend_reservation_bytes

    @property
    def available_range_bytes(self) -> tuple[int, int]:
        """Smallest and largest `available_bytes` that the ranges of the estimated rows allow."""
        worst = tuple(attrs.evolve(row, num_bytes=row.high_bytes) for row in self.non_kv_rows)
        best = tuple(attrs.evolve(row, num_bytes=row.low_bytes) for row in self.non_kv_rows)
        low, high = (attrs.evolve(self, non_kv_rows=rows).available_bytes for rows in (worst, best))
        return low, high

    def suggested_by_vllm(self, graph_bytes: int) -> KVBytesSuggestion:
        """The pool sizes that vLLM suggests after start-up: limit - everything else - *actual* graphs - 150 MiB.

        The graph memory counts twice if its estimate was reserved, since that is part of everything else. Below 0
        where nothing is left.
        Source: golden/memory.jsonl, `available_memory`.
        """
        used = self.non_kv_bytes + graph_bytes + SUGGESTION_MARGIN_BYTES
        return KVBytesSuggestion(
            to_requested_limit_bytes=self.budget.requested_bytes - used,
            to_gpu_limit_bytes=self.budget.free_bytes - used,
        )

    def row(self, name: str) -> LedgerRow:
        """Return the row with this name.

        Raises:
            InputError: there is none.
        """
        for row in self.non_kv_rows:
            if row.name == name:
                return row
        raise InputError(f"the ledger has no row {name!r}; it has {', '.join(row.name for row in self.non_kv_rows)}")

    def rows(self, pool_bytes: int) -> tuple[LedgerRow, ...]:
        """List every row of the device with a pool of `pool_bytes`; the rows add up to the device's total."""
        others = self.non_kv_rows
        if self.frontend_reservation_bytes:
            others = (*others, given_row("frontend reservation", self.frontend_reservation_bytes, RowRole.RESIDENT))
        if self.budget.externally_held_bytes:
            held = given_row("weights held externally", self.budget.externally_held_bytes, RowRole.BUDGET)
            others = (held, *others)
        taken = max(self.budget.total_bytes - self.budget.free_bytes - self.budget.externally_held_bytes, 0)
        left = self.budget.total_bytes - sum_bytes(others) - pool_bytes - taken
        out = [*others, _derived("KV cache blocks", pool_bytes, RowRole.POOL, "num_gpu_blocks x bytes per block")]
        # The budget may count on memory that others hold, and a pinned pool need not fit into free memory at all.
        remainder = self.available_bytes - pool_bytes
        formula = f"available {self.available_bytes:,} - blocks {pool_bytes:,}"
        if left < remainder:
            remainder, formula = left, f"{formula}, of which so much is free"
        if remainder > 0:
            out.append(_derived("remainder", remainder, RowRole.POOL, formula))
            left -= remainder
        if taken:
            out.append(_derived("in use before start", taken, RowRole.BUDGET, "total - free"))
        name = "outside the budget" if left >= 0 else "missing"
        return (*out, _derived(name, left, RowRole.BUDGET, "total - all rows above"))


def _derived(name: str, num_bytes: int, role: RowRole, formula: str) -> LedgerRow:
    return LedgerRow(name, num_bytes, RowSource.DERIVED, role, formula)
