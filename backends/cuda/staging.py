"""Sends the inputs of a step to the device in one asynchronous transfer from pinned host memory.

The first bytes are the batch, at a fixed address, so that a captured CUDA graph reads each step's batch; arrays of any
length follow: changed table entries, blocks to copy.
"""

import itertools
from collections.abc import Sequence

import attrs
import numpy as np
import torch
from numpy.typing import NDArray

from ...core.types import TokenBatch

PADDING_ROW = -1
# Arrays start at multiples of an int64.
ALIGNMENT_BYTES = 8
# The host fills one buffer while the transfer of the other may still be running.
NUM_HOST_BUFFERS = 2


@attrs.frozen(eq=False)
class BatchInputs:
    """The batch on the device, at addresses that never change. Rows behind the last request are padding."""

    rows: torch.Tensor  # int32 `[max_num_reqs]`, the row of each request in the block tables; -1 for padding
    # int32 `[max_num_reqs + 1]`, where each request's tokens start; padding requests are empty.
    query_start_loc: torch.Tensor
    first_positions: torch.Tensor  # int64 `[max_num_reqs]`, the position of each request's first token
    seq_lens: torch.Tensor  # int32 `[max_num_reqs]`, tokens of each request in the cache after the batch is written


@attrs.define(eq=False)
class _HostBuffer:
    memory: torch.Tensor
    sent: torch.cuda.Event | None
    bytes: NDArray[np.uint8] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.bytes = self.memory.numpy()


class StepStaging:
    """The staging buffers of one backend.

    Attributes:
        inputs: the batch that was sent last.
        num_transfers: how many transfers were started.
        num_bytes: bytes of all of them together.
    """

    def __init__(self, device: torch.device, max_num_reqs: int, payload_bytes: int) -> None:
        """Allocate them: on the host twice, and once on the device."""
        self.num_transfers = self.num_bytes = 0
        self._max_num_reqs = max_num_reqs
        sizes = _header_bytes(max_num_reqs)
        self._header_bytes = _aligned(sum(sizes))
        self._capacity_bytes = self._header_bytes + _aligned(payload_bytes)
        on_cuda = device.type == "cuda"
        self._host = [
            _HostBuffer(
                torch.zeros(self._capacity_bytes, dtype=torch.uint8, pin_memory=on_cuda),
                torch.cuda.Event() if on_cuda else None,
            )
            for _ in range(NUM_HOST_BUFFERS)
        ]
        self._header: NDArray[np.uint8] = np.zeros(self._header_bytes, dtype=np.uint8)
        bounds = np.cumsum([0, *sizes]).tolist()
        places = [slice(begin, end) for begin, end in itertools.pairwise(bounds)]
        self._firsts = self._header[places[0]].view(np.int64)
        self._starts, self._rows, self._lens = (self._header[place].view(np.int32) for place in places[1:])
        self._rows[:] = PADDING_ROW
        self._device = torch.zeros(self._capacity_bytes, dtype=torch.uint8, device=device)
        firsts, starts, rows, lens = (self._device[place] for place in places)
        self.inputs = BatchInputs(
            rows.view(torch.int32), starts.view(torch.int32), firsts.view(torch.int64), lens.view(torch.int32)
        )
        self.send([])

    @property
    def payload_bytes(self) -> int:
        """Bytes that one transfer has room for beside the batch."""
        return self._capacity_bytes - self._header_bytes

    def set_batch(self, batch: TokenBatch) -> None:
        """Set the batch that the next transfers send."""
        num_reqs = len(batch.rows)
        self._rows[:num_reqs] = batch.rows
        self._rows[num_reqs:] = PADDING_ROW
        np.cumsum(batch.counts, out=self._starts[1 : num_reqs + 1])
        self._starts[num_reqs + 1 :] = self._starts[num_reqs]
        self._firsts[:num_reqs] = batch.first_positions
        self._firsts[num_reqs:] = 0
        self._lens[:num_reqs] = batch.first_positions + batch.counts
        self._lens[num_reqs:] = 0

    def send(self, arrays: Sequence[NDArray[np.generic]]) -> list[torch.Tensor]:
        """Send the batch and these arrays, together at most `payload_bytes` long when aligned, in one transfer.

        Returns:
            The arrays on the device; valid until the next call (in the order of the device's work).
        """
        host = self._host[self.num_transfers % NUM_HOST_BUFFERS]
        if host.sent is not None and self.num_transfers >= NUM_HOST_BUFFERS:
            # The transfer before the last; it has finished unless the host runs two steps ahead of the device.
            host.sent.synchronize()
        host.bytes[: self._header_bytes] = self._header
        begin, places = self._header_bytes, []
        for array in arrays:
            end = begin + array.nbytes
            host.bytes[begin:end] = array.view(np.uint8)
            places.append(slice(begin, end))
            begin = _aligned(end)
        self._device[:begin].copy_(host.memory[:begin], non_blocking=True)
        if host.sent is not None:
            host.sent.record()
        self.num_transfers += 1
        self.num_bytes += begin
        return [
            self._device[place].view(torch.int32 if array.itemsize == 4 else torch.int64)
            for place, array in zip(places, arrays, strict=True)
        ]


def _header_bytes(max_num_reqs: int) -> tuple[int, int, int, int]:
    """Bytes of first_positions, query_start_loc, rows and seq_lens."""
    return 8 * max_num_reqs, 4 * (max_num_reqs + 1), 4 * max_num_reqs, 4 * max_num_reqs


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def on_device(values: NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """Copy an array to a device in its dtype, without waiting.

    On a GPU the copy from pinned memory runs after the work that is queued there; on a CPU the tensor may share the
    array's memory.
    """
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
