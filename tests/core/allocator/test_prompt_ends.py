"""Rule 23: the end of a prompt inside a block gets a key, until the block is complete (histories: tests/parity)."""

import numpy as np
import pytest
from kvledger.backends.sinks.kv_events.content import ContentRegistry, ListedTokens, RequestContent
from kvledger.backends.sinks.kv_events.encoder import KVEventEncoder
from kvledger.backends.sinks.kv_events.schema import BlockRemoved, BlockStored
from kvledger.core import AllocatorConfig, EventLog, FullAttention, KVCacheAllocator, Request, SlidingWindow
from kvledger.core.cache_kinds import SequenceState
from kvledger.core.keys.block_hash import block_hasher
from kvledger.core.keys.token_keys import TokenKeySource

FULL_16_SLIDING_4 = (FullAttention(16), SlidingWindow(4, 7))


class Prefixes:
    """A block's key is all tokens up to its end, and those that it looks ahead to."""

    def __init__(self, tokens: list[int], size: int, ahead: int = 0) -> None:
        self.tokens, self.size, self.ahead = tokens, size, ahead

    def keys(self, start: int, stop: int) -> list[tuple[int, ...]]:
        stop = min(stop, (len(self.tokens) - self.ahead) // self.size)
        return [tuple(self.tokens[: (i + 1) * self.size + self.ahead]) for i in range(start, stop)]


def allocator(groups=FULL_16_SLIDING_4, **rules) -> tuple[KVCacheAllocator, EventLog]:
    log = EventLog()
    rules = {"use_eagle": True, "retention_interval": 0, **rules}
    return KVCacheAllocator(AllocatorConfig(num_blocks=60, groups=groups, max_model_len=200, **rules), [log]), log


def request(pool: KVCacheAllocator, num_tokens: int, name: str = "a") -> Request:
    config = pool.config
    keys = Prefixes(list(range(num_tokens)), config.hash_block_size, config.num_lookahead_tokens)
    return Request(name, num_tokens, keys=keys)


def tokens_keyed(pool: KVCacheAllocator, name: str = "a", group: int = 0) -> list[int]:
    """How many tokens the key of each block of a request covers; 0 without a key."""
    keys = [pool.pool.key_of(block) for block in pool.block_ids(name)[group]]
    return [0 if key is None else len(key) for key in keys]


@pytest.mark.parametrize(
    ("num_tokens", "keyed"),
    [(33, [16, 32, 0]), (36, [16, 32, 36]), (47, [16, 32, 44]), (48, [16, 32, 48]), (15, [0]), (16, [16])],
)
def test_under_eagle_the_block_in_which_a_prompt_ends_has_the_key_of_its_last_hash_block(num_tokens, keyed) -> None:
    pool, log = allocator()
    pool.allocate(request(pool, num_tokens), num_tokens)
    assert tokens_keyed(pool) == keyed
    assert log.replay().snapshot() == pool.state.snapshot()


def test_without_eagle_a_complete_block_has_its_own_key_alone() -> None:
    pool, _ = allocator(use_eagle=False)
    pool.allocate(request(pool, 47), 47)
    assert tokens_keyed(pool) == [16, 32, 0]


@pytest.mark.parametrize("at_once", [True, False])
def test_the_key_of_the_end_gives_way_to_that_of_the_complete_block(at_once) -> None:
    """A decode step of a batch registers what single allocations do, drafts that were rejected included."""
    pool, log = allocator()
    one = request(pool, 45)
    pool.allocate(one, 20)
    assert tokens_keyed(pool) == [16, 0]
    row = np.array([pool.row_of("a")])

    def serve(count: int, start: int, num_drafts: int = 0) -> None:
        if at_once:
            first = np.array([start])
            assert pool.append(row, count, num_draft_tokens=num_drafts, first_positions=first)
        else:
            assert pool.allocate(one, count, num_computed_tokens=start) is not None

    serve(25, 20)
    assert tokens_keyed(pool) == [16, 32, 44]
    for step in range(3):
        one.keys.tokens.append(1000 + step)
        one.num_output_tokens += 1
        serve(4, 45 + step, num_drafts=3)  # none is accepted
        assert tokens_keyed(pool)[:3] == [16, 32, 48 if step == 2 else 44]
    assert log.replay().snapshot() == pool.state.snapshot()


def test_a_block_with_the_key_of_an_end_is_reused_after_those_without_a_key() -> None:
    pool, _ = allocator(retention_interval=None)
    pool.allocate(request(pool, 37), 37)
    last = pool.block_ids("a")[0][-1]
    pool.free("a")
    assert pool.pool.free_queue.order().index(last) > 40


def test_no_lookup_reads_the_key_of_an_end() -> None:
    pool, _ = allocator()
    pool.allocate(request(pool, 47), 47)
    assert pool.match_prefix(request(pool, 47, "b")).num_hit_tokens == 16


def test_keys_that_look_ahead_by_several_tokens_give_the_end_its_key_when_they_exist() -> None:
    """vLLM 0.33 with 3 modules: after 45 tokens the last key covers 40 + 3; 2 outputs later there is one of 44 + 3."""
    pool, log = allocator(use_eagle=False, num_lookahead_tokens=3)
    one = request(pool, 45)
    pool.allocate(one, 45)
    assert tokens_keyed(pool) == [19, 35, 0]  # 32 of 45 tokens are aligned
    for token in (101, 102, 103, 104):
        one.keys.tokens.append(token)
        one.num_output_tokens += 1
        pool.allocate(one, 1)
    assert tokens_keyed(pool) == [19, 35, 47, 0]  # 48 are aligned, but the block's own key would look 3 further
    one.keys.tokens += [105, 106]
    one.num_output_tokens += 2
    pool.allocate(one, 2)
    assert tokens_keyed(pool) == [19, 35, 51, 0]
    assert log.replay().snapshot() == pool.state.snapshot()


def test_what_was_evicted_by_id_at_the_end_of_a_prompt_gets_its_key_again() -> None:
    pool, log = allocator((FullAttention(16), SequenceState(16)), use_eagle=False)
    one = request(pool, 126)
    pool.allocate(one, 112)
    (state,) = [block for block in pool.block_ids("a")[1] if block]
    assert tokens_keyed(pool, group=1)[-1] == 112
    assert pool.evict([state]) == 1
    pool.allocate(one, 14)
    assert pool.pool.key_of(state) == tuple(range(112))
    assert log.replay().snapshot() == pool.state.snapshot()


def test_the_end_is_published_as_one_block_of_the_size_of_a_key() -> None:
    hasher = block_hasher("sha256")
    tokens = list(range(60))
    keys = TokenKeySource(tokens, hasher, 4)
    contents = ContentRegistry()
    contents.add("a", RequestContent(ListedTokens(tokens), keys))
    encoder = KVEventEncoder(contents)
    pool, log = allocator()
    one = Request("a", 37, keys=TokenKeySource(tokens[:37], hasher, 4))
    pool.allocate(one, 37)
    stored = [event for commit in log for event in encoder.encode(commit) if isinstance(event, BlockStored)]
    (end,) = [event for event in stored if event.group_idx == 0 and event.block_size == 4]
    assert (end.token_ids, end.parent_block_hash) == (tokens[32:36], keys.keys(7, 8)[0])
    assert end.block_hashes == list(keys.keys(8, 9))
    pool.evict([pool.block_ids("a")[0][-1]])
    assert encoder.encode(list(log)[-1]) == [BlockRemoved(end.block_hashes, "GPU", 0)]
