"""The kernels in Triton, for a GPU, or for any tensors under Triton's interpreter.

A cache write checks its arguments once per layout (dtypes, shapes, strides, alignments) and keeps the checked launch,
so that the next layer and the next step repeat neither the checks nor Triton's specialisation. No call waits for the
device unless `checked=True`, and only results and their parts are allocated, so that calls can be captured in a CUDA
graph after one call of each kind and shape.
"""

import torch
from torch import Tensor

from .attention_launches import attention_launch, merge_launch, num_splits_for, query_tile_for
from .concat_and_cache_mla import check_mla_cache, check_mla_write
from .copy_blocks import BlockRegions
from .fp8 import numbers_of
from .gather_cache import BlockTableRows, TokensToRead
from .kernel_set import Kernels
from .launch import Launch, LaunchCache, memory_key, num_lanes_for, rows_key
from .reshape_and_cache import CachePair, Caches, PairOf, Scales, check_write
from .slot_mapping import SlotTables
from .triton_launches import (
    COPY_TILE_WORDS,
    SLOT_TILE,
    copy_launch,
    current_target,
    gather_launch,
    mla_write_launch,
    refuse_unsupported_dtype,
    slot_mapping_launch,
    write_launch,
)


class TritonKernels(Kernels):
    """`Kernels` in Triton. Launches go to the current stream of the current device, where the tensors must be."""

    def __init__(self) -> None:
        """Find the target that Triton compiles for.

        Raises:
            KernelInputError: Triton finds no GPU and its interpreter is not on.
        """
        current_target()
        self._launches = LaunchCache()

    def _map_slots(
        self, tables: SlotTables, rows: Tensor, query_start_loc: Tensor, first_positions: Tensor, slot_mapping: Tensor
    ) -> None:
        constants = (tables.context_rank, tables.context_size, tables.interleave, tables.max_num_positions)
        launch = self._launches.get(
            ("slot_mapping", *constants, *memory_key(slot_mapping)), lambda: slot_mapping_launch(tables, slot_mapping)
        )
        if slot_mapping.shape[1]:
            num_lanes = num_lanes_for(slot_mapping.shape[1], SLOT_TILE)
            pointers = (tables.descriptors, rows, query_start_loc, first_positions, slot_mapping)
            launch((len(rows) + 1, len(tables.block_tables), num_lanes), pointers, len(rows))

    def _write(
        self,
        pair_of: PairOf,
        caches: Caches,
        key: Tensor,
        value: Tensor,
        slot_mapping: Tensor,
        scales: Scales,
        checked: bool,
    ) -> None:
        def checked_launch() -> Launch:
            pair = pair_of(*caches)
            refuse_unsupported_dtype(pair.key.dtype)
            check_write(pair, key, value, slot_mapping, scales, checked)
            return write_launch(pair, key, value, scales)

        key_cache, value_cache, kv_cache_dtype = caches
        layout = (pair_of, kv_cache_dtype, memory_key(key_cache, value_cache, *scales))
        launch = self._launches.get((*layout, rows_key(key, value, slot_mapping)), checked_launch)
        num_tokens = slot_mapping.shape[0]
        if checked or not num_tokens <= key.shape[0] == value.shape[0]:
            check_write(pair_of(*caches), key, value, slot_mapping, scales, checked)
        if num_tokens:
            grid = (num_tokens, -(-key.shape[1] // launch.constants["HEADS_TILE"]), 1)
            stored = (numbers_of(key_cache, kv_cache_dtype), numbers_of(value_cache, kv_cache_dtype))
            launch(grid, (key, value, *stored, slot_mapping, *scales))

    def _write_latents(
        self,
        cache: Tensor,
        kv_cache_dtype: str,
        kv_c: Tensor,
        k_pe: Tensor,
        slot_mapping: Tensor,
        scale: Tensor | None,
        checked: bool,
    ) -> None:
        def checked_launch() -> Launch:
            numbers = check_mla_cache(cache, kv_cache_dtype)
            refuse_unsupported_dtype(numbers.dtype)
            check_mla_write(numbers, kv_c, k_pe, slot_mapping, scale, checked)
            return mla_write_launch(numbers, kv_c, k_pe, scale)

        layout = ("mla", kv_cache_dtype, memory_key(cache, scale), rows_key(kv_c, k_pe, slot_mapping))
        launch = self._launches.get(layout, checked_launch)
        num_tokens = slot_mapping.shape[0]
        numbers = numbers_of(cache, kv_cache_dtype)
        if checked or not num_tokens <= kv_c.shape[0] == k_pe.shape[0]:
            check_mla_write(numbers, kv_c, k_pe, slot_mapping, scale, checked)
        if num_tokens:
            launch((num_tokens, 1, 1), (kv_c, k_pe, numbers, slot_mapping, scale))

    def _copy(self, caches: BlockRegions, sources: Tensor, targets: Tensor) -> None:
        launch = self._launches.get(
            ("copy", caches.num_blocks, caches.word_bytes, caches.descriptors.device), lambda: copy_launch(caches)
        )
        if len(sources):
            tile_bytes = COPY_TILE_WORDS * launch.constants["WORD_BYTES"]
            num_tiles = -(-caches.longest_run_bytes // tile_bytes)
            launch((len(sources), len(caches.regions), num_tiles), (caches.descriptors, sources, targets))

    def _gather(
        self, key_cache: Tensor, value_cache: Tensor | None, tokens: TokensToRead, dtype: torch.dtype, scales: Scales
    ) -> tuple[Tensor, Tensor]:
        refuse_unsupported_dtype(key_cache.dtype)
        table, cu_seqlens, first_positions, num_tokens = tokens
        has_first = first_positions is not None
        layout = ("gather", dtype, table.block_size, has_first)
        launch = self._launches.get(
            (*layout, memory_key(key_cache, value_cache, table.block_table, *scales)),
            lambda: gather_launch(key_cache, value_cache, table, dtype, has_first, scales),
        )
        num_heads, num_seqs = key_cache.shape[2], len(table.rows)
        key = torch.empty(num_tokens, num_heads, key_cache.shape[3:].numel(), dtype=dtype, device=key_cache.device)
        value = key if value_cache is None else key.new_empty(num_tokens, num_heads, value_cache.shape[3])
        if num_tokens:
            num_lanes = num_lanes_for(num_tokens, num_seqs + 1)
            grid = (num_seqs + 1, num_lanes, -(-num_heads // launch.constants["HEADS_TILE"]))
            pointers = (key_cache, value_cache, key, value, table.block_table, table.rows, cu_seqlens, first_positions)
            launch(grid, (*pointers, *scales), num_seqs, num_tokens)
        return key, value

    def _attend(
        self,
        pair: CachePair,
        table: BlockTableRows,
        query: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
        scales: Scales,
    ) -> Tensor:
        refuse_unsupported_dtype(pair.key.dtype)
        block_table, rows = table.block_table, table.rows
        num_tokens, num_q_heads, _ = query.shape
        num_seqs, num_kv_heads = len(rows), pair.key.shape[2]
        output = query.new_zeros(num_tokens, num_q_heads, pair.value.shape[3])
        if not (num_tokens and num_seqs):
            return output
        # Enough lanes for the mean sequence; the queries of a longer chunk take turns.
        num_lanes = num_lanes_for(num_tokens, num_seqs * query_tile_for(num_q_heads // num_kv_heads))
        max_keys = table.block_size * block_table.shape[1]
        num_splits = num_splits_for(
            num_seqs * num_kv_heads * num_lanes, max_keys if window is None else min(window, max_keys)
        )
        is_split = num_splits > 1
        memory = memory_key(pair.key, pair.value, block_table, *scales)
        launch = self._launches.get(
            ("attention", table.block_size, window, softcap, is_split, memory, rows_key(query)),
            lambda: attention_launch(pair, table, query, window, softcap, scales, is_split),
        )
        written, lse = output, None
        if is_split:
            written = output.new_empty(num_splits, *output.shape, dtype=torch.float32)
            lse = written.new_empty(written.shape[:-1])
        launch(
            (num_seqs, num_kv_heads, num_lanes * num_splits),
            (query, pair.key, pair.value, written, lse, block_table, rows, query_start_loc, seq_lens, *scales),
            num_tokens,
            num_splits,
            scale,
        )
        if is_split:
            num_rows = len(block_table)
            merge = self._launches.get(("merge", num_rows, rows_key(output)), lambda: merge_launch(output, num_rows))
            grid = (num_seqs, num_q_heads, num_lanes_for(num_tokens, num_seqs))
            merge(grid, (written, lse, output, rows, query_start_loc), num_tokens, num_splits)
        return output
