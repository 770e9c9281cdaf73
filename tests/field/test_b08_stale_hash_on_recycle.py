"""B08: a block that is taken for new content loses its old key, and says so before it gets a new one."""

from kvledger.backends.sinks.kv_events.content import ContentRegistry, ListedTokens, RequestContent
from kvledger.backends.sinks.kv_events.encoder import KVEventEncoder
from kvledger.backends.sinks.kv_events.schema import BlockRemoved, BlockStored
from kvledger.core.events import BlocksAllocated, BlocksCached


def test_b08_a_recycled_block_is_found_by_its_new_content_alone(ledger_of) -> None:
    ledger = ledger_of(num_usable_blocks=2, block_size=4)
    old, new = ledger.request("a", range(8)), ledger.request("b", range(50, 58))
    ledger.admit(old)
    ledger.allocator.free("a")
    before = len(ledger.log)
    ledger.admit(new)

    assert ledger.allocator.match_prefix(ledger.request("a again", range(9))).num_hit_tokens == 0
    old_keys, new_keys = old.keys.keys(0, 2), new.keys.keys(0, 2)
    assert [ledger.pool.find(key) for key in old_keys] == [None, None]
    assert dict(ledger.pool.keyed_blocks()) == dict(zip(ledger.table("b"), new_keys, strict=True))
    assert [ledger.pool.ref_cnt(block) for block in ledger.table("b")] == [1, 1]

    (commit,) = list(ledger.log)[before:]
    kinds = [type(event) for event in commit.events]
    (taken,) = [event for event in commit.events if isinstance(event, BlocksAllocated)]
    (cached,) = [event for event in commit.events if isinstance(event, BlocksCached)]
    assert kinds.index(BlocksAllocated) < kinds.index(BlocksCached)
    assert sorted(taken.lost_keys) == sorted(old_keys)
    assert list(cached.keys) == new_keys


def test_b08_two_removals_precede_the_store_on_the_wire(ledger_of) -> None:
    ledger = ledger_of(num_usable_blocks=2, block_size=4)
    contents = ContentRegistry()
    keys = {}
    for name, tokens in (("a", range(8)), ("b", range(50, 58))):
        request = ledger.request(name, tokens)
        contents.add(name, RequestContent(ListedTokens(list(tokens)), request.keys))
        keys[name] = request.keys.keys(0, 2)
        ledger.admit(request)
        ledger.allocator.free(name)
    encoder = KVEventEncoder(contents)
    events = [event for commit in ledger.log for event in encoder.encode(commit)]
    assert [type(event) for event in events] == [BlockStored, BlockRemoved, BlockRemoved, BlockStored]
    assert {hashed for event in events[1:3] for hashed in event.block_hashes} == set(keys["a"])
    assert events[3].block_hashes == keys["b"]
