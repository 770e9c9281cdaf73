"""What the kernels refuse before they touch memory: strides, shapes, dtypes, devices, and in checked mode contents."""

import torch
from torch import Tensor

from .errors import KernelInputError
from .scales import check_scale_value

MAX_LISTED = 8


def check(holds: bool, message: str) -> None:
    """Raise `KernelInputError` unless the condition holds."""
    if not holds:
        raise KernelInputError(message)


def describe(tensor: Tensor) -> str:
    """`torch.bfloat16 [4, 16, 8, 128] strides (16384, 1024, 128, 1) on cpu`."""
    return f"{tensor.dtype} {list(tensor.shape)} strides {tuple(tensor.stride())} on {tensor.device}"


def check_cache_view(cache: Tensor, num_dims: int, name: str) -> None:
    """A cache: `num_dims` dimensions, the last one dense, and no two elements in one place."""
    check(cache.dim() == num_dims, f"{name} has {cache.dim()} dimensions, not {num_dims}: {describe(cache)}")
    check(
        cache.stride(-1) == 1 or cache.shape[-1] == 1,
        f"{name} needs a last stride of 1: {describe(cache)}; permute a dense buffer instead",
    )
    span = 1
    for stride, size in sorted((stride, size) for stride, size in zip(cache.stride(), cache.shape, strict=True)):
        if size > 1:
            check(stride >= span, f"{name} holds two elements in one place: {describe(cache)}")
            span += stride * (size - 1)


def check_rows(tensor: Tensor, num_dims: int, name: str) -> None:
    """Tokens to store: a dense last dimension; any other stride (a slice of a fused qkv, an expanded head)."""
    check(tensor.dim() == num_dims, f"{name} has {tensor.dim()} dimensions, not {num_dims}: {describe(tensor)}")
    check(
        tensor.stride(-1) == 1 or tensor.shape[-1] == 1,
        f"{name} needs a last stride of 1: {describe(tensor)}; call .contiguous() first",
    )


def check_vector(tensor: Tensor, dtype: torch.dtype, name: str, device: torch.device) -> None:
    """A dense vector of indices."""
    check(
        tensor.dim() == 1 and tensor.dtype == dtype and tensor.is_contiguous() and tensor.device == device,
        f"{name} must be a contiguous {dtype} vector on {device}: {describe(tensor)}",
    )


def check_dtypes(rows: Tensor, cache: Tensor, name: str) -> None:
    """Rows are stored as they are, or quantised from a 16- or 32-bit float."""
    floats = (torch.float32, torch.float16, torch.bfloat16)
    check(
        rows.dtype == cache.dtype or (cache.element_size() == 1 and rows.dtype in floats),
        f"{name} is {rows.dtype} and its cache {cache.dtype}; only 8-bit caches convert, from {floats}",
    )


def check_scale(scale: Tensor | None, is_quantized: bool, name: str, device: torch.device, checked: bool) -> None:
    """One float32 on the cache's device, only where something is converted; its value is read in checked mode."""
    if scale is None:
        return
    check(is_quantized, f"{name} is given, but nothing is quantised here; pass None")
    check(
        scale.dtype == torch.float32 and scale.numel() == 1 and scale.device == device,
        f"{name} must be one float32 on {device}: {describe(scale)}; make it with kv_scale()",
    )
    if checked:
        check_scale_value(scale.item(), name)


def check_slots(slot_mapping: Tensor, num_tokens: int, num_slots: int) -> None:
    """Every slot is -1 (skip) or inside the cache. Waits for the device: for tests and debugging.

    Raises:
        KernelInputError: lists the first slots that are out of bounds, with their tokens and the bound (field report
            F02).
    """
    wrong = ((slot_mapping < -1) | (slot_mapping >= num_slots)).nonzero().flatten()
    if not len(wrong):
        return
    listed = ", ".join(f"slot {slot_mapping[i].item()} of token {i}" for i in wrong[:MAX_LISTED].tolist())
    more = f" and {len(wrong) - MAX_LISTED} more" if len(wrong) > MAX_LISTED else ""
    raise KernelInputError(
        f"{len(wrong)} of {len(slot_mapping)} slots are out of bounds: {listed}{more}; slots are 0 to {num_slots - 1}, "
        "or -1 to skip a token"
    )
