"""Which blocks become findable where two sides of a fork share them."""

import numpy as np
from kvledger.core import AllocatorConfig, EventLog, FullAttention, KVCacheAllocator, Request


class CountedKeys:
    """The keys of the first tokens of one text, as many as are known."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens

    def keys(self, start: int, stop: int) -> list[int]:
        return list(range(100 + start, 100 + min(stop, self.num_tokens // 4)))


def test_blocks_behind_an_evicted_one_that_the_other_side_of_a_fork_registered_are_left_alone() -> None:
    log = EventLog()
    config = AllocatorConfig(num_blocks=9, groups=[FullAttention(4)], max_model_len=64, max_num_reqs=4)
    allocator = KVCacheAllocator(config, [log])
    keys = CountedKeys(5)
    parent, child = Request("parent", 5, 32, keys), Request("child", 5, 32, keys)
    allocator.allocate(parent, 12)  # five known tokens and seven drafts
    allocator.fork("parent", child)
    parent.num_output_tokens = child.num_output_tokens = 8  # every draft was accepted
    keys.num_tokens = 13
    assert allocator.append(np.array([allocator.row_of("parent")]))
    assert [allocator.pool.key_of(block) for block in allocator.block_ids("child")[0]] == [100, 101, 102]
    assert allocator.evict([2]) == 1  # the middle one; the last one stays registered

    assert allocator.append(np.array([allocator.row_of("child")]))

    assert [allocator.pool.key_of(block) for block in allocator.block_ids("child")[0]] == [100, 101, 102, None]
    assert allocator.pool.copies(102) == (3,)
    assert log.verify().snapshot() == allocator.state.snapshot()
