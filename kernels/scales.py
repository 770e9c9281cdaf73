"""The scales of a quantised cache: made and checked once on the host, read on the device from there on."""

import math
import warnings

import torch
from torch import Tensor

from .checks import describe
from .errors import KernelInputError


class MissingScaleWarning(UserWarning):
    """A quantised cache is used without a scale, so 1.0 is used (field report F05)."""


def kv_scale(scale: float | None, *, name: str, device: torch.device | str) -> Tensor:
    """Make a one-element float32 tensor that the kernels read on the device, so a captured graph sees a new value.

    Args:
        scale: stored = saturate(value / scale), read = stored * scale; None uses 1.0 and warns.
        name: `k_scale` or `v_scale`, for messages.
        device: where the cache is.

    Raises:
        KernelInputError: a scale that is zero, negative, not finite, or whose reciprocal is not finite in float32.
    """
    if scale is None:
        _warn_of_missing_scale(name, stacklevel=3)
        scale = 1.0
    _check_value(scale, name)
    return torch.tensor([scale], dtype=torch.float32, device=device)


def check_scale(scale: Tensor | None, is_quantized: bool, name: str, device: torch.device, checked: bool) -> None:
    """Check one float32 on the cache's device, given only where something is converted; warn where it is missing there.

    In checked mode its value is read, too.
    """
    if scale is None:
        if is_quantized:
            _warn_of_missing_scale(name, stacklevel=4)
        return
    if not is_quantized:
        raise KernelInputError(f"{name} is given, but nothing is quantised here; pass None")
    if scale.dtype != torch.float32 or scale.numel() != 1 or scale.device != device:
        raise KernelInputError(f"{name} must be one float32 on {device}: {describe(scale)}; make it with kv_scale()")
    if checked:
        _check_value(scale.item(), name)


def _warn_of_missing_scale(name: str, stacklevel: int) -> None:
    warnings.warn(
        f"{name} is missing for a quantised KV cache: 1.0 is used; pass the checkpoint's scale (kv_scale(value, ...))",
        MissingScaleWarning,
        stacklevel=stacklevel,
    )


def _check_value(scale: float, name: str) -> None:
    in_float32 = torch.tensor(scale, dtype=torch.float32).item()
    if not (in_float32 > 0 and math.isfinite(in_float32)) or math.isinf(1 / in_float32) or 1 / in_float32 > 3.4e38:
        raise KernelInputError(
            f"{name} is {scale}; a scale is a positive finite float32 with a finite reciprocal (1.0 leaves values as "
            "they are)"
        )
