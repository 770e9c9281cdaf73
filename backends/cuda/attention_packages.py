"""Computes attention with other packages on request: FlashAttention's and FlashInfer's kernels on this cache.

    CudaBackend(device="cuda", ..., attention_packages=installed_packages())

For each call the first package that fits computes attention; if none fits, the backend's own kernel does. The call
signatures are those of `flash_attn/flash_attn_interface.py` (Dao-AILab/flash-attention, commit 0053002) and of
`flashinfer/decode.py` (flashinfer-ai/flashinfer, commit 002752a). Tests call stand-ins of these signatures; the
packages themselves have not been run.
"""

import logging
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Protocol

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...core.types import TokenBatch
from ..context_rank import ContextRank
from .staging import on_device


@attrs.frozen(eq=False)
class FlashInferTables:
    """A batch's block tables for FlashInfer's paged attention: pages of the kernel's block size in one flat list."""

    indptr: torch.Tensor  # int32 `[num_reqs + 1]`, where each request's pages start in `indices`
    indices: torch.Tensor  # int32 `[num_pages]`, the pages
    # int32 `[num_reqs]`, tokens in each request's last page: 1 to the page size, 0 for a request without tokens on this
    # rank.
    last_page_len: torch.Tensor
    indptr_host: NDArray[np.int32]  # `indptr`, for FlashInfer's plan, which runs on the host
    last_page_len_host: NDArray[np.int32]  # `last_page_len`, for the same


def num_local_tokens(num_tokens: NDArray[np.int64], context: ContextRank) -> NDArray[np.int64]:
    """Count which of a request's first `num_tokens` tokens this rank of decode context parallelism holds."""
    stripe = context.interleave_tokens
    rounds, rest = np.divmod(num_tokens, stripe * context.size)
    return rounds * stripe + np.clip(rest - context.rank * stripe, 0, stripe)


def flashinfer_tables(
    table: torch.Tensor,
    rows: torch.Tensor,
    batch: TokenBatch,
    page_size: int,
    pages_per_block: int,
    context: ContextRank,
) -> FlashInferTables:
    """Read the pages of a batch from a block table on the device, without waiting for it.

    Args:
        table: int32 `[max_num_reqs, width]` on the device.
        rows: int32 `[num_reqs]` on the device, the batch's rows.
        batch: the batch; its tokens count as written.
        page_size: tokens of a page on this rank.
        pages_per_block: pages in one entry of the table.
        context: which rank this is; `ContextRank()` if the group's tokens are not split over the ranks.
    """
    lengths = num_local_tokens(batch.first_positions + batch.counts, context)
    num_pages = -(-lengths // page_size)
    indptr = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(num_pages)])
    last_page_len = (lengths - np.maximum(num_pages - 1, 0) * page_size).astype(np.int32)
    total = int(indptr[-1])
    device = table.device
    staged = on_device(np.concatenate([indptr, num_pages]), device)
    starts, counts = staged[: len(indptr)], staged[len(indptr) :]
    # With its length given, repeat_interleave does not have to ask the device for it.
    requests = torch.repeat_interleave(torch.arange(len(counts), device=device), counts.clone(), output_size=total)
    page = torch.arange(total, device=device) - starts[requests]
    blocks = table[rows.long()[requests], page // pages_per_block]
    indices = (blocks * pages_per_block + page % pages_per_block).to(torch.int32)
    return FlashInferTables(
        starts.to(torch.int32), indices, on_device(last_page_len, device), indptr.astype(np.int32), last_page_len
    )


HALF_FLOATS = (torch.float16, torch.bfloat16)
FLASH_ATTENTION_PAGE_TOKENS = 256
FLASH_ATTENTION_MAX_HEAD_SIZE = 256
FLASHINFER_HEAD_SIZES = (64, 128, 256)
FLASHINFER_GROUP_SIZES = (1, 2, 4, 8)
FLASHINFER_WORKSPACE_BYTES = 128 << 20


@attrs.frozen(eq=False)
class AttentionCall:
    """Attention of a prepared batch over one layer's cache."""

    batch: TokenBatch
    query: Tensor  # `[num_tokens, num_q_heads, head_size]`, padding allowed behind the batch's tokens
    key_cache: Tensor  # logical `[num_blocks, block_size, num_kv_heads, head_size]`, last stride 1
    value_cache: Tensor  # the same
    block_table: Tensor  # int32 `[max_num_reqs, width]`
    table_block_size: int  # tokens of one entry of the block table
    rows: Tensor  # int32 `[num_reqs]`; -1 is a padding request
    query_start_loc: Tensor  # int32 `[num_reqs + 1]`
    seq_lens: Tensor  # int32 `[num_reqs]`, the batch's tokens included; 0 for a padding request
    scale: float  # factor of the scores
    window: int | None  # tokens that a query sees, itself included; None: all
    softcap: float | None  # scores become softcap * tanh(score / softcap); None: no cap

    @property
    def is_decode(self) -> bool:
        """Whether every request has one token, so that token i belongs to request i."""
        return bool((self.batch.counts == 1).all())

    @property
    def misfit(self) -> str | None:
        """Why no package can compute this call; None if one may."""
        dtypes, sizes = {self.query.dtype, self.key_cache.dtype}, (self.key_cache.shape[3], self.value_cache.shape[3])
        if len(dtypes) > 1 or not dtypes <= set(HALF_FLOATS):
            return (
                f"it takes one of {HALF_FLOATS}, not queries and keys of {self.query.dtype} and {self.key_cache.dtype}"
            )
        return None if sizes[0] == sizes[1] else f"it takes keys and values of one head size, not {sizes}"


class AttentionPackage(Protocol):
    """A package with kernels for paged attention."""

    @property
    def name(self) -> str:
        """The name that is imported."""
        ...

    def misfit(self, call: AttentionCall) -> str | None:
        """Why it cannot compute this call; None if it can."""
        ...

    def attend(self, call: AttentionCall) -> Tensor:
        """Compute `[num_tokens, num_q_heads, head_size]` in the query's dtype; zeros for padding."""
        ...


def installed_packages() -> list[AttentionPackage]:
    """Return the packages that can be imported if torch sees a GPU, FlashAttention first."""
    found: list[AttentionPackage] = []
    if torch.cuda.is_available():
        for make in (FlashAttention, FlashInfer):
            try:
                found.append(make(import_module(make.name)))
            except ImportError:
                continue
    return found


class AttentionChoices:
    """Chooses the first package that fits each call, or the backend's own kernel.

    Attributes:
        by_layer: layer -> the last choice, and why no package fitted. Each new choice is logged once.
    """

    def __init__(self, packages: Sequence[AttentionPackage]) -> None:
        self._packages = tuple(packages)
        self._logged: set[str] = set()
        self.by_layer: dict[str, str] = {}

    def choose(self, layer: str, call: AttentionCall) -> AttentionPackage | None:
        """Return the package for this call; None: the backend's own kernel."""
        misfits: list[str] = []
        chosen: AttentionPackage | None = None
        for package in self._packages:
            misfit = package.misfit(call)
            if misfit is None:
                chosen = package
                break
            misfits.append(f"{package.name}: {misfit}")
        choice = chosen.name if chosen is not None else "; ".join(["own kernel", *misfits])
        self.by_layer[layer] = choice
        if choice not in self._logged:
            self._logged.add(choice)
            logging.getLogger(__name__).info("attention of layer %s: %s", layer, choice)
        return chosen


class FlashAttention:
    """`flash_attn`: computes decodes with `flash_attn_with_kvcache`, other batches with `flash_attn_varlen_func`.

    It reads the block tables directly and takes blocks of a multiple of 256 tokens.
    """

    name = "flash_attn"

    def __init__(self, module: Any) -> None:
        """Use the imported package `flash_attn`."""
        self._module = module

    def misfit(self, call: AttentionCall) -> str | None:
        """See `AttentionPackage`."""
        page_size, head_size = call.key_cache.shape[1], call.key_cache.shape[3]
        if page_size % FLASH_ATTENTION_PAGE_TOKENS:
            return f"it takes blocks of a multiple of {FLASH_ATTENTION_PAGE_TOKENS} tokens, not of {page_size}"
        if call.table_block_size != page_size:
            return f"an entry of the block table is {call.table_block_size} tokens, and a block of its own {page_size}"
        if head_size % 8 or head_size > FLASH_ATTENTION_MAX_HEAD_SIZE:
            return f"it takes head sizes of a multiple of 8 up to {FLASH_ATTENTION_MAX_HEAD_SIZE}, not {head_size}"
        return call.misfit

    def attend(self, call: AttentionCall) -> Tensor:
        """See `AttentionPackage`."""
        # A padding request gets row 0, of which it reads nothing.
        table = call.block_table[call.rows.clamp(min=0).long()]
        options = {
            "softmax_scale": call.scale,
            "causal": True,
            # Keys that a query sees before and behind its own.
            "window_size": (-1, -1) if call.window is None else (call.window - 1, 0),
            "softcap": 0.0 if call.softcap is None else call.softcap,
        }
        output = torch.zeros_like(call.query, memory_format=torch.contiguous_format)
        if call.is_decode:
            count = min(len(call.query), len(call.rows))
            output[:count] = self._module.flash_attn_with_kvcache(
                call.query[:count, None],
                call.key_cache,
                call.value_cache,
                cache_seqlens=call.seq_lens[:count],
                block_table=table[:count],
                **options,
            )[:, 0]
            return output
        count = call.batch.num_tokens
        output[:count] = self._module.flash_attn_varlen_func(
            call.query[:count],
            call.key_cache,
            call.value_cache,
            cu_seqlens_q=call.query_start_loc,
            cu_seqlens_k=torch.nn.functional.pad(call.seq_lens.cumsum(0, dtype=torch.int32), (1, 0)),
            max_seqlen_q=int(call.batch.counts.max()),
            max_seqlen_k=table.shape[1] * call.table_block_size,
            block_table=table,
            **options,
        )
        return output


class FlashInfer:
    """`flashinfer`: computes decodes with `BatchDecodeWithPagedKVCacheWrapper`, planned once per batch for like layers.

    Its plan runs on the host, so no graph captures it. Its workspace of 128 MiB is not in the memory plan: leave room.
    """

    name = "flashinfer"

    def __init__(self, module: Any) -> None:
        """Use the imported package `flashinfer`."""
        self._module = module
        self._workspace: Tensor | None = None
        # For layers that are alike, FlashInfer's wrapper and the batch that it was planned for.
        self._plans: dict[tuple[Any, ...], tuple[Any, TokenBatch]] = {}

    def misfit(self, call: AttentionCall) -> str | None:
        """See `AttentionPackage`."""
        head_size, group = call.key_cache.shape[3], call.query.shape[1] // call.key_cache.shape[2]
        if not call.is_decode or not call.batch.num_tokens:
            return "its decode kernel takes one token of each request"
        if call.query.is_cuda and torch.cuda.is_current_stream_capturing():
            return "its plan runs on the host, which a graph does not capture"
        if head_size not in FLASHINFER_HEAD_SIZES or group not in FLASHINFER_GROUP_SIZES:
            return (
                f"it takes head sizes {FLASHINFER_HEAD_SIZES} and {FLASHINFER_GROUP_SIZES} query heads a key head, not "
                f"{head_size} and {group}"
            )
        if call.key_cache.stride() != call.value_cache.stride():
            return "it takes keys and values of the same strides"
        return call.misfit

    def attend(self, call: AttentionCall) -> Tensor:
        """See `AttentionPackage`."""
        count = len(call.batch.rows)
        # Its last dimensions are [tokens, heads] or [heads, tokens], as they lie in memory.
        is_heads_first = call.key_cache.stride(1) < call.key_cache.stride(2)
        caches = (call.key_cache, call.value_cache)
        if is_heads_first:
            caches = (call.key_cache.transpose(1, 2), call.value_cache.transpose(1, 2))
        wrapper = self._planned(call, "HND" if is_heads_first else "NHD")
        output = torch.zeros_like(call.query, memory_format=torch.contiguous_format)
        output[:count] = wrapper.run(call.query[:count].contiguous(), caches)
        return output

    def _planned(self, call: AttentionCall, layout: str) -> Any:
        num_kv_heads, head_size = call.key_cache.shape[2:]
        page_size, query = call.key_cache.shape[1], call.query
        shape = (query.shape[1], num_kv_heads, head_size, page_size)
        options = (call.scale, call.window, call.softcap, query.dtype)
        key = (layout, call.block_table.data_ptr(), *shape, *options)
        if self._workspace is None:
            self._workspace = torch.zeros(FLASHINFER_WORKSPACE_BYTES, dtype=torch.uint8, device=query.device)
        wrapper, planned = self._plans.get(key, (None, None))
        if wrapper is None:
            wrapper = self._module.BatchDecodeWithPagedKVCacheWrapper(self._workspace, layout)
        if planned is not call.batch:
            pages_per_block = call.table_block_size // page_size
            rows = call.rows[: len(call.batch.rows)]
            tables = flashinfer_tables(call.block_table, rows, call.batch, page_size, pages_per_block, ContextRank())
            wrapper.plan(
                torch.from_numpy(tables.indptr_host),
                tables.indices,
                torch.from_numpy(tables.last_page_len_host),
                *shape,
                pos_encoding_mode="NONE",
                window_left=-1 if call.window is None else call.window - 1,
                logits_soft_cap=call.softcap,
                q_data_type=query.dtype,
                kv_data_type=query.dtype,
                sm_scale=call.scale,
            )
            self._plans[key] = wrapper, call.batch
        return wrapper
