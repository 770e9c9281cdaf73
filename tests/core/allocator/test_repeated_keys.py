"""A request whose keys repeat: a trace may name content alone, so that one id stands at several places of a prompt."""

import numpy as np
import pytest
from kvledger.core import AllocatorConfig, EventLog, FreeReason, FullAttention, KVCacheAllocator, MisuseError, Request
from kvledger.core.allocator.checks import Rows
from kvledger.testing import check_log

BLOCK_SIZE = 16


class GivenKeys:
    def __init__(self, keys: list[str]) -> None:
        self._keys = keys

    def keys(self, start: int, stop: int) -> list[str]:
        return self._keys[start:stop]


def request(request_id: str, words: str, num_tail_tokens: int = 1) -> Request:
    return Request(request_id, len(words) * BLOCK_SIZE + num_tail_tokens, 1, GivenKeys(list(words)))


@pytest.fixture
def ledger() -> tuple[KVCacheAllocator, EventLog]:
    log = EventLog()
    config = AllocatorConfig(num_blocks=12, groups=[FullAttention(BLOCK_SIZE)], max_model_len=1024, max_num_reqs=4)
    return KVCacheAllocator(config, sinks=[log]), log


def admit(allocator: KVCacheAllocator, new: Request) -> int:
    match = allocator.match_prefix(new)
    assert allocator.allocate(new, new.num_tokens - match.num_hit_tokens, match) is not None
    return match.num_hit_tokens


def test_a_block_that_is_found_twice_is_held_twice_and_given_back_once(
    ledger: tuple[KVCacheAllocator, EventLog],
) -> None:
    allocator, log = ledger
    admit(allocator, request("first", "aabc"))
    allocator.free("first")
    free = allocator.pool.free_queue.order()

    assert admit(allocator, request("again", "aabc")) == 4 * BLOCK_SIZE
    (blocks,) = allocator.block_ids("again")
    assert blocks[0] == blocks[1]
    assert allocator.pool.ref_cnt(blocks[0]) == 2
    assert allocator.num_free_blocks == len(free) - 4

    allocator.free("again", FreeReason.PREEMPTED)
    assert sorted(allocator.pool.free_queue.order()) == sorted(free)
    assert not any(allocator.pool.ref_cnts())
    assert log.verify().snapshot() == allocator.state.snapshot()


def test_forks_and_neighbours_share_such_a_block_and_the_last_one_frees_it(
    ledger: tuple[KVCacheAllocator, EventLog],
) -> None:
    allocator, log = ledger
    admit(allocator, request("first", "aa"))
    allocator.free("first")
    admit(allocator, request("again", "aaa"))
    admit(allocator, request("beside", "aa"))
    allocator.fork("again", request("fork", "aaa"))
    shared = allocator.block_ids("again")[0][0]
    assert allocator.pool.ref_cnt(shared) == 3 + 2 + 3  # every "a" of each finds the block registered first

    for name in ("again", "fork", "beside"):
        allocator.free(name)
        assert log.verify().snapshot() == allocator.state.snapshot()
    assert not any(allocator.pool.ref_cnts())
    assert len(set(allocator.pool.free_queue.order())) == allocator.pool.num_usable_blocks


def held_twice(allocator: KVCacheAllocator, log: EventLog, words: str = "aab") -> tuple[Rows, int]:
    """A request whose first two blocks are one: its row, and the block."""
    admit(allocator, request("first", words))
    allocator.free("first")
    admit(allocator, request("again", words))
    (blocks,) = allocator.block_ids("again")
    assert blocks[0] == blocks[1]
    return np.array([allocator.row_of("again")]), blocks[0]


def written_blocks(allocator: KVCacheAllocator, name: str, first: int) -> set[int]:
    (blocks,) = allocator.block_ids(name)
    return set(blocks[first // BLOCK_SIZE :])


@pytest.mark.parametrize("cut", [BLOCK_SIZE + 1, 2 * BLOCK_SIZE - 1])
def test_a_row_that_is_cut_back_to_its_second_place_writes_a_copy(
    ledger: tuple[KVCacheAllocator, EventLog], cut: int
) -> None:
    allocator, log = ledger
    rows, block = held_twice(allocator, log)
    allocator.truncate("again", cut)
    assert not allocator.could_append(rows, 1)
    assert allocator.append(rows)
    (blocks,) = allocator.block_ids("again")
    assert blocks[0] == block != blocks[1]
    assert allocator.pool.ref_cnt(block) == 1
    assert allocator.pool.key_of(block) == "a"
    assert check_log(log).snapshot() == allocator.state.snapshot()


@pytest.mark.parametrize("cut", [1, BLOCK_SIZE - 2])
def test_a_row_that_is_cut_back_to_its_first_place_writes_there_and_nobody_finds_it(
    ledger: tuple[KVCacheAllocator, EventLog], cut: int
) -> None:
    allocator, log = ledger
    rows, block = held_twice(allocator, log)
    allocator.truncate("again", cut)
    assert allocator.append(rows)
    assert [list(blocks) for blocks in allocator.block_ids("again")] == [[block]]
    assert allocator.pool.ref_cnt(block) == 1
    assert allocator.pool.key_of(block) is None
    assert check_log(log).snapshot() == allocator.state.snapshot()


def test_a_row_that_goes_back_over_both_places_writes_two_blocks(ledger: tuple[KVCacheAllocator, EventLog]) -> None:
    allocator, log = ledger
    _, block = held_twice(allocator, log)
    again = request("again", "aab")
    assert allocator.allocate(again, 2 * BLOCK_SIZE, num_computed_tokens=3) is not None
    (blocks,) = allocator.block_ids("again")
    assert len(set(blocks)) == len(blocks) == 4
    assert allocator.pool.ref_cnt(block) == 1
    assert check_log(log).snapshot() == allocator.state.snapshot()


def test_several_steps_into_such_a_block_are_refused_and_one_copies_it(
    ledger: tuple[KVCacheAllocator, EventLog],
) -> None:
    allocator, log = ledger
    rows, block = held_twice(allocator, log)
    allocator.truncate("again", BLOCK_SIZE + 5)
    assert not allocator.could_append(rows, 4)
    with pytest.raises(MisuseError, match="others read its block 1"):
        allocator.append_steps(rows, 4)
    assert allocator.append(rows)
    assert block not in written_blocks(allocator, "again", BLOCK_SIZE)
    allocator.append_steps(rows, 4)
    assert check_log(log).snapshot() == allocator.state.snapshot()


def test_the_forks_of_such_a_row_write_copies_of_their_own(ledger: tuple[KVCacheAllocator, EventLog]) -> None:
    allocator, log = ledger
    rows, block = held_twice(allocator, log)
    allocator.truncate("again", BLOCK_SIZE + 5)
    allocator.fork("again", request("fork", "aab"))
    assert allocator.pool.ref_cnt(block) == 4
    assert allocator.append(np.array([allocator.row_of("fork"), *rows]))
    one, other = [written_blocks(allocator, name, BLOCK_SIZE) for name in ("again", "fork")]
    assert len(one | other) == 2 and block not in one | other
    assert allocator.pool.ref_cnt(block) == 2
    assert check_log(log).snapshot() == allocator.state.snapshot()


def test_without_a_free_block_for_the_copy_nothing_is_written() -> None:
    log = EventLog()
    config = AllocatorConfig(num_blocks=6, groups=[FullAttention(BLOCK_SIZE)], max_model_len=1024, max_num_reqs=4)
    allocator = KVCacheAllocator(config, sinks=[log])
    rows, block = held_twice(allocator, log)
    allocator.truncate("again", BLOCK_SIZE + 5)
    assert allocator.allocate(Request("else", 4 * BLOCK_SIZE), 4 * BLOCK_SIZE) is not None
    before = allocator.state.snapshot()
    assert not allocator.append(rows)
    assert allocator.append_in_turn(rows) == 0
    assert allocator.state.snapshot() == before
    allocator.free("else")
    assert allocator.append(rows)
    assert block not in written_blocks(allocator, "again", BLOCK_SIZE)


def test_evicting_a_block_strands_nothing_that_a_lookup_comes_to_by_another_way() -> None:
    config = AllocatorConfig(
        num_blocks=12, groups=[FullAttention(BLOCK_SIZE)], max_model_len=1024, max_num_reqs=4, orphans="drop"
    )
    allocator = KVCacheAllocator(config)
    admit(allocator, request("first", "abcad"))
    a, b, c, again, d = allocator.block_ids("first")[0][:5]
    allocator.free("first")
    keyed = lambda: {block for block, _ in allocator.pool.keyed_blocks()}  # noqa: E731

    assert allocator.evict([c]) == 1  # "a" begins a prompt as well, and what follows it stays with it
    assert keyed() == {a, b, again, d}
    assert allocator.match_prefix(request("next", "abx")).num_hit_tokens == 2 * BLOCK_SIZE
    assert allocator.evict([a]) == 1  # another block carries its key
    assert keyed() == {b, again, d}
    assert allocator.evict([again]) == 3
    assert keyed() == set()


def test_what_is_remembered_of_chains_is_in_proportion_to_the_cache() -> None:
    config = AllocatorConfig(
        num_blocks=20, groups=[FullAttention(BLOCK_SIZE)], max_model_len=1024, max_num_reqs=4, orphans="drop"
    )
    allocator = KVCacheAllocator(config)
    for number in range(3_000):
        # All begin with the same block, and end with the same one.
        admit(allocator, request("one", f"a{chr(2 * number + 1_000)}{chr(2 * number + 1_001)}z."))
        allocator.free("one")
    (links,) = allocator._links._links
    assert links is not None
    assert links._num_links <= 2 * (len(allocator.pool.index()) + 1) + 1_024 + 4
    held = links._parents, links._children
    assert all(sum(map(len, side.values())) <= links._num_links for side in held)
