"""Traces made from other traces: another block size, another rate or output length, several samples per request."""

from collections.abc import Iterator, Sequence

import attrs

from ...core.errors import InputError
from .trace import Trace, TraceInfo, TraceRequest, Turn

MOST_SAMPLES = 1_024
# Block size for prompts without ids, so that their own samples find each other's blocks.
SAMPLE_BLOCK_SIZE = 16


def names_in_full_blocks(hash_ids: Sequence[int], trace_block_size: int, block_size: int) -> list[int]:
    """A number for every whole block of `block_size` tokens in these full trace blocks.

    A block is named by the id of the trace block in which it ends, and by where in it.
    """
    names: list[int] = []
    if trace_block_size % block_size == 0:
        for hash_id in hash_ids:
            start = hash_id * trace_block_size
            names.extend(range(start + block_size, start + trace_block_size + 1, block_size))
        return names
    for end in range(block_size, len(hash_ids) * trace_block_size + 1, block_size):
        trace_block, offset = divmod(end - 1, trace_block_size)
        names.append(hash_ids[trace_block] * trace_block_size + offset + 1)
    return names


def reblocked_ids(
    hash_ids: tuple[int, ...], input_length: int, trace_block_size: int, block_size: int, full_blocks_only: bool
) -> tuple[int, ...]:
    """Ids of one prompt's blocks of `block_size` tokens, non-negative ints.

    Returns one id per block, the last one perhaps partial; with `full_blocks_only`, one per full block that lies in
    full trace blocks. Even ids end in full trace blocks, odd ids in the partial trace block at the prompt's end.
    """
    full_ids = hash_ids[: input_length // trace_block_size]
    ids = [2 * name for name in names_in_full_blocks(full_ids, trace_block_size, block_size)]
    if full_blocks_only:
        return tuple(ids)
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
    """A `Trace` with the ids of another trace at another block size; everything else is the same.

    Every id has one parent, so an id names all content up to the end of its trace block, and `names_in_full_blocks`
    works for any two sizes:

    * smaller blocks (512 -> 16): a full trace block gives `512 / 16` of them. No known reuse is lost, but what two
      prompts share inside a trace block in which they diverge stays unknown: up to `trace_block_size - 1` tokens a
      request.
    * larger blocks (64 -> 256): reuse of less than a whole new block is lost, up to `block_size - 1` tokens a request.

    A partial trace block at the end of a prompt matches the same partial block only, and so do the blocks cut from it.
    """

    def __init__(self, trace: Trace, block_size: int) -> None:
        """Wrap a trace. Raises `InputError` if it has no block size or `block_size` is below 1."""
        if block_size < 1:
            raise InputError(f"the block size to re-block to is {block_size}; it must be 1 token or more")
        if trace.info.trace_block_size is None:
            raise InputError(f"{trace.info.name} carries no hash ids, so there are no blocks to re-block")
        self._trace = trace
        self._own_size = trace.info.trace_block_size
        self._block_size = block_size

    @property
    def info(self) -> TraceInfo:
        """The info of the wrapped trace, with the new block size."""
        info = self._trace.info
        return attrs.evolve(
            info,
            trace_block_size=self._block_size,
            trace_block_size_source=f"re-blocked from {self._own_size} ({info.trace_block_size_source})",
        )

    def __iter__(self) -> Iterator[TraceRequest]:
        full_only = self._trace.info.full_blocks_only
        for request in self._trace:
            ids = request.hash_ids
            if ids is not None:
                ids = reblocked_ids(ids, request.input_length, self._own_size, self._block_size, full_only)
                request = attrs.evolve(request, hash_ids=ids)
            yield request


class ChangedTrace:
    """A `Trace` whose requests arrive `rate` times as fast and have outputs `output` times as long as another's."""

    def __init__(self, trace: Trace, rate: float = 1.0, output: float = 1.0) -> None:
        self._trace, self._rate, self._output = trace, rate, output

    @property
    def info(self) -> TraceInfo:
        """The info of the wrapped trace."""
        return self._trace.info

    def __iter__(self) -> Iterator[TraceRequest]:
        for row in self._trace:
            output_length = max(1, round(row.output_length * self._output))
            turn = None if row.turn is None else row.turn.at_rate(self._rate)
            yield attrs.evolve(row, arrival_s=row.arrival_s / self._rate, output_length=output_length, turn=turn)


class SampledTrace:
    """A `Trace` in which every request of another trace comes `n` times at once.

    vLLM V1 serves parallel sampling this way: a request with `n` samples becomes `n` requests with one prompt. The
    samples find each other's blocks in the prefix cache, so full blocks of the prompt are computed and held once; each
    sample computes the partial last block, and at least one token, itself. (`sim/engine/sampling.py` counts samples
    that fork from one prefill and share the partial block, too, until they write.)
    """

    def __init__(self, trace: Trace, n: int) -> None:
        """Wrap a trace. Raises `InputError` unless `n` is from 1 to MOST_SAMPLES."""
        if not 1 <= n <= MOST_SAMPLES:
            raise InputError(f"--n is {n}; a request has from 1 to {MOST_SAMPLES:,} samples")
        if trace.info.max_concurrency is not None:
            raise InputError(f"--n {n} and --max-concurrency exclude each other: samples of one request come at once")
        self._trace = trace
        self._n = n

    @property
    def info(self) -> TraceInfo:
        """The info of the wrapped trace, with a note about samples."""
        info = self._trace.info
        about = f"every request has {self._n} samples, each a request of its own at the same time with the same prompt"
        info = attrs.evolve(info, about=about if info.about is None else f"{info.about}; {about}")
        if info.trace_block_size is None:
            info.trace_block_size, info.trace_block_size_source = SAMPLE_BLOCK_SIZE, "chosen for samples"
        return info

    def __iter__(self) -> Iterator[TraceRequest]:
        num_ids = 0
        has_ids = self._trace.info.trace_block_size is not None
        for request in self._trace:
            ids = request.hash_ids
            if not has_ids:
                first_id = num_ids
                num_ids += -(-request.input_length // SAMPLE_BLOCK_SIZE)
                ids = tuple(range(first_id, num_ids))
            turn = request.turn
            if turn is not None:
                turn = attrs.evolve(turn, waits_for=self._all_samples(turn))
            first = (request.place - 1) * self._n + 1
            for place in range(first, first + self._n):
                yield attrs.evolve(request, hash_ids=ids, place=place, turn=turn)

    def _all_samples(self, turn: Turn) -> tuple[int, ...]:
        """A next turn waits for all samples of the requests before it: the client reads them all."""
        n = self._n
        return tuple(sample for place in turn.waits_for for sample in range((place - 1) * n + 1, place * n + 1))
