"""The torch dtype behind a KV-cache dtype's name."""

import torch

from ..core.cache_dtype import BITS_PER_ELEMENT, canonical_dtype


def torch_dtype(name: str) -> torch.dtype:
    """`bf16` -> `torch.bfloat16`; 4-bit elements are packed two to a `torch.uint8`.

    Raises:
        InputError: the name is not a KV-cache dtype.
    """
    canonical = canonical_dtype(name)
    if BITS_PER_ELEMENT[canonical] == 4:
        return torch.uint8
    return {
        "fp32": torch.float32,
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
        "fp8_e4m3": torch.float8_e4m3fn,
        "fp8_e5m2": torch.float8_e5m2,
        "int8": torch.int8,
        "uint8": torch.uint8,
    }[canonical]
