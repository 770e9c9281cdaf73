"""What a request holds: a bounded number of blocks behind a window, and no more slots than it can fill."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvledger.core import (
    AllocatorConfig,
    ChunkedLocal,
    FullAttention,
    KVCacheAllocator,
    Request,
    SequenceState,
    SlidingWindow,
)
from kvledger.core.cache_kinds import CacheKind


def blocks_spanned(num_tokens: int, block_size: int) -> int:
    """The most blocks that this many consecutive tokens touch, wherever they start."""
    return (num_tokens + block_size - 2) // block_size + 1


def most_blocks(kind: CacheKind, step: int) -> int:
    """What the next token attends to and the tokens of one step, in whole blocks: independent of the length."""
    match kind:
        case SlidingWindow():
            return blocks_spanned(kind.window - 1 + step, kind.block_size)
        case ChunkedLocal():
            return blocks_spanned(kind.chunk_size + step, kind.block_size)
        case _:
            return blocks_spanned(1 + step, kind.block_size)


KINDS = st.one_of(
    st.builds(SlidingWindow, st.integers(4, 64), st.integers(1, 100)),
    st.builds(ChunkedLocal, st.integers(4, 64), st.integers(1, 100)),
    st.builds(SequenceState, st.integers(4, 64)),
)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(kind=KINDS, step=st.integers(1, 48))
def test_a_windowed_request_of_any_length_holds_a_bounded_number_of_blocks(kind: CacheKind, step: int) -> None:
    length, bound = 40 * step, most_blocks(kind, step)
    config = AllocatorConfig(
        num_blocks=bound + 1, groups=[kind], max_model_len=length, retention_interval=None, max_in_flight_tokens=step
    )
    allocator = KVCacheAllocator(config)
    request = Request("a", length)
    for start in range(0, length, step):
        if start:
            allocator.release_out_of_window("a")
        assert allocator.allocate(request, step) is not None
        held = sum([block != 0 for block in allocator.block_ids("a")[0]])
        assert held == allocator.pool.num_held_blocks <= bound


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(kind=KINDS, step=st.integers(1, 48))
def test_a_pool_of_the_admission_cap_serves_a_request_of_any_length(kind: CacheKind, step: int) -> None:
    length = 20 * step + kind.block_size
    cap = kind.admission_cap_blocks(step, length)
    assert cap is not None
    config = AllocatorConfig(
        num_blocks=cap + 1, groups=[kind], max_model_len=length, retention_interval=None, max_in_flight_tokens=step
    )
    allocator = KVCacheAllocator(config)
    request = Request("a", length)
    allocator.check_fits(length)
    assert allocator.can_admit(request)
    for start in range(0, length - step, step):
        if start:
            allocator.release_out_of_window("a")
        assert allocator.allocate(request, step) is not None


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(block_size=st.integers(1, 64), steps=st.lists(st.integers(1, 100), min_size=1, max_size=12))
def test_at_most_block_size_less_one_slots_of_a_full_attention_request_are_unused(block_size, steps) -> None:
    config = AllocatorConfig(num_blocks=2_000, groups=[FullAttention(block_size)], max_model_len=1_200)
    allocator = KVCacheAllocator(config)
    request = Request("a", sum(steps))
    for step in steps:
        allocator.allocate(request, step)
        unused = len(allocator.block_ids("a")[0]) * block_size - allocator.num_placed_tokens("a")
        assert 0 <= unused <= block_size - 1


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 31, 32, 33])
def test_a_hit_never_covers_the_last_token(num_tokens) -> None:
    class Numbers:
        def keys(self, start: int, stop: int) -> list[int]:
            return list(range(start, stop))

    allocator = KVCacheAllocator(AllocatorConfig(num_blocks=9, groups=[FullAttention(8)], max_model_len=64))
    request = Request("a", num_tokens, keys=Numbers())
    allocator.allocate(request, num_tokens)
    allocator.free("a")
    assert allocator.match_prefix(request).num_hit_tokens == (num_tokens - 1) // 8 * 8
