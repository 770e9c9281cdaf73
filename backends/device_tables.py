"""Block tables on the device, kept equal to what the events say: one transfer a step, and only of what changed."""

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import attrs
import torch
from numpy.typing import NDArray

from ..core.types import TokenBatch
from ..kernels.copy_blocks import BlockRegions
from ..kernels.kernel_set import Kernels
from .pending_copies import PendingCopies
from .step_staging import BatchInputs, StepStaging
from .table_mirror import TableMirror

# Table entries and copied blocks that one transfer has room for. More are sent in several: after a long log is
# replayed, say, or when all rows are given back at once; a step of an engine changes far fewer.
MAX_STAGED_ENTRIES = 1 << 18
# An index or a source, int64, and a block or a target, int32 or int64.
ENTRY_BYTES = 16


@attrs.frozen(eq=False)
class _Piece:
    """Part of what is sent: entries of a group's table, or a round of block copies."""

    group: int
    is_copy: bool
    arrays: tuple[NDArray[Any], NDArray[Any]]


_Transfer: TypeAlias = list[_Piece]


class DeviceTables:
    """All groups' block tables on the host and on the device, and the block copies that wait for the next step.

    Attributes:
        mirrors: the host's table of each group.
        tables: int32 `[max_num_reqs, width]` a group, on the device.
        copies: blocks to be copied before the next step.
        regions: where each group's blocks lie in memory; None for a group without layers on this rank.
    """

    def __init__(
        self, device: torch.device, max_num_reqs: int, widths: Sequence[int], regions: Sequence[BlockRegions | None]
    ) -> None:
        """Empty tables.

        Args:
            device: where the tables are.
            max_num_reqs: rows of every table.
            widths: columns of each group's table.
            regions: where each group's blocks lie in memory; None for a group without layers on this rank.
        """
        self.mirrors = [TableMirror(max_num_reqs, width) for width in widths]
        self.tables = [torch.zeros((max_num_reqs, width), dtype=torch.int32, device=device) for width in widths]
        self.copies = PendingCopies()
        self.regions = list(regions)
        self._max_entries = min(MAX_STAGED_ENTRIES, max(max_num_reqs * sum(widths), 1))
        # Arrays are aligned, so each piece may take a few bytes more than its entries.
        room_bytes = ENTRY_BYTES * (self._max_entries + 2 * len(widths))
        self._staging = StepStaging(device, max_num_reqs, room_bytes)

    @property
    def inputs(self) -> BatchInputs:
        """The last batch, on the device."""
        return self._staging.inputs

    @property
    def num_transfers(self) -> int:
        """Transfers to the device so far."""
        return self._staging.num_transfers

    @property
    def num_transfer_bytes(self) -> int:
        """Bytes of all of them together."""
        return self._staging.num_bytes

    @property
    def has_changes(self) -> bool:
        """Whether the device lags behind the events."""
        return bool(self.copies) or any(mirror.has_changes for mirror in self.mirrors)

    def upload(self, batch: TokenBatch | None, kernels: Kernels) -> None:
        """Start bringing the device up to date, and to this batch; never waits for it.

        Block copies are started here, so they come before whatever the step writes.
        """
        if batch is not None:
            self._staging.set_batch(batch)
        for transfer in self._transfers():
            arrays = [array for piece in transfer for array in piece.arrays]
            sent = iter(self._staging.send(arrays))
            for piece in transfer:
                self._apply(piece, next(sent), next(sent), kernels)

    def _apply(self, piece: _Piece, first: torch.Tensor, second: torch.Tensor, kernels: Kernels) -> None:
        if not piece.is_copy:
            self.tables[piece.group].view(-1).index_copy_(0, first, second)
            return
        regions = self.regions[piece.group]
        if regions is not None:
            kernels.copy_blocks(caches=regions, sources=first, targets=second)

    def _transfers(self) -> Iterator[_Transfer]:
        """Everything that waits, in order, in as few transfers as there is room in; at least one, for the batch."""
        transfer: _Transfer = []
        free = self._max_entries
        for piece in self._pieces():
            start, length = 0, len(piece.arrays[0])
            while start < length:
                if not free:
                    yield transfer
                    transfer, free = [], self._max_entries
                count = min(free, length - start)
                arrays = (piece.arrays[0][start : start + count], piece.arrays[1][start : start + count])
                transfer.append(attrs.evolve(piece, arrays=arrays))
                start, free = start + count, free - count
        yield transfer

    def _pieces(self) -> Iterator[_Piece]:
        for group, mirror in enumerate(self.mirrors):
            if mirror.has_changes:
                changes = mirror.take_changes()
                yield _Piece(group, False, (changes.indices, changes.blocks))
        for round_ in self.copies.take():
            yield _Piece(round_.group, True, (round_.sources, round_.targets))
