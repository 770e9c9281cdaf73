"""Computes attention of many decodes at once in plain torch; keys are padded to the longest sequence."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .gather_cache import BlockTableRows, read_slots, slots_of
from .reshape_and_cache import CachePair, Scales

# Numbers of the keys that are gathered at once, padding included; more would not fit the processor's cache.
MAX_GATHERED_NUMBERS = 1 << 18
# A sequence joins a batch if it has at most MAX_RATIO times the keys of the shortest one, or MAX_EXTRA_KEYS more.
MAX_RATIO, MAX_EXTRA_KEYS = 2, 32


def batches_of(num_keys: Sequence[int], numbers_per_key: int) -> Iterator[list[int]]:
    """Yield batches of sequences (by place) of similar lengths, so that padding at most about doubles the keys."""
    batch: list[int] = []
    for place in sorted(range(len(num_keys)), key=num_keys.__getitem__):
        longest = num_keys[place]
        if batch:
            shortest = num_keys[batch[0]]
            is_alike = longest <= max(MAX_RATIO * shortest, shortest + MAX_EXTRA_KEYS)
            if not is_alike or longest * (len(batch) + 1) * numbers_per_key > MAX_GATHERED_NUMBERS:
                yield batch
                batch = []
        batch.append(place)
    if batch:
        yield batch


def decode_attention(
    query: Tensor,
    pair: CachePair,
    table: BlockTableRows,
    first_positions: Sequence[int],
    seq_lens: Sequence[int],
    scale: float,
    softcap: float | None,
    scales: Scales,
) -> Tensor:
    """Compute attention of one query token of each sequence over its keys.

    Args:
        query: `[num_seqs, num_q_heads, head_size]`.
        pair: the cache.
        table: the rows of these sequences, none of them padding.
        first_positions: the first key that each query sees.
        seq_lens: tokens of each sequence; its query sees the last one of them.
        scale: factor of the scores.
        softcap: scores become softcap * tanh(score / softcap).
        scales: of an 8-bit cache's keys and of its values.

    Returns:
        `[num_seqs, num_q_heads, v_head_size]`, float32; zeros for a query that sees no key.
    """
    device, num_seqs = query.device, len(seq_lens)
    firsts = torch.tensor(first_positions, dtype=torch.int64, device=device)
    ends = torch.tensor(seq_lens, dtype=torch.int64, device=device)
    longest = max(end - first for first, end in zip(first_positions, seq_lens, strict=True))
    cu_seqlens = torch.arange(0, (num_seqs + 1) * longest, longest, dtype=torch.int32, device=device)
    slots = slots_of(table, cu_seqlens, firsts, num_seqs * longest).view(num_seqs, longest)
    positions = firsts[:, None] + torch.arange(longest, device=device)
    is_seen = (positions < ends[:, None]) & (slots >= 0) & (slots < pair.num_slots)
    # Keys that no query sees are read as zeros, whatever the table and the cache hold behind a sequence's end.
    slots = slots.where(is_seen, -1).flatten()
    key, value = (
        read_slots(cache, slots, query.dtype, cache_scale)
        .float()
        .view(num_seqs, longest, *cache.shape[2:])
        .transpose(1, 2)
        for cache, cache_scale in zip((pair.key, pair.value), scales, strict=True)
    )
    # The query heads that share a key head are the rows of one matrix product.
    queries = query.float().view(num_seqs, pair.key.shape[2], -1, query.shape[2])
    scores = queries @ key.transpose(2, 3) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    is_hidden = ~is_seen[:, None, None]
    weights = scores.masked_fill(is_hidden, -torch.inf).softmax(-1).masked_fill(is_hidden, 0)
    return (weights @ value).reshape(*query.shape[:2], -1)
