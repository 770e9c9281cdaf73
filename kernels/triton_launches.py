"""Makes launches from checked tensors: tiles, access widths and strides of each Triton kernel."""

import math

import torch
import triton.language as tl
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

from .copy_blocks import BlockRegions
from .copy_blocks_triton import copy_blocks_kernel
from .errors import KernelInputError
from .fp8 import LARGEST
from .gather_cache import BlockTableRows
from .gather_cache_triton import gather_cache_kernel
from .launch import MAX_ACCESS_BYTES, WARP_SIZE, Launch, next_power_of_2, num_warps_for, vector_elements
from .reshape_and_cache import CachePair, Scales
from .reshape_and_cache_triton import concat_and_cache_mla_kernel, reshape_and_cache_kernel
from .slot_mapping import NUM_COLUMNS, SlotTables
from .slot_mapping_triton import slot_mapping_kernel

# Elements of one tile of heads x dimensions; larger tiles spill registers.
MAX_TILE_ELEMENTS = 2048
# With larger heads the rows of neighbours spill when they are transposed.
MAX_RUN_HEAD_SIZE = 512
SLOT_TILE = 1024
MAX_INT32 = (1 << 31) - 1
COPY_TILE_WORDS = 2048
WORD_TYPES = {1: tl.uint8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


def current_target() -> GPUTarget | None:
    """Return the target that Triton compiles for; None in the interpreter.

    Raises:
        KernelInputError: no GPU driver, and no interpreter.
    """
    if not isinstance(reshape_and_cache_kernel, JITFunction):
        return None
    try:
        return driver.active.get_current_target()
    except RuntimeError as error:
        raise KernelInputError(
            f"Triton finds no GPU ({error}); use TorchKernels, or set TRITON_INTERPRET=1 before triton is imported"
        ) from error


def warp_size() -> int:
    """Threads of a warp: 32, or 64 on AMD's data-center GPUs."""
    target = current_target()
    return WARP_SIZE if target is None else target.warp_size


def refuse_unsupported_dtype(dtype: torch.dtype) -> None:
    """Refuse float8_e4m3fn below compute capability 8.9: older GPUs cannot convert it, nor can Triton in software."""
    target = current_target()
    if target is None or target.backend != "cuda" or dtype != torch.float8_e4m3fn:
        return
    major, minor = divmod(int(target.arch), 10)
    if (major, minor) < (8, 9):
        raise KernelInputError(
            f"a float8_e4m3fn cache needs compute capability 8.9 and this GPU has {major}.{minor}; use fp8_e5m2, a "
            "16-bit cache, or TorchKernels"
        )


def heads_tile_for(num_heads: int, *tiles: int) -> int:
    """Return the heads of one program."""
    return min(next_power_of_2(num_heads), max(MAX_TILE_ELEMENTS // max(tiles), 1))


def slot_mapping_launch(tables: SlotTables, slot_mapping: Tensor) -> Launch:
    """Make the launch; its strides are those of the slot buffer, and `num_reqs` changes from call to call."""
    return Launch(
        slot_mapping_kernel,
        (slot_mapping.stride(0), slot_mapping.shape[1]),
        {
            "NUM_COLUMNS": NUM_COLUMNS,
            "CONTEXT_RANK": tables.context_rank,
            "CONTEXT_SIZE": tables.context_size,
            "INTERLEAVE": tables.interleave,
            "POSITION_TYPE": tl.int32 if tables.max_num_positions <= MAX_INT32 else tl.int64,
            "TILE": min(SLOT_TILE, next_power_of_2(slot_mapping.shape[1])),
        },
        num_warps=4,
    )


class CacheSide:
    """Strides and access width of one cache, as a kernel addresses it.

    The cache is logical `[num_blocks, block_size, heads, head_size]`; with `x` > 0 it holds classic keys, split into
    `[head_size / x, x]`; with `x` = 1 classic values, whose neighbours within a head are a block apart.
    """

    def __init__(self, cache: Tensor, x: int = 0) -> None:
        item = cache.element_size()
        if x:
            places = (cache.data_ptr(), x * item, *(stride * item for stride in cache.stride()[:4]))
            self.vec = math.gcd(16, *places) // item
        else:
            self.vec = vector_elements(cache)
        self.vec_bytes = self.vec * item
        block, slot, head = (stride // self.vec for stride in cache.stride()[:3])
        self.strides = (block, slot, head, cache.stride(3) // self.vec if x else 0)


def run_tokens(value: Tensor, is_quantized: bool) -> int:
    """Return how many tokens' values fill one access of 16 bytes in a classic cache if they are adjacent; else 1.

    Also 1 for a quantised cache, which has 16 such tokens, and for large heads, which have long rows: the threads of a
    program lack registers for them.
    """
    item = value.element_size()
    places = (value.data_ptr(), *(stride * item for stride in (value.stride(0), *value.stride()[2:])))
    run = MAX_ACCESS_BYTES // item
    is_aligned = math.gcd(MAX_ACCESS_BYTES, *places) == MAX_ACCESS_BYTES and value.shape[1] % run == 0
    fits = not is_quantized and value.shape[3] <= MAX_RUN_HEAD_SIZE
    return run if is_aligned and value.stride(1) == 1 and fits else 1


def write_launch(pair: CachePair, key: Tensor, value: Tensor, scales: Scales) -> Launch:
    """Launch one program per token and `HEADS_TILE` heads; the classic layout differs only in the cache's addresses."""
    num_heads, head_size, v_head_size = key.shape[1], key.shape[2], value.shape[2]
    key_tile, value_tile = next_power_of_2(head_size), next_power_of_2(v_head_size)
    heads_tile = heads_tile_for(num_heads, key_tile, value_tile)
    row_vec = vector_elements(key, value)
    is_classic = pair.key.dim() == 5
    x = pair.key.shape[4] if is_classic else 0
    key_side, value_side = CacheSide(pair.key, x), CacheSide(pair.value, int(is_classic))
    is_quantized = key.dtype != pair.key.dtype
    row_strides = [stride // row_vec for rows in (key, value) for stride in rows.stride()[:2]]
    num_warps = num_warps_for(heads_tile * max(key_tile, value_tile), pair.key.element_size(), warp_size())
    return Launch(
        reshape_and_cache_kernel,
        (*row_strides, *key_side.strides, *value_side.strides, pair.num_slots),
        {
            "NUM_HEADS": num_heads,
            "HEAD_SIZE": head_size,
            "V_HEAD_SIZE": v_head_size,
            "BLOCK_SIZE": pair.key.shape[1],
            "CLASSIC_X": x,
            "RUN": run_tokens(pair.value, is_quantized) if is_classic else 1,
            "RUN_STEP_HEADS": min(max(num_warps * warp_size() // value_tile, 1), heads_tile),
            "HEADS_TILE": heads_tile,
            "KEY_TILE": key_tile,
            "VALUE_TILE": value_tile,
            "ROW_VEC": row_vec,
            "ROW_VEC_BYTES": row_vec * key.element_size(),
            "KEY_VEC": key_side.vec,
            "KEY_VEC_BYTES": key_side.vec_bytes,
            "VALUE_VEC": value_side.vec,
            "VALUE_VEC_BYTES": value_side.vec_bytes,
            "LARGEST": LARGEST[pair.key.dtype] if is_quantized else 0.0,
            "HAS_K_SCALE": scales[0] is not None,
            "HAS_V_SCALE": scales[1] is not None,
        },
        num_warps,
    )


def mla_write_launch(cache: Tensor, kv_c: Tensor, k_pe: Tensor, scale: Tensor | None) -> Launch:
    """Launch one program per token."""
    latent_size, rope_size = kv_c.shape[1], k_pe.shape[1]
    row_tile = next_power_of_2(latent_size + rope_size)
    row_vec = vector_elements(kv_c, k_pe)
    cache_vec = vector_elements(cache)
    strides = (kv_c.stride(0), k_pe.stride(0), cache.stride(0), cache.stride(1))
    units = (row_vec, row_vec, cache_vec, cache_vec)
    return Launch(
        concat_and_cache_mla_kernel,
        (*(stride // unit for stride, unit in zip(strides, units, strict=True)), cache.shape[0] * cache.shape[1]),
        {
            "LATENT_SIZE": latent_size,
            "ROPE_SIZE": rope_size,
            "BLOCK_SIZE": cache.shape[1],
            "ROW_TILE": row_tile,
            "ROW_VEC": row_vec,
            "ROW_VEC_BYTES": row_vec * kv_c.element_size(),
            "CACHE_VEC": cache_vec,
            "CACHE_VEC_BYTES": cache_vec * cache.element_size(),
            "LARGEST": LARGEST[cache.dtype] if kv_c.dtype != cache.dtype else 0.0,
            "HAS_SCALE": scale is not None,
        },
        num_warps_for(row_tile, cache.element_size(), warp_size()),
    )


def copy_launch(caches: BlockRegions) -> Launch:
    """Launch one program per copy, region and `COPY_TILE_WORDS` words."""
    word_bytes = min(caches.word_bytes, max(WORD_TYPES))
    return Launch(
        copy_blocks_kernel,
        (caches.num_blocks,),
        {
            "WORD": WORD_TYPES[word_bytes],
            "WORD_BYTES": word_bytes,
            "ALIGNED_BYTES": caches.word_bytes,
            "TILE": COPY_TILE_WORDS,
        },
        num_warps=4,
    )


def gather_launch(
    key: Tensor, value: Tensor | None, table: BlockTableRows, dtype: torch.dtype, has_first: bool, scales: Scales
) -> Launch:
    """Launch one program per sequence, lane and `HEADS_TILE` heads.

    `num_seqs` and `num_tokens` change from call to call.
    """
    is_classic = key.dim() == 5
    x = key.shape[4] if is_classic else 0
    num_heads, head_size = key.shape[2], key.shape[3:].numel()
    v_head_size = head_size if value is None else value.shape[3]
    key_tile, value_tile = next_power_of_2(head_size), next_power_of_2(v_head_size)
    heads_tile = heads_tile_for(num_heads, key_tile, value_tile)
    key_side = CacheSide(key, x)
    value_side = key_side if value is None else CacheSide(value, int(is_classic))
    return Launch(
        gather_cache_kernel,
        (
            *key_side.strides,
            *value_side.strides,
            key.shape[0] * key.shape[1],
            table.block_table.stride(0),
            *table.block_table.shape,
        ),
        {
            "NUM_HEADS": num_heads,
            "HEAD_SIZE": head_size,
            "V_HEAD_SIZE": v_head_size,
            "BLOCK_SIZE": key.shape[1],
            "TABLE_BLOCK_SIZE": table.block_size,
            "CLASSIC_X": x,
            "HEADS_TILE": heads_tile,
            "KEY_TILE": key_tile,
            "VALUE_TILE": value_tile,
            "KEY_VEC": key_side.vec,
            "KEY_VEC_BYTES": key_side.vec_bytes,
            "VALUE_VEC": value_side.vec,
            "VALUE_VEC_BYTES": value_side.vec_bytes,
            "KEY_OUT_BYTES": math.gcd(16, head_size * dtype.itemsize),
            "VALUE_OUT_BYTES": math.gcd(16, v_head_size * dtype.itemsize),
            "HAS_VALUE": value is not None,
            "HAS_FIRST": has_first,
            "CONVERTS": dtype != key.dtype,
            "HAS_K_SCALE": scales[0] is not None,
            "HAS_V_SCALE": scales[1] is not None,
        },
        num_warps_for(heads_tile * max(key_tile, value_tile), key.element_size(), warp_size()),
    )
