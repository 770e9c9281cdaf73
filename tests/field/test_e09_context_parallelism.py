"""E09: under decode context parallelism a published block has the tokens of all ranks (dynamo#13653; vllm#46394)."""

import pytest
from kvledger.backends.sinks.kv_events.content import ContentRegistry, ListedTokens, RequestContent
from kvledger.backends.sinks.kv_events.encoder import KVEventEncoder
from kvledger.backends.sinks.kv_events.schema import BlockStored, KVEventBatch, encode_batch
from kvledger.core import KVCacheAllocator, Request
from kvledger.core.events import Commit
from kvledger.core.keys.block_hash import block_hasher
from kvledger.core.keys.token_keys import TokenKeySource
from kvledger.sim import Scenario
from kvledger.sim.scenario.engine import pool_of

TOKENS = list(range(500, 570))


@pytest.mark.parametrize("wire", ["vllm", "strict"])
@pytest.mark.parametrize("ranks, num_hashes", [(1, 4), (2, 2), (4, 1)])
def test_e09_a_published_block_has_the_tokens_of_all_ranks(follow, wire, ranks: int, num_hashes: int) -> None:
    """70 tokens, physical blocks of 16."""
    scenario = Scenario(
        model="deepseek-v3.2", gpu="H200", tensor_parallel_size=8, decode_context_parallel_size=ranks, block_size=16
    )
    registry, events = ContentRegistry(), list[BlockStored]()
    encoder = KVEventEncoder(registry, wire=wire)

    class Sink:
        def apply(self, commit: Commit) -> None:
            events.extend(each for each in encoder.encode(commit) if isinstance(each, BlockStored))

    config = pool_of(scenario).allocator
    allocator = KVCacheAllocator(config, [Sink()])
    keys = TokenKeySource(TOKENS, block_hasher(), config.hash_block_size)
    registry.add("r", RequestContent(ListedTokens(TOKENS), keys))
    request = Request("r", len(TOKENS), keys=keys)
    allocator.allocate(request, len(TOKENS), allocator.match_prefix(request))
    (event,) = events
    size = 16 * ranks
    assert (event.block_size, len(event.block_hashes), len(event.token_ids)) == (size, num_hashes, size * num_hashes)

    seen = follow(encode_batch(KVEventBatch(1.0, events)), options=())
    assert seen.figures("block_sizes", "stored_tokens", "num_blocks") == ({"0": [size]}, size * num_hashes, num_hashes)
    assert [(row["input_length"], len(row["hash_ids"])) for row in seen.rows] == [(size * num_hashes, num_hashes)]
    assert seen["trace"]["block_size"] == size
