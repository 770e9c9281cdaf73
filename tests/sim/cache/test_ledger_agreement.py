"""A policy finds the same hits in the capacity curve's bare loop as in a ledger: one policy, one answer.

Both serve the same prompts, one after the other, in blocks of the same size. A capacity of C blocks is a pool of C + 1,
the null block being the one more. In the ledger a prompt is a request of whole blocks: it adopts what `match_prefix`
finds, allocates all its tokens at once and is freed before the next one comes. So its blocks are held while victims are
chosen, and given back last block first. (A ledger recomputes the last block of a prompt that it holds entirely; no
prompt of this workload repeats an earlier one, which the fixture checks.)
"""

import numpy as np
import pytest
from kvledger.core import (
    AllocatorConfig,
    BeladyOrder,
    FullAttention,
    FutureUses,
    KVCacheAllocator,
    Request,
    eviction_policies,
    make_eviction_order,
)
from kvledger.sim.cache.lru_curve import lru_curve
from kvledger.sim.cache.policies import replay_policy
from kvledger.sim.cache.prompt_blocks import PromptBlocks, read_prompt_blocks
from kvledger.sim.workloads.builtin import open_workload

NUM_REQUESTS = 10_000
CAPACITIES = (1_000, 5_000, 20_000)


class Keys:
    """The keys of one prompt, for the allocator."""

    def __init__(self, keys: list[int]) -> None:
        self._keys = keys

    def keys(self, start: int, stop: int) -> list[int]:
        return self._keys[start:stop]


def ledger_hits(prompts: PromptBlocks, policy: str, num_blocks: int) -> int:
    """Blocks that the prompts find in a pool of `num_blocks` usable blocks."""
    block_size, longest = prompts.block_size, int(prompts.counts.max())
    if policy == "belady":
        order = BeladyOrder(num_blocks + 1, FutureUses(prompts))
    else:
        order = make_eviction_order(policy, num_blocks + 1)
    config = AllocatorConfig(num_blocks + 1, [FullAttention(block_size)], longest * block_size, max_num_reqs=1)
    allocator = KVCacheAllocator(config, (), order)
    num_hits = 0
    for ordinal, keys in enumerate(prompts):
        request = Request(str(ordinal), len(keys) * block_size, keys=Keys(keys))
        match = allocator.match_prefix(request)
        num_hits += match.num_hit_tokens // block_size
        assert allocator.allocate(request, len(keys) * block_size - match.num_hit_tokens, match) is not None
        allocator.free(request.request_id)
    return num_hits


@pytest.fixture(scope="module")
def prompts() -> PromptBlocks:
    prompts = read_prompt_blocks(open_workload("conversation", limit=NUM_REQUESTS))
    num_new = np.bincount(prompts.requests[prompts.previous_request < 0], minlength=NUM_REQUESTS)
    assert num_new.min() >= 1, "no prompt repeats an earlier one"
    assert prompts.counts.max() <= min(CAPACITIES)
    return prompts


@pytest.mark.parametrize("num_blocks", CAPACITIES)
@pytest.mark.parametrize("policy", [*eviction_policies.names(), "belady"])
def test_the_curve_counts_the_hits_of_the_ledger(prompts, policy, num_blocks):
    hits = replay_policy(prompts, policy, num_blocks).hit_blocks
    assert hits == ledger_hits(prompts, policy, num_blocks)
    if policy == "lru":
        assert hits == lru_curve(prompts).at(num_blocks).hit_blocks
