"""The scale of a quantised cache, checked once where it enters and a device tensor from there on."""

import math
import warnings

import torch
from torch import Tensor

from .errors import KernelInputError


class MissingScaleWarning(UserWarning):
    """A quantised cache is used without a scale; 1.0 stands in (field report F05)."""


def kv_scale(scale: float | None, *, name: str, device: torch.device | str) -> Tensor:
    """A one-element float32 tensor that the kernels read on the device, so that a captured graph sees a new value.

    Args:
        scale: stored = saturate(value / scale), read = stored * scale; None uses 1.0 and warns.
        name: `k_scale` or `v_scale`, for messages.
        device: where the cache is.

    Raises:
        KernelInputError: a scale that is zero, negative, not finite, or whose reciprocal is not finite in float32.
    """
    if scale is None:
        warn_of_missing_scale(name)
        scale = 1.0
    check_scale_value(scale, name)
    return torch.tensor([scale], dtype=torch.float32, device=device)


def warn_of_missing_scale(name: str) -> None:
    """Say that a scale is missing and 1.0 is used."""
    warnings.warn(
        f"{name} is missing for a quantised KV cache: 1.0 is used; pass the checkpoint's scale (kv_scale(value, ...))",
        MissingScaleWarning,
        stacklevel=3,
    )


def check_scale_value(scale: float, name: str) -> None:
    """Refuse a scale by which nothing can be divided."""
    in_float32 = torch.tensor(scale, dtype=torch.float32).item()
    if not (in_float32 > 0 and math.isfinite(in_float32)) or math.isinf(1 / in_float32) or 1 / in_float32 > 3.4e38:
        raise KernelInputError(
            f"{name} is {scale}; a scale is a positive finite float32 with a finite reciprocal (1.0 leaves values as "
            "they are)"
        )
