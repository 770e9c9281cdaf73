"""Where every byte of a device goes: rows with a name, bytes and a source, which add up to the device's total.

total -> requested -> weights, non-torch, sampler and workspace, encoder, activation peak, CUDA graphs -> available
for the KV cache -> blocks -> remainder. A row is *measured* (from a profile), *given* (by the user) or an *estimate*
(by a formula that stands in it). Rules: golden/memory.jsonl, field reports A11 to A15.
"""

import math
from enum import StrEnum

import attrs

from ..errors import InputError
from ..quantities import format_bytes
from .budget import BudgetSemantics, check_utilization, requested_bytes
from .profile import MemoryProfile


class RowSource(StrEnum):
    """Where a row's bytes come from."""

    MEASURED = "measured"
    GIVEN = "given"
    ESTIMATE = "estimate"
    DERIVED = "derived"  # arithmetic on the other rows


class RowRole(StrEnum):
    """How long a row's bytes are needed; budget semantics differ in which of these they count."""

    RESIDENT = "resident"  # from loading to the end: weights, libraries, workspaces
    TRANSIENT = "transient"  # only inside a step: activations, the encoder's too
    GRAPHS = "graphs"  # CUDA graphs, captured after the pool has been sized
    BUDGET = "budget"  # not this engine's: left outside the request, or held for it by somebody else
    POOL = "pool"  # the KV cache and what is left of it


@attrs.frozen(kw_only=True)
class LedgerRow:
    """One line of the ledger.

    Attributes:
        name: what the bytes are for.
        num_bytes: how many, on one device. Negative only where other processes gave memory back.
        source: measured, given, estimate or derived.
        role: how long they are needed.
        formula: how they come about, with the numbers substituted.
        low_bytes, high_bytes: the range of an estimate; equal to `num_bytes` for every other source.
    """

    name: str
    num_bytes: int
    source: RowSource
    role: RowRole
    formula: str
    low_bytes: int = attrs.field(default=attrs.Factory(lambda self: self.num_bytes, takes_self=True))
    high_bytes: int = attrs.field(default=attrs.Factory(lambda self: self.num_bytes, takes_self=True))

    def __attrs_post_init__(self) -> None:
        if not self.low_bytes <= self.num_bytes <= self.high_bytes:
            raise InputError(
                f"ledger row {self.name!r}: {self.num_bytes:,} bytes lie outside the row's own range"
                f" {self.low_bytes:,} to {self.high_bytes:,}"
            )


def given_row(name: str, num_bytes: int, role: RowRole) -> LedgerRow:
    """A row whose bytes the user gave.

    Raises:
        InputError: negative.
    """
    if num_bytes < 0:
        raise InputError(f"{name}: {num_bytes} bytes; give 0 or more")
    return LedgerRow(name=name, num_bytes=num_bytes, source=RowSource.GIVEN, role=role, formula="as given")


def measured_rows(
    profile: MemoryProfile, cudagraph_row: LedgerRow | None, weights_row: LedgerRow | None = None
) -> tuple[LedgerRow, ...]:
    """The rows of one profile; those before the transient headroom add up to `profile.total_consumed_bytes`.

    Negative differences are clamped to 0 (a pluggable allocator may report negative reserved bytes); what the clamps
    and a neighbour's memory leave over is a row of its own, so that the rows still tie out.

    Args:
        profile: two readings.
        cudagraph_row: the graph memory, measured or estimated; None: none is reserved.
        weights_row: weights known from elsewhere, where the profile did not measure them.

    Raises:
        InputError: neither the profile nor `weights_row` says what the weights take.
    """
    source = RowSource.MEASURED if profile.strict_profiling or profile.is_attributed else RowSource.ESTIMATE
    if profile.weights_bytes is not None:
        weights_row = LedgerRow(
            name="weights",
            num_bytes=profile.weights_bytes,
            source=RowSource.MEASURED,
            role=RowRole.RESIDENT,
            formula="measured around loading",
        )
    if weights_row is None:
        raise InputError("the profile did not measure the weights; give them as a row")
    consumed = profile.total_consumed_bytes
    non_torch = max(consumed - max(profile.torch_increase_bytes, weights_row.num_bytes), 0)
    other = consumed - weights_row.num_bytes - non_torch
    rows = [
        weights_row,
        LedgerRow(
            name="non-torch",
            num_bytes=non_torch,
            source=source,
            role=RowRole.RESIDENT,
            formula=f"consumed {consumed:,} - held by torch {profile.torch_increase_bytes:,}, at least 0",
        ),
    ]
    if other:
        name = "sampler and workspace" if other > 0 else "freed by other processes"
        rows.append(
            LedgerRow(
                name=name,
                num_bytes=other,
                source=source,
                role=RowRole.RESIDENT,
                formula=f"consumed {consumed:,} - weights {weights_row.num_bytes:,} - non-torch {non_torch:,}",
            )
        )
    peak, kept = profile.after.torch_peak_bytes, profile.after.torch_allocated_bytes
    rows.append(
        LedgerRow(
            name="peak activation",
            num_bytes=profile.transient_headroom_bytes,
            source=RowSource.MEASURED,
            role=RowRole.TRANSIENT,
            formula=f"torch peak {peak:,} - torch allocated after the step {kept:,}, at least 0",
        )
    )
    return (*rows, cudagraph_row) if cudagraph_row is not None else tuple(rows)


@attrs.frozen(kw_only=True)
class MemoryBudget:
    """What one engine may use of one device.

    Attributes:
        total_bytes, free_bytes: of the device, before this engine loaded anything.
        fraction: `--gpu-memory-utilization` or its twin.
        semantics: what the fraction is a fraction of.
        externally_held_bytes: weights that somebody else holds for this engine on the same device.
    """

    total_bytes: int
    free_bytes: int
    fraction: float
    semantics: BudgetSemantics = BudgetSemantics.OF_TOTAL
    externally_held_bytes: int = 0

    def __attrs_post_init__(self) -> None:
        check_utilization(self.fraction)

    @property
    def requested_bytes(self) -> int:
        """`ceil(total * fraction)` less what is held externally; of what is free under `of_free`."""
        if self.semantics is BudgetSemantics.OF_FREE:
            return self.free_bytes
        return requested_bytes(self.total_bytes, self.fraction) - self.externally_held_bytes

    def available_for_kv_bytes(self, rows: tuple[LedgerRow, ...]) -> int:
        """What the rows leave for the KV cache; may be negative."""
        if self.semantics is BudgetSemantics.OF_FREE:
            return math.floor((self.free_bytes - sum_bytes(rows)) * self.fraction)
        if self.semantics is BudgetSemantics.STATIC_FRACTION:
            return self.requested_bytes - sum_bytes(rows, RowRole.RESIDENT)
        return self.requested_bytes - sum_bytes(rows)

    def formula(self, rows: tuple[LedgerRow, ...]) -> str:
        """How `available_for_kv_bytes` comes about, with the numbers substituted."""
        if self.semantics is BudgetSemantics.OF_FREE:
            return f"floor((free {self.free_bytes:,} - everything else {sum_bytes(rows):,}) x {self.fraction:g})"
        held = f" - held externally {self.externally_held_bytes:,}" if self.externally_held_bytes else ""
        requested = f"ceil(total {self.total_bytes:,} x {self.fraction:g}){held}"
        if self.semantics is BudgetSemantics.STATIC_FRACTION:
            resident = sum_bytes(rows, RowRole.RESIDENT)
            return f"{requested} - resident {resident:,} (activations and graphs live outside)"
        return f"{requested} - everything else {sum_bytes(rows):,}"


def sum_bytes(rows: tuple[LedgerRow, ...], role: RowRole | None = None) -> int:
    """Bytes of all rows, or of those of one role."""
    return sum(row.num_bytes for row in rows if role is None or row.role is role)


@attrs.frozen(kw_only=True)
class MemoryLedger:
    """The account of one device (one rank).

    Attributes:
        budget: what may be used.
        non_kv_rows: everything this engine needs beside the pool.
        kv_cache_memory_bytes: the pool's size where it was pinned; utilization is ignored then.
        frontend_reservation_bytes: taken off the pool for multimodal inputs passed between processes on the device.
    """

    budget: MemoryBudget
    non_kv_rows: tuple[LedgerRow, ...] = attrs.field(converter=tuple)
    kv_cache_memory_bytes: int | None = None
    frontend_reservation_bytes: int = 0

    @property
    def non_kv_bytes(self) -> int:
        """Everything this engine needs beside the pool."""
        return sum_bytes(self.non_kv_rows)

    @property
    def available_bytes(self) -> int:
        """What the KV cache may take; may be negative."""
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

    def row(self, name: str) -> LedgerRow:
        """The row of that name.

        Raises:
            InputError: there is none.
        """
        for row in self.non_kv_rows:
            if row.name == name:
                return row
        raise InputError(f"the ledger has no row {name!r}; it has {', '.join(row.name for row in self.non_kv_rows)}")

    def rows(self, pool_bytes: int) -> tuple[LedgerRow, ...]:
        """Every row of the device with a pool of `pool_bytes`; they add up to the device's total."""
        others = self.non_kv_rows
        if self.frontend_reservation_bytes:
            others = (*others, given_row("frontend reservation", self.frontend_reservation_bytes, RowRole.RESIDENT))
        if self.budget.externally_held_bytes:
            held = given_row("weights held externally", self.budget.externally_held_bytes, RowRole.BUDGET)
            others = (held, *others)
        taken = max(self.budget.total_bytes - self.budget.free_bytes - self.budget.externally_held_bytes, 0)
        left = self.budget.total_bytes - sum_bytes(others) - pool_bytes - taken
        remainder = self._remainder_rows(pool_bytes, left)
        return (
            *others,
            _derived("KV cache blocks", pool_bytes, RowRole.POOL, "num_gpu_blocks x bytes per block"),
            *remainder,
            *_unused_rows(taken, left - sum_bytes(remainder)),
        )

    def _remainder_rows(self, pool_bytes: int, left_bytes: int) -> tuple[LedgerRow, ...]:
        """What the budget leaves beside the pool, as far as it is there: a budget may count on memory that others hold,
        and where the pool's size is given nobody has checked that it is free.
        """
        remainder = self.available_bytes - pool_bytes
        formula = f"available {self.available_bytes:,} - blocks {pool_bytes:,}"
        if left_bytes < remainder:
            remainder, formula = left_bytes, f"{formula}, of which so much is free"
        return (_derived("remainder", remainder, RowRole.POOL, formula),) if remainder > 0 else ()


def _unused_rows(taken_bytes: int, spare_bytes: int) -> tuple[LedgerRow, ...]:
    name = "outside the budget" if spare_bytes >= 0 else "missing"
    spare = _derived(name, spare_bytes, RowRole.BUDGET, "total - all rows above")
    if not taken_bytes:
        return (spare,)
    return _derived("in use before start", taken_bytes, RowRole.BUDGET, "total - free"), spare


def _derived(name: str, num_bytes: int, role: RowRole, formula: str) -> LedgerRow:
    return LedgerRow(name=name, num_bytes=num_bytes, source=RowSource.DERIVED, role=role, formula=formula)


def describe_rows(rows: tuple[LedgerRow, ...]) -> str:
    """`weights 14.96 GiB (...) + non-torch ...`: the rows in one line of an error message."""
    return " + ".join(f"{row.name} {format_bytes(row.num_bytes)}" for row in rows)
