"""Stand-ins for `flash_attn` and `flashinfer`: their call signatures, computed by the twin from what they are given.

A wrong pointer into the pages, a wrong length or layout gives wrong numbers, as it would there. What they refuse, these
refuse: FlashAttention pages that are no multiple of 256 tokens, FlashInfer runs without a plan and other shapes than
planned.
"""

from types import SimpleNamespace
from typing import Any

import torch
from kvledger.kernels import TorchKernels


def _integers(values: Any) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.int32)


def _check_flash_cache(q: Any, k_cache: Any, v_cache: Any, block_table: Any, batch_size: int) -> None:
    assert q.dtype == k_cache.dtype == v_cache.dtype
    assert q.dtype in (torch.float16, torch.bfloat16)
    assert k_cache.shape[1] % 256 == 0
    assert block_table.dtype == torch.int32
    assert block_table.is_contiguous()
    assert block_table.shape[0] == batch_size


def flash_attn_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any = None,
    v: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    cache_seqlens: Any = None,
    cache_batch_idx: Any = None,
    cache_leftpad: Any = None,
    block_table: Any = None,
    softmax_scale: Any = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Any = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    batch_size, num_queries, num_heads, _ = q.shape
    _check_flash_cache(q, k_cache, v_cache, block_table, batch_size)
    starts = torch.arange(batch_size + 1, dtype=torch.int32) * num_queries
    # A sequence without keys gives zeros, as rows of the mask without a key do there.
    rows = _integers([i if length else -1 for i, length in enumerate(cache_seqlens.tolist())])
    seq_lens = cache_seqlens.clamp(min=num_queries)
    flat = _attend(
        q.flatten(0, 1),
        k_cache,
        v_cache,
        block_table,
        rows,
        starts,
        seq_lens,
        softmax_scale,
        causal,
        window_size,
        softcap,
    )
    return flat.view(batch_size, num_queries, num_heads, -1)


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: Any = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Any = None,
) -> Any:
    _check_flash_cache(q, k, v, block_table, len(cu_seqlens_q) - 1)
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    seq_lens = cu_seqlens_k.diff()
    assert int(cu_seqlens_q.diff().max()) <= max_seqlen_q
    assert int(seq_lens.max()) <= max_seqlen_k
    rows = torch.arange(len(seq_lens), dtype=torch.int32)
    return _attend(q, k, v, block_table, rows, cu_seqlens_q, seq_lens, softmax_scale, causal, window_size, softcap)


def _attend(
    q: Any,
    k: Any,
    v: Any,
    table: Any,
    rows: Any,
    starts: Any,
    seq_lens: Any,
    scale: float,
    causal: bool,
    window_size: Any,
    softcap: float,
) -> Any:
    assert causal
    left, right = window_size
    assert right == (-1 if left == -1 else 0)
    return TorchKernels().paged_attention(
        query=q,
        key_cache=k,
        value_cache=v,
        block_table=table,
        rows=rows,
        query_start_loc=starts,
        seq_lens=seq_lens,
        scale=scale,
        window=None if left == -1 else left + 1,
        softcap=softcap or None,
        checked=True,
    )


class BatchDecodeWithPagedKVCacheWrapper:
    def __init__(self, float_workspace_buffer: Any, kv_layout: str = "NHD", use_cuda_graph: bool = False) -> None:
        assert kv_layout in ("NHD", "HND")
        assert float_workspace_buffer.dtype == torch.uint8
        assert not float_workspace_buffer.any()
        self.layout = kv_layout
        self.planned: dict[str, Any] | None = None
        self.num_plans = 0

    def plan(
        self,
        indptr: Any,
        indices: Any,
        last_page_len: Any,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        sm_scale: float | None = None,
    ) -> None:
        assert indptr.dtype == indices.dtype == last_page_len.dtype == torch.int32
        assert len(indptr) == len(last_page_len) + 1
        assert len(indices) == int(indptr[-1])
        assert bool(((last_page_len >= 1) & (last_page_len <= page_size)).all())
        self.planned = dict(locals())
        self.num_plans += 1

    def run(self, q: Any, paged_kv_cache: Any) -> Any:
        plan = self.planned
        assert plan is not None
        key, value = paged_kv_cache if self.layout == "NHD" else [part.transpose(1, 2) for part in paged_kv_cache]
        assert q.is_contiguous()
        assert tuple(q.shape) == (len(plan["last_page_len"]), plan["num_qo_heads"], plan["head_dim"])
        assert tuple(key.shape[1:]) == (plan["page_size"], plan["num_kv_heads"], plan["head_dim"])
        assert q.dtype == plan["q_data_type"] and key.dtype == plan["kv_data_type"]
        num_pages = plan["indptr"].diff()
        table = torch.full((len(num_pages), int(num_pages.max())), -1, dtype=torch.int32)
        for row, (begin, end) in enumerate(zip(plan["indptr"].tolist(), plan["indptr"][1:].tolist(), strict=False)):
            table[row, : end - begin] = plan["indices"][begin:end]
        window_left = plan["window_left"]
        return TorchKernels().paged_attention(
            query=q,
            key_cache=key,
            value_cache=value,
            block_table=table,
            rows=torch.arange(len(table), dtype=torch.int32),
            query_start_loc=torch.arange(len(table) + 1, dtype=torch.int32),
            seq_lens=_integers((num_pages - 1) * plan["page_size"] + plan["last_page_len"]),
            scale=plan["sm_scale"],
            window=None if window_left == -1 else window_left + 1,
            softcap=plan["logits_soft_cap"],
            checked=True,
        )


flash_attn = SimpleNamespace(
    flash_attn_with_kvcache=flash_attn_with_kvcache, flash_attn_varlen_func=flash_attn_varlen_func
)
flashinfer = SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=BatchDecodeWithPagedKVCacheWrapper)
