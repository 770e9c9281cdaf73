"""SimBackend rebuilds tables and slots from the events alone; the allocator's own tables are the check."""

import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvledger.backends import SimBackend
from kvledger.backends.context_rank import ContextRank
from kvledger.core import (
    AllocatorConfig,
    FullAttention,
    InputError,
    KVCacheAllocator,
    MisuseError,
    Request,
    ScheduledStep,
    SequenceState,
    SlidingWindow,
    StepLoad,
    TokenBatch,
)
from kvledger.sim.latency.linear import LinearLatency


def make(groups=None, context=None) -> tuple[KVCacheAllocator, SimBackend]:
    backend = SimBackend(context=context)
    config = AllocatorConfig(
        num_blocks=60, groups=groups or [FullAttention(4)], max_model_len=120, max_num_reqs=6, retention_interval=0
    )
    return KVCacheAllocator(config, sinks=[backend]), backend


def batch(*requests: tuple[int, int, int]) -> TokenBatch:
    rows, first_positions, counts = np.array(requests, dtype=np.int64).reshape(-1, 3).T.copy()
    return TokenBatch(rows, first_positions, counts)


def test_c05_slot_of_position_8_in_table_7_2_5() -> None:
    allocator, backend = make()
    allocator.allocate(Request("a", 9), 9)
    row = allocator.row_of("a")
    backend.block_tables[0][row, :3] = [7, 2, 5]
    assert backend.slot_mapping(batch((row, 8, 1))).tolist() == [20]


def test_slots_of_a_mixed_batch_in_batch_order_with_padding() -> None:
    allocator, backend = make()
    allocator.allocate(Request("a", 6), 6)
    allocator.allocate(Request("b", 5), 5)
    a, b = allocator.row_of("a"), allocator.row_of("b")
    (blocks_a,), (blocks_b,) = allocator.block_ids("a"), allocator.block_ids("b")
    slots = backend.slot_mapping(batch((b, 3, 2), (a, 5, 1)), num_padded_tokens=5)
    assert slots.dtype == np.int64
    assert slots.tolist() == [blocks_b[0] * 4 + 3, blocks_b[1] * 4, blocks_a[1] * 4 + 1, -1, -1]


def test_a_batch_longer_than_its_padding_is_refused() -> None:
    allocator, backend = make()
    allocator.allocate(Request("a", 6), 6)
    with pytest.raises(InputError, match="6 tokens cannot be padded to 4"):
        backend.slot_mapping(batch((allocator.row_of("a"), 0, 6)), num_padded_tokens=4)


def test_query_starts_and_positions_are_derived() -> None:
    tokens = batch((4, 10, 3), (2, 0, 2))
    assert tokens.query_start_loc().tolist() == [0, 3, 5]
    assert tokens.positions().tolist() == [10, 11, 12, 0, 1]


def test_collect_without_a_step_or_without_a_latency_model_is_refused() -> None:
    _, backend = make()
    with pytest.raises(MisuseError, match="collect without a submitted step"):
        backend.collect()


class AskedForEveryStep:
    """A latency model that does not say that contexts are nothing to it."""

    def __init__(self, inner: LinearLatency) -> None:
        self._inner = inner

    def step_seconds(self, load: StepLoad) -> float:
        return self._inner.step_seconds(load)

    def assumptions(self) -> dict:
        return self._inner.assumptions()


@given(num_reqs=st.integers(1, 300), limit=st.integers(0, 6), horizon_ns=st.integers(0, 80_000_000) | st.just(math.inf))
def test_a_run_of_decodes_that_take_the_same_time_is_foreseen_as_if_each_were_asked_for(
    num_reqs, limit, horizon_ns
) -> None:
    rows = np.arange(num_reqs)
    step = ScheduledStep(TokenBatch(rows, rows, np.ones_like(rows)), StepLoad(0, num_reqs, 0, 9 * num_reqs, num_reqs))

    def foreseen(latency) -> tuple[int, tuple[int, ...]]:
        backend = SimBackend(latency)
        repeats = backend.repeats_before(step, limit, horizon_ns)
        backend.submit(step._replace(num_steps=1 + repeats))
        return repeats, backend.collect().nanoseconds

    linear = LinearLatency()
    repeats, nanoseconds = foreseen(linear)
    assert (repeats, nanoseconds) == foreseen(AskedForEveryStep(linear))
    assert len(nanoseconds) == 1 + repeats and repeats <= limit


@pytest.mark.parametrize("decode_seq_s", [0.0, 1e-3])
def test_every_horizon_around_the_end_of_a_step_is_told_apart(decode_seq_s) -> None:
    """A repetition that would start at the horizon does not start."""
    latency = LinearLatency(1e-3, 0.0, decode_seq_s)
    step_ns = 1_000_000 + round(2 * decode_seq_s * 1e9)
    rows = np.arange(2)
    step = ScheduledStep(TokenBatch(rows, rows, np.ones_like(rows)), StepLoad(0, 2, 0, 8, 2))
    horizons = [2 * step_ns - 1, 2 * step_ns, 2 * step_ns + 1]
    for model in (latency, AskedForEveryStep(latency)):
        assert [SimBackend(model).repeats_before(step, 9, horizon) for horizon in horizons] == [1, 1, 2]


operations = st.lists(
    st.tuples(
        st.sampled_from(["allocate", "append", "fork", "free", "truncate", "window"]),
        st.integers(0, 5),
        st.integers(1, 30),
    ),
    max_size=40,
)


@given(operations=operations, windowed=st.booleans())
@settings(max_examples=150, deadline=None)
def test_tables_and_slots_equal_the_allocators_after_any_history(operations, windowed) -> None:
    allocator, backend = make([FullAttention(4), SlidingWindow(8, 12)] if windowed else None)
    names = iter(range(1000))
    held: list[str] = []
    for op, which, amount in operations:
        name = held[which % len(held)] if held else None
        if op == "allocate" and len(held) < 6:
            new = Request(str(next(names)), amount)
            if allocator.allocate(new, amount) is not None:
                held.append(new.request_id)
        elif name is None:
            continue
        elif op == "append":
            rows = np.array(sorted({allocator.row_of(other) for other in held}), dtype=np.int64)
            if (allocator.state.num_placed[rows] + 1 <= 120).all():
                allocator.append(rows)
        elif op == "fork" and len(held) < 6:
            child = Request(str(next(names)), 1)
            allocator.fork(name, child)
            held.append(child.request_id)
        elif op == "free":
            allocator.free(name)
            held.remove(name)
        elif op == "truncate" and not windowed:
            allocator.truncate(name, min(amount, allocator.num_placed_tokens(name)))
        elif op == "window":
            allocator.release_out_of_window(name)
    for group, table in enumerate(allocator.state.tables):
        width = backend.block_tables[group].shape[1]
        assert backend.block_tables[group].tolist() == [row + [0] * (width - len(row)) for row in table.rows]
        assert np.array_equal(backend.num_blocks_per_row[group], table.num_blocks_per_row)
        for name in held:
            row, placed = allocator.row_of(name), allocator.num_placed_tokens(name)
            size = table.block_size
            expected = [table.block(row, p // size) * size + p % size for p in range(placed)]
            assert backend.slot_mapping(batch((row, 0, placed)), group).tolist() == expected


@given(
    ranks=st.integers(1, 4),
    stripe=st.sampled_from([1, 2, 4]),
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=3),
)
@settings(max_examples=80, deadline=None)
def test_context_ranks_share_every_token_between_them_and_collide_nowhere(ranks, stripe, lengths) -> None:
    local_size = 4
    backends = [SimBackend(context=ContextRank(rank, ranks, stripe)) for rank in range(ranks)]
    allocator = KVCacheAllocator(
        AllocatorConfig(num_blocks=99, groups=[FullAttention(local_size * ranks)], max_model_len=400, max_num_reqs=3),
        sinks=backends,
    )
    seen: set[tuple[int, int]] = set()
    for i, length in enumerate(lengths):
        allocator.allocate(Request(str(i), length), length)
        row = allocator.row_of(str(i))
        (blocks,) = allocator.block_ids(str(i))
        assert len(blocks) == -(-length // (local_size * ranks))  # one rank alone: ranks times as many
        by_rank = np.array([backend.slot_mapping(batch((row, 0, length))) for backend in backends])
        for position in range(length):
            (holder,) = np.flatnonzero(by_rank[:, position] >= 0)
            assert holder == position // stripe % ranks
            slot = int(by_rank[holder, position])
            assert slot // local_size == blocks[position // (local_size * ranks)]
            assert (holder, slot) not in seen
            seen.add((holder, slot))


def test_a_state_is_whole_on_every_context_rank() -> None:
    backend = SimBackend(context=ContextRank(1, 2))
    allocator = KVCacheAllocator(
        AllocatorConfig(num_blocks=9, groups=[SequenceState(8)], max_model_len=32, retention_interval=0),
        sinks=[backend],
    )
    allocator.allocate(Request("a", 3), 3)
    (blocks,) = allocator.block_ids("a")
    assert backend.slot_mapping(batch((allocator.row_of("a"), 0, 3))).tolist() == [blocks[0] * 8 + i for i in range(3)]


def test_blocks_that_do_not_divide_over_context_ranks_are_refused() -> None:
    with pytest.raises(InputError, match="blocks of 6 tokens do not divide into stripes of 2 on 2 ranks"):
        KVCacheAllocator(
            AllocatorConfig(num_blocks=9, groups=[FullAttention(6)], max_model_len=32),
            sinks=[SimBackend(context=ContextRank(0, 2, 2))],
        )
    with pytest.raises(InputError, match="rank 2 of 2"):
        ContextRank(2, 2)


@settings(max_examples=100, deadline=None)
@given(st.data(), st.sampled_from([1, 3, 8, 12, 16]))
def test_slots_of_long_chunks_are_those_of_each_token_alone(data, block_size: int) -> None:
    width = 20
    backend = SimBackend()
    allocator = KVCacheAllocator(
        AllocatorConfig(
            num_blocks=200, groups=[FullAttention(block_size)], max_model_len=width * block_size, max_num_reqs=5
        ),
        sinks=[backend],
    )
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    table = backend.block_tables[0]
    table[:] = rng.permutation(199)[: table.size].reshape(table.shape) + 1
    assert allocator.num_free_blocks == 199
    chunks = []
    for row in data.draw(st.permutations(range(5)))[: data.draw(st.integers(1, 5))]:
        first = data.draw(st.integers(0, width * block_size - 1))
        chunks.append((row, first, data.draw(st.integers(0, width * block_size - first))))
    expected = [
        int(table[row, position // block_size]) * block_size + position % block_size
        for row, first, count in chunks
        for position in range(first, first + count)
    ]
    assert backend.slot_mapping(batch(*chunks)).tolist() == expected


@pytest.mark.parametrize("context", [ContextRank(), ContextRank(rank=1, size=2)])
@pytest.mark.parametrize("requests", [[(0, 100, 21)], [(0, 120, 1)], [(0, 119, 2)], [(0, 119, 1), (1, 120, 1)]])
def test_a_chunk_that_leaves_its_table_is_refused(context, requests) -> None:
    _, backend = make(context=context)
    with pytest.raises(InputError, match="position 120 lies beyond a block table of 30 blocks of 4"):
        backend.slot_mapping(batch(*requests))


@pytest.mark.parametrize("context", [ContextRank(), ContextRank(rank=1, size=2)])
@pytest.mark.parametrize("num_tokens", [1, 2, 9])
def test_a_row_that_no_table_has_is_refused(context, num_tokens) -> None:
    _, backend = make(context=context)
    with pytest.raises(InputError, match="no row 6: the block tables have rows 0 to 5"):
        backend.slot_mapping(batch((6, 0, num_tokens)))


def test_slots_are_overwritten_by_the_next_batch_of_their_group_alone_and_by_nobody_else() -> None:
    allocator, backend = make([FullAttention(4), SlidingWindow(8, 12)])
    for name in "ab":
        allocator.allocate(Request(name, 8), 8)
    of_a, of_b = (batch((allocator.row_of(name), 0, 8)) for name in "ab")
    first, other_group = backend.slot_mapping(of_a, 0), backend.slot_mapping(of_a, 1)
    before = first.tolist(), other_group.tolist()
    assert backend.slot_mapping(of_b, 0).tolist() != before[0]
    assert first.tolist() != before[0] and other_group.tolist() == before[1]
    with pytest.raises(ValueError, match="read-only"):
        first[0] = 0


def mapped(requests: list[tuple[int, int, int]], block_size: int, context=None) -> tuple[SimBackend, TokenBatch]:
    """A backend with tables of random blocks for these requests, and their batch."""
    backend = SimBackend(context=context)
    tokens = batch(*requests)
    config = AllocatorConfig(
        num_blocks=9,
        groups=[FullAttention(block_size)],
        max_model_len=int((tokens.first_positions + tokens.counts).max()),
        max_num_reqs=1 + int(tokens.rows.max()),
    )
    KVCacheAllocator(config, sinks=[backend])
    (table,) = backend.block_tables
    table[:] = np.random.default_rng(0).permutation(table.size).reshape(table.shape) + 1
    return backend, tokens


def slots_one_by_one(table: np.ndarray, block_size: int, tokens: TokenBatch) -> list[int]:
    rows, positions = np.repeat(tokens.rows, tokens.counts), tokens.positions()
    return (table[rows, positions // block_size].astype(np.int64) * block_size + positions % block_size).tolist()


@pytest.mark.parametrize("block_size", [1, 16, 100, 4096])
@pytest.mark.parametrize("longest", [3, 300, 9000])
def test_slots_of_a_batch_that_is_written_in_many_pieces_are_those_of_each_token_alone(block_size, longest) -> None:
    rng = np.random.default_rng(longest)
    requests = [(row, int(rng.integers(0, 9000)), int(rng.integers(0, longest + 1))) for row in rng.permutation(60)]
    backend, tokens = mapped(requests, block_size)
    assert backend.slot_mapping(tokens).tolist() == slots_one_by_one(backend.block_tables[0], block_size, tokens)


@pytest.mark.parametrize("requests", [[(0, 0, 32)], [(0, 5, 20)], [(0, 17, 1), (1, 31, 1)]])
def test_slots_beyond_the_range_of_int32_are_exact(requests) -> None:
    backend, tokens = mapped(requests, 16)
    (table,) = backend.block_tables
    table[:] = np.iinfo(np.int32).max - np.arange(table.size).reshape(table.shape)
    assert backend.slot_mapping(tokens).tolist() == slots_one_by_one(table, 16, tokens)
    assert backend.slot_mapping(tokens).min() > np.iinfo(np.int32).max


@pytest.mark.parametrize("context", [ContextRank(), ContextRank(1, 2)])
@pytest.mark.parametrize(
    ("requests", "block_size"),
    [
        pytest.param([(row, 0, 512) for row in range(64)], 16, id="whole blocks"),
        pytest.param([(row, 5 + row, 500) for row in range(64)], 16, id="chunks that begin and end inside a block"),
        pytest.param([*[(row, 700, 1) for row in range(255)], (255, 3, 30_000)], 16, id="a chunk among decode rows"),
        pytest.param([(row, row % 900, 1) for row in range(8192)], 16, id="decode rows"),
        pytest.param([(0, 5, 30_000)], 16_384, id="parts of long blocks"),
    ],
)
def test_mapping_takes_no_memory_as_long_as_the_tokens(requests, block_size, context) -> None:
    backend, tokens = mapped(requests, block_size, context)
    size_bytes = backend.slot_mapping(tokens).nbytes
    tracemalloc.start()
    try:
        backend.slot_mapping(tokens)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert size_bytes == 8 * tokens.num_tokens
    # Columns of a request and of a block each, and one piece of a batch that is not of whole blocks.
    assert peak_bytes < size_bytes / 4
