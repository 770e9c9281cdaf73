"""E01: a stored event's parent is the block just before its first hash, its tokens are its blocks' own, and a consumer
counts what it cannot place (llm-d-kv-cache#372; vllm PR#44488; vllm-ascend#12002; dynamo PR#14314, #693).
"""

import pytest
from kvledger.backends.sinks.kv_events.content import ContentRegistry, ListedTokens, RequestContent
from kvledger.backends.sinks.kv_events.encoder import KVEventEncoder
from kvledger.backends.sinks.kv_events.schema import BlockRemoved, BlockStored, KVCacheEvent, KVEventBatch
from kvledger.backends.sinks.kv_events.shadow_pool import ShadowPool
from kvledger.core import AllocatorConfig, KVCacheAllocator, Request
from kvledger.core.cache_kinds import FullAttention, SlidingWindow
from kvledger.core.events import BlocksCached, Commit, PoolCreated, RowsAssigned
from kvledger.core.keys.block_hash import block_hasher
from kvledger.core.keys.token_keys import TokenKeySource

TOKENS = list(range(100, 120))
HASHES = TokenKeySource(TOKENS, block_hasher(), 4).keys(0, 5)
H1, H2, H3, H4, H5 = HASHES


def encoder_of(wire: str) -> KVEventEncoder:
    registry = ContentRegistry()
    registry.add("r", RequestContent(ListedTokens(TOKENS), TokenKeySource(TOKENS, block_hasher(), 4)))
    encoder = KVEventEncoder(registry, wire=wire)  # pyright: ignore[reportArgumentType]
    created = PoolCreated(32, (FullAttention(4),), 4, 64, True, 4, 4, "lru", "sha256")
    encoder.encode(Commit(0, (created, RowsAssigned(("r",), (0,)))))
    return encoder


def cached(start: int, stop: int, indices: tuple[int, ...]) -> Commit:
    """Blocks `start <= i < stop` of the request were looked at, those in `indices` got their hash."""
    parent = HASHES[start - 1] if start else None
    keys = tuple(HASHES[i] for i in indices)
    blocks = tuple(i + 1 for i in indices)
    return Commit(1, (BlocksCached(0, (0,), (start,), (stop,), (len(indices),), indices, blocks, keys, (parent,)),))


def test_a_skipped_block_is_the_parent_of_the_one_behind_it() -> None:
    """H1..H3 were cached before, H4 is skipped, H5 is stored."""
    (event,) = encoder_of("strict").encode(cached(3, 5, (4,)))
    assert event.block_hashes == [H5]
    assert event.parent_block_hash == H4
    assert event.token_ids == TOKENS[16:20]


def test_the_wire_of_vllm_spans_the_range_that_was_looked_at() -> None:
    (event,) = encoder_of("vllm").encode(cached(3, 5, (4,)))
    assert (event.block_hashes, event.parent_block_hash, event.token_ids) == ([H5], H3, TOKENS[12:20])
    (empty,) = encoder_of("vllm").encode(cached(3, 5, ()))
    assert (empty.block_hashes, len(empty.token_ids)) == ([], 8)
    assert encoder_of("strict").encode(cached(3, 5, ())) == []


@pytest.mark.parametrize(
    ("indices", "runs"),
    [
        ((0, 1, 2, 3, 4), [(None, [0, 1, 2, 3, 4])]),
        ((0, 2, 3), [(None, [0]), (1, [2, 3])]),
        ((1, 3), [(0, [1]), (2, [3])]),
    ],
)
def test_each_run_of_consecutive_blocks_is_an_event_of_its_own(indices, runs) -> None:
    events = encoder_of("strict").encode(cached(0, 5, indices))
    assert [(event.parent_block_hash, event.block_hashes, event.token_ids) for event in events] == [
        (
            None if parent is None else HASHES[parent],
            [HASHES[i] for i in run],
            [token for i in run for token in TOKENS[4 * i : 4 * i + 4]],
        )
        for parent, run in runs
    ]


def test_sparse_windows_of_a_live_allocator_keep_the_invariants() -> None:
    registry, events = ContentRegistry(), list[KVCacheEvent]()
    encoder = KVEventEncoder(registry, wire="strict")

    class Sink:
        def apply(self, commit: Commit) -> None:
            events.extend(encoder.encode(commit))

    groups = [FullAttention(4), SlidingWindow(4, 8), SlidingWindow(8, 16)]
    config = AllocatorConfig(num_blocks=200, groups=groups, max_model_len=256, retention_interval=0)
    allocator = KVCacheAllocator(config, [Sink()])
    chains = {}
    for number in range(6):
        tokens = [number % 2] * 40 + [number] * 41
        keys = TokenKeySource(tokens, block_hasher(), config.hash_block_size)
        registry.add(str(number), RequestContent(ListedTokens(tokens), keys))
        for group, kind in enumerate(groups):
            step = kind.block_size // config.hash_block_size
            chain = keys.keys(0, keys.num_blocks)[step - 1 :: step]
            chains.update({(group, hashed): before for before, hashed in zip([None, *chain], chain, strict=False)})
        request = Request(str(number), len(tokens), keys=keys)
        match = allocator.match_prefix(request)
        allocator.allocate(request, len(tokens) - match.num_hit_tokens, match)
        allocator.free(str(number))
    stored = [event for event in events if isinstance(event, BlockStored)]
    assert any(event.parent_block_hash is not None and event.group_idx == 1 for event in stored)
    for event in stored:
        assert len(event.token_ids) == len(event.block_hashes) * event.block_size
        parent = event.parent_block_hash
        for hashed in event.block_hashes:
            assert chains[event.group_idx, hashed] == parent
            parent = hashed


# -- the consumer ------------------------------------------------------------------------------------------------------


def stored(parent: bytes | None, *hashes: bytes) -> BlockStored:
    return BlockStored(list(hashes), parent, [0] * 4 * len(hashes), 4, medium="GPU", group_idx=0)


def test_a_consumer_that_lost_its_index_counts_orphans() -> None:
    pool = ShadowPool()
    pool.apply([stored(H1, H3)])
    assert pool.num_orphans == 1
    pool = ShadowPool()
    pool.apply([stored(H1, H2, H3, H4)])
    assert pool.num_orphans == 3, "each block of the batch, not the batch"


def test_a_consumer_that_has_the_parent_counts_none() -> None:
    pool = ShadowPool()
    pool.apply([stored(None, H1, H2), stored(H2, H3)])
    assert (pool.num_orphans, pool.depth(H3)) == (0, 3)


def test_a_window_is_no_orphan_because_what_is_before_it_is_gone_by_design() -> None:
    window = BlockStored([H4, H5], H3, [0] * 8, 4, group_idx=1, kv_cache_spec_kind="sliding_window")
    pool = ShadowPool()
    pool.apply([window])
    assert pool.num_orphans == 0


def test_a_block_stored_twice_is_gone_after_two_removals_and_never_comes_back() -> None:
    pool = ShadowPool()
    pool.apply([stored(None, H1), stored(None, H1)])
    assert pool.num_copies_of(H1) == 2
    pool.apply([BlockRemoved([H1], "GPU", 0)])
    assert pool.num_copies_of(H1) == 1
    pool.apply([BlockRemoved([H1], "GPU", 0), BlockRemoved([H1], "GPU", 0)])
    assert pool.num_copies_of(H1) == 0
    assert pool.num_unknown_removals == 1
    pool.apply([stored(None, H1)])
    assert pool.num_copies_of(H1) == 1, "a removal of nothing is no debt"


def test_tiers_and_groups_are_kept_apart() -> None:
    pool = ShadowPool()
    on_host = BlockStored([H1], None, [0] * 4, 4, medium="CPU", group_idx=0)
    pool.apply([stored(None, H1), on_host, BlockStored([H1], None, [0] * 4, 4, medium="GPU", group_idx=1)])
    pool.apply([BlockRemoved([H1], "GPU", 0)])
    assert (pool.num_copies_of(H1, 0, "GPU"), pool.num_copies_of(H1, 0, "CPU"), pool.num_copies_of(H1, 1)) == (0, 1, 1)


def test_a_pool_described_again_is_the_same_pool() -> None:
    """The snapshot that a reader gets whom replay cannot reach: as events, each block behind its parent."""
    pool = ShadowPool(describes_itself=True)
    pool.apply([stored(None, H1, H2, H3), stored(H3, H4), stored(None, H1), BlockRemoved([H2], "GPU", 0)])
    again = ShadowPool()
    again.apply([stored(None, H5)])
    again.apply(KVEventBatch(0.0, list(pool.describe())).events)
    assert again.by_copies() == pool.by_copies()
    assert all(event.is_dense for event in pool.describe() if isinstance(event, BlockStored))
