"""The ids of a trace as block keys: the same id is the same content, at whatever block size the engine uses."""

from collections.abc import Sequence

from ..core.errors import InputError


class TraceKeySource:
    """Keys of one traced request, for engine blocks of `block_size` tokens on ids of `trace_block_size` tokens.

    * A full trace block becomes `trace_block_size / block_size` engine blocks, each derived from its id and its place
      in it. Where the engine's blocks are larger, a block's key is the id of the last trace block in it, which names
      all before it because every id has one parent.
    * The last trace block of a prompt may be partial. Its engine blocks carry its length too, so that they match the
      same partial block only.
    * Blocks that reach into the output, and prompts without ids, are unique to their request (`ordinal`).

    Keys are ints: non-negative for full blocks, negative and odd for partial ones, negative and even for unique ones.
    """

    __slots__ = ("_hash_ids", "_input_length", "_ordinal", "_prompt_keys", "_sizes")

    def __init__(
        self,
        hash_ids: Sequence[int] | None,
        input_length: int,
        ordinal: int,
        block_size: int,
        trace_block_size: int | None,
    ) -> None:
        self._hash_ids = hash_ids
        self._input_length = input_length
        self._ordinal = ordinal
        self._sizes = (block_size, trace_block_size)
        self._prompt_keys: Sequence[int] | None = None

    def keys(self, start: int, stop: int) -> Sequence[int]:
        """Keys of the complete engine blocks `start <= i < stop`."""
        prompt_keys = self._prompt_keys
        if prompt_keys is None:
            prompt_keys = self._prompt_keys = self._derive_prompt_keys()
        known = len(prompt_keys)
        if stop <= known:
            return prompt_keys[start:stop]
        unique = -2 - (self._ordinal << 41)
        return [*prompt_keys[start:known], *(unique - 2 * index for index in range(max(start, known), stop))]

    def _derive_prompt_keys(self) -> Sequence[int]:
        block_size, trace_block_size = self._sizes
        ids = self._hash_ids
        if ids is None or trace_block_size is None:
            return ()
        num_full, tail_length = divmod(self._input_length, trace_block_size)
        if block_size == trace_block_size:
            return ids[:num_full]
        if block_size > trace_block_size:
            per_block = block_size // trace_block_size
            return ids[:num_full][per_block - 1 :: per_block]
        per_block = trace_block_size // block_size
        keys: list[int] = []
        for hash_id in ids[:num_full]:
            keys.extend(range(hash_id * per_block, (hash_id + 1) * per_block))
        if tail_length >= block_size:
            first = (ids[num_full] * trace_block_size + tail_length) * per_block
            keys.extend(-2 * (first + i) - 1 for i in range(tail_length // block_size))
        return keys


def check_block_sizes(block_size: int, trace_block_size: int | None) -> None:
    """Raise `InputError` unless one of the two sizes divides the other."""
    if trace_block_size is None or not (block_size % trace_block_size and trace_block_size % block_size):
        return
    raise InputError(
        f"a trace with ids of {trace_block_size} tokens cannot be replayed on blocks of {block_size}: one must divide "
        f"the other; use a divisor or a multiple of {trace_block_size} for --block-size"
    )
