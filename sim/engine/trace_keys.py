"""The ids of a trace as block keys: the same id is the same content, at whatever block size the engine uses."""

from collections.abc import Sequence


class TraceKeySource:
    """Keys of one traced request, for engine blocks of `block_size` tokens on ids of `trace_block_size` tokens.

    Every id has one parent, so an id names all content up to the end of its trace block. An engine block is named by
    the id of the trace block in which it ends and by where in it: any two block sizes go together. Two prompts that
    diverge inside a trace block have different ids for it, so what they share of it is not found: at most
    `trace_block_size - 1` tokens a request.

    * The last trace block of a prompt may be partial. Engine blocks that end in it carry its length too, so that they
      match the same partial block only.
    * Blocks that reach into the output, and prompts without ids, are unique to their request (`ordinal`).

    Keys are ints: non-negative in full trace blocks, negative and odd in partial ones, negative and even if unique.
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
        keys: list[int] = []
        if trace_block_size % block_size == 0:
            for hash_id in ids[:num_full]:
                start = hash_id * trace_block_size
                keys.extend(range(start + block_size, start + trace_block_size + 1, block_size))
        else:
            for end in range(block_size, num_full * trace_block_size + 1, block_size):
                trace_block, offset = divmod(end - 1, trace_block_size)
                keys.append(ids[trace_block] * trace_block_size + offset + 1)
        # A trace that names full blocks only has no id for the tail: what ends in it is unique to its request.
        if tail_length and len(ids) > num_full:
            partial = (ids[num_full] * trace_block_size + tail_length) * trace_block_size
            ends = range((len(keys) + 1) * block_size, self._input_length + 1, block_size)
            keys.extend(-2 * (partial + end - num_full * trace_block_size) - 1 for end in ends)
        return keys
