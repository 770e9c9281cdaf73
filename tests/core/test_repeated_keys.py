"""A request whose keys repeat: a trace may name content alone, so that one id stands at several places of a prompt."""

import pytest
from kvledger.core import AllocatorConfig, EventLog, FreeReason, FullAttention, KVCacheAllocator, Request

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
