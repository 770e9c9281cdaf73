"""The allocator under every eviction order on a real trace: prompts only, each freed before the next arrives."""

import os
from pathlib import Path

import pytest
from kvledger.core import AllocatorConfig, EventLog, FullAttention, KVCacheAllocator, Request
from kvledger.core.pool.eviction_order import EvictionOrder, make_eviction_order
from kvledger.core.pool.policies.belady import BeladyOrder, FutureUses
from kvledger.sim.cache.policies import replay_policy
from kvledger.sim.cache.prompt_blocks import read_prompt_blocks
from kvledger.sim.engine.arrivals import TraceKeySource
from kvledger.sim.traces import open_trace

BLOCK_SIZE = 512
ORDERS = ("lru", "fifo", "lfu", "s3fifo", "sieve", "length-aware", "belady")
# vLLM's own core on the same prompts, pool sizes with the null block (reference figures of the conversation trace).
LRU_HIT_BLOCKS = {1_000: 12_986, 10_000: 61_998, 50_000: 102_722}


@pytest.fixture(scope="module")
def conversation() -> Path:
    directory = os.environ.get("KVLEDGER_TRACES")
    if not directory:
        pytest.skip("KVLEDGER_TRACES does not name the directory of the public traces")
    return Path(directory) / "mooncake" / "conversation_trace.jsonl.gz"


@pytest.fixture(scope="module")
def prompts(conversation):
    """Input length and key source of every prompt."""
    return [
        (request.input_length, TraceKeySource(request.hash_ids, request.input_length, place, BLOCK_SIZE, BLOCK_SIZE))
        for place, request in enumerate(open_trace(conversation))
    ]


def new_order(prompts, eviction: str, num_blocks: int) -> EvictionOrder:
    if eviction == "belady":
        keys = (source.keys(0, input_length // BLOCK_SIZE) for input_length, source in prompts)
        return BeladyOrder(num_blocks, FutureUses(keys))
    return make_eviction_order(eviction, num_blocks)


def serve(prompts, eviction: str, num_blocks: int, sinks=()) -> tuple[int, KVCacheAllocator]:
    """Blocks that were found, over all prompts; and the allocator that found them."""
    longest = max(input_length for input_length, _ in prompts)
    config = AllocatorConfig(num_blocks, [FullAttention(BLOCK_SIZE)], longest, max_num_reqs=1)
    allocator = KVCacheAllocator(config, sinks, new_order(prompts, eviction, num_blocks))
    found = 0
    for place, (input_length, source) in enumerate(prompts):
        request = Request(str(place), input_length, keys=source)
        match = allocator.match_prefix(request)
        found += match.num_hit_tokens // BLOCK_SIZE
        assert allocator.allocate(request, input_length - match.num_hit_tokens, match) is not None
        allocator.free(request.request_id)
    return found, allocator


def hit_blocks(prompts, eviction: str, num_blocks: int) -> int:
    found, _ = serve(prompts, eviction, num_blocks)
    return found


@pytest.mark.parametrize("num_blocks", [10_000, *(pytest.param(n, marks=pytest.mark.slow) for n in (1_000, 50_000))])
def test_lru_finds_the_blocks_that_vllm_finds(prompts, num_blocks):
    assert hit_blocks(prompts, "lru", num_blocks) == LRU_HIT_BLOCKS[num_blocks]


@pytest.mark.parametrize(
    ("limit", "num_blocks"),
    [(2_000, 3_000), *(pytest.param(None, n, marks=pytest.mark.slow) for n in LRU_HIT_BLOCKS)],
)
def test_every_order_finds_what_its_study_finds_and_belady_the_most(conversation, prompts, limit, num_blocks):
    """The two differ by the partial last block of a prompt, which the study keeps like any other block.

    In the pool it has no key, so it can never hit and is the first to be reused: a little more room for full blocks,
    most of it felt by the orders that would have kept partial blocks long (fifo and length-aware). Prompts of whole
    blocks find exactly the same (tests/sim/cache/test_ledger_agreement.py).
    """
    found = {order: hit_blocks(prompts[:limit], order, num_blocks) for order in ORDERS}
    blocks = read_prompt_blocks(open_trace(conversation, limit=limit))
    study = {order: replay_policy(blocks, order, num_blocks).full_block_hit_tokens // BLOCK_SIZE for order in ORDERS}
    print(f"{num_blocks} blocks: {found}; full blocks in the study: {study}")
    assert all(0.99 * study[order] <= found[order] <= 1.07 * study[order] for order in ORDERS)
    assert max(found, key=found.__getitem__) == "belady"


@pytest.mark.parametrize("eviction", ORDERS)
def test_a_replay_of_the_log_rebuilds_every_order(prompts, eviction):
    log = EventLog()
    _, allocator = serve(prompts[:600], eviction, 500, [log])
    replayed = log.replay(eviction=new_order(prompts[:600], eviction, 500))
    assert replayed.snapshot() == allocator.state.snapshot()
