"""KV events of our commits: the schema, both wire modes, and that a stream rebuilds the pool that it tells of."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from kvledger.backends.sinks.kv_events.content import (
    ContentRegistry,
    ListedTokens,
    RequestContent,
    SyntheticTokens,
)
from kvledger.backends.sinks.kv_events.encoder import KVEventEncoder, block_hash, block_hash_low64
from kvledger.backends.sinks.kv_events.schema import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    decode_batch,
    encode_batch,
)
from kvledger.backends.sinks.kv_events.shadow_pool import ShadowPool
from kvledger.core import AllocatorConfig, EventLog, FullAttention, KVCacheAllocator, Request
from kvledger.core.cache_kinds import SlidingWindow
from kvledger.core.errors import InputError, MisuseError
from kvledger.core.events import Commit
from kvledger.core.keys.block_hash import block_hasher
from kvledger.core.keys.extra_keys import ExtraKeys, LoraIdentity
from kvledger.core.keys.token_keys import TokenKeySource


class HistoryContents:
    """The contents of the requests of a `RandomHistory`, those that have ended included."""

    def __init__(self) -> None:
        self.history: Any = None
        self.seen: dict[str, RequestContent] = {}

    def content_of(self, request_id: str) -> RequestContent:
        return self.seen[request_id]


class Recording:
    """A sink that encodes as it goes, as a publisher does."""

    def __init__(self, encoder: KVEventEncoder) -> None:
        self.encoder = encoder
        self.batches: list[list[Any]] = []

    def apply(self, commit: Commit) -> None:
        self.batches.append(self.encoder.encode(commit))


def pool_as_copies(allocator: KVCacheAllocator) -> dict[tuple[int, Any], int]:
    pool = allocator.pool
    groups = range(len(allocator.config.groups))
    return {(group, block_hash(key)): len(pool.copies(key, group)) for group in groups for key in pool.index(group)}


class TokensOf:
    def __init__(self, request: Request) -> None:
        self.request = request

    def token_ids(self, start: int, stop: int) -> list[int]:
        return self.request.keys.source._tokens[start:stop].tolist()  # pyright: ignore


def encoded_history(history_of: Callable, wire: str, **options: Any) -> tuple[Any, Recording]:
    contents = HistoryContents()
    recording = Recording(KVEventEncoder(contents, wire=wire))  # pyright: ignore[reportArgumentType]
    history = history_of(num_commands=0, sinks=[recording], **options)
    make = history._new_request

    def remembered(tokens: Any) -> Request:
        request = make(tokens)
        contents.seen[request.request_id] = RequestContent(TokensOf(request), request.keys)
        return request

    history._new_request = remembered
    recording.encoder.encode(history.log[0])
    return history, recording


@pytest.mark.parametrize("wire", ["vllm", "strict"])
@pytest.mark.parametrize("pool", ["full", "hybrid"])
@pytest.mark.parametrize("keys", ["bytes", "int", "str", "tuple"])
def test_the_stream_of_a_history_rebuilds_the_index_with_its_copies(history_of, wire, pool, keys) -> None:
    history, recording = encoded_history(history_of, wire, seed=17, pool=pool, keys=keys)
    shadow = ShadowPool()
    for _ in range(300):
        history.step()
        for events in recording.batches:
            shadow.apply(decode_batch(encode_batch(KVEventBatch(1.0, events))).events)
        recording.batches.clear()
        assert shadow.by_copies() == pool_as_copies(history.allocator)
    assert shadow.num_unknown_removals == 0


@pytest.mark.parametrize("pool", ["full", "hybrid"])
def test_strict_events_are_dense_consecutive_and_behind_their_predecessor(history_of, pool) -> None:
    history, recording = encoded_history(history_of, "strict", seed=23, pool=pool)
    predecessor: dict[Any, Any] = {}
    stored = 0
    for _ in range(300):
        history.step()
    for event in [each for batch in recording.batches for each in batch if isinstance(each, BlockStored)]:
        assert event.block_hashes
        assert event.is_dense
        parent = event.parent_block_hash
        for hashed in event.block_hashes:
            assert predecessor.setdefault((event.group_idx, hashed), parent) == parent
            parent = hashed
        stored += len(event.block_hashes)
    assert stored > 100


def test_a_batch_is_an_array_of_maps_with_defaults_left_out() -> None:
    batch = KVEventBatch(
        1.5,
        [
            BlockStored([b"\x01" * 32, 7], None, [1, 2], 1, medium="GPU", group_idx=0),
            BlockRemoved([2**64 - 1], "GPU"),
            AllBlocksCleared(),
        ],
        data_parallel_rank=3,
    )
    assert msgspec.msgpack.decode(encode_batch(batch)) == [
        1.5,
        [
            {
                "type": "BlockStored",
                "block_hashes": [b"\x01" * 32, 7],
                "parent_block_hash": None,
                "token_ids": [1, 2],
                "block_size": 1,
                "medium": "GPU",
                "group_idx": 0,
            },
            {"type": "BlockRemoved", "block_hashes": [2**64 - 1], "medium": "GPU"},
            {"type": "AllBlocksCleared"},
        ],
        3,
    ]
    assert decode_batch(encode_batch(batch)) == batch


@pytest.mark.parametrize("payload", [b"", b"\x00", msgspec.msgpack.encode([1.0, {}]), b"\xc1"])
def test_what_is_no_batch_is_refused(payload: bytes) -> None:
    with pytest.raises(InputError, match="no batch of KV events"):
        decode_batch(payload)


def test_later_fields_of_other_producers_are_ignored() -> None:
    event = {"type": "BlockRemoved", "block_hashes": [1], "colour": "blue"}
    assert decode_batch(msgspec.msgpack.encode([0.0, [event], None])).events == [BlockRemoved([1])]


@pytest.mark.parametrize(
    ("key", "hashed"),
    [(b"k", b"k"), (0, 0), (2**63 - 1, 2**63 - 1), (-1, 2**64 - 1), (-(2**63), 2**63)],
)
def test_keys_travel_as_bytes_or_unsigned_numbers(key, hashed) -> None:
    assert block_hash(key) == hashed


def test_other_keys_travel_as_digests_that_do_not_collide() -> None:
    keys = ["1", ("1",), (1,), 2**63, -(2**63) - 1, (b"1",), "t", 2**64 - 1]
    assert len({block_hash(key) for key in [*keys, 1, b"1", -1]}) == len(keys) + 3
    assert all(isinstance(block_hash(key), bytes) for key in keys)
    assert block_hash_low64(b"\x00" * 24 + b"\x01" * 8) == 0x0101010101010101


def test_adapter_and_extra_keys_stand_with_each_block() -> None:
    extra = ExtraKeys(cache_salt="tenant", lora=LoraIdentity("adapter", "v1"))
    tokens = list(range(20))
    keys = TokenKeySource(tokens, block_hasher(), 4, extra)
    registry = ContentRegistry()
    registry.add("r", RequestContent(ListedTokens(tokens), keys, "adapter", 9, extra.for_blocks))
    recording = Recording(KVEventEncoder(registry))
    config = AllocatorConfig(num_blocks=9, groups=[FullAttention(4)], max_model_len=64)
    KVCacheAllocator(config, [recording]).allocate(Request("r", 20, keys=keys), 20)
    ((event,),) = [batch for batch in recording.batches if batch]
    assert (event.lora_name, event.lora_id) == ("adapter", 9)
    assert len(event.extra_keys) == 5
    assert event.extra_keys[0] != event.extra_keys[1] == event.extra_keys[4]


def test_a_request_whose_content_is_unknown_is_named() -> None:
    recording = Recording(KVEventEncoder(ContentRegistry()))
    config = AllocatorConfig(num_blocks=9, groups=[FullAttention(4)], max_model_len=64)
    allocator = KVCacheAllocator(config, [recording])
    keys = TokenKeySource(list(range(8)), block_hasher(), 4)
    with pytest.raises(MisuseError, match="request 'r' has blocks to announce"):
        allocator.allocate(Request("r", 8, keys=keys), 8)


def test_a_wire_mode_that_there_is_not_is_refused() -> None:
    with pytest.raises(InputError, match="must be one of vllm, strict"):
        KVEventEncoder(ContentRegistry(), wire="loose")  # pyright: ignore[reportArgumentType]


class Ids:
    def __init__(self, ids: list[int]) -> None:
        self.ids = ids

    def keys(self, start: int, stop: int) -> list[int]:
        return self.ids[start:stop]


def test_synthetic_tokens_are_equal_where_ids_are() -> None:
    one = SyntheticTokens(Ids([5, 6, 7]), 16, vocab_size=1000)
    other = SyntheticTokens(Ids([5, 8, 7]), 16, vocab_size=1000)
    assert one.token_ids(0, 48) == one.token_ids(0, 16) + one.token_ids(16, 32) + one.token_ids(32, 48)
    assert one.token_ids(0, 16) == other.token_ids(0, 16)
    assert one.token_ids(16, 32) != other.token_ids(16, 32)
    assert one.token_ids(32, 48) == other.token_ids(32, 48)
    assert all(0 <= token < 1000 for token in one.token_ids(0, 48))
    with pytest.raises(MisuseError, match="blocks of 16"):
        one.token_ids(8, 24)


def test_a_block_of_a_larger_group_has_the_tokens_and_key_of_all_its_hash_blocks() -> None:
    tokens = list(range(32))
    keys = TokenKeySource(tokens, block_hasher(), 4)
    registry = ContentRegistry()
    registry.add("r", RequestContent(ListedTokens(tokens), keys))
    log, recording = EventLog(), Recording(KVEventEncoder(registry, wire="strict"))
    groups = [FullAttention(8), SlidingWindow(4, 8)]
    config = AllocatorConfig(num_blocks=40, groups=groups, max_model_len=64, retention_interval=0)
    allocator = KVCacheAllocator(config, [log, recording])
    allocator.allocate(Request("r", 32, keys=keys), 32)
    events = {event.group_idx: event for batch in recording.batches for event in batch}
    assert events[0].block_hashes == keys.keys(0, 8)[1::2]
    assert events[0].token_ids == tokens
    first = events[1].token_ids[0] // 4
    assert events[1].parent_block_hash == keys.keys(first - 1, first)[0], "the block before the window has no event"
    assert events[1].kv_cache_spec_sliding_window == 8
