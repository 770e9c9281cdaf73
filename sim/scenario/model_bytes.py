"""Bytes of one block of a model's keys and values, over all its layers and all its GPUs."""

from ...core.errors import InputError
from ...core.models.geometry import load_geometry

_MANY_TOKENS = 1 << 20


def bytes_per_block(model: str, kv_cache_dtype: str, block_size: int) -> int:
    """For a built-in model or a config.json. Raises `InputError` where not every token of it takes the same bytes."""
    geometry = load_geometry(model)
    per_token = geometry.sequence_bytes(1, kv_cache_dtype).total
    if geometry.sequence_bytes(_MANY_TOKENS, kv_cache_dtype).total != _MANY_TOKENS * per_token:
        raise InputError(
            f"--model {model}: some of its layers keep a window or a state, so a number of blocks is not a number of "
            "bytes; leave --model out, and turn blocks into memory with kvledger plan"
        )
    return per_token * block_size
