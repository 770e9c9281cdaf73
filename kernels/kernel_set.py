"""A set of kernels: `TorchKernels` on any device, `TritonKernels` on a GPU or in Triton's interpreter.

Both give the same bytes (paged attention: the same numbers up to rounding). All arguments are keywords; outputs are
written in place. Calls do not read device memory unless `checked=True`, so that `TritonKernels` neither waits for the
device nor breaks the capture of a CUDA graph.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from .concat_and_cache_mla import check_mla_cache
from .copy_blocks import BlockRegions, check_copy
from .gather_cache import BlockTableRows, TokensToRead, check_gather, check_read, check_table
from .paged_attention import check_attention
from .reshape_and_cache import CachePair, Caches, PairOf, Scales, classic_pair, flash_pair
from .slot_mapping import SlotTables, check_batch


class Kernels:
    """Writes, copies and reads a paged KV cache. Errors are `KernelInputError`; after one, nothing has been written.

    The methods check the arguments and call what the two sets implement; only the two writes are left to check for
    themselves, since `TritonKernels` checks them once per layout.

    Shared arguments:
        key_cache, value_cache: logical views `[num_blocks, block_size, num_kv_heads, head_size]` of any layout (NHD,
            HND, interleaved, packed K|V), last stride 1, other strides free and free to differ. float32, float16,
            bfloat16, float8_e4m3fn or float8_e5m2; or uint8 with `kv_cache_dtype` `fp8`, `fp8_e4m3` or `fp8_e5m2`.
        slot_mapping: int64 `[num_slots_given]`; slot = block * block_size + offset. Negative slots are skipped. Slots
            past the end of the cache are skipped too, and refused in checked mode.
        k_scale, v_scale, scale: float32 `[1]` on the device, for 8-bit caches only: stored = saturate(value / scale),
            read = stored * scale (`kv_scale` makes one). None is 1.0, with a `MissingScaleWarning`.
        block_table, rows: int32 `[max_num_reqs, max_num_blocks_per_req]` and int32 `[num_seqs]`, the row of each
            sequence, -1 for padding.
        block_size: tokens of one table entry, if the cache is viewed in smaller (kernel) blocks.
        checked: verify the contents of index tensors and scales as well; waits for the device.
    """

    # What a set implements, with the arguments in the order of the calls below.
    _map_slots: Callable[[SlotTables, Tensor, Tensor, Tensor, Tensor], None]
    _write: Callable[[PairOf, Caches, Tensor, Tensor, Tensor, Scales, bool], None]
    _write_latents: Callable[[Tensor, str, Tensor, Tensor, Tensor, Tensor | None, bool], None]
    _copy: Callable[[BlockRegions, Tensor, Tensor], None]
    # Without a value cache (None), the second result means nothing.
    _gather: Callable[[Tensor, Tensor | None, TokensToRead, torch.dtype, Scales], tuple[Tensor, Tensor]]
    _attend: Callable[
        [CachePair, BlockTableRows, Tensor, Tensor, Tensor, float, int | None, float | None, Scales], Tensor
    ]

    def compute_slot_mapping(
        self,
        *,
        tables: SlotTables,
        rows: Tensor,
        query_start_loc: Tensor,
        first_positions: Tensor,
        slot_mapping: Tensor,
        checked: bool = False,
    ) -> None:
        """Compute the slot of every token of a batch, for all groups in one launch.

        Token t of request i is at position `first_positions[i] + t - query_start_loc[i]`. Padding requests (row -1),
        tokens that another context-parallel rank holds, positions outside the table, and all entries from
        `query_start_loc[-1]` to the end of the buffer get -1. Sizes are read on the device: a captured graph of
        `len(rows)` requests serves any batch that fits.

        Beside the shared arguments:
            tables: the block tables of all groups, prepared once.
            rows: int32 `[num_reqs]`.
            query_start_loc: int32 `[num_reqs + 1]`, rising from 0; padding requests are empty.
            first_positions: int64 `[num_reqs]`.
            slot_mapping: int64 `[num_groups, max_num_batched_tokens]`, written.
        """
        check_batch(tables, rows, query_start_loc, first_positions, slot_mapping, checked)
        self._map_slots(tables, rows, query_start_loc, first_positions, slot_mapping)

    def reshape_and_cache(
        self,
        *,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
        kv_cache_dtype: str = "auto",
        checked: bool = False,
    ) -> None:
        """Write token t's key and value to `slot_mapping[t]`.

        Beside the shared arguments:
            key: `[num_tokens, num_kv_heads, head_size]`, last stride 1 (a slice of a fused qkv is fine); may be longer
                than `slot_mapping` (a graph-padded batch). Of the cache's dtype, or any float for an 8-bit cache.
            value: like `key`; its head size may differ.
        """
        caches = (key_cache, value_cache, kv_cache_dtype)
        self._write(flash_pair, caches, key, value, slot_mapping, (k_scale, v_scale), checked)

    def reshape_and_cache_classic(
        self,
        *,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
        kv_cache_dtype: str = "auto",
        checked: bool = False,
    ) -> None:
        """As `reshape_and_cache`, for keys `[num_blocks, num_kv_heads, head_size / x, block_size, x]` and values
        `[num_blocks, num_kv_heads, head_size, block_size]`.
        """
        caches = (key_cache, value_cache, kv_cache_dtype)
        self._write(classic_pair, caches, key, value, slot_mapping, (k_scale, v_scale), checked)

    def concat_and_cache_mla(
        self,
        *,
        kv_c: Tensor,
        k_pe: Tensor,
        cache: Tensor,
        slot_mapping: Tensor,
        scale: Tensor | None = None,
        kv_cache_dtype: str = "auto",
        checked: bool = False,
    ) -> None:
        """Write the latent `[num_tokens, latent]` and the rotary key `[num_tokens, rope]` of multi-head latent
        attention, side by side, into `cache` `[num_blocks, block_size, latent + rope]`.
        """
        self._write_latents(cache, kv_cache_dtype, kv_c, k_pe, slot_mapping, scale, checked)

    def copy_blocks(self, *, caches: BlockRegions, sources: Tensor, targets: Tensor, checked: bool = False) -> None:
        """Copy block `sources[i]` to `targets[i]` in all layers, byte for byte, in one launch.

        Beside the shared arguments:
            caches: the caches of all layers, prepared once.
            sources: int64 `[num_copies]`; a pair with a negative id is skipped.
            targets: int64 `[num_copies]`; no block may be a target twice, or both a source and a target.
        """
        check_copy(caches, sources, targets, checked)
        self._copy(caches, sources, targets)

    def gather_cache(
        self,
        *,
        key_cache: Tensor,
        value_cache: Tensor,
        block_table: Tensor,
        rows: Tensor,
        cu_seqlens: Tensor,
        num_tokens: int,
        first_positions: Tensor | None = None,
        block_size: int | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
        kv_cache_dtype: str = "auto",
        dtype: torch.dtype | None = None,
        checked: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Read keys and values back, sequence after sequence: two dense `[num_tokens, num_kv_heads, head_size]`.

        Tokens of padding sequences and positions outside the table are read as zeros.

        Beside the shared arguments:
            cu_seqlens: int32 `[num_seqs + 1]`: sequence i fills `[cu_seqlens[i], cu_seqlens[i + 1])` of the result.
            num_tokens: `cu_seqlens[-1]`, on the host.
            first_positions: int64 `[num_seqs]`, the first position read of each sequence; None is 0.
            dtype: of the result; None is the cache's own. An 8-bit cache is multiplied by its scale.
        """
        pair = flash_pair(key_cache, value_cache, kv_cache_dtype)
        table = check_table(block_table, rows, block_size, pair.key)
        tokens = check_gather(table, cu_seqlens, first_positions, num_tokens, checked)
        read_as = check_read(pair.key, dtype, checked, k_scale=k_scale, v_scale=v_scale)
        return self._gather(pair.key, pair.value, tokens, read_as, (k_scale, v_scale))

    def gather_cache_classic(
        self,
        *,
        key_cache: Tensor,
        value_cache: Tensor,
        block_table: Tensor,
        rows: Tensor,
        cu_seqlens: Tensor,
        num_tokens: int,
        first_positions: Tensor | None = None,
        block_size: int | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
        kv_cache_dtype: str = "auto",
        dtype: torch.dtype | None = None,
        checked: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """As `gather_cache`, from the classic layout."""
        pair = classic_pair(key_cache, value_cache, kv_cache_dtype)
        table = check_table(block_table, rows, block_size, pair.key)
        tokens = check_gather(table, cu_seqlens, first_positions, num_tokens, checked)
        read_as = check_read(pair.key, dtype, checked, k_scale=k_scale, v_scale=v_scale)
        return self._gather(pair.key, pair.value, tokens, read_as, (k_scale, v_scale))

    def gather_mla_cache(
        self,
        *,
        cache: Tensor,
        block_table: Tensor,
        rows: Tensor,
        cu_seqlens: Tensor,
        num_tokens: int,
        first_positions: Tensor | None = None,
        block_size: int | None = None,
        scale: Tensor | None = None,
        kv_cache_dtype: str = "auto",
        dtype: torch.dtype | None = None,
        checked: bool = False,
    ) -> Tensor:
        """As `gather_cache`, from a latent cache `[num_blocks, block_size, latent + rope]`; returns
        `[num_tokens, latent + rope]`.
        """
        numbers = check_mla_cache(cache, kv_cache_dtype).unsqueeze(2)
        table = check_table(block_table, rows, block_size, numbers)
        tokens = check_gather(table, cu_seqlens, first_positions, num_tokens, checked)
        latents, _ = self._gather(
            numbers, None, tokens, check_read(numbers, dtype, checked, scale=scale), (scale, None)
        )
        return latents.squeeze(1)

    def paged_attention(
        self,
        *,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_table: Tensor,
        rows: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        scale: float,
        block_size: int | None = None,
        window: int | None = None,
        softcap: float | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
        kv_cache_dtype: str = "auto",
        checked: bool = False,
    ) -> Tensor:
        """Compute causal attention of a batch's query tokens over the cache, their own keys included.

        The query tokens of sequence i are its last ones: positions `seq_lens[i] - num_queries` to `seq_lens[i] - 1`
        (one for a decode, a chunk for a prefill). Grouped-query attention: `num_q_heads / num_kv_heads` query heads
        share a key head. Positions without a block (-1 in the table, or past its end) are not attended. Tokens of
        padding sequences, and those that see no key, give zeros.

        Beside the shared arguments:
            query: `[num_tokens, num_q_heads, head_size]`, last stride 1; at least `query_start_loc[-1]` tokens.
            query_start_loc: int32 `[num_seqs + 1]`.
            seq_lens: int32 `[num_seqs]`, tokens in the cache, the batch's own included.
            scale: factor of the scores, usually head_size ** -0.5.
            window: tokens that a query sees, itself included; earlier keys are not read.
            softcap: scores become softcap * tanh(score / softcap).

        Returns:
            `[num_tokens, num_q_heads, v_head_size]` of the query's dtype.
        """
        pair = flash_pair(key_cache, value_cache, kv_cache_dtype)
        table = check_table(block_table, rows, block_size, pair.key)
        check_attention(pair, table, query, query_start_loc, seq_lens, window, softcap, checked)
        check_read(pair.key, query.dtype, checked, k_scale=k_scale, v_scale=v_scale)
        scales = (k_scale, v_scale)
        return self._attend(pair, table, query, query_start_loc, seq_lens, scale, window, softcap, scales)
