"""A hash trace at another block size than its own: what its ids still say, and what they cannot.

Every id has one parent, so an id names all content up to the end of its trace block. A block of another size is named
by the id of the trace block in which it ends and by where in it, which works for any two sizes:

* smaller blocks (512 -> 16): a full trace block gives `512 / 16` of them. Nothing known is lost, but what two prompts
  share inside a trace block in which they diverge stays unknown: up to `trace_block_size - 1` tokens a request.
* larger blocks (64 -> 256): what is shared below a whole new block is lost, up to `block_size - 1` tokens a request.

A partial trace block at the end of a prompt matches the same partial block only, and so does what is cut out of it.
"""

from collections.abc import Iterator

import attrs

from ...core.errors import InputError
from .trace import Trace, TraceInfo, TraceRequest


def reblocked_ids(
    hash_ids: tuple[int, ...], input_length: int, trace_block_size: int, block_size: int, full_blocks_only: bool
) -> tuple[int, ...]:
    """Ids of the blocks of `block_size` tokens of one prompt, non-negative ints.

    As many as blocks, the last one perhaps partial; with `full_blocks_only` as many as full blocks that lie in full
    trace blocks. Even ids end in full trace blocks, odd ones in the partial trace block at the prompt's end.
    """
    num_known_tokens = len(hash_ids) * trace_block_size
    num_full_tokens = min(num_known_tokens, input_length // trace_block_size * trace_block_size)
    if block_size == trace_block_size:
        ids = [2 * (hash_id * trace_block_size + trace_block_size) for hash_id in hash_ids]
    elif trace_block_size % block_size == 0:
        ids = [
            2 * (hash_id * trace_block_size + end)
            for hash_id in hash_ids[: num_full_tokens // trace_block_size]
            for end in range(block_size, trace_block_size + 1, block_size)
        ]
    else:
        ids = []
        for end in range(block_size, num_full_tokens + 1, block_size):
            trace_block, offset = divmod(end - 1, trace_block_size)
            ids.append(2 * (hash_ids[trace_block] * trace_block_size + offset + 1))
    if full_blocks_only:
        return tuple(ids)
    if block_size == trace_block_size:
        ids = ids[: num_full_tokens // trace_block_size]
    ends = [*range((len(ids) + 1) * block_size, input_length, block_size), input_length]
    if len(ids) * block_size < input_length:
        ids.extend(_id_at_the_end(hash_ids, input_length, trace_block_size, end) for end in ends)
    return tuple(ids)


def _id_at_the_end(hash_ids: tuple[int, ...], input_length: int, trace_block_size: int, end: int) -> int:
    """The id of a block that ends after `end` tokens, behind the last block that lies in full trace blocks."""
    trace_block, offset = divmod(end - 1, trace_block_size)
    tail_tokens = input_length - trace_block * trace_block_size
    if tail_tokens >= trace_block_size:
        return 2 * (hash_ids[trace_block] * trace_block_size + offset + 1)
    partial = (hash_ids[trace_block] * trace_block_size + tail_tokens) * trace_block_size
    return 2 * (partial + offset + 1) + 1


class ReblockedTrace:
    """A `Trace` with the ids of another at another block size; everything else is the same."""

    def __init__(self, trace: Trace, block_size: int) -> None:
        """Wrap a trace. Raises `InputError` where it has no block size or `block_size` is below 1."""
        if block_size < 1:
            raise InputError(f"the block size to re-block to is {block_size}; it must be 1 token or more")
        if trace.info.trace_block_size is None:
            raise InputError(f"{trace.info.name} carries no hash ids, so there are no blocks to re-block")
        self._trace = trace
        self._own_size = trace.info.trace_block_size
        self._block_size = block_size

    @property
    def info(self) -> TraceInfo:
        """The trace's own, at the new block size."""
        info = self._trace.info
        return attrs.evolve(
            info,
            trace_block_size=self._block_size,
            trace_block_size_source=f"re-blocked from {self._own_size} ({info.trace_block_size_source})",
        )

    def __iter__(self) -> Iterator[TraceRequest]:
        """The trace's requests."""
        full_only = self._trace.info.full_blocks_only
        for request in self._trace:
            ids = request.hash_ids
            if ids is not None:
                ids = reblocked_ids(ids, request.input_length, self._own_size, self._block_size, full_only)
                request = attrs.evolve(request, hash_ids=ids)
            yield request


# A trace whose traffic is heavier or lighter than recorded.


class ChangedTrace:
    """A trace whose arrivals come `rate` times as fast, and whose outputs are `output` times as long."""

    def __init__(self, trace: Trace, rate: float = 1.0, output: float = 1.0) -> None:
        self._trace, self._rate, self._output = trace, rate, output

    @property
    def info(self) -> TraceInfo:
        """That of the trace behind it."""
        return self._trace.info

    def __iter__(self) -> Iterator[TraceRequest]:
        """The requests, changed."""
        for row in self._trace:
            output_length = max(1, round(row.output_length * self._output))
            turn = None if row.turn is None else row.turn.at_rate(self._rate)
            yield attrs.evolve(row, arrival_s=row.arrival_s / self._rate, output_length=output_length, turn=turn)
