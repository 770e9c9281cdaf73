"""Element types of a KV cache, and the scales that a quantised cache stores beside its elements."""

from typing import Final

import attrs

from ..errors import InputError, positive

BITS_PER_ELEMENT: Final[dict[str, int]] = {
    "fp32": 32,
    "bf16": 16,
    "fp16": 16,
    "fp8_e4m3": 8,
    "fp8_e5m2": 8,
    "int8": 8,
    "uint8": 8,
    "int4": 4,
    "fp4": 4,
}
"""Bits of one stored element, by dtype name. Two 4-bit elements share a byte."""

_ALIASES: Final[dict[str, str]] = {
    "float32": "fp32",
    "float": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "fp8": "fp8_e4m3",
}


def canonical_dtype(name: str) -> str:
    """Return the project's name of a dtype: `bfloat16` -> `bf16`, `fp8` -> `fp8_e4m3`.

    Raises:
        InputError: the name is not a dtype for a KV cache.
    """
    canonical = _ALIASES.get(name, name)
    if canonical not in BITS_PER_ELEMENT:
        known = ", ".join(sorted({*BITS_PER_ELEMENT, *_ALIASES}))
        raise InputError(f"dtype {name!r} is not a KV-cache dtype; known are {known}")
    return canonical


def packed_bytes(dtype: str, num_elements: int) -> int:
    """Bytes of `num_elements` consecutive elements.

    Raises:
        InputError: the elements do not fill whole bytes (an odd count of 4-bit elements).
    """
    bits = BITS_PER_ELEMENT[canonical_dtype(dtype)] * num_elements
    if bits % 8:
        raise InputError(f"{num_elements} elements of {dtype} take {bits} bits, which is not a whole number of bytes")
    return bits // 8


@attrs.frozen
class ScaleStorage:
    """Scales stored in the page beside quantised keys and values.

    Per-tensor scales (plain fp8) take a few bytes per layer whatever the number of tokens, and need no `ScaleStorage`.

    Attributes:
        bytes_per_scale: bytes of one scale (and its zero point, where it has one).
        elements_per_scale: elements of one head's vector that share a scale; None: the whole vector shares one.
    """

    bytes_per_scale: int = attrs.field(validator=positive)
    elements_per_scale: int | None = attrs.field(default=None, validator=attrs.validators.optional(positive))

    def bytes_for(self, num_elements: int) -> int:
        """Bytes of the scales of one vector of `num_elements` (0 for a vector that is not stored)."""
        if num_elements == 0:
            return 0
        if self.elements_per_scale is None:
            return self.bytes_per_scale
        return -(-num_elements // self.elements_per_scale) * self.bytes_per_scale


@attrs.frozen
class CacheFormat:
    """What a `kv_cache_dtype` means: the dtype of the elements, and the scales stored with them."""

    dtype: str
    scales: ScaleStorage | None = None


def cache_format(kv_cache_dtype: str, model_dtype: str | None = None) -> CacheFormat:
    """The storage format of a `kv_cache_dtype`.

    `auto` is the model's own dtype. The `*_per_token_head` formats store one fp32 scale per token, head and side (K or
    V); `nvfp4` stores one fp8 scale for every 16 elements (rules of vLLM's KV quantisation modes).

    Raises:
        InputError: the value is unknown, or `auto` was given without the model's dtype.
    """
    if kv_cache_dtype == "auto":
        if model_dtype is None:
            raise InputError("kv_cache_dtype 'auto' means the model's dtype, and no model dtype was given")
        return CacheFormat(canonical_dtype(model_dtype))
    if kv_cache_dtype in ("int8_per_token_head", "fp8_per_token_head"):
        return CacheFormat(canonical_dtype(kv_cache_dtype.split("_")[0]), ScaleStorage(4))
    if kv_cache_dtype == "nvfp4":
        return CacheFormat("fp4", ScaleStorage(1, 16))
    return CacheFormat(canonical_dtype(kv_cache_dtype))
