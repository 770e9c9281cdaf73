"""Calls of the real Triton wrappers with CPU tensors, by name: what is compiled ahead of time for each target.

Nothing runs, so the tensors are as small as their strides and alignments allow.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from kvledger.kernels import BlockRegions, SlotTables

NUM_BLOCKS = 4
NUM_TOKENS = 8
BF16, E4M3, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2

Call = Callable[[Any], None]


def flash(heads: int, size: int, dtype: torch.dtype, page: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    raw = torch.zeros(2, NUM_BLOCKS, page, heads, size, dtype=dtype)
    return raw[0], raw[1]


def flash_hnd(heads: int, size: int, dtype: torch.dtype, page: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    raw = torch.zeros(2, NUM_BLOCKS, heads, page, size, dtype=dtype).transpose(2, 3)
    return raw[0], raw[1]


def interleaved(heads: int, size: int, dtype: torch.dtype, page: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    raw = torch.zeros(NUM_BLOCKS, 2, page, heads, size, dtype=dtype)
    return raw[:, 0], raw[:, 1]


def packed(heads: int, size: int, dtype: torch.dtype, page: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    raw = torch.zeros(NUM_BLOCKS, heads, page, 2 * size, dtype=dtype).transpose(1, 2)
    return raw[..., :size], raw[..., size:]


def classic(heads: int, size: int, dtype: torch.dtype, page: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    x = 16 // dtype.itemsize
    key = torch.zeros(NUM_BLOCKS, heads, size // x, page, x, dtype=dtype)
    return key, torch.zeros(NUM_BLOCKS, heads, size, page, dtype=dtype)


def dense_rows(heads: int, size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(NUM_TOKENS, heads, size, dtype=dtype), torch.zeros(NUM_TOKENS, heads, size, dtype=dtype)


def qkv_slice(heads: int, size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values as they lie in the output of one fused projection, beside four query heads a key head."""
    fused = torch.zeros(NUM_TOKENS, 6 * heads, size, dtype=dtype)
    return fused[:, 4 * heads : 5 * heads], fused[:, 5 * heads :]


def rows_8_bytes_off(heads: int, size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of which only every other one begins at a multiple of 16 bytes."""
    wide = torch.zeros(2, NUM_TOKENS, heads * size + 4, dtype=dtype)
    return tuple(part[:, : heads * size].view(NUM_TOKENS, heads, size) for part in wide)


def slots() -> torch.Tensor:
    return torch.zeros(NUM_TOKENS, dtype=torch.int64)


def scales(*names: str) -> dict[str, torch.Tensor]:
    return {name: torch.ones(1) for name in names}


def write(
    cache_of: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    heads: int = 8,
    size: int = 128,
    dtype: torch.dtype = BF16,
    cache_dtype: torch.dtype | None = None,
    rows_of: Callable[..., tuple[torch.Tensor, torch.Tensor]] = dense_rows,
    page: int = 16,
) -> Call:
    """One `reshape_and_cache`, with scales where it quantises."""

    def call(kernels: Any) -> None:
        key, value = rows_of(heads, size, dtype)
        key_cache, value_cache = cache_of(heads, size, cache_dtype or dtype, page)
        run = kernels.reshape_and_cache_classic if cache_of is classic else kernels.reshape_and_cache
        given = scales("k_scale", "v_scale") if cache_dtype else {}
        run(key=key, value=value, key_cache=key_cache, value_cache=value_cache, slot_mapping=slots(), **given)

    return call


def write_mla(cache_dtype: torch.dtype) -> Call:
    def call(kernels: Any) -> None:
        kernels.concat_and_cache_mla(
            kv_c=torch.zeros(NUM_TOKENS, 512, dtype=BF16),
            k_pe=torch.zeros(NUM_TOKENS, 64, dtype=BF16),
            cache=torch.zeros(NUM_BLOCKS, 64, 576, dtype=cache_dtype),
            slot_mapping=slots(),
            **(scales("scale") if cache_dtype != BF16 else {}),
        )

    return call


def map_slots(context_size: int = 1, block_size: int = 16) -> Call:
    def call(kernels: Any) -> None:
        tables = [torch.zeros(4, 64, dtype=torch.int32), torch.zeros(4, 32, dtype=torch.int32)]
        kernels.compute_slot_mapping(
            tables=SlotTables.of(tables, [block_size, 2 * block_size], context_size=context_size),
            rows=torch.zeros(4, dtype=torch.int32),
            query_start_loc=torch.zeros(5, dtype=torch.int32),
            first_positions=torch.zeros(4, dtype=torch.int64),
            slot_mapping=torch.zeros(2, 8192, dtype=torch.int64),
        )

    return call


def copy(kernels: Any) -> None:
    pairs = torch.zeros(2, dtype=torch.int64)
    caches = [part for _ in range(2) for part in flash(8, 128, BF16)]
    kernels.copy_blocks(caches=BlockRegions.of(caches), sources=pairs, targets=pairs)


def block_table(width: int = 8) -> dict[str, torch.Tensor]:
    return {"block_table": torch.zeros(4, width, dtype=torch.int32), "rows": torch.zeros(2, dtype=torch.int32)}


def gather(
    cache_of: Callable[..., tuple[torch.Tensor, torch.Tensor]], cache_dtype: torch.dtype = BF16, size: int = 128
) -> Call:
    def call(kernels: Any) -> None:
        key_cache, value_cache = cache_of(8, size, cache_dtype)
        run = kernels.gather_cache_classic if cache_of is classic else kernels.gather_cache
        given = {"dtype": BF16, **scales("k_scale", "v_scale")} if cache_dtype != BF16 else {}
        run(
            key_cache=key_cache,
            value_cache=value_cache,
            **block_table(),
            cu_seqlens=torch.zeros(3, dtype=torch.int32),
            num_tokens=NUM_TOKENS,
            **given,
        )

    return call


def gather_mla(kernels: Any) -> None:
    kernels.gather_mla_cache(
        cache=torch.zeros(NUM_BLOCKS, 64, 576, dtype=BF16),
        **block_table(),
        cu_seqlens=torch.zeros(3, dtype=torch.int32),
        num_tokens=NUM_TOKENS,
    )


def attend(
    cache_of: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    size: int = 128,
    dtype: torch.dtype = BF16,
    cache_dtype: torch.dtype | None = None,
    q_heads: int = 32,
    num_tokens: int = 2,
    width: int = 8,
    **options: float,
) -> Call:
    """Attention of two sequences: a decode by default, a chunk with more tokens, split with a wider block table."""

    def call(kernels: Any) -> None:
        key_cache, value_cache = cache_of(8, size, cache_dtype or dtype)
        kernels.paged_attention(
            query=torch.zeros(num_tokens, q_heads, size, dtype=dtype),
            key_cache=key_cache,
            value_cache=value_cache,
            **block_table(width),
            query_start_loc=torch.tensor([0, num_tokens // 2, num_tokens], dtype=torch.int32),
            seq_lens=torch.full((2,), num_tokens // 2, dtype=torch.int32),
            scale=size**-0.5,
            **(scales("k_scale", "v_scale") if cache_dtype else {}),
            **options,
        )

    return call


@triton.jit
def fixed_tile_write(
    key_ptr,
    value_ptr,
    key_cache_ptr,
    value_cache_ptr,
    slots_ptr,
    token_stride,
    block_stride,
    slot_stride,
    num_elements,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """A cache write in the common shape: one row of elements a program, in tiles of a fixed size.

    It stands here to show that the checks see the difference: its tile is as wide as a row of 8 x 128, and with 16
    warps each thread has two elements of it.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if slot >= 0:
        elements = tl.program_id(1) * TILE + tl.arange(0, TILE)
        mask = elements < num_elements
        at = slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * slot_stride
        key = tl.load(key_ptr + token * token_stride + elements, mask=mask)
        tl.store(key_cache_ptr + at + elements, key, mask=mask)
        value = tl.load(value_ptr + token * token_stride + elements, mask=mask)
        tl.store(value_cache_ptr + at + elements, value, mask=mask)


def fixed_tile(num_warps: int) -> Call:
    """The kernel above over 8 x 128 bf16, with tiles of 1,024."""

    def call(_: Any) -> None:
        key, value = dense_rows(8, 128, BF16)
        key_cache, value_cache = flash(8, 128, BF16)
        fixed_tile_write[(NUM_TOKENS, 1)](
            key,
            value,
            key_cache,
            value_cache,
            slots(),
            key.stride(0),
            key_cache.stride(0),
            key_cache.stride(1),
            1024,
            BLOCK_SIZE=16,
            TILE=1024,
            num_warps=num_warps,
        )

    return call


# Compiled for every target.
EVERYWHERE: dict[str, Call] = {
    "write flash 8x128": write(flash),
    "write packed 8x128": write(packed),
    "write classic 8x128": write(classic),
    "write classic 8x128, page 20": write(classic, page=20),
    "write flash 8x128 to e4m3": write(flash, cache_dtype=E4M3),
    "write flash 8x128 to e5m2": write(flash, cache_dtype=E5M2),
    "write MLA 512+64": write_mla(BF16),
    "slot mapping": map_slots(),
    "slot mapping, 2^32 positions": map_slots(block_size=1 << 26),
    "copy blocks 8x128": copy,
    "gather flash 8x128": gather(flash),
    "attend flash 32/8x128": attend(flash),
    "attend flash 32/8x128, split": attend(flash, width=512),
    "attend flash 32/8x576 fp32, split": attend(flash, size=576, dtype=torch.float32, width=512),
    "fixed tile, 16 warps": fixed_tile(16),
    "fixed tile, 4 warps": fixed_tile(4),
}
# Compiled for one target: what differs is in Triton's own layouts, which all targets share.
ON_SM_90: dict[str, Call] = {
    "write flash, heads first 8x128": write(flash_hnd),
    "write interleaved 8x128": write(interleaved),
    "write qkv slices 8x128": write(flash, rows_of=qkv_slice),
    "write rows 8 bytes off 8x128": write(flash, rows_of=rows_8_bytes_off),
    "write classic 32x64": write(classic, heads=32, size=64),
    "write flash 8x128, page 17": write(flash, page=17),
    "write flash 8x64": write(flash, size=64),
    "write flash 8x80": write(flash, size=80),
    "write flash 8x256": write(flash, size=256),
    "write flash 3x64": write(flash, heads=3, size=64),
    "write flash 1x128": write(flash, heads=1),
    "write flash 8x128 fp32": write(flash, dtype=torch.float32),
    "write MLA 512+64 to e4m3": write_mla(E4M3),
    "slot mapping, 2 context ranks": map_slots(context_size=2),
    "gather packed 8x128": gather(packed),
    "gather classic 8x128": gather(classic),
    "gather flash 8x128 from e4m3": gather(flash, E4M3),
    "gather MLA 512+64": gather_mla,
    "attend packed 32/8x64": attend(packed, size=64),
    "attend flash 32/8x128 from e4m3": attend(flash, cache_dtype=E4M3),
    "attend flash 64/8x256, window, softcap": attend(flash, size=256, q_heads=64, window=64, softcap=30.0),
    "attend flash 32/8x128, a chunk": attend(flash, num_tokens=64),
}


# Too many to compile in each run.
HEADS: dict[str, Call] = {
    f"attend flash 32/8x{size} {str(dtype).removeprefix('torch.')}{how}": attend(flash, size, dtype, width=width)
    for size in (64, 80, 96, 112, 120, 128, 192, 256, 576)
    for dtype in (BF16, torch.float32)
    for how, width in (("", 8), (", split", 512))
}


def calls_for(target_name: str, which: str = "") -> dict[str, Call]:
    """What is compiled for a target; `which` is "" or "heads"."""
    if which == "heads":
        return HEADS
    return {**EVERYWHERE, **ON_SM_90} if target_name == "sm_90" else EVERYWHERE
