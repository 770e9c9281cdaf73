"""Caches in every layout, and what the kernels must do to them, written down as plain indexing."""

import math
from typing import Any

import attrs
import torch

from tests.kernels.kernel_sets import device

LAYOUTS = ("NHD", "HND", "interleaved", "packed", "classic")
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
PERIOD = 65_537
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@attrs.frozen(eq=False)
class PagedCache:
    """One layer's memory and its two views, as the kernels take them."""

    raw: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    is_classic: bool

    def views(self) -> dict[str, torch.Tensor]:
        return {"key_cache": self.key, "value_cache": self.value}

    def method(self, kernels: Any, name: str) -> Any:
        return getattr(kernels, f"{name}_classic" if self.is_classic else name)

    def logical(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`[num_blocks, block_size, ...]` of both."""
        if self.is_classic:
            return self.key.permute(0, 3, 1, 2, 4), self.value.permute(0, 3, 1, 2)
        return self.key, self.value

    def bytes(self) -> torch.Tensor:
        return self.raw.view(torch.uint8)


def paged_cache(
    layout: str, num_blocks: int, block_size: int, num_heads: int, head_size: int, dtype: torch.dtype, seed: int = 7
) -> PagedCache:
    """Memory full of random bytes, so that a byte written where none belongs shows."""
    size = 2 * num_blocks * block_size * num_heads * head_size * dtype.itemsize
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randint(0, 256, (PERIOD,), dtype=torch.uint8, generator=generator)
    raw = repeated(noise, size).to(device()).view(dtype)
    if layout == "NHD":
        key, value = raw.view(2, num_blocks, block_size, num_heads, head_size)
    elif layout == "HND":
        key, value = raw.view(2, num_blocks, num_heads, block_size, head_size).transpose(2, 3)
    elif layout == "interleaved":
        key, value = raw.view(num_blocks, 2, block_size, num_heads, head_size).unbind(1)
    elif layout == "packed":
        both = raw.view(num_blocks, num_heads, block_size, 2 * head_size).transpose(1, 2)
        key, value = both[..., :head_size], both[..., head_size:]
    else:
        x = math.gcd(16 // dtype.itemsize, head_size)
        first, second = raw.view(2, -1)
        key = first.view(num_blocks, num_heads, head_size // x, block_size, x)
        value = second.view(num_blocks, num_heads, head_size, block_size)
    return PagedCache(raw, key, value, layout == "classic")


def rows_of(num_tokens: int, num_heads: int, head_size: int, dtype: torch.dtype, seed: int = 3) -> tuple[Any, Any]:
    """Keys and values as slices of a fused qkv projection with one query head a key head."""
    generator = torch.Generator().manual_seed(seed)
    numbers = (torch.randn(PERIOD, generator=generator) * 60).to(dtype)
    fused = repeated(numbers, num_tokens * 3 * num_heads * head_size).to(device())
    fused = fused.view(num_tokens, 3 * num_heads, head_size)
    return fused[:, num_heads : 2 * num_heads], fused[:, 2 * num_heads :]


def repeated(numbers: torch.Tensor, count: int) -> torch.Tensor:
    """The first `count` numbers of a cycle; its prime length keeps rows and blocks different from each other."""
    return numbers.repeat(-(-count // len(numbers)))[:count]


def distinct_slots(num_slots: int, num_tokens: int, seed: int = 5) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(num_slots, generator=generator)[:num_tokens].to(device())


def written_by_indexing(cache: torch.Tensor, rows: torch.Tensor, slots: list[int]) -> None:
    """The reference: one assignment a token, on the bits."""
    word = WORDS[cache.element_size()]
    cache, block_size = cache.view(word), cache.shape[1]
    for token, slot in enumerate(slots):
        if slot >= 0:
            cache[slot // block_size, slot % block_size] = rows[token].contiguous().view(word).view(cache.shape[2:])


def integers(*values: int) -> torch.Tensor:
    """int32, as rows, starts and lengths are."""
    return torch.tensor(values, dtype=torch.int32, device=device())


def longs(*values: int) -> torch.Tensor:
    """int64, as slots and positions are."""
    return torch.tensor(values, dtype=torch.int64, device=device())
