"""The work that is timed, once, so that the suites and the side-by-side comparison time the same thing.

Each function does its work a single time and returns the seconds that count, after asserting its result.
"""

import gc
import gzip
import json
import os
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
from kvledger.backends import SimBackend
from kvledger.core import AllocatorConfig, BlockPool, EventLog, FullAttention, KVCacheAllocator, Request, TokenBatch
from kvledger.core.events import BlocksAllocated, BlocksFreed, FreeReason, as_ints
from kvledger.core.keys.block_hash import block_hasher
from kvledger.sim.engine.arrivals import TraceKeySource

clock = time.perf_counter
# How often a process of the side-by-side comparison does its work; the median counts.
REPEATS = 5
HIT_BLOCKS = {1_000: 12_986, 10_000: 61_998, 50_000: 102_722}


def conversation_rows() -> list[dict] | None:
    """The public conversation trace, from the folder that KVLEDGER_TRACES names; None where it is not set."""
    folder = os.environ.get("KVLEDGER_TRACES")
    if not folder:
        return None
    with gzip.open(Path(folder) / "mooncake" / "conversation_trace.jsonl.gz", "rt") as lines:
        return [json.loads(line) for line in lines]


class ListedKeys:
    """A key source with its keys at hand, as a server has them once a prompt is hashed."""

    def __init__(self, keys: list) -> None:
        self._keys = keys

    def keys(self, start: int, stop: int) -> list:
        return self._keys[start:stop]


def allocator_for(num_blocks: int, block_size: int, max_num_reqs: int = 256, log: bool = True) -> KVCacheAllocator:
    config = AllocatorConfig(
        num_blocks=num_blocks, groups=[FullAttention(block_size)], max_model_len=1 << 20, max_num_reqs=max_num_reqs
    )
    return KVCacheAllocator(config, sinks=[EventLog()] if log else [])


def lifecycle(rows: list[dict], num_blocks: int, log: bool = True) -> float:
    """match, allocate, free of every prompt of the trace in blocks of 512; events on, log in memory."""
    allocator = allocator_for(num_blocks, 512, max_num_reqs=4, log=log)
    requests = [
        Request(str(i), r["input_length"], 1, TraceKeySource(tuple(r["hash_ids"]), r["input_length"], i, 512, 512))
        for i, r in enumerate(rows)
    ]
    hit_blocks = 0
    gc.collect()
    started = clock()
    for request in requests:
        match = allocator.match_prefix(request)
        if allocator.allocate(request, request.num_tokens - match.num_hit_tokens, match) is not None:
            hit_blocks += match.num_hit_tokens // 512
            allocator.free(request.request_id)
    seconds = clock() - started
    assert len(rows) != 12_031 or hit_blocks == HIT_BLOCKS.get(num_blocks, hit_blocks)
    return seconds


def decode_steps(num_reqs: int = 256, prompt: int = 1024, num_steps: int = 64) -> float:
    """Seconds a step of `num_reqs` running requests, blocks of 16, caching and events on."""
    allocator = allocator_for(num_reqs * ((prompt + num_steps + 64) // 16 + 2), 16, num_reqs)
    for i in range(num_reqs):
        keys = ListedKeys([(i * 1000 + j).to_bytes(32, "big") for j in range((prompt + num_steps) // 16)])
        assert allocator.allocate(Request(str(i), prompt, 1 << 20, keys), prompt) is not None
    rows = np.array([allocator.row_of(str(i)) for i in range(num_reqs)], dtype=np.int64)
    gc.collect()
    started = clock()
    for _ in range(num_steps):
        assert allocator.append(rows)
    seconds = clock() - started
    assert (allocator.state.num_placed[rows] == prompt + num_steps).all()
    return seconds / num_steps


def take_and_release(num_blocks: int = 20_001, batch: int = 16, num_batches: int = 2_000) -> float:
    """Seconds a block: taken from a pool full of cached content, so that each take evicts a key, and released.

    Both events are made and applied, as a command makes and applies them.
    """
    pool = BlockPool(num_blocks)
    blocks = pool.free_queue.peek(num_blocks - 1)
    pool.take(blocks)
    pool.cache(0, blocks, [i.to_bytes(36, "big") for i in range(num_blocks - 1)], range(num_blocks - 1))
    pool.release(blocks)
    serial = num_blocks
    spent = 0.0
    groups, rows, counts = (0,), (0,), (batch,)
    for _ in range(num_batches):
        started = clock()
        taken = pool.free_queue.peek(batch)
        event = BlocksAllocated(0, rows, counts, taken, pool.keys_of(taken))
        pool.apply_take(taken, event.lost_keys)
        spent += clock() - started
        assert len(event.lost_keys) == batch and None not in event.lost_keys
        pool.cache(0, taken, [(serial + i).to_bytes(36, "big") for i in range(batch)], range(batch))
        serial += batch
        started = clock()
        freed = BlocksFreed(FreeReason.FINISHED, groups, rows, counts, taken[::-1])
        pool.apply_release(as_ints(freed.blocks))
        spent += clock() - started
    return spent / (num_batches * batch)


def full_hit(num_hit_blocks: int = 1024, block_size: int = 16) -> tuple[float, float, float]:
    """Seconds a block of a full prefix hit: match, adopt, free."""
    allocator = allocator_for(num_hit_blocks + 10, block_size, 4)
    keys = ListedKeys([i.to_bytes(32, "big") for i in range(num_hit_blocks)])
    length = num_hit_blocks * block_size
    allocator.allocate(Request("first", length, 1, keys), length)
    allocator.free("first")
    again = Request("again", length + 1, 1, keys)
    started = clock()
    match = allocator.match_prefix(again)
    matched = clock()
    assert allocator.allocate(again, 1, match) is not None
    adopted = clock()
    allocator.free("again")
    freed = clock()
    assert match.num_hit_tokens == length
    return tuple(s / num_hit_blocks for s in (matched - started, adopted - matched, freed - adopted))


def construct_pool(num_blocks: int = 1_000_000) -> tuple[float, float]:
    """Seconds to make a pool, and its bytes a block."""
    gc.collect()
    started = clock()
    pool = BlockPool(num_blocks)
    seconds = clock() - started
    assert pool.num_free_blocks == num_blocks - 1
    del pool
    tracemalloc.start()
    pool = BlockPool(num_blocks)
    bytes_held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert pool.num_free_blocks == num_blocks - 1
    return seconds, bytes_held / num_blocks


def bytes_a_block(num_blocks: int = 1_000_000) -> float:
    """Bytes that a new pool holds for each of its blocks."""
    return construct_pool(num_blocks)[1]


def hash_chain(block_size: int, num_tokens: int = 1 << 16) -> float:
    """Seconds a token of the SHA-256 chain over a prompt's int32 tokens, once another prompt has been hashed."""
    tokens = (np.arange(num_tokens, dtype=np.int64) * 7919 % 150_000).astype(np.int32)
    hasher = block_hasher()
    hasher.chain(tokens[::-1].copy(), block_size)
    gc.collect()
    started = clock()
    keys = hasher.chain(tokens, block_size)
    seconds = clock() - started
    assert len(set(keys)) == num_tokens // block_size
    return seconds / num_tokens


def slot_mapping(num_reqs: int = 64, tokens_each: int = 128, first_position: int = 0) -> Callable[[], float]:
    """A function that maps a batch of `num_reqs x tokens_each` tokens to slots and returns the seconds.

    Every request's tokens start at `first_position`: inside a block, unless that is a multiple of 16.
    """
    backend = SimBackend()
    config = AllocatorConfig(
        num_blocks=num_reqs * 600, groups=[FullAttention(16)], max_model_len=1 << 14, max_num_reqs=num_reqs
    )
    allocator = KVCacheAllocator(config, sinks=[backend])
    for i in range(num_reqs):
        num_tokens = first_position + tokens_each
        assert allocator.allocate(Request(str(i), num_tokens), num_tokens) is not None
    rows = np.array([allocator.row_of(str(i)) for i in range(num_reqs)], dtype=np.int64)
    firsts, counts = np.full(num_reqs, first_position, np.int64), np.full(num_reqs, tokens_each, np.int64)
    batch = TokenBatch(rows, firsts, counts)

    def once() -> float:
        started = clock()
        slots = backend.slot_mapping(batch)
        seconds = clock() - started
        assert len(slots) == num_reqs * tokens_each and slots.min() >= 16
        return seconds

    return once


def plain_slot_mapping(num_reqs: int = 64, tokens_each: int = 128) -> Callable[[], float]:
    """The same number of tokens by one NumPy expression over all of them, each one's request and position given."""
    rows = np.repeat(np.arange(num_reqs, dtype=np.int64), tokens_each)
    positions = np.tile(np.arange(tokens_each, dtype=np.int64), num_reqs)
    width = 1024
    table = np.arange(num_reqs * width, dtype=np.int32) + 1
    slots = np.empty(len(rows), dtype=np.int64)

    def once() -> float:
        started = clock()
        blocks = table[rows * width + positions // 16]
        np.add(blocks * np.int64(16), positions % 16, out=slots)
        seconds = clock() - started
        assert slots.min() >= 16
        return seconds

    return once
