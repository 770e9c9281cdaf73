"""B11: content from elsewhere fills new blocks behind the local hit, and never a block that is found or shared."""

import pytest
from kvledger.core import InputError, Request
from kvledger.core.events import TokensPlaced
from kvledger.core.scheduler.config import SchedulerConfig
from kvledger.core.scheduler.scheduler import Scheduler
from kvledger.sim.fleet.tiers import Tier, TierStore

PROMPT = list(range(600))


def with_288_cached(ledger_of):
    """Blocks of 16; another request holds the first 288 tokens. The external store has 512, in chunks of 256."""
    ledger = ledger_of(num_usable_blocks=100, block_size=16)
    ledger.admit(ledger.request("sharer", PROMPT[:288]))
    request = ledger.request("a", PROMPT)
    match = ledger.allocator.match_prefix(request)
    assert match.num_hit_tokens == 288
    return ledger, request, match


def test_b11_only_what_the_local_cache_lacks_gets_new_blocks(ledger_of) -> None:
    ledger, request, match = with_288_cached(ledger_of)
    free = ledger.allocator.num_free_blocks
    taken = ledger.allocator.allocate(request, 16, match, num_external_tokens=512 - 288)
    assert len(taken[0]) == 14 + 1
    assert ledger.allocator.num_free_blocks == free - 15
    assert ledger.allocator.num_placed_tokens("a") == 528


def test_b11_the_copy_writes_no_block_that_is_shared(ledger_of) -> None:
    ledger, request, match = with_288_cached(ledger_of)
    ledger.allocator.allocate(request, 16, match, num_external_tokens=512 - 288)
    shared, own = ledger.table("a")[:18], ledger.table("a")[18:]
    assert shared == ledger.table("sharer")
    assert [ledger.pool.ref_cnt(block) for block in shared] == [2] * 18
    assert [ledger.pool.ref_cnt(block) for block in own] == [1] * 15
    placed = [event for event in list(ledger.log)[-1].events if isinstance(event, TokensPlaced)]
    assert [(event.first_positions[0], event.counts[0]) for event in placed] == [(288, 224), (512, 16)]


def test_b11_an_external_hit_that_would_leave_nothing_to_compute_is_refused_before_any_change(ledger_of) -> None:
    ledger, request, match = with_288_cached(ledger_of)
    before = ledger.snapshot()
    with pytest.raises(InputError, match="must leave one to be computed"):
        ledger.allocator.allocate(request, 1, match, num_external_tokens=600 - 288)
    assert ledger.snapshot() == before


class OtherEngine:
    """Holds 512 tokens of every prompt, in chunks of 256, whatever the engine that asks finds of its own."""

    def __init__(self) -> None:
        self.copied: list[int] = []

    def num_tokens_after(self, request: Request, num_hit_tokens: int) -> int:
        return max(512 - num_hit_tokens, 0)

    def admitted(self, request: Request, num_tokens: int) -> None:
        self.copied.append(num_tokens)


def test_b11_an_engine_that_waits_for_another_ones_copy_holds_new_blocks_only_for_what_it_lacks(ledger_of) -> None:
    ledger, other = ledger_of(num_usable_blocks=100, block_size=16), OtherEngine()
    scheduler = Scheduler(SchedulerConfig(max_num_seqs=4), ledger.allocator, remote=other)
    ledger.admit(ledger.request("sharer", PROMPT[:288]))
    held = ledger.pool.num_held_blocks
    request = ledger.request("a", PROMPT)
    request.max_tokens = 8
    scheduler.submit(request)
    assert scheduler.schedule() is None
    assert other.copied == [224]
    assert ledger.pool.num_held_blocks == held + 14
    shared, written = ledger.table("a")[:18], ledger.table("a")[18:]
    assert shared == ledger.table("sharer")
    # While the copy writes into them, nobody else may read them: neither a holder nor a lookup.
    assert [ledger.pool.ref_cnt(block) for block in written] == [1] * 14
    assert [ledger.pool.key_of(block) for block in written] == [None] * 14
    assert ledger.allocator.match_prefix(ledger.request("b", PROMPT)).num_hit_tokens == 288
    scheduler.received("a")
    step = scheduler.schedule()
    assert (step.batch.first_positions.tolist(), step.batch.counts.tolist()) == ([512], [88])
    assert ledger.allocator.match_prefix(ledger.request("b", PROMPT)).num_hit_tokens == 592


def test_b11_a_tier_gives_back_only_the_blocks_that_the_pool_has_lost(ledger_of) -> None:
    """24 blocks are cached and 5 of them lost, from the end; the prompt that comes back promotes those 5."""
    ledger = ledger_of(num_usable_blocks=30, block_size=16)
    store = TierStore([Tier(name="host", num_blocks=50)], ledger.allocator.config, None)
    ledger.allocator.sinks = (*ledger.allocator.sinks, store)
    ledger.serve("first", PROMPT[:384])
    ledger.serve("other", list(range(1000, 1000 + 11 * 16)))
    assert len(store.state.kept[0]) == 5
    again = ledger.request("again", PROMPT[:385])
    match = ledger.allocator.match_prefix(again)
    assert match.num_hit_tokens == 19 * 16
    external = store.num_tokens_after(again, match.num_hit_tokens)
    assert external == 5 * 16
    ledger.allocator.allocate(again, 1, match, num_external_tokens=external)
    assert store.state.counts[0].promoted == 5
    assert [ledger.pool.ref_cnt(block) for block in ledger.table("again")] == [1] * 25
