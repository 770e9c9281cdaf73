"""No token is written where another request, or a later lookup, still reads: rollbacks, forks, stale matches."""

import numpy as np
import pytest
from kvledger.core import AllocatorConfig, FullAttention, KVCacheAllocator, MisuseError, Request, SlidingWindow


class Prefixes:
    """A key source whose keys are the tokens themselves."""

    def __init__(self, tokens, block_size: int = 4) -> None:
        self.tokens, self.block_size = list(tokens), block_size

    def keys(self, start: int, stop: int) -> list[tuple[int, ...]]:
        return [tuple(self.tokens[: (i + 1) * self.block_size]) for i in range(start, stop)]


def allocator_of(num_usable_blocks: int, **config) -> KVCacheAllocator:
    settings = {"groups": [FullAttention(4)], "max_model_len": 64, "max_num_reqs": 4} | config
    return KVCacheAllocator(AllocatorConfig(num_blocks=num_usable_blocks + 1, **settings))


def request_of(request_id: str, tokens) -> Request:
    return Request(request_id, len(list(tokens)), max_tokens=64, keys=Prefixes(tokens))


@pytest.mark.parametrize("enable_caching", [True, False])
def test_a_fork_that_goes_back_and_on_writes_into_no_block_of_its_parent(enable_caching) -> None:
    allocator = allocator_of(12, enable_caching=enable_caching)
    allocator.allocate(request_of("parent", range(10)), 10)
    child = request_of("child", range(10))
    allocator.fork("parent", child)
    allocator.allocate(child, 1, num_computed_tokens=2)
    allocator.allocate(child, 7)
    (parent_table,), (child_table,) = allocator.block_ids("parent"), allocator.block_ids("child")
    assert not set(parent_table) & set(child_table)
    assert [allocator.pool.ref_cnt(block) for block in parent_table + child_table] == [1] * 6


def test_a_request_that_goes_back_and_on_leaves_no_key_on_what_it_overwrites() -> None:
    allocator = allocator_of(12)
    request = request_of("a", range(12))
    allocator.allocate(request, 12)
    request.keys.tokens[5:] = [90, 91, 92, 93, 94, 95, 96]
    allocator.allocate(request, 1, num_computed_tokens=5)
    allocator.allocate(request, 6)
    keys = {key for _, key in allocator.pool.keyed_blocks()}
    assert keys == set(request.keys.keys(0, 3))


def test_a_copy_that_finds_no_block_waits_for_the_other_reader_to_end() -> None:
    allocator = allocator_of(2)
    allocator.allocate(request_of("parent", range(6)), 6)
    child = request_of("child", range(7))
    allocator.fork("parent", child)
    assert allocator.allocate(child, 1) is None
    allocator.free("parent")
    assert allocator.allocate(child, 1) == ((),)


def test_two_children_of_one_parent_write_into_blocks_of_their_own() -> None:
    allocator = allocator_of(12)
    allocator.allocate(request_of("parent", range(6)), 6)
    for name in ("first", "second"):
        child = request_of(name, range(6))
        allocator.fork("parent", child)
        allocator.allocate(child, 1)
    tables = [allocator.block_ids(name)[0] for name in ("parent", "first", "second")]
    assert len({table[0] for table in tables}) == 1
    assert len({table[1] for table in tables}) == 3


def test_blocks_that_a_fork_shares_are_registered_once() -> None:
    """With blocks of 8 and 4 the second block of 4 waits for the alignment, and both sides reach it."""
    allocator = allocator_of(16, groups=[FullAttention(8), FullAttention(4)])
    parent, child = request_of("parent", range(8)), request_of("child", range(8))
    allocator.allocate(parent, 6)
    allocator.fork("parent", child)
    rows = np.array([allocator.row_of("parent"), allocator.row_of("child")])
    assert allocator.append(rows, 2)
    copies = [len(allocator.pool.copies(key, 1)) for key in parent.keys.keys(0, 2)]
    assert copies == [1, 2]


def test_a_shared_block_behind_null_blocks_is_registered_once() -> None:
    groups = [SlidingWindow(4, 9), FullAttention(16)]
    allocator = allocator_of(32, groups=groups, retention_interval=None)
    parent, child = request_of("parent", range(16)), request_of("child", range(16))
    allocator.allocate(parent, 13)
    allocator.release_out_of_window("parent")
    allocator.fork("parent", child)
    assert allocator.block_ids("child")[0][:1] == [0]
    rows = np.array([allocator.row_of("parent"), allocator.row_of("child")])
    assert allocator.append(rows, 3)
    shared = allocator.block_ids("child")[0][2]
    assert allocator.block_ids("parent")[0][2] == shared
    assert allocator.pool.copies(allocator.pool.key_of(shared), 0) == (shared,)


def test_what_a_fork_registers_behind_shared_blocks_is_dropped_with_them() -> None:
    """Its links run through blocks that the other side registered in the same command."""
    allocator = allocator_of(24, groups=[FullAttention(4), FullAttention(16)], orphans="drop")
    parent, child = request_of("parent", range(16)), request_of("child", [*range(15), 99])
    allocator.allocate(parent, 15)
    allocator.fork("parent", child)
    rows = np.array([allocator.row_of("parent"), allocator.row_of("child")])
    assert allocator.append(rows, 1)
    shared, own = allocator.block_ids("child")[0][1], allocator.block_ids("child")[0][3]
    assert allocator.pool.key_of(own) is not None
    allocator.evict([shared])
    assert allocator.pool.key_of(own) is None


def test_a_match_is_stale_when_its_block_carries_the_same_key_for_another_group() -> None:
    allocator = allocator_of(4, groups=[FullAttention(4)] * 2)
    allocator.allocate(request_of("a", range(5)), 5)
    allocator.free("a")
    late = request_of("late", range(5))
    match = allocator.match_prefix(late)
    assert match.blocks == ((1,), (3,))
    allocator.pool.take((4,))
    allocator.allocate(request_of("quick", range(4)), 4)
    assert allocator.block_ids("quick") == [[2], [1]]
    with pytest.raises(MisuseError, match="stale match for 'late': block 1"):
        allocator.allocate(late, 1, match)
