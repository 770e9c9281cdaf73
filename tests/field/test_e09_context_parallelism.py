"""E09: under decode context parallelism a published block has the tokens of all ranks (dynamo#13653; vllm#46394)."""

import json

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


def test_e09_a_replay_has_blocks_of_all_ranks_tokens_and_each_rank_reads_its_share(tmp_path, kvledger) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [0, 1]}\n')
    command = ["replay", str(trace), "--model", "deepseek-v3.2", "--gpu", "H200", "-tp", "8", "--json"]
    reads = []
    for ranks in (1, 2):
        _, report, _ = kvledger(*command, "--decode-context-parallel-size", ranks)
        assert f"FullAttention(block_size={16 * ranks})" in report
        (per_token,) = json.loads(report)["assumptions"]["kv_bytes_per_token_per_rank"].values()
        reads.append(per_token)
    assert reads[0] == 2 * reads[1]


def test_e09_ranks_without_a_model_are_refused(kvledger) -> None:
    command = ["replay", "--workload", "sharegpt", "--num-gpu-blocks-override", "100", "-dcp", "2"]
    code, _, err = kvledger(*command)
    assert (code, "parallel sizes have no effect without --model" in err) == (2, True)
