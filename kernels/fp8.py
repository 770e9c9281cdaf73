"""Converts numbers to and from 8-bit caches, with a rounding that twin and kernel share bit for bit."""

import torch
from torch import Tensor

from .errors import KernelInputError

# vLLM's names of --kv-cache-dtype; `fp8` is e4m3.
FP8_DTYPES = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
CACHE_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def typed_cache(cache: Tensor, kv_cache_dtype: str, name: str) -> Tensor:
    """View the cache in the dtype of its numbers: uint8 storage becomes the 8-bit format that `kv_cache_dtype` names.

    Raises:
        KernelInputError: a dtype that no kernel stores, uint8 without a format, or a format that contradicts the dtype.
    """
    if kv_cache_dtype == "auto":
        if cache.dtype not in CACHE_DTYPES:
            raise KernelInputError(
                f"{name} is {cache.dtype}; caches are {', '.join(map(str, CACHE_DTYPES))}, or torch.uint8 with "
                f"kv_cache_dtype one of {', '.join(FP8_DTYPES)}"
            )
        return cache
    if kv_cache_dtype not in FP8_DTYPES:
        raise KernelInputError(f"kv_cache_dtype {kv_cache_dtype!r}: use auto, {', '.join(FP8_DTYPES)}")
    dtype = FP8_DTYPES[kv_cache_dtype]
    if cache.dtype == torch.uint8:
        return cache.view(dtype)
    if cache.dtype != dtype:
        raise KernelInputError(
            f"{name} is {cache.dtype}, but kv_cache_dtype {kv_cache_dtype!r} is {dtype} (or torch.uint8)"
        )
    return cache


def numbers_of(cache: Tensor, kv_cache_dtype: str) -> Tensor:
    """Return `typed_cache` of a cache that was checked before."""
    return cache if kv_cache_dtype == "auto" or cache.dtype != torch.uint8 else cache.view(FP8_DTYPES[kv_cache_dtype])


def quantize(values: Tensor, dtype: torch.dtype, scale: Tensor | None) -> Tensor:
    """Convert numbers for storage: float32 product with 1 / scale, clamped, rounded to nearest even.

    The clamp is explicit because a plain cast of larger numbers differs between versions and devices (field report
    F05). NaN stays NaN, as the one positive byte that NVIDIA's conversion writes.

    Args:
        values: any float dtype.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        scale: float32 `[1]`, or None for 1.0.
    """
    numbers = values.float()
    if scale is not None:
        numbers = numbers * (1.0 / scale)
    largest = LARGEST[dtype]
    numbers = numbers.clamp(-largest, largest)
    return numbers.masked_fill_(numbers.isnan(), torch.nan).to(dtype)


def dequantize(stored: Tensor, dtype: torch.dtype, scale: Tensor | None) -> Tensor:
    """Convert stored numbers back: stored * scale in float32, rounded to `dtype`."""
    numbers = stored.float()
    if scale is not None:
        numbers = numbers * scale
    return numbers.to(dtype)
