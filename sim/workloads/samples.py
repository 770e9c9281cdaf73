"""Parallel sampling as vLLM V1 serves it: every request with `n` samples is `n` requests of one prompt.

The samples of a prompt are found in the prefix cache by each other, so that its full blocks are computed and held once;
its partial last block, and one token at least, each sample computes on its own. (Samples that fork from one prefill,
and share the partial block too until they write, are what sim/engine/sampling.py counts.)
"""

from collections.abc import Iterator

import attrs

from ...core.errors import InputError
from ..traces import Trace, TraceInfo, TraceRequest, Turn
from .stream import BlockIds

MOST_SAMPLES = 1_024
# Tokens of the blocks that prompts without ids are given, so that their own samples find them.
BLOCK_SIZE = 16


class SampledTrace:
    """A `Trace` in which every request of another comes `n` times at once."""

    def __init__(self, trace: Trace, n: int) -> None:
        """Wrap a trace. Raises `InputError` unless `n` is from 1 to MOST_SAMPLES."""
        if not 1 <= n <= MOST_SAMPLES:
            raise InputError(f"--n is {n}; a request has from 1 to {MOST_SAMPLES:,} samples")
        self._trace = trace
        self._n = n

    @property
    def info(self) -> TraceInfo:
        """The trace's own, and what was made of it."""
        info = self._trace.info
        about = f"every request has {self._n} samples, each a request of its own at the same time with the same prompt"
        info = attrs.evolve(info, about=about if info.about is None else f"{info.about}; {about}")
        if info.trace_block_size is None:
            info.trace_block_size, info.trace_block_size_source = BLOCK_SIZE, "chosen for samples"
        return info

    def __iter__(self) -> Iterator[TraceRequest]:
        """The samples, one request's after the other's."""
        own_ids = BlockIds()
        has_ids = self._trace.info.trace_block_size is not None
        for request in self._trace:
            ids = request.hash_ids
            if not has_ids:
                ids = tuple(own_ids.new(-(-request.input_length // BLOCK_SIZE)))
            turn = request.turn
            if turn is not None:
                turn = attrs.evolve(turn, waits_for=self._all_samples(turn))
            first = (request.place - 1) * self._n + 1
            for place in range(first, first + self._n):
                yield attrs.evolve(request, hash_ids=ids, place=place, turn=turn)

    def _all_samples(self, turn: Turn) -> tuple[int, ...]:
        """A next turn follows all samples of the requests before it: the client reads them all."""
        n = self._n
        return tuple(sample for place in turn.waits_for for sample in range((place - 1) * n + 1, place * n + 1))
