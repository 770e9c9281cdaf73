"""Captures decode steps as CUDA graphs at a ladder of batch sizes, and replays each with one launch.

A step in which every request computes one token is padded to the next captured size. It reads only buffers that never
move: token ids and logits here; positions, rows, lengths, block tables and slots in the backend. Padding has row -1,
length 0 and slot -1, so it neither writes nor reads the cache.
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from ....core.deployment.estimates import capture_sizes
from ....core.errors import InputError
from ....core.types import TokenBatch
from ...cuda.backend import CudaBackend
from ...cuda.graphs import GraphCapturer

# The model over a padded batch: token ids and positions, int64 `[num_reqs]`, to logits `[num_reqs, vocab_size]`.
DecodeForward = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def decode_capture_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Return vLLM's ladder for decode steps: 1, 2, 4, multiples of 8 below 256 and of 16 up to 512, and `max_num_seqs`
    itself if that is below.
    """
    return tuple(sorted({min(size, max_num_seqs) for size in capture_sizes(max_num_seqs)}))


def checked_capture_sizes(sizes: Sequence[int], max_num_seqs: int) -> tuple[int, ...]:
    """Return the sizes in ascending order, each once.

    Raises:
        InputError: there are none, or one that no decode step can have.
    """
    ladder = tuple(sorted(set(sizes)))
    if not ladder or ladder[0] < 1 or ladder[-1] > max_num_seqs:
        raise InputError(
            f"cudagraph_capture_sizes {list(sizes)}: give numbers of requests from 1 to max_num_seqs {max_num_seqs}, "
            "or enforce_eager to capture nothing"
        )
    return ladder


class DecodeGraphs:
    """The captured decode steps of one model on one pool.

    Attributes:
        num_replays: steps replayed so far.
    """

    def __init__(
        self, forward: DecodeForward, backend: CudaBackend, capturer: GraphCapturer, *, max_num_reqs: int
    ) -> None:
        """Start with nothing captured, for steps of up to `max_num_reqs` requests; the backend's tables must exist."""
        self.num_replays = 0
        self._forward = forward
        self._backend = backend
        self._capturer = capturer
        # By size: the function that replays the step, and its logits.
        self._steps: dict[int, tuple[Callable[[], None], torch.Tensor]] = {}
        self._token_ids = self._buffer((max_num_reqs,), torch.int64)
        self._logits: torch.Tensor | None = None

    def _buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        # Graphs may be captured in inference mode, whose tensors cannot be written outside it.
        with torch.inference_mode(False):
            return torch.zeros(shape, dtype=dtype, device=self._backend.device)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of requests of the captured steps, ascending."""
        return tuple(sorted(self._steps))

    def capture(self, size: int) -> None:
        """Capture the step of `size` requests on a batch of padding only; no request's memory is touched.

        Raises:
            InputError: part of the step waits for the device, or there is not enough memory.
        """
        nothing = np.zeros(0, dtype=np.int64)
        self._backend.slot_mapping(TokenBatch(nothing, nothing, nothing))
        try:
            if self._logits is None:  # only the model knows their width and dtype
                found = self._logits_of(size)
                self._logits = self._buffer((len(self._token_ids), found.shape[1]), found.dtype)
            logits = self._logits[:size]
            self._steps[size] = self._capturer.capture(partial(self._decode, logits)), logits
        except RuntimeError as error:  # the class of torch's own errors
            raise InputError(
                f"the decode step of {size} requests cannot be captured in a CUDA graph ({error}); set enforce_eager"
            ) from error

    def _decode(self, logits: torch.Tensor) -> None:
        logits.copy_(self._logits_of(len(logits)))

    def _logits_of(self, size: int) -> torch.Tensor:
        return self._forward(self._token_ids[:size], self._backend.inputs.first_positions[:size])

    def size_for(self, batch: TokenBatch) -> int | None:
        """Return the smallest captured size that holds a batch of single tokens; None: the batch runs eagerly."""
        num_reqs = len(batch.rows)
        if not num_reqs or batch.num_tokens != num_reqs:
            return None
        return min((size for size in self._steps if size >= num_reqs), default=None)

    def replay(self, size: int, token_ids: NDArray[np.int64]) -> torch.Tensor:
        """Run the captured step on the batch that the backend has prepared, with its slots mapped.

        Args:
            size: from `size_for`.
            token_ids: int64 `[num_reqs]`, one per request, in batch order.

        Returns:
            Logits `[num_reqs, vocab_size]` on the device, which the next replay overwrites.
        """
        given = torch.from_numpy(token_ids)
        if self._token_ids.device.type == "cuda":
            given = given.pin_memory()
        # The ids after them are from an earlier step: padding may be any token.
        self._token_ids[: len(given)].copy_(given, non_blocking=True)
        replay, logits = self._steps[size]
        replay()
        self.num_replays += 1
        return logits[: len(given)]
