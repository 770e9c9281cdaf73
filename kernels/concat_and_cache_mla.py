"""Writes the latent and the rotary key of multi-head latent attention, side by side, to their slots."""

import torch
from torch import Tensor

from .checks import check_cache_view, check_dtypes, check_rows, check_slots, check_vector, describe
from .errors import KernelInputError
from .fp8 import quantize, typed_cache
from .reshape_and_cache import store_rows, tokens_with_slots
from .scales import check_scale


def check_mla_cache(cache: Tensor, kv_cache_dtype: str) -> Tensor:
    """Check and return the cache `[num_blocks, block_size, latent + rope]` in the dtype of its numbers."""
    cache = typed_cache(cache, kv_cache_dtype, "cache")
    check_cache_view(cache, 3, "cache")
    return cache


def check_mla_write(
    cache: Tensor, kv_c: Tensor, k_pe: Tensor, slot_mapping: Tensor, scale: Tensor | None, checked: bool
) -> bool:
    """Check one write. Returns whether it quantises."""
    device = cache.device
    for name, rows in (("kv_c", kv_c), ("k_pe", k_pe)):
        check_rows(rows, 2, name)
        check_dtypes(rows, cache, name)
        if rows.device != device:
            raise KernelInputError(f"{name} must be on {device}: {describe(rows)}")
    latent_size, rope_size, row_size = kv_c.shape[1], k_pe.shape[1], cache.shape[2]
    if latent_size + rope_size != row_size:
        raise KernelInputError(
            f"a latent of {latent_size} and a rotary key of {rope_size} do not fill a cache row of {row_size}"
        )
    check_vector(slot_mapping, torch.int64, "slot_mapping", device)
    if not len(slot_mapping) <= len(kv_c) == len(k_pe) or kv_c.dtype != k_pe.dtype:
        raise KernelInputError(
            f"{len(slot_mapping)} slots, {len(kv_c)} latents ({kv_c.dtype}) and {len(k_pe)} rotary keys "
            f"({k_pe.dtype}): both must be alike and at least as many as slots"
        )
    is_quantized = kv_c.dtype != cache.dtype
    check_scale(scale, is_quantized, "scale", device, checked)
    if checked:
        check_slots(slot_mapping, cache.shape[0] * cache.shape[1])
    return is_quantized


def write_latents(
    cache: Tensor,
    kv_cache_dtype: str,
    kv_c: Tensor,
    k_pe: Tensor,
    slot_mapping: Tensor,
    scale: Tensor | None,
    checked: bool,
) -> None:
    """See `Kernels.concat_and_cache_mla`."""
    cache = check_mla_cache(cache, kv_cache_dtype)
    is_quantized = check_mla_write(cache, kv_c, k_pe, slot_mapping, scale, checked)
    tokens, slots = tokens_with_slots(slot_mapping, cache.shape[0] * cache.shape[1])
    latent = kv_c.shape[1]
    for rows, part in ((kv_c, cache[..., :latent]), (k_pe, cache[..., latent:])):
        chosen = rows[: len(slot_mapping)] if tokens is None else rows[tokens]
        store_rows(quantize(chosen, cache.dtype, scale) if is_quantized else chosen, part, slots)
