"""Slots of a batch against ten lines of Python: all groups, padding, context parallelism, 64-bit slots."""

import random
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="kernels need torch")

from kvledger.kernels import KernelInputError, SlotTables  # noqa: E402
from kvledger.kernels.launch import MAX_GRID, Launch  # noqa: E402

from tests.kernels.cache_layouts import integers, longs  # noqa: E402
from tests.kernels.kernel_sets import device  # noqa: E402

pytestmark = pytest.mark.torch


def slots_by_hand(tables: SlotTables, requests: list[tuple[int, int, int]], num_slots: int) -> list[list[int]]:
    """The oracle: (row, first position, count) a request, one group after the other."""
    ranks, stripe, result = tables.context_size, tables.interleave, []
    for table, size, is_sharded in zip(tables.block_tables, tables.block_sizes, tables.sharded, strict=True):
        slots = []
        for row, first, count in requests:
            for position in range(first, first + count):
                block, offset = (int(table[row, position // size]) if row >= 0 else -1), position % size
                if block < 0 or (is_sharded and offset // stripe % ranks != tables.context_rank):
                    slots.append(-1)
                elif is_sharded and ranks > 1:
                    slots.append(block * (size // ranks) + offset // (stripe * ranks) * stripe + offset % stripe)
                else:
                    slots.append(block * size + offset)
        result.append(slots + [-1] * (num_slots - len(slots)))
    return result


def batch_of(requests: list[tuple[int, int, int]]) -> dict[str, Any]:
    starts = [0]
    for _, _, count in requests:
        starts.append(starts[-1] + count)
    return {
        "rows": integers(*(row for row, _, _ in requests)),
        "query_start_loc": integers(*starts),
        "first_positions": longs(*(first for _, first, _ in requests)),
    }


def block_tables(num_rows: int, widths: list[int], num_blocks: int = 1000, seed: int = 0) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(0, num_blocks, (num_rows, width), dtype=torch.int32, generator=generator).to(device())
        for width in widths
    ]


def slots_of(kernels: Any, tables: SlotTables, requests: list[tuple[int, int, int]], width: int, **options: Any) -> Any:
    slots = torch.full((len(tables.block_tables), width), 12345, dtype=torch.int64, device=device())
    kernels.compute_slot_mapping(tables=tables, **batch_of(requests), slot_mapping=slots, **options)
    return slots.tolist()


@pytest.mark.parametrize("seed", range(4))
def test_every_token_of_every_group_gets_its_slot_and_the_tail_gets_none(kernels: Any, seed: int) -> None:
    choose = random.Random(seed)
    sizes = choose.sample([1, 8, 16, 17, 128, 784], 3)
    tables = SlotTables.of(block_tables(6, [300, 100, 300], seed=seed), sizes)
    room = min(table.shape[1] * size for table, size in zip(tables.block_tables, sizes, strict=True))
    requests = [(row, choose.randrange(room - 40), choose.randrange(40)) for row in choose.sample(range(6), 4)]
    assert slots_of(kernels, tables, requests, 200, checked=True) == slots_by_hand(tables, requests, 200)


def test_a_prompt_longer_than_a_tile_is_mapped_whole(kernels: Any) -> None:
    tables = SlotTables.of(block_tables(2, [600]), [16])
    requests = [(1, 5, 2500), (0, 7, 1), (-1, 0, 3), (0, 2000, 1100)]
    assert slots_of(kernels, tables, requests, 8192) == slots_by_hand(tables, requests, 8192)


def test_padding_requests_and_an_empty_batch_map_to_no_slot(kernels: Any) -> None:
    tables = SlotTables.of(block_tables(2, [4, 4]), [16, 8])
    assert slots_of(kernels, tables, [(-1, 0, 2), (1, 3, 1), (-1, 0, 0)], 6) == slots_by_hand(
        tables, [(-1, 0, 2), (1, 3, 1)], 6
    )
    assert slots_of(kernels, tables, [], 5) == [[-1] * 5] * 2
    assert slots_of(kernels, tables, [], 0) == [[], []]


@pytest.mark.parametrize(("size", "stripe"), [(2, 1), (2, 8), (4, 4)])
def test_ranks_share_the_tokens_of_a_context_and_states_are_whole_on_each(kernels: Any, size: int, stripe: int) -> None:
    requests = [(0, 3, 70), (1, 0, 20)]
    held = []
    for rank in range(size):
        tables = SlotTables.of(
            block_tables(2, [4, 4]),
            [32, 32],
            context_rank=rank,
            context_size=size,
            interleave=stripe,
            sharded=[True, False],
        )
        slots = slots_of(kernels, tables, requests, 96)
        assert slots == slots_by_hand(tables, requests, 96)
        held.append([slot >= 0 for slot in slots[0]])
    assert [sum(ranks) for ranks in zip(*held, strict=True)] == [1] * 90 + [0] * 6


def test_slots_beyond_32_bits_are_exact(kernels: Any) -> None:
    blocks = [2**31 - 1, 2**27, 0]
    tables = SlotTables.of([torch.tensor([blocks], dtype=torch.int32, device=device())], [784])
    slots = slots_of(kernels, tables, [(0, 783, 786)], 800)
    assert slots == slots_by_hand(tables, [(0, 783, 786)], 800)
    assert slots[0][0] == (2**31 - 1) * 784 + 783


def test_tables_may_be_rows_of_a_wider_buffer(kernels: Any) -> None:
    wide = block_tables(4, [64])[0]
    tables = SlotTables.of([wide[1:, 8:20]], [16])
    requests = [(2, 100, 30)]
    assert slots_of(kernels, tables, requests, 32, checked=True) == slots_by_hand(tables, requests, 32)


def test_outside_the_table_there_is_no_slot_and_checked_mode_says_so(kernels: Any) -> None:
    tables = SlotTables.of(block_tables(2, [3]), [16])
    requests = [(1, 40, 12), (5, 0, 2), (0, 0, 1)]
    expected = slots_by_hand(tables, [(1, 40, 8), (-1, 0, 6), (0, 0, 1)], 15)
    assert slots_of(kernels, tables, requests, 15) == expected
    with pytest.raises(
        KernelInputError, match=r"group 0: .*\(0, 1, 52\), \(1, 5, 2\).* 2 rows of 3 blocks of 16 tokens"
    ):
        slots_of(kernels, tables, requests, 15, checked=True)
    with pytest.raises(KernelInputError, match="at most 10"):
        slots_of(kernels, tables, [(0, 0, 11)], 10, checked=True)


def test_tokens_beyond_the_buffer_are_not_written(kernels: Any) -> None:
    tables = SlotTables.of(block_tables(2, [3]), [16])
    whole = torch.full((2, 10), 777, dtype=torch.int64, device=device())
    kernels.compute_slot_mapping(tables=tables, **batch_of([(0, 0, 14)]), slot_mapping=whole[:1, :8])
    assert whole[0].tolist() == [*slots_by_hand(tables, [(0, 0, 8)], 8)[0], 777, 777]
    assert whole[1].tolist() == [777] * 10


def test_the_same_launch_serves_the_next_step(kernels: Any) -> None:
    tables = SlotTables.of(block_tables(3, [8, 8]), [16, 4])
    batch, slots = batch_of([(0, 0, 20), (1, 0, 9)]), torch.zeros(2, 40, dtype=torch.int64, device=device())
    kernels.compute_slot_mapping(tables=tables, **batch, slot_mapping=slots)
    tables.block_tables[0][2, 1] = 4321
    for name, values in batch_of([(2, 20, 1), (-1, 0, 0)]).items():
        batch[name].copy_(values)
    kernels.compute_slot_mapping(tables=tables, **batch, slot_mapping=slots)
    assert slots.tolist() == slots_by_hand(tables, [(2, 20, 1)], 40)
    assert slots[0, 0] == 4321 * 16 + 4


def test_tables_that_do_not_fit_are_refused_with_the_numbers() -> None:
    (table,) = block_tables(2, [3])
    with pytest.raises(KernelInputError, match="use a multiple of 8"):
        SlotTables.of([table], [12], context_size=2, interleave=4)
    with pytest.raises(KernelInputError, match="rank 2 of 2"):
        SlotTables.of([table], [16], context_rank=2, context_size=2)
    with pytest.raises(KernelInputError, match="group 0 must be int32"):
        SlotTables.of([table.long()], [16])
    with pytest.raises(KernelInputError, match=r"group 1 must be int32 .* dense rows"):
        SlotTables.of([table, table[:, ::2]], [16, 16])
    with pytest.raises(KernelInputError, match="1 block tables, 2 block sizes"):
        SlotTables.of([table], [16, 8])
    with pytest.raises(KernelInputError, match="at least one group"):
        SlotTables.of([], [])
    assert SlotTables.of([table], [13], context_size=2, interleave=4, sharded=[False]).sharded == (False,)


def test_a_batch_that_does_not_fit_its_buffers_is_refused(kernels: Any) -> None:
    tables = SlotTables.of(block_tables(2, [3]), [16])
    slots = torch.zeros(1, 8, dtype=torch.int64, device=device())
    batch = batch_of([(0, 0, 2)])
    for name, value, message in (
        ("rows", longs(0), "rows must be a contiguous torch.int32 vector"),
        ("query_start_loc", integers(0, 1, 2), "1 rows need 2 query starts"),
        ("first_positions", integers(0), "first_positions must be a contiguous torch.int64"),
        ("slot_mapping", slots[0], "slot_mapping must be int64"),
        ("slot_mapping", slots.expand(2, -1), r"slot_mapping must be int64 \[1, max_num_batched_tokens\]"),
    ):
        with pytest.raises(KernelInputError, match=message):
            kernels.compute_slot_mapping(**({"tables": tables, "slot_mapping": slots} | batch | {name: value}))


def test_positions_past_2_to_the_31_find_their_blocks(kernels: Any) -> None:
    size = 1 << 26
    tables = SlotTables.of([integers(*range(3, 67)).view(1, 64)], [size])
    assert tables.max_num_positions == 1 << 32
    requests = [(0, (1 << 31) - 1, 3), (0, (1 << 32) - 2, 2), (0, size - 1, 2)]
    slots = slots_of(kernels, tables, requests, 8)
    assert slots == slots_by_hand(tables, requests, 8)
    assert slots[0][:3] == [(1 << 31) - 1 + 3 * size, (1 << 31) + 3 * size, (1 << 31) + 1 + 3 * size]


def test_a_position_past_the_table_has_no_slot_however_far_past_it_is(kernels: Any) -> None:
    tables = SlotTables.of([integers(3, 4).view(1, 2)], [16])
    firsts = (31, (1 << 32) - 1, (1 << 32) + 15, (1 << 62) - 1)
    assert slots_of(kernels, tables, [(0, first, 2) for first in firsts], 8) == [[79, *[-1] * 7]]


def test_more_requests_than_the_short_axes_of_a_grid_hold_are_one_launch(
    triton_kernels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    grids: list[tuple[int, int, int]] = []
    monkeypatch.setattr(Launch, "__call__", lambda self, grid, pointers, *numbers: grids.append(grid))
    num_reqs = MAX_GRID + 10
    tables = SlotTables.of(block_tables(2, [4, 4]), [16, 16])
    type(triton_kernels)().compute_slot_mapping(
        tables=tables,
        rows=torch.zeros(num_reqs, dtype=torch.int32, device=device()),
        query_start_loc=torch.zeros(num_reqs + 1, dtype=torch.int32, device=device()),
        first_positions=torch.zeros(num_reqs, dtype=torch.int64, device=device()),
        slot_mapping=torch.zeros(2, 8192, dtype=torch.int64, device=device()),
    )
    assert grids == [(num_reqs + 1, 2, 8)]
