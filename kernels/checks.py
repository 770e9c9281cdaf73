"""Checks tensors before a kernel touches memory: strides, shapes, dtypes, devices, and in checked mode their contents.

Checks run at every call, so each is a plain comparison, and its text is formatted only when it fails.
"""

import torch
from torch import Tensor

from .errors import KernelInputError

MAX_LISTED = 8
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def describe(tensor: Tensor) -> str:
    """Describe a tensor: `torch.bfloat16 [4, 16, 8, 128] strides (16384, 1024, 128, 1) on cpu`."""
    return f"{tensor.dtype} {list(tensor.shape)} strides {tuple(tensor.stride())} on {tensor.device}"


def check_cache_view(cache: Tensor, num_dims: int, name: str) -> None:
    """Check a cache: `num_dims` dimensions, the last one dense, and no two elements in one place."""
    strides, shape = cache.stride(), cache.shape
    if len(shape) != num_dims:
        raise KernelInputError(f"{name} has {len(shape)} dimensions, not {num_dims}: {describe(cache)}")
    if strides[-1] != 1 and shape[-1] != 1:
        raise KernelInputError(f"{name} needs a last stride of 1: {describe(cache)}; permute a dense buffer instead")
    span = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1:
            if stride < span:
                raise KernelInputError(f"{name} holds two elements in one place: {describe(cache)}")
            span += stride * (size - 1)


def check_rows(tensor: Tensor, num_dims: int, name: str) -> None:
    """Check tokens to store: a dense last dimension; any other stride (a slice of a fused qkv, an expanded head)."""
    shape = tensor.shape
    if len(shape) != num_dims:
        raise KernelInputError(f"{name} has {len(shape)} dimensions, not {num_dims}: {describe(tensor)}")
    if shape[-1] != 1 and tensor.stride(-1) != 1:
        raise KernelInputError(f"{name} needs a last stride of 1: {describe(tensor)}; call .contiguous() first")


def check_vector(tensor: Tensor, dtype: torch.dtype, name: str, device: torch.device) -> None:
    """Check a dense vector of indices."""
    if tensor.dtype != dtype or tensor.dim() != 1 or not tensor.is_contiguous() or tensor.device != device:
        raise KernelInputError(f"{name} must be a contiguous {dtype} vector on {device}: {describe(tensor)}")


def check_block_table(table: Tensor, name: str, device: torch.device) -> None:
    """Check a block table: int32 `[max_num_reqs, max_num_blocks_per_req]` with dense rows, and not empty."""
    if (
        table.dtype != torch.int32
        or table.dim() != 2
        or table.device != device
        or not table.numel()
        or (table.stride(1) != 1 and table.shape[1] != 1)
    ):
        raise KernelInputError(
            f"{name} must be int32 [max_num_reqs, max_num_blocks_per_req] with dense rows on {device}, and not empty: "
            f"{describe(table)}"
        )


def check_dtypes(rows: Tensor, cache: Tensor, name: str) -> None:
    """Check that rows can be stored as they are, or quantised from a 16- or 32-bit float."""
    if rows.dtype != cache.dtype and not (cache.element_size() == 1 and rows.dtype in FLOATS):
        raise KernelInputError(
            f"{name} is {rows.dtype} and its cache {cache.dtype}; only 8-bit caches convert, from {FLOATS}"
        )


def check_starts(starts: list[int], highest: int, name: str, limit: str) -> None:
    """Check that the starts of requests, read back from the device, rise from 0 to at most `highest`."""
    if starts[0] != 0 or starts[-1] > highest or starts != sorted(starts):
        raise KernelInputError(f"{name} must rise from 0 to at most {highest} ({limit}): {starts[:MAX_LISTED]}")


def check_slots(slot_mapping: Tensor, num_slots: int) -> None:
    """Check that every slot is -1 (skip) or inside the cache. Waits for the device: for tests and debugging.

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
