"""Field report F06: requests without query tokens or without keys, and padding, in one batch: zeros, never NaN."""

from collections.abc import Sequence
from typing import Any

import attrs
import pytest

torch = pytest.importorskip("torch", reason="kernels need torch")

from tests.kernels.kernel_sets import KERNEL_SETS, device, kernel_set  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.parametrize("name", KERNEL_SETS)]

BLOCK_SIZE, HEADS, KV_HEADS, HEAD_SIZE, SCALE = 16, 4, 2, 64, 0.125


@attrs.frozen(kw_only=True)
class Batch:
    """Requests of some query tokens over some keys, then `num_padded` padding requests and as many padding tokens.

    Everything that no request may read is NaN: blocks of nobody, slots behind a sequence's end, padding queries.
    """

    num_queries: Sequence[int]
    lengths: Sequence[int]
    num_padded: int = 0
    padded_have_queries: bool = False
    window: int | None = None
    max_blocks: int = 4
    tensors: dict[str, Any] = attrs.field(init=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        torch.manual_seed(0)
        at = device()
        cache = torch.full((2, 40, BLOCK_SIZE, KV_HEADS, HEAD_SIZE), float("nan"), device=at)
        table = torch.full((len(self.lengths) + self.num_padded, self.max_blocks), -1, dtype=torch.int32, device=at)
        block = 1
        for row, length in enumerate(self.lengths):
            for index in range(-(-length // BLOCK_SIZE)):
                table[row, index] = block
                filled = min(BLOCK_SIZE, length - index * BLOCK_SIZE)
                cache[:, block, :filled] = torch.randn(2, filled, KV_HEADS, HEAD_SIZE, device=at)
                block += 1
        padded = [int(self.padded_have_queries)] * self.num_padded
        ends = torch.tensor([*self.num_queries, *padded]).cumsum(0).tolist()
        query = torch.full((sum(self.num_queries) + self.num_padded, HEADS, HEAD_SIZE), float("nan"), device=at)
        query[: sum(self.num_queries)] = torch.randn(sum(self.num_queries), HEADS, HEAD_SIZE, device=at)
        self.tensors.update(
            query=query,
            key_cache=cache[0],
            value_cache=cache[1],
            block_table=table,
            rows=torch.tensor([*range(len(self.lengths)), *[-1] * self.num_padded], dtype=torch.int32, device=at),
            query_start_loc=torch.tensor([0, *ends], dtype=torch.int32, device=at),
            seq_lens=torch.tensor([*self.lengths, *[0] * self.num_padded], dtype=torch.int32, device=at),
        )

    def attended(self, name: str) -> Any:
        return kernel_set(name).paged_attention(**self.tensors, scale=SCALE, window=self.window)

    def plain(self) -> Any:
        """Attention token by token, in float64; zeros for a token that sees no key and for padding."""
        query, cache = self.tensors["query"], (self.tensors["key_cache"], self.tensors["value_cache"])
        out = torch.zeros(query.shape, dtype=torch.float64)
        token = 0
        for row, (count, length) in enumerate(zip(self.num_queries, self.lengths, strict=True)):
            for position in range(length - count, length):
                first = 0 if self.window is None else max(0, position + 1 - self.window)
                if position >= 0:
                    out[token] = self._one(query[token].double().cpu(), row, first, position, cache)
                token += 1
        return out

    def _one(self, query: Any, row: int, first: int, position: int, cache: tuple[Any, Any]) -> Any:
        table = self.tensors["block_table"]
        slots = [(int(table[row, at // BLOCK_SIZE]), at % BLOCK_SIZE) for at in range(first, position + 1)]
        key, value = (
            torch.stack([each[slot].double().cpu() for slot in slots]).repeat_interleave(HEADS // KV_HEADS, 1)
            for each in cache
        )
        weights = torch.softmax(torch.einsum("hd,phd->hp", query, key) * SCALE, 1)
        return torch.einsum("hp,phd->hd", weights, value)


BATCHES = {
    "no_query_beside_a_chunk": Batch(num_queries=[0, 37, 0, 1], lengths=[20, 50, 7, 33]),
    "padding_at_the_end": Batch(num_queries=[1, 1, 1], lengths=[5, 33, 17], num_padded=1),
    "padding_with_a_query": Batch(num_queries=[1, 1, 1], lengths=[5, 33, 17], num_padded=3, padded_have_queries=True),
    "a_row_without_keys": Batch(num_queries=[1, 1, 1], lengths=[5, 0, 17]),
    "only_rows_without_keys": Batch(num_queries=[1, 1], lengths=[0, 0]),
    "no_query_at_all": Batch(num_queries=[0, 0], lengths=[20, 0]),
    "only_padding": Batch(num_queries=[], lengths=[], num_padded=4, padded_have_queries=True),
    "more_queries_than_keys": Batch(num_queries=[5, 1], lengths=[2, 9]),
    "a_window": Batch(num_queries=[0, 30, 1, 1], lengths=[20, 60, 0, 40], num_padded=2, window=8),
    # Tables this wide are computed in several parts of the sequence, most of which hold no key of a short request.
    "parts_without_keys": Batch(
        num_queries=[0, 1, 1, 1], lengths=[20, 300, 0, 1], num_padded=1, padded_have_queries=True, max_blocks=256
    ),
}


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES.keys())
def test_every_row_is_plain_attention_or_zero(name: str, batch: Batch) -> None:
    out = batch.attended(name).double().cpu()
    assert out.isfinite().all()
    assert torch.allclose(out, batch.plain(), rtol=0, atol=1e-5)
    assert not out[sum(batch.num_queries) :].any()


def test_rows_beside_one_without_keys_are_attended(name: str) -> None:
    batch = BATCHES["a_row_without_keys"]
    out = batch.attended(name).cpu()
    assert out[0].any() and out[2].any() and not out[1].any()
