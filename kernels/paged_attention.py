"""Computes attention over a paged cache, decodes and prefill chunks in one batch. The twin of the Triton kernel."""

from collections.abc import Iterator, Sequence

import attrs
import torch
from torch import Tensor

from .checks import FLOATS, MAX_LISTED, check_rows, check_starts, check_vector, describe
from .errors import KernelInputError
from .gather_cache import BlockTableRows, check_positions, read_slots, slots_of
from .reshape_and_cache import CachePair, Scales

# Numbers of the keys that are gathered at once, padding included; more would not fit the processor's cache.
MAX_GATHERED_NUMBERS = 1 << 18
# A sequence joins a batch if it has at most MAX_RATIO times the keys of the shortest one, or MAX_EXTRA_KEYS more.
MAX_RATIO, MAX_EXTRA_KEYS = 2, 32


def check_attention(
    pair: CachePair,
    table: BlockTableRows,
    query: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    window: int | None,
    softcap: float | None,
    checked: bool,
) -> None:
    """Check one call; in checked mode also the lengths, which waits for the device."""
    device, num_seqs = pair.key.device, len(table.rows)
    check_rows(query, 3, "query")
    num_kv_heads, head_size = pair.key.shape[2:]
    _, num_q_heads, query_size = query.shape
    if query.device != device or query_size != head_size or num_q_heads % num_kv_heads:
        raise KernelInputError(
            f"query must be [num_tokens, a multiple of {num_kv_heads} heads, {head_size}] on {device}: "
            f"{describe(query)}"
        )
    dtype = query.dtype
    if dtype not in FLOATS or (dtype != pair.key.dtype and pair.key.element_size() != 1):
        raise KernelInputError(
            f"query is {dtype} and the cache {pair.key.dtype}; they must be the same, or the cache 8-bit"
        )
    check_vector(query_start_loc, torch.int32, "query_start_loc", device)
    check_vector(seq_lens, torch.int32, "seq_lens", device)
    if len(query_start_loc) != num_seqs + 1 or len(seq_lens) != num_seqs:
        raise KernelInputError(
            f"{num_seqs} rows need {num_seqs + 1} query starts and {num_seqs} seq_lens, not {len(query_start_loc)} and "
            f"{len(seq_lens)}"
        )
    if window is not None and window < 1:
        raise KernelInputError(f"window is {window}; it counts the tokens that a query sees, itself included")
    if softcap is not None and not softcap > 0:
        raise KernelInputError(f"softcap is {softcap}; it must be positive, or None")
    if not checked:
        return
    starts, lengths = query_start_loc.tolist(), seq_lens.tolist()
    check_starts(starts, len(query), "query_start_loc", "num_tokens")
    wrong = [
        (i, end - begin, length)
        for i, (begin, end, length) in enumerate(zip(starts, starts[1:], lengths, strict=False))
        if end - begin > length
    ]
    if wrong:
        raise KernelInputError(
            f"(sequence, query tokens, seq_len) {wrong[:MAX_LISTED]}: a sequence includes its query tokens"
        )
    check_positions(table, [(row, 0, length) for row, length in zip(table.rows.tolist(), lengths, strict=True)])


def attend(
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
    """See `Kernels.paged_attention`. Computes in float32, decodes together and every chunk by itself; on a GPU it waits
    for the device.
    """
    output = torch.zeros(*query.shape[:2], pair.value.shape[3], dtype=query.dtype, device=query.device)
    starts = query_start_loc.tolist()
    sequences = [
        # Keys before the first query's window are not read: their blocks may have been freed.
        _Sequence(place, begin, end, 0 if window is None else max(0, seq_len - (end - begin) - window + 1), seq_len)
        for place, (begin, end, seq_len, row) in enumerate(
            zip(starts, starts[1:], seq_lens.tolist(), table.rows.tolist(), strict=False)
        )
        if row >= 0 and begin < end
    ]
    decodes = [each for each in sequences if each.is_decode]
    if len(decodes) > 1:
        _attend_together(output, query, pair, table, decodes, scale, softcap, scales)
        sequences = [each for each in sequences if not each.is_decode]
    for each in sequences:
        sequence = BlockTableRows(table.block_table, table.rows[each.place : each.place + 1], table.block_size)
        key, value, is_stored = _keys_and_values(pair, sequence, each.first, each.seq_len, query.dtype, scales)
        queries = query[each.begin : each.end]
        output[each.begin : each.end] = _attend(
            queries, key, value, is_stored, each.first, each.seq_len, scale, window, softcap
        )
    return output


@attrs.frozen
class _Sequence:
    """One sequence of a batch: its place, its query tokens (begin to end), and its keys from `first` on."""

    place: int
    begin: int
    end: int
    first: int
    seq_len: int

    @property
    def is_decode(self) -> bool:
        """Whether it has one query token and at least one key."""
        return self.end - self.begin == 1 and self.seq_len > 0


def _attend_together(
    output: Tensor,
    query: Tensor,
    pair: CachePair,
    table: BlockTableRows,
    decodes: list[_Sequence],
    scale: float,
    softcap: float | None,
    scales: Scales,
) -> None:
    """Write the attention of many single query tokens. Their first keys already respect the window."""
    device = query.device
    for batch in batches_of([each.seq_len - each.first for each in decodes], pair.key[0, 0].numel()):
        members = [decodes[number] for number in batch]
        tokens = torch.tensor([each.begin for each in members], device=device)
        rows = table.rows[torch.tensor([each.place for each in members], device=device)]
        output[tokens] = decode_attention(
            query[tokens],
            pair,
            BlockTableRows(table.block_table, rows, table.block_size),
            [each.first for each in members],
            [each.seq_len for each in members],
            scale,
            softcap,
            scales,
        ).to(query.dtype)


def _keys_and_values(
    pair: CachePair, sequence: BlockTableRows, first: int, seq_len: int, dtype: torch.dtype, scales: Scales
) -> tuple[Tensor, Tensor, Tensor]:
    """Read a sequence's keys and values from position `first` on, float32 `[num_kv_heads, seq_len - first, head_size]`,
    and which of them the cache holds, bool `[seq_len - first]`.
    """
    device = pair.key.device
    cu_seqlens = torch.tensor([0, seq_len - first], dtype=torch.int32, device=device)
    positions = torch.tensor([first], dtype=torch.int64, device=device)
    slots = slots_of(sequence, cu_seqlens, positions, seq_len - first)
    key, value = read_slots(pair.key, slots, dtype, scales[0]), read_slots(pair.value, slots, dtype, scales[1])
    is_stored = (slots >= 0) & (slots < pair.num_slots)
    return key.float().transpose(0, 1), value.float().transpose(0, 1), is_stored


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_stored: Tensor,
    first: int,
    seq_len: int,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Compute causal attention of a sequence's last tokens, `[num_queries, num_q_heads, head_size]` in float32."""
    num_queries, num_q_heads, _ = query.shape
    heads_per_kv_head = num_q_heads // len(key)
    key, value = key.repeat_interleave(heads_per_kv_head, 0), value.repeat_interleave(heads_per_kv_head, 0)
    scores = query.float().transpose(0, 1) @ key.transpose(1, 2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    at = torch.arange(seq_len - num_queries, seq_len, device=query.device)[:, None]
    positions = torch.arange(first, seq_len, device=query.device)[None, :]
    is_hidden = (positions > at) | ~is_stored
    if window is not None:
        is_hidden |= positions <= at - window
    # A query that sees nothing has no weights: softmax over -inf alone is NaN.
    weights = scores.masked_fill(is_hidden, -torch.inf).softmax(-1).masked_fill(is_hidden, 0)
    return (weights @ value).transpose(0, 1)


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
