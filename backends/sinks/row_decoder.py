"""Rows into events: what `RowEncoder` wrote, exactly."""

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import pyarrow as pa

from ...core.errors import CorruptLedgerError
from ...core.events import (
    BlockCopied,
    BlocksAllocated,
    BlocksCached,
    BlocksFreed,
    BlocksShared,
    BlocksUncached,
    CacheReset,
    Commit,
    Event,
    FreeReason,
    PoolCreated,
    PrefixAdopted,
    RowsAssigned,
    RowsReleased,
    TokensPlaced,
)
from ...core.types import StepLoad
from .log_keys import decode_keys
from .log_rows import (
    LIST_COLUMNS,
    LoggedCommit,
    LoggedNote,
    Note,
    Record,
    RequestArrived,
    RequestEnded,
    RunEnded,
    StepComputed,
    pool_from_json,
)

_KEY_COLUMNS = ("keys", "parents")
_REASONS = {reason.value: reason for reason in FreeReason}
# A row's entry of a list column, by the column's name.
_Entries: TypeAlias = Callable[[str], tuple[Any, ...]]


class RowDecoder:
    """Reads one record batch row by row. Flat columns become Python values once, rows are slices of them."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        self._flat: dict[str, tuple[Any, ...]] = {}
        self._ends: dict[str, list[int]] = {}
        for name in LIST_COLUMNS:
            column = batch.column(name)
            offsets = column.offsets.to_pylist()
            values = column.values.to_pylist()
            self._flat[name] = decode_keys(values) if name in _KEY_COLUMNS else tuple(values)
            self._ends[name] = offsets
        self._scalars = {
            name: batch.column(name).to_pylist()
            for name in ("commit", "time_ns", "event", "group", "reason", "arrival_s", "detail")
        }
        self._row = 0

    def rows(self) -> Iterator[tuple[int, int | None, Event | Note | None]]:
        """(commit, time, what the row says) of every row; None for the row of a commit without events.

        Raises:
            CorruptLedgerError: an event that this version does not know.
        """
        scalars = self._scalars
        for row, (commit, time_ns, name) in enumerate(
            zip(scalars["commit"], scalars["time_ns"], scalars["event"], strict=True)
        ):
            self._row = row
            if name is None:
                yield commit, time_ns, None
                continue
            decode = _DECODERS.get(name)
            if decode is None:
                raise CorruptLedgerError(f"commit {commit} holds {name!r}, which this kvledger does not know")
            yield commit, time_ns, decode(self, self.entries)

    def entries(self, name: str) -> tuple[Any, ...]:
        """The current row's entries of one list column."""
        ends = self._ends[name]
        return self._flat[name][ends[self._row] : ends[self._row + 1]]

    def scalar(self, name: str) -> Any:
        """The current row's value of one scalar column."""
        return self._scalars[name][self._row]


def records(batches: Iterable[pa.RecordBatch]) -> Iterator[Record]:
    """Commits and notes from batches in order; a commit is whole within a batch."""
    for batch in batches:
        sequence, when = -1, None
        events: list[Event] = []
        for commit, time_ns, said in RowDecoder(batch).rows():
            if commit != sequence or isinstance(said, Note):
                if sequence >= 0:
                    yield LoggedCommit(Commit(sequence, tuple(events)), when)
                sequence, when, events = -1, None, []
            if isinstance(said, Note):
                yield LoggedNote(said, time_ns, commit)
                continue
            sequence, when = commit, time_ns
            if said is not None:
                events.append(said)
        if sequence >= 0:
            yield LoggedCommit(Commit(sequence, tuple(events)), when)


def _pool_created(row: RowDecoder, of: _Entries) -> Event:
    return pool_from_json(row.scalar("detail"))


def _rows_assigned(row: RowDecoder, of: _Entries) -> Event:
    return RowsAssigned(of("requests"), of("rows"))


def _rows_released(row: RowDecoder, of: _Entries) -> Event:
    return RowsReleased(of("requests"), of("rows"))


def _prefix_adopted(row: RowDecoder, of: _Entries) -> Event:
    (adopting,) = of("rows")
    return PrefixAdopted(row.scalar("group"), adopting, of("blocks"))


def _blocks_allocated(row: RowDecoder, of: _Entries) -> Event:
    return BlocksAllocated(row.scalar("group"), of("rows"), of("counts"), of("blocks"), of("keys"), of("groups"))


def _blocks_cached(row: RowDecoder, of: _Entries) -> Event:
    return BlocksCached(
        row.scalar("group"),
        of("rows"),
        of("starts"),
        of("stops"),
        of("counts"),
        of("indices"),
        of("blocks"),
        of("keys"),
        of("parents"),
    )


def _tokens_placed(row: RowDecoder, of: _Entries) -> Event:
    return TokensPlaced(of("rows"), of("first_positions"), of("counts"))


def _blocks_shared(row: RowDecoder, of: _Entries) -> Event:
    parent, child = of("rows")
    return BlocksShared(row.scalar("group"), parent, child, of("blocks"))


def _block_copied(row: RowDecoder, of: _Entries) -> Event:
    (writer,), (index,), (source, target) = of("rows"), of("indices"), of("blocks")
    (lost_key,), (lost_group,) = of("keys"), of("groups")
    return BlockCopied(row.scalar("group"), writer, index, source, target, lost_key, lost_group)


def _blocks_freed(row: RowDecoder, of: _Entries) -> Event:
    reason = _REASONS[row.scalar("reason")]
    return BlocksFreed(reason, of("groups"), of("rows"), of("counts"), of("blocks"), of("indices"))


def _blocks_uncached(row: RowDecoder, of: _Entries) -> Event:
    return BlocksUncached(of("blocks"), of("keys"), of("groups"))


def _cache_reset(row: RowDecoder, of: _Entries) -> Event:
    return CacheReset()


def _request_arrived(row: RowDecoder, of: _Entries) -> Note:
    num_prompt_tokens, *outputs = of("counts")
    (request_id,) = of("requests")
    return RequestArrived(
        request_id,
        row.scalar("arrival_s"),
        num_prompt_tokens,
        outputs[0] if outputs else None,
        of("keys"),
        json.loads(row.scalar("detail") or "{}"),
    )


def _request_ended(row: RowDecoder, of: _Entries) -> Note:
    (request_id,), (num_output_tokens,) = of("requests"), of("counts")
    return RequestEnded(request_id, row.scalar("reason"), num_output_tokens, of("keys"))


def _step_computed(row: RowDecoder, of: _Entries) -> Note:
    nanoseconds, *counts = of("counts")
    num_figures = len(StepLoad._fields)
    checksum = counts[num_figures:]
    return StepComputed(nanoseconds, StepLoad(*counts[:num_figures]), of("rows"), checksum[0] if checksum else None)


def _run_ended(row: RowDecoder, of: _Entries) -> Note:
    return RunEnded(json.loads(row.scalar("detail")))


_DECODERS: dict[str, Callable[[RowDecoder, _Entries], Event | Note]] = {
    PoolCreated.__name__: _pool_created,
    RowsAssigned.__name__: _rows_assigned,
    RowsReleased.__name__: _rows_released,
    PrefixAdopted.__name__: _prefix_adopted,
    BlocksAllocated.__name__: _blocks_allocated,
    BlocksCached.__name__: _blocks_cached,
    TokensPlaced.__name__: _tokens_placed,
    BlocksShared.__name__: _blocks_shared,
    BlockCopied.__name__: _block_copied,
    BlocksFreed.__name__: _blocks_freed,
    BlocksUncached.__name__: _blocks_uncached,
    CacheReset.__name__: _cache_reset,
    RequestArrived.__name__: _request_arrived,
    RequestEnded.__name__: _request_ended,
    StepComputed.__name__: _step_computed,
    RunEnded.__name__: _run_ended,
}
