"""Writes the keys and values of a batch to their slots. The plain-torch twin of the Triton kernels.

Flash, HND, interleaved and packed K|V layouts are the same here: logical `[num_blocks, block_size, num_kv_heads,
head_size]` views that differ in strides. The classic layout splits a head, so it has functions of its own.
"""

from collections.abc import Callable
from typing import TypeAlias

import attrs
import torch
from torch import Tensor

from .checks import check_cache_view, check_dtypes, check_rows, check_slots, check_vector, describe
from .errors import KernelInputError
from .fp8 import quantize, typed_cache
from .scales import check_scale

# Of the keys, and of the values.
Scales: TypeAlias = tuple[Tensor | None, Tensor | None]
WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@attrs.frozen(eq=False)
class CachePair:
    """A checked key and value cache in the dtype of their numbers."""

    key: Tensor  # logical `[num_blocks, block_size, num_kv_heads, head_size]`; classic `[.., head_size / x, x]`
    value: Tensor  # logical `[num_blocks, block_size, num_kv_heads, head_size]`
    num_slots: int  # num_blocks * block_size


def flash_pair(key_cache: Tensor, value_cache: Tensor, kv_cache_dtype: str) -> CachePair:
    """Check two logical views of one shape (head sizes may differ) with any strides.

    Raises:
        KernelInputError: other shapes, a last stride that is not 1, overlapping elements, unsupported dtypes.
    """
    key = typed_cache(key_cache, kv_cache_dtype, "key_cache")
    value = typed_cache(value_cache, kv_cache_dtype, "value_cache")
    check_cache_view(key, 4, "key_cache")
    check_cache_view(value, 4, "value_cache")
    if key.shape[:3] != value.shape[:3] or key.dtype != value.dtype or key.device != value.device:
        raise _unlike(key, value)
    return CachePair(key, value, key.shape[0] * key.shape[1])


def classic_pair(key_cache: Tensor, value_cache: Tensor, kv_cache_dtype: str) -> CachePair:
    """Check `[num_blocks, heads, head_size / x, block_size, x]` keys and `[num_blocks, heads, head_size, block_size]`
    values, and view them with the slot's dimensions first.

    Raises:
        KernelInputError: as `flash_pair`.
    """
    key = typed_cache(key_cache, kv_cache_dtype, "key_cache")
    value = typed_cache(value_cache, kv_cache_dtype, "value_cache")
    check_cache_view(key, 5, "key_cache")
    check_cache_view(value, 4, "value_cache")
    num_blocks, num_heads, _, block_size, _ = key.shape
    has_like_shape = (*value.shape[:2], value.shape[3]) == (num_blocks, num_heads, block_size)
    if not has_like_shape or key.dtype != value.dtype or key.device != value.device:
        raise _unlike(key, value)
    return CachePair(key.permute(0, 3, 1, 2, 4), value.permute(0, 3, 1, 2), num_blocks * block_size)


# Both caches and `kv_cache_dtype`, and what checks them: `flash_pair` or `classic_pair`.
Caches: TypeAlias = tuple[Tensor, Tensor, str]
PairOf: TypeAlias = Callable[[Tensor, Tensor, str], CachePair]


def _unlike(key: Tensor, value: Tensor) -> KernelInputError:
    return KernelInputError(f"key_cache and value_cache do not belong together: {describe(key)} and {describe(value)}")


def check_write(
    pair: CachePair, key: Tensor, value: Tensor, slot_mapping: Tensor, scales: Scales, checked: bool
) -> bool:
    """Check one write. Returns whether it quantises.

    Raises:
        KernelInputError: rows that do not fit the cache, fewer rows than slots, scales where nothing is quantised; in
            checked mode slots out of bounds and scales that are not positive and finite.
    """
    num_heads, head_size, v_head_size = pair.key.shape[2], pair.key.shape[3:].numel(), pair.value.shape[3]
    device = pair.key.device
    for name, rows, size in (("key", key, head_size), ("value", value, v_head_size)):
        check_rows(rows, 3, name)
        if rows.shape[1:] != (num_heads, size) or rows.device != device:
            raise KernelInputError(f"{name} must be [num_tokens, {num_heads}, {size}] on {device}: {describe(rows)}")
        check_dtypes(rows, pair.key, name)
    check_vector(slot_mapping, torch.int64, "slot_mapping", device)
    if not len(slot_mapping) <= len(key) == len(value) or key.dtype != value.dtype:
        raise KernelInputError(
            f"{len(slot_mapping)} slots, {len(key)} keys ({key.dtype}) and {len(value)} values ({value.dtype}): keys "
            "and values must be alike and at least as many as slots"
        )
    is_quantized = key.dtype != pair.key.dtype
    for name, scale in zip(("k_scale", "v_scale"), scales, strict=True):
        check_scale(scale, is_quantized, name, device, checked)
    if checked:
        check_slots(slot_mapping, pair.num_slots)
    return is_quantized


def write_pair(
    pair_of: PairOf, caches: Caches, key: Tensor, value: Tensor, slot_mapping: Tensor, scales: Scales, checked: bool
) -> None:
    """See `Kernels.reshape_and_cache`. On a GPU this twin waits for the device (it selects the tokens with slots)."""
    pair = pair_of(*caches)
    is_quantized = check_write(pair, key, value, slot_mapping, scales, checked)
    tokens, slots = tokens_with_slots(slot_mapping, pair.num_slots)
    for rows, cache, scale in zip((key, value), (pair.key, pair.value), scales, strict=True):
        chosen = rows[: len(slot_mapping)] if tokens is None else rows[tokens]
        if is_quantized:
            chosen = quantize(chosen, cache.dtype, scale)
        store_rows(chosen.reshape(len(chosen), *cache.shape[2:]), cache, slots)


def tokens_with_slots(slot_mapping: Tensor, num_slots: int) -> tuple[Tensor | None, Tensor]:
    """Return the tokens that are stored (None: all) and their slots."""
    is_stored = (slot_mapping >= 0) & (slot_mapping < num_slots)
    if bool(is_stored.all()):
        return None, slot_mapping
    tokens = is_stored.nonzero().flatten()
    return tokens, slot_mapping[tokens]


def store_rows(rows: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Store `cache[slot // block_size, slot % block_size] = row` in the widest words that both allow.

    NaN payloads stay as they are, and words are two to four times as fast as elements.

    Args:
        rows: `[num_tokens, ...]`, any strides.
        cache: `[num_blocks, block_size, ...]` of the same dtype and trailing shape.
        slots: int64 `[num_tokens]`, all inside the cache.
    """
    block_size = cache.shape[1]
    if not (cache.stride(-1) == 1 and rows.stride(-1) == 1):
        word = WORDS[cache.element_size()]
    else:
        word = widest_word(rows, cache)
    rows, cache = rows.view(word), cache.view(word)
    if cache.shape[0] == 1 or cache.stride(0) == cache.stride(1) * block_size:
        # Slots are evenly spaced: one index instead of two.
        flat = cache.as_strided((cache.shape[0] * block_size, *cache.shape[2:]), cache.stride()[1:])
        flat.index_copy_(0, slots, rows)
    else:
        cache[slots // block_size, slots % block_size] = rows


def widest_word(*tensors: Tensor) -> torch.dtype:
    """Return the widest integer dtype that all tensors (of one element size, last dimension dense) can be viewed as."""
    element_size = tensors[0].element_size()
    sizes = [size for each in tensors for size in (each.shape[-1], each.storage_offset(), *each.stride()[:-1])]
    for word_bytes, word in WORDS.items():
        per_word, rest = divmod(word_bytes, element_size)
        if per_word and not rest and all(size % per_word == 0 for size in sizes):
            return word
    return WORDS[element_size]
