"""What each token stores in the histories of slots: a pattern of bits for its content, its layer, and key or value.

A token's content is that of all tokens up to it, so whoever shares a prefix shares markers. In an 8-bit cache a marker
is the stored byte: the number that the model computes is that byte times the scale, rounded to the model's 16 bits.
Quantising gives the byte back, because neighbours among 8-bit numbers are 2**-4 of their size apart and more, and the
two roundings on the way move a number by less than 2**-8.
"""

import math

import attrs
import numpy as np
import torch
from kvledger.backends.cuda.layout import torch_dtype
from numpy.typing import NDArray

MODEL_DTYPE = torch.bfloat16

_MIX = np.uint64(0x9E3779B97F4A7C15)
# Finite ones only: NaN and infinities need not survive arithmetic, and the reading kernels do some.
_FINITE = {"bf16": np.uint16(0xBFFF), "fp8_e4m3": np.uint8(0xFB), "fp8_e5m2": np.uint8(0xFB)}


@attrs.frozen
class MarkedPart:
    """One vector that a layer stores of each token.

    Attributes:
        layer: its name.
        number: 0 for keys and latents, 1 for values.
        shape: of one token's vector.
        dtype: of the cache.
        scale: of an 8-bit cache.
    """

    layer: str
    number: int
    shape: tuple[int, ...]
    dtype: str = "bf16"
    scale: float = 1.0


class MarkedTokens:
    """Tokens of a batch and their markers, made once for all memories that store the same parts.

    Attributes:
        contents: int64 `[num_tokens]`, a number for what each token and all before it are.
    """

    def __init__(self, contents: NDArray[np.int64]) -> None:
        self.contents = contents
        self._markers: dict[MarkedPart, NDArray[np.unsignedinteger]] = {}
        self._numbers: dict[tuple[MarkedPart, int], torch.Tensor] = {}

    def markers(self, part: MarkedPart) -> NDArray[np.unsignedinteger]:
        """The stored bits: uint16 or uint8 `[num_tokens, *shape]`, different for different contents and parts."""
        if part not in self._markers:
            kind = np.uint64(int.from_bytes(f"{part.layer}.{part.number}".encode(), "big") % (1 << 61))
            elements = np.arange(math.prod(part.shape), dtype=np.uint64)
            mixed = (self.contents.astype(np.uint64)[:, None] * np.uint64(1 << 20) + elements) * _MIX ^ kind
            mixed = (mixed ^ (mixed >> np.uint64(29))) * _MIX
            finite = _FINITE[part.dtype]
            patterns = (mixed >> np.uint64(40)).astype(finite.dtype) & finite
            self._markers[part] = patterns.reshape(len(self.contents), *part.shape)
        return self._markers[part]

    def numbers(self, part: MarkedPart, num_padding: int, device: torch.device) -> torch.Tensor:
        """What the model computes: bfloat16 `[num_tokens + num_padding, *shape]`; the padding is NaN."""
        key = (part, num_padding)
        if key not in self._numbers:
            stored = torch.from_numpy(self.markers(part)).view(torch_dtype(part.dtype))
            padded = torch.full((len(stored) + num_padding, *part.shape), torch.nan, dtype=MODEL_DTYPE)
            padded[: len(stored)] = stored if stored.dtype == MODEL_DTYPE else stored.float() * part.scale
            self._numbers[key] = padded.to(device)
        return self._numbers[key]
