"""Makes the launches of paged attention: tiles, the warps that hold them, and splits along the sequence."""

import math

from torch import Tensor

from .gather_cache import BlockTableRows
from .launch import Launch, next_power_of_2, vector_elements
from .paged_attention_triton import merge_splits_kernel, paged_attention_kernel
from .reshape_and_cache import CachePair, Scales
from .triton_launches import CacheSide, current_target, warp_size

MIN_DOT_SIZE = 16
MAX_KEYS_TILE = 32
# Elements of the keys, or of the values, of one step through the cache; more would spill registers.
MAX_STEP_ELEMENTS = 8192
# A larger head takes several tiles: its keys tiles of KEY_TILE_BYTES, its values one of this size and one for the rest.
# A single tile would be half empty at 576 dimensions, and would spill in float32.
MAX_HEAD_TILE = 512
KEY_TILE_BYTES = 256
# A head with a wider tile needs the registers of WIDE_HEAD_THREADS threads.
MAX_TILE_BYTES_OF_4_WARPS = 256
WIDE_HEAD_THREADS = 256
MAX_REGISTERS = 255

# Programs that fill a large GPU: with 128 registers per thread, four programs of four warps share one of 132
# multiprocessors. The number is fixed, so that the same call splits alike on every GPU and in every graph.
FILLING_PROGRAMS = 512
# A split is at least eight steps of the largest tile.
MIN_SPLIT_KEYS = 256
# A merge of this many splits of a head of 128 takes sixteen steps.
MAX_SPLITS = 128
MERGE_TILE_ELEMENTS = 1024


def num_splits_for(num_programs: int, max_keys: int) -> int:
    """Return the splits along the sequence, from numbers that are known before a launch and fixed in a graph.

    `num_programs` are those without splits; `max_keys` the most that a query can see: those of a row of the block
    table, or the window.
    """
    return max(min(-(-FILLING_PROGRAMS // num_programs), max_keys // MIN_SPLIT_KEYS, MAX_SPLITS), 1)


def key_tiles_for(head_size: int, item_bytes: int) -> tuple[int, int]:
    """Return the dimensions of one tile of a key, and the number of tiles."""
    if head_size <= MAX_HEAD_TILE:
        return max(next_power_of_2(head_size), MIN_DOT_SIZE), 1
    tile = KEY_TILE_BYTES // item_bytes
    return tile, -(-head_size // tile)


def value_tiles_for(head_size: int) -> tuple[int, int]:
    """Return the dimensions of the first tile of a value, and of the tile for its rest (0: no rest)."""
    if MAX_HEAD_TILE < head_size < 2 * MAX_HEAD_TILE:
        return MAX_HEAD_TILE, max(next_power_of_2(head_size - MAX_HEAD_TILE), MIN_DOT_SIZE)
    return max(next_power_of_2(head_size), MIN_DOT_SIZE), 0


def keys_tile_for(*tiles: int) -> int:
    """Return the keys of one step through the cache."""
    return max(MIN_DOT_SIZE, min(MAX_KEYS_TILE, MAX_STEP_ELEMENTS // max(tiles)))


def query_tile_for(heads_per_kv_head: int) -> int:
    """Return the query tokens that, times the heads of a group, fill the rows of a matrix product."""
    return max(MIN_DOT_SIZE // next_power_of_2(heads_per_kv_head), 1)


def attention_launch(
    pair: CachePair,
    table: BlockTableRows,
    query: Tensor,
    window: int | None,
    softcap: float | None,
    scales: Scales,
    is_split: bool,
) -> Launch:
    """Launch one program per sequence, key head, lane and split.

    `num_tokens`, `num_splits` and `scale` change from call to call.
    """
    num_kv_heads, head_size, v_head_size = pair.key.shape[2], pair.key.shape[3], pair.value.shape[3]
    group = query.shape[1] // num_kv_heads
    key_tile, key_tiles = key_tiles_for(head_size, query.element_size())
    value_tile, value_rest_tile = value_tiles_for(v_head_size)
    is_narrow = max(key_tile, value_tile) * query.element_size() <= MAX_TILE_BYTES_OF_4_WARPS
    key_side, value_side = CacheSide(pair.key), CacheSide(pair.value)
    query_vec = vector_elements(query)
    return Launch(
        paged_attention_kernel,
        (
            *(stride // query_vec for stride in query.stride()[:2]),
            *key_side.strides[:3],
            *value_side.strides[:3],
            pair.num_slots,
            table.block_table.stride(0),
            *table.block_table.shape,
        ),
        {
            "NUM_KV_HEADS": num_kv_heads,
            "GROUP": group,
            "HEAD_SIZE": head_size,
            "V_HEAD_SIZE": v_head_size,
            "BLOCK_SIZE": pair.key.shape[1],
            "TABLE_BLOCK_SIZE": table.block_size,
            "GROUP_TILE": next_power_of_2(group),
            "QUERY_TILE": query_tile_for(group),
            "KEYS_TILE": keys_tile_for(key_tile, value_tile),
            "KEY_TILE": key_tile,
            "KEY_TILES": key_tiles,
            "VALUE_TILE": value_tile,
            "VALUE_REST_TILE": value_rest_tile,
            "MIN_SPLIT_KEYS": MIN_SPLIT_KEYS if is_split else 0,
            "EARLY_VALUES": query.element_size() == 2,
            "QUERY_VEC": query_vec,
            "QUERY_VEC_BYTES": query_vec * query.element_size(),
            "KEY_VEC": key_side.vec,
            "KEY_VEC_BYTES": key_side.vec_bytes,
            "VALUE_VEC": value_side.vec,
            "VALUE_VEC_BYTES": value_side.vec_bytes,
            "OUT_BYTES": math.gcd(16, v_head_size * (4 if is_split else query.element_size())),
            "WINDOW": window or 0,
            "SOFTCAP": softcap or 0.0,
            "CONVERTS": query.dtype != pair.key.dtype,
            "HAS_K_SCALE": scales[0] is not None,
            "HAS_V_SCALE": scales[1] is not None,
        },
        num_warps=4 if is_narrow else WIDE_HEAD_THREADS // warp_size(),
        num_stages=1,
        max_registers=_max_registers(query.element_size()),
    )


def _max_registers(item_bytes: int) -> int | None:
    """Return the most registers for products of float32, which hold whole rows in registers."""
    target = current_target()
    return MAX_REGISTERS if item_bytes == 4 and target is not None and target.backend == "cuda" else None


def merge_launch(output: Tensor, num_rows: int) -> Launch:
    """Launch one program per sequence, query head and lane; `num_tokens` and `num_splits` change from call to call."""
    _, num_heads, v_head_size = output.shape
    value_tile = next_power_of_2(v_head_size)
    splits_tile = min(max(MERGE_TILE_ELEMENTS // value_tile, 1), MAX_SPLITS)
    return Launch(
        merge_splits_kernel,
        (num_rows,),
        {
            "NUM_HEADS": num_heads,
            "V_HEAD_SIZE": v_head_size,
            "SPLITS_TILE": splits_tile,
            "VALUE_TILE": value_tile,
            "OUT_BYTES": math.gcd(16, v_head_size * output.element_size()),
        },
        num_warps=4,
    )
