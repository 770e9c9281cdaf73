"""The block tables of a batch as FlashInfer takes them: pages of all requests in one flat list."""

import attrs
import numpy as np
import torch
from numpy.typing import NDArray

from ..core.types import TokenBatch
from .context_rank import ContextRank
from .device_values import on_device


@attrs.frozen(eq=False)
class FlashInferTables:
    """Arguments of FlashInfer's paged attention, in pages of the kernel's block size.

    Attributes:
        indptr: int32 `[num_reqs + 1]`, where each request's pages start in `indices`.
        indices: int32 `[num_pages]`, the pages.
        last_page_len: int32 `[num_reqs]`, tokens in each request's last page: 1 to the page size, 0 for a request
            without tokens on this rank.
        indptr_host: `indptr`, for FlashInfer's plan, which runs on the host.
        last_page_len_host: `last_page_len`, for the same.
    """

    indptr: torch.Tensor
    indices: torch.Tensor
    last_page_len: torch.Tensor
    indptr_host: NDArray[np.int32]
    last_page_len_host: NDArray[np.int32]


def num_local_tokens(num_tokens: NDArray[np.int64], context: ContextRank) -> NDArray[np.int64]:
    """How many of a request's first `num_tokens` tokens this rank of decode context parallelism holds."""
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
    """Read the pages of a batch out of a block table on the device, without waiting for it.

    Args:
        table: int32 `[max_num_reqs, width]` on the device.
        rows: int32 `[num_reqs]` on the device, the batch's rows.
        batch: the batch; its tokens count as written.
        page_size: tokens of a page on this rank.
        pages_per_block: pages that one entry of the table stands for.
        context: which rank this is; `ContextRank()` where the group's tokens are not dealt out.
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
