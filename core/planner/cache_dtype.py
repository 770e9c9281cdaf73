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


@attrs.frozen(kw_only=True)
class PackedHead:
    """A head's key and value in one slot, each with bits and scales of its own; the slot is a whole number of pairs.

    Attributes:
        key_bits, value_bits: bits of one element; a vector is rounded up to whole bytes.
        key_scale_bytes, value_scale_bytes: scales (and zero points) of one vector.
    """

    key_bits: int = attrs.field(validator=positive)
    key_scale_bytes: int
    value_bits: int = attrs.field(validator=positive)
    value_scale_bytes: int

    def bytes_for(self, head_size: int, head_size_v: int) -> int:
        """Bytes of one slot."""
        size = self._key_bytes(head_size) + self._value_bytes(head_size_v)
        return size + size % 2

    def formula(self, head_size: int, head_size_v: int) -> str:
        """How they are computed, with the numbers substituted."""
        odd = (self._key_bytes(head_size) + self._value_bytes(head_size_v)) % 2
        key = f"{head_size} x {self.key_bits} bits + {self.key_scale_bytes} B"
        value = f"{head_size_v} x {self.value_bits} bits + {self.value_scale_bytes} B"
        return f"({key} + {value}{' + 1 B to an even size' if odd else ''})"

    def _key_bytes(self, head_size: int) -> int:
        return -(-head_size * self.key_bits // 8) + self.key_scale_bytes

    def _value_bytes(self, head_size_v: int) -> int:
        return -(-head_size_v * self.value_bits // 8) + self.value_scale_bytes


@attrs.frozen
class PackedLatent:
    """The record of one token's latent in a sparse latent attention: quantised elements, scales and rotary part.

    Attributes:
        name: the `kv_cache_dtype` that asks for it.
        bytes_per_token: bytes of the record.
        formula: how they are computed.
        page_alignment: bytes that a page of such records is rounded up to a multiple of.
    """

    name: str
    bytes_per_token: int
    formula: str
    page_alignment: int = 1


PACKED_LATENT_SIZES: Final[tuple[int, ...]] = (512, 576)
"""Latents that a packed record holds: 512 elements, with a rotary part of 64 or without (its room stays empty)."""

PACKED_LATENTS: Final[dict[str, PackedLatent]] = {
    "fp8_ds_mla": PackedLatent("fp8_ds_mla", 656, "512 x 1 B (fp8) + 4 x 4 B scales + 64 x 2 B (bf16)"),
    "nvfp4_ds_mla": PackedLatent("nvfp4_ds_mla", 352, "512 x 0.5 B (fp4) + 32 x 1 B scales + 64 x 1 B (fp8)"),
}
"""The packed records of a latent of 512 + 64 elements, by `kv_cache_dtype` (rules of vLLM 0.32)."""

_PACKED_HEADS: Final[dict[str, PackedHead]] = {
    "turboquant_k8v4": PackedHead(key_bits=8, key_scale_bytes=0, value_bits=4, value_scale_bytes=4),
    "turboquant_4bit_nc": PackedHead(key_bits=4, key_scale_bytes=2, value_bits=4, value_scale_bytes=4),
    "turboquant_k3v4_nc": PackedHead(key_bits=3, key_scale_bytes=2, value_bits=4, value_scale_bytes=4),
    "turboquant_3bit_nc": PackedHead(key_bits=3, key_scale_bytes=2, value_bits=3, value_scale_bytes=4),
}
_SCALED: Final[dict[str, tuple[str, ScaleStorage]]] = {
    "int4_per_token_head": ("int4", ScaleStorage(4)),
    "int8_per_token_head": ("int8", ScaleStorage(4)),
    "fp8_per_token_head": ("fp8_e4m3", ScaleStorage(4)),
    "nvfp4": ("fp4", ScaleStorage(1, 16)),
    "nvfp4_4over6": ("fp4", ScaleStorage(1, 16)),
    "ultraquant_4bit": ("fp4", ScaleStorage(1, 32)),
}
KEEPS_BOUNDARY_LAYERS: Final[frozenset[str]] = frozenset({*_PACKED_HEADS, "ultraquant_4bit"})
"""Formats whose server leaves the first and last two layers of a model without states in the model's dtype."""


@attrs.frozen
class CacheFormat:
    """What a `kv_cache_dtype` means.

    Attributes:
        dtype: dtype of the elements; uint8 where bytes are packed.
        scales: scales stored beside each vector.
        packed: the slot of a head, where keys and values differ.
        latent: the record of a latent, where it is packed; keys and values then have one scale for the whole tensor.
    """

    dtype: str
    scales: ScaleStorage | None = None
    packed: PackedHead | None = None
    latent: PackedLatent | None = None


def known_cache_dtypes() -> tuple[str, ...]:
    """Every `kv_cache_dtype` that has a format here, the servers' names first."""
    servers = ("auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc")
    named = (*servers, *PACKED_LATENTS, *_SCALED, *_PACKED_HEADS)
    return (*named, *sorted({*BITS_PER_ELEMENT, *_ALIASES} - set(named)))


def cache_format(kv_cache_dtype: str, model_dtype: str | None = None) -> CacheFormat:
    """The storage format of a `kv_cache_dtype` (rules of vLLM 0.32; field reports A18, A23 and A26).

    `auto` is the model's own dtype. The `*_per_token_head` formats store one fp32 scale per token, head and side (K or
    V; the zero point of int4 is in the scale's low bits); `nvfp4` and `nvfp4_4over6` one fp8 scale for every 16
    elements, `ultraquant_4bit` one power of two for every 32. The `turboquant_*` formats pack a head's key and value
    in one slot, the `*_ds_mla` formats a latent in one record.

    Raises:
        InputError: the value is unknown (the known ones are listed), or `auto` without the model's dtype.
    """
    if kv_cache_dtype == "auto":
        if model_dtype is None:
            raise InputError("kv_cache_dtype 'auto' means the model's dtype, and no model dtype was given")
        return CacheFormat(canonical_dtype(model_dtype))
    if kv_cache_dtype in _SCALED:
        return CacheFormat(*_SCALED[kv_cache_dtype])
    if kv_cache_dtype in _PACKED_HEADS:
        return CacheFormat("uint8", packed=_PACKED_HEADS[kv_cache_dtype])
    if kv_cache_dtype in PACKED_LATENTS:
        return CacheFormat("fp8_e4m3", latent=PACKED_LATENTS[kv_cache_dtype])
    if kv_cache_dtype == "fp8_inc":
        return CacheFormat("fp8_e4m3")
    if _ALIASES.get(kv_cache_dtype, kv_cache_dtype) not in BITS_PER_ELEMENT:
        known = ", ".join(known_cache_dtypes())
        raise InputError(f"kv_cache_dtype {kv_cache_dtype!r} is not a KV-cache dtype; known are {known}")
    return CacheFormat(canonical_dtype(kv_cache_dtype))
