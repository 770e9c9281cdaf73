"""A whole step on fixed buffers: refilled between calls, and on a GPU captured once in a CUDA graph and replayed."""

from typing import Any

import attrs
import pytest

torch = pytest.importorskip("torch", reason="kernels need torch")

from kvledger.kernels import BlockRegions, SlotTables  # noqa: E402

from tests.kernels.cache_layouts import PagedCache, integers, longs, paged_cache, rows_of  # noqa: E402
from tests.kernels.kernel_sets import device, kernel_set  # noqa: E402

MAX_TOKENS = 8
BLOCK_SIZE = 16

# (row, first position, number of tokens) a request, then (source, target) of copies.
STEPS = [
    ([(0, 0, 5), (2, 7, 1), (1, 30, 2)], [(1, 10), (-1, -1)]),
    ([(2, 8, 1), (1, 32, 1), (-1, 0, 0)], [(-1, -1), (-1, -1)]),
    ([(-1, 0, 0), (-1, 0, 0), (0, 5, 8)], [(3, 11), (4, 0)]),
]


@attrs.frozen(eq=False)
class Step:
    """The buffers of a step, and the calls on them: map slots, write, copy blocks, attend."""

    cache: PagedCache
    tables: SlotTables
    regions: BlockRegions
    rows: Any
    query_start_loc: Any
    first_positions: Any
    seq_lens: Any
    slots: Any
    copies: Any
    key: Any
    value: Any
    query: Any

    @classmethod
    def of(cls) -> "Step":
        cache = paged_cache("interleaved", 12, BLOCK_SIZE, 2, 64, torch.float16)
        cache.raw.zero_()
        table = integers(1, 2, 3, 4, 5, 6, 7, 8, 9).view(3, 3)
        key, value = rows_of(MAX_TOKENS, 2, 64, torch.float16)
        return cls(
            cache=cache,
            tables=SlotTables.of([table], [BLOCK_SIZE]),
            regions=BlockRegions.of([cache.raw.view(12, -1)]),
            rows=integers(-1, -1, -1),
            query_start_loc=integers(0, 0, 0, 0),
            first_positions=longs(0, 0, 0),
            seq_lens=integers(0, 0, 0),
            slots=torch.zeros(1, MAX_TOKENS, dtype=torch.int64, device=device()),
            copies=torch.full((2, 2), -1, dtype=torch.int64, device=device()),
            key=key,
            value=value,
            query=torch.zeros(MAX_TOKENS, 4, 64, dtype=torch.float16, device=device()),
        )

    def fill(self, number: int) -> None:
        """Put batch `number` into the buffers."""
        requests, copies = STEPS[number]
        starts = [0]
        for _, _, count in requests:
            starts.append(starts[-1] + count)
        self.rows.copy_(integers(*(row for row, _, _ in requests)))
        self.query_start_loc.copy_(integers(*starts))
        self.first_positions.copy_(longs(*(first for _, first, _ in requests)))
        self.seq_lens.copy_(integers(*(first + count for _, first, count in requests)))
        self.copies.copy_(longs(*(block for pair in copies for block in pair)).view(2, 2).t())
        for buffer, heads in ((self.key, 2), (self.value, 2), (self.query, 4)):
            buffer.copy_(rows_of(MAX_TOKENS, heads, 64, torch.float16, seed=number + heads)[0] / 60)

    def run(self, kernels: Any) -> Any:
        batch = {"rows": self.rows, "query_start_loc": self.query_start_loc}
        views = self.cache.views()
        kernels.compute_slot_mapping(
            tables=self.tables, **batch, first_positions=self.first_positions, slot_mapping=self.slots
        )
        kernels.reshape_and_cache(key=self.key, value=self.value, **views, slot_mapping=self.slots[0])
        kernels.copy_blocks(caches=self.regions, sources=self.copies[0], targets=self.copies[1])
        return kernels.paged_attention(
            query=self.query,
            **views,
            block_table=self.tables.block_tables[0],
            **batch,
            seq_lens=self.seq_lens,
            scale=0.125,
        )


def expected_steps() -> list[tuple[Any, Any, Any]]:
    """Slots, memory and output after each batch, by the twins."""
    step, results = Step.of(), []
    for number in range(len(STEPS)):
        step.fill(number)
        output = step.run(kernel_set("torch"))
        results.append((step.slots.clone(), step.cache.bytes().clone(), output))
    return results


def assert_same(step: Step, output: Any, expected: tuple[Any, Any, Any]) -> None:
    slots, memory, attended = expected
    assert torch.equal(step.slots, slots)
    assert torch.equal(step.cache.bytes(), memory)
    torch.testing.assert_close(output, attended, rtol=0, atol=4e-3)


@pytest.mark.torch
def test_refilled_buffers_are_the_next_step(triton_kernels: Any) -> None:
    step = Step.of()
    for number, expected in enumerate(expected_steps()):
        step.fill(number)
        assert_same(step, step.run(triton_kernels), expected)


@pytest.mark.torch
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_step_captured_once_replays_with_new_slots(triton_kernels: Any) -> None:
    expected, step = expected_steps(), Step.of()
    # Rows of -1 write nothing, so the warm-up before the capture leaves the memory as it is.
    step.run(triton_kernels)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = step.run(triton_kernels)
    for number in range(len(STEPS)):
        step.fill(number)
        graph.replay()
        assert_same(step, output, expected[number])


@pytest.mark.torch
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
def test_a_step_does_not_wait_for_the_device(triton_kernels: Any) -> None:
    step = Step.of()
    step.run(triton_kernels)
    step.fill(0)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step.run(triton_kernels)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert (step.slots >= 0).sum() == sum(count for _, _, count in STEPS[0][0])
