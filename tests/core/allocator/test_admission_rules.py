"""Rules that few recorded traces catch: the watermark, reserved blocks, and the full-sequence gate."""

import numpy as np
import pytest
from kvledger.core import AllocatorConfig, DoesNotFitError, FullAttention, KVCacheAllocator, Request, SlidingWindow


def allocator_of(num_usable_blocks: int, **config) -> KVCacheAllocator:
    settings = {"groups": [FullAttention(4)], "max_model_len": 256} | config
    return KVCacheAllocator(AllocatorConfig(num_blocks=num_usable_blocks + 1, **settings))


@pytest.mark.parametrize(("num_blocks", "fits"), [(7, True), (8, False)])
def test_an_admission_leaves_the_watermark_free(num_blocks, fits) -> None:
    allocator = allocator_of(10, watermark_blocks=3)
    request = Request("a", 4 * num_blocks)
    assert (allocator.allocate(request, request.num_tokens, use_watermark=True) is not None) is fits
    if not fits:
        assert allocator.num_free_blocks == 10
        assert allocator.allocate(request, request.num_tokens) is not None


def test_the_watermark_does_not_stop_a_running_request() -> None:
    allocator = allocator_of(10, watermark_blocks=3)
    request = Request("a", 40)
    assert allocator.allocate(request, 28, use_watermark=True) is not None
    assert allocator.allocate(request, 12) is not None
    assert allocator.num_free_blocks == 0


@pytest.mark.parametrize(("reserved", "fits"), [(6, True), (7, False)])
def test_reserved_blocks_are_not_taken(reserved, fits) -> None:
    allocator = allocator_of(10)
    assert (allocator.allocate(Request("a", 16), 16, reserved_blocks=reserved) is not None) is fits
    assert allocator.num_free_blocks == (6 if fits else 10)


@pytest.mark.parametrize(("reserved", "fits"), [(7, True), (8, False)])
def test_reserved_blocks_are_not_taken_by_a_decode_step(reserved, fits) -> None:
    allocator = allocator_of(10)
    for i in range(2):
        assert allocator.allocate(Request(str(i), 4), 3 + i) is not None
    assert allocator.append(np.array([0, 1]), 1, reserved_blocks=reserved) is fits
    assert allocator.num_free_blocks == (7 if fits else 8)


def test_reserve_and_watermark_add_up() -> None:
    allocator = allocator_of(10, watermark_blocks=2)
    assert allocator.allocate(Request("a", 16), 16, reserved_blocks=5, use_watermark=True) is None
    assert allocator.allocate(Request("a", 16), 16, reserved_blocks=4, use_watermark=True) is not None


@pytest.mark.parametrize(("num_tokens", "fits"), [(32, True), (33, False)])
def test_the_gate_asks_for_the_whole_sequence_although_a_chunk_would_fit(num_tokens, fits) -> None:
    allocator = allocator_of(10, watermark_blocks=2)
    request = Request("a", num_tokens)
    assert allocator.can_admit(request) is fits
    assert allocator.can_admit(request, use_watermark=False)
    assert allocator.allocate(request, 4, use_watermark=True) is not None


def test_the_gate_asks_a_windowed_group_for_its_window_and_what_is_in_flight_only() -> None:
    groups = [SlidingWindow(4, 9)]
    allocator = allocator_of(5, groups=groups, retention_interval=None, max_in_flight_tokens=8)
    request = Request("a", 200)
    assert allocator.can_admit(request)
    assert not allocator_of(4, groups=groups, retention_interval=None, max_in_flight_tokens=8).can_admit(request)
    start = 0
    while start < 200:
        if allocator.holds("a"):
            allocator.release_out_of_window("a")
        assert allocator.allocate(request, 8) is not None
        start += 8


def test_what_can_never_fit_is_refused_with_the_longest_length_that_does() -> None:
    allocator = allocator_of(10)
    with pytest.raises(DoesNotFitError, match=r"41 tokens needs 11 blocks, but the pool has 10 .* has 40 tokens"):
        allocator.check_fits(41)
    allocator.check_fits(40)
    with pytest.raises(DoesNotFitError, match=r"needs 11 blocks at once, but the pool has 10"):
        allocator.allocate(Request("a", 41), 41)
