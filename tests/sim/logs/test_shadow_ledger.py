"""What a stream of KV events shows of a server, against a server whose truth is known."""

import random
from typing import Any

import pytest
from kvledger.backends.sinks.kv_events.content import ContentRegistry, RequestContent, SyntheticTokens
from kvledger.backends.sinks.kv_events.encoder import KVEventEncoder
from kvledger.backends.sinks.kv_events.schema import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from kvledger.core import AllocatorConfig, FullAttention, KVCacheAllocator, Request
from kvledger.core.events import Commit
from kvledger.sim.logs.shadow_ledger import ASSUMPTIONS, SeenRequest, ShadowLedger


def stored(parent: int | None, *hashes: int, group: int = 0) -> BlockStored:
    return BlockStored(list(hashes), parent, [0] * 16 * len(hashes), 16, medium="GPU", group_idx=group)


class Stream:
    """A ledger that is told batches at times."""

    def __init__(self, **options: Any) -> None:
        self.ledger = ShadowLedger(**options)
        self.ended: list[SeenRequest] = []
        self.ledger.requests.ended = self.ended.append
        self._sequence = 0

    def at(self, ts: float, *events: Any) -> "Stream":
        self.ledger.apply(self._sequence, KVEventBatch(ts, list(events)))
        self._sequence += 1
        return self


def test_a_request_hits_what_stands_before_the_first_block_that_it_stores() -> None:
    stream = Stream().at(0.0, stored(None, 1, 2, 3)).at(10.0, stored(2, 4)).at(20.0, stored(None, 9))
    report = stream.ledger.report()
    assert (report["requests"], report["hit_blocks"]) == (3, 2)
    assert report["prefix_hit_rate"] == 2 / (2 + 5)


def test_blocks_right_behind_a_sequence_belong_to_it_while_it_is_fresh() -> None:
    stream = Stream(continuation_s=2.0).at(0.0, stored(None, 1)).at(1.0, stored(1, 2)).at(2.5, stored(2, 3))
    assert stream.ledger.report()["requests"] == 1
    stream.at(60.0, stored(3, 4))
    report = stream.ledger.report()
    assert (report["requests"], report["hit_blocks"]) == (2, 3), "a later turn of the same session"
    stream.ledger.requests.forget()
    assert [(each.arrival_s, each.chain) for each in stream.ended] == [(0.0, [1, 2, 3]), (60.0, [1, 2, 3, 4])]


def test_two_requests_that_share_a_tip_are_two() -> None:
    stream = Stream().at(0.0, stored(None, 1)).at(0.1, stored(1, 2)).at(0.2, stored(1, 3)).at(0.3, stored(3, 4))
    assert stream.ledger.report()["requests"] == 2


def test_churn_is_counted_by_interval_and_occupancy_over_the_pool() -> None:
    stream = Stream(num_gpu_blocks=11).at(0.0, stored(None, 1, 2, 3, 4)).at(2.0, BlockRemoved([4], "GPU", 0))
    report = stream.ledger.report()
    assert (report["stored"], report["removed"], report["stored_per_s"]) == (4, 1, 2.0)
    assert (report["num_blocks"], report["occupancy"]) == (3, 0.3)
    assert stream.at(3.0).ledger.report()["stored"] == 0


def test_a_block_that_comes_back_within_a_pool_of_evictions_would_have_stayed() -> None:
    stream = Stream(num_gpu_blocks=4).at(0.0, stored(None, 1, 2, 3))
    stream.at(1.0, BlockRemoved([3], "GPU", 0), stored(None, 4), BlockRemoved([2], "GPU", 0), stored(None, 5))
    stream.at(9.0, BlockRemoved([4], "GPU", 0), stored(1, 2))
    twice = stream.ledger.report()["twice_memory"]
    assert twice["blocks_not_computed_again"] == 1
    assert twice["share_of_stored"] == 1 / 6
    for hashed in range(100, 110):
        stream.at(10.0, stored(None, hashed), BlockRemoved([hashed], "GPU", 0))
    stream.at(30.0, stored(2, 3))
    assert stream.ledger.report()["twice_memory"]["blocks_not_computed_again"] == 1, "3 went too long ago"


def test_a_reset_is_no_eviction() -> None:
    stream = (
        Stream(num_gpu_blocks=8).at(0.0, stored(None, 1, 2)).at(1.0, AllBlocksCleared()).at(2.0, stored(None, 1, 2))
    )
    report = stream.ledger.report()
    assert report["twice_memory"]["blocks_not_computed_again"] == 0
    assert report["num_blocks"] == 2


def test_a_cut_stream_forgets_blocks_and_requests() -> None:
    stream = Stream(num_gpu_blocks=8).at(0.0, stored(None, 1, 2))
    stream.ledger.clear()
    stream.at(0.1, stored(2, 3))
    report = stream.ledger.report()
    assert (report["num_blocks"], report["orphans"], report["hit_blocks"]) == (1, 1, 0)


def test_other_groups_are_counted_as_blocks_but_make_no_requests() -> None:
    window = BlockStored([1], None, [0] * 16, 16, group_idx=0, kv_cache_spec_kind="sliding_window")
    full = BlockStored([1, 2], None, [0] * 32, 16, group_idx=1, kv_cache_spec_kind="full_attention")
    report = Stream().at(0.0, window, full).ledger.report()
    assert (report["num_blocks"], report["requests"]) == (3, 1)


def test_nothing_seen_is_nothing_claimed() -> None:
    report = ShadowLedger().report()
    assert report["prefix_hit_rate"] is None
    assert report["occupancy"] is None
    assert report["twice_memory"]["prefix_hit_rate"] is None
    assert set(ASSUMPTIONS) == {"prefix_hit_rate", "twice_memory", "occupancy"}


# -- against the truth -------------------------------------------------------------------------------------------------


class Ids:
    def __init__(self, ids: list[int]) -> None:
        self.ids = ids

    def keys(self, start: int, stop: int) -> list[int]:
        return self.ids[start:stop]


class Server:
    """Sessions whose prompts grow, on a pool of a given size; what a shadow ledger sees, and what is true."""

    def __init__(self, num_blocks: int, wire: str) -> None:
        registry = ContentRegistry()
        encoder = KVEventEncoder(registry, wire=wire)  # pyright: ignore[reportArgumentType]
        self.ledger = ShadowLedger(num_gpu_blocks=num_blocks, continuation_s=0.5)
        self.now = 0.0
        outer = self

        class Sink:
            def apply(self, commit: Commit) -> None:
                events = encoder.encode(commit)
                if events:
                    outer.ledger.apply(commit.sequence, KVEventBatch(outer.now, events))

        config = AllocatorConfig(num_blocks=num_blocks, groups=[FullAttention(4)], max_model_len=400, max_num_reqs=4)
        self.allocator = KVCacheAllocator(config, [Sink()])
        self.hit_tokens = self.tokens = 0
        chance = random.Random(4)
        turns: dict[int, int] = {}
        for number in range(1500):
            self.now += 1.0
            session = chance.choice(range(max(0, number // 6 - 12), number // 6 + 1))
            turns[session] = turns.get(session, 0) + 1
            ids = [1000 * session + i for i in range(6 * turns[session])][:60]
            self._serve(registry, str(number), ids)

    def _serve(self, registry: ContentRegistry, request_id: str, ids: list[int]) -> None:
        keys = Ids(ids)
        registry.add(request_id, RequestContent(SyntheticTokens(keys, 4), keys))
        request = Request(request_id, 4 * len(ids) + 1, keys=keys)
        match = self.allocator.match_prefix(request)
        self.hit_tokens += match.num_hit_tokens
        self.tokens += 4 * len(ids)
        self.allocator.allocate(request, request.num_tokens - match.num_hit_tokens, match)
        self.allocator.free(request_id)
        registry.discard(request_id)


@pytest.mark.parametrize("wire", ["vllm", "strict"])
def test_hits_are_those_of_the_server_and_twice_the_memory_comes_near_a_pool_of_that_size(wire: str) -> None:
    server, larger = Server(151, wire), Server(301, wire)
    report = server.ledger.report()
    truth, truth_at_twice = server.hit_tokens / server.tokens, larger.hit_tokens / larger.tokens
    assert truth_at_twice - truth > 0.1
    assert report["prefix_hit_rate"] == pytest.approx(truth, abs=0.02)
    assert report["twice_memory"]["prefix_hit_rate"] == pytest.approx(truth_at_twice, abs=0.02)
    assert report["num_blocks"] == len(list(server.allocator.pool.keyed_blocks()))
    assert report["orphans"] == report["unknown_removals"] == 0
