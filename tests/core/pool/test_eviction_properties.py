"""Every eviction order against a slow one written out of its rule, on random histories through the allocator."""

import contextlib
import copy
import math
import random
from collections.abc import Callable

import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvledger.core import (
    AllocatorConfig,
    DoesNotFitError,
    EventLog,
    FullAttention,
    KVCacheAllocator,
    LedgerState,
    Request,
    SlidingWindow,
)
from kvledger.core.events import BlockCopied, BlocksAllocated
from kvledger.core.ledger.replay_checks import CheckedReplay
from kvledger.core.pool.eviction_order import make_eviction_order
from kvledger.core.pool.policies.belady import BeladyOrder

BLOCK_SIZE = 2
NUM_BLOCKS = 14
ONE_GROUP = (FullAttention(BLOCK_SIZE),)
TWO_GROUPS = (FullAttention(BLOCK_SIZE), SlidingWindow(BLOCK_SIZE, 5))
ORDERS = ("fifo", "lfu", "s3fifo", "sieve", "length-aware", "belady")


# -- the rules, written out --------------------------------------------------------------------------------------------


@attrs.define
class Cached:
    """What there is to know about a block that can be found."""

    name: tuple
    event: int
    place: int
    index: int
    uses: int = 0
    released: int = 0
    is_queued: bool = False


class SlowOrder:
    """Lists and loops only. A policy says who is evicted next and changes what that changes, one block at a time."""

    observes_keys = True

    def __init__(self, name: str, future: Callable) -> None:
        self.name = name
        self.future = future
        self.unkeyed = list(range(1, NUM_BLOCKS))
        self.cached: dict[int, Cached] = {}  # the oldest first
        self.next_use: dict = {}
        self.num_events = self.num_releases = 0
        self.hand: int | None = None
        self.small: list[int] = []
        self.main: list[int] = []
        self.ghosts: list[tuple] = []

    def __len__(self) -> int:
        return len(self.order())

    def order(self) -> list[int]:
        later = copy.copy(self)
        later.cached = {block: copy.copy(fact) for block, fact in self.cached.items()}
        later.small, later.main = list(self.small), list(self.main)
        out = list(self.unkeyed)
        while later.queued():
            out.append(later.next_victim())
            later.lose(out[-1])
        return out

    def peek(self, count: int) -> tuple[int, ...]:
        return tuple(self.order()[:count])

    def take(self, blocks: tuple[int, ...]) -> None:
        keyed = [block for block in blocks if block in self.cached]
        self.unkeyed = [block for block in self.unkeyed if block not in blocks]
        if set(keyed) == set(self.order()[len(self.unkeyed) :][: len(keyed)]):
            for _ in keyed:
                self.lose(self.next_victim())
        else:
            for block in keyed:
                if self.name == "s3fifo" and block in self.small:
                    self.remember(self.cached[block].name)
                self.lose(block)

    def remove(self, blocks) -> None:
        for block in blocks:
            self.cached[block].is_queued = False

    def append(self, blocks) -> None:
        for block in blocks:
            self.num_releases += 1
            self.cached[block].released = self.num_releases
            self.cached[block].is_queued = True

    def prepend(self, blocks) -> None:
        self.unkeyed[:0] = blocks

    def on_cached(self, group, blocks, indices, keys) -> None:
        self.num_events += 1
        facts = [
            Cached((group, key), self.num_events, place, index)
            for place, (index, key) in enumerate(zip(indices, keys, strict=True))
        ]
        for fact in facts:
            self.learn(fact.name[1])
        for fact, block in sorted(zip(facts, blocks, strict=True), key=lambda pair: (-pair[0].index, pair[0].place)):
            self.cached[block] = fact
            remembered = fact.name in self.ghosts
            (self.main if remembered else self.small).append(block)
            if remembered:
                self.ghosts.remove(fact.name)

    def on_adopted(self, blocks) -> None:
        for block in blocks:
            if block in self.cached:
                self.cached[block].uses += 1
                self.learn(self.cached[block].name[1])

    def learn(self, key) -> None:
        """Ask for the next use of a key. Free blocks of the key count as released now."""
        self.next_use[key] = self.future(key)
        if self.name == "belady":
            self.append([block for block, fact in self.cached.items() if fact.name[1] == key and fact.is_queued])

    def on_uncached(self, blocks) -> None:
        self.unkeyed += [block for block in self.order()[len(self.unkeyed) :] if block in blocks]
        for block in blocks:
            if block in self.cached:
                self.lose(block)

    # -- the policy

    def queued(self) -> list[int]:
        return [block for block, fact in self.cached.items() if fact.is_queued]

    def next_victim(self) -> int:
        match self.name:
            case "sieve":
                return self.sieve()
            case "s3fifo":
                return self.s3fifo()
            case "fifo":
                rank = lambda fact: (fact.event, -fact.index, fact.place)  # noqa: E731
            case "lfu":
                rank = lambda fact: (fact.uses, fact.released)  # noqa: E731
            case "length-aware":
                rank = lambda fact: (-fact.index, fact.released)  # noqa: E731
            case _:
                rank = lambda fact: (-self.next_use[fact.name[1]], fact.released)  # noqa: E731
        return min(self.queued(), key=lambda block: rank(self.cached[block]))

    def sieve(self) -> int:
        ring = list(self.cached)
        at = 0 if self.hand is None else ring.index(self.hand)
        while True:
            fact = self.cached[ring[at]]
            if fact.is_queued and not fact.uses:
                break
            if fact.is_queued:
                fact.uses = 0
            at = (at + 1) % len(ring)
        self.hand = ring[at]
        return ring[at]

    def s3fifo(self) -> int:
        target = max(1, (NUM_BLOCKS - 1) // 10)
        while True:
            small = [block for block in self.small if self.cached[block].is_queued]
            main = [block for block in self.main if self.cached[block].is_queued]
            if small and (len(self.small) >= target or not main):
                fact = self.cached[small[0]]
                if fact.uses <= 1:
                    self.remember(fact.name)
                    return small[0]
                fact.uses = 0
                self.small.remove(small[0])
                self.main.append(small[0])
            else:
                fact = self.cached[main[0]]
                if not fact.uses:
                    return main[0]
                fact.uses = min(fact.uses, 3) - 1
                self.main.remove(main[0])
                self.main.append(main[0])

    def remember(self, name: tuple) -> None:
        num_usable = NUM_BLOCKS - 1
        self.ghosts = [ghost for ghost in self.ghosts if ghost != name] + [name]
        self.ghosts = self.ghosts[-(num_usable - num_usable // 10) :]

    def lose(self, block: int) -> None:
        if self.hand == block:
            ring = list(self.cached)
            self.hand = ring[ring.index(block) + 1] if ring[-1] != block else None
        del self.cached[block]
        for queue in (self.small, self.main):
            if block in queue:
                queue.remove(block)


# -- random histories --------------------------------------------------------------------------------------------------


class Oracle:
    """A future that contradicts itself: each question is answered anew, by its number and the seed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.num_questions = 0

    def __call__(self, key) -> float:
        self.num_questions += 1
        drawn = random.Random(self.seed * 1000 + self.num_questions).randrange(12)
        return math.inf if drawn < 3 else drawn


class Tokens:
    """A key source whose keys are the tokens up to the block's end; output tokens are the request's own."""

    def __init__(self, request_id: str, prompt: tuple[int, ...]) -> None:
        self.tokens = (*prompt, *[(request_id, i) for i in range(64)])

    def keys(self, start: int, stop: int) -> list:
        return [self.tokens[: (i + 1) * BLOCK_SIZE] for i in range(start, stop)]


PROMPTS = st.lists(st.integers(0, 1), min_size=2, max_size=11).map(tuple)
WHICH = st.integers(0, 3)
SERVING = st.one_of(
    st.tuples(st.just("submit"), PROMPTS, st.integers(1, 11)),
    st.tuples(st.just("submit"), PROMPTS, st.just(11)),
    st.tuples(st.just("submit"), st.sampled_from([(0,) * 10, (0,) * 9 + (1,), (1,) * 7]), st.just(11)),
    st.tuples(st.just("free"), WHICH),
    st.tuples(st.just("free"), WHICH),
    st.tuples(st.just("preempt"), WHICH),
    st.tuples(st.just("extend"), WHICH, st.integers(1, 6)),
    st.tuples(st.sampled_from(["decode", "decode_steps"]), st.integers(1, 3)),
    st.tuples(st.just("reset")),
)
EVERYTHING = st.one_of(
    SERVING,
    st.tuples(st.just("fork"), WHICH),
    st.tuples(st.just("truncate"), WHICH, st.integers(0, 8)),
    st.tuples(st.just("evict"), st.lists(st.integers(1, NUM_BLOCKS - 1), max_size=4)),
)


class History:
    """Plays commands on an allocator; those that make no sense where they stand do nothing."""

    def __init__(self, name: str, groups: tuple, eviction=None) -> None:
        self.log = EventLog()
        config = AllocatorConfig(
            NUM_BLOCKS, groups, max_model_len=24, max_num_reqs=4, eviction=name, retention_interval=None
        )
        self.allocator = KVCacheAllocator(config, [self.log], eviction)
        self.running: list[Request] = []
        self.num_requests = 0

    def play(self, command: str, *arguments) -> None:
        if command in ("submit", "evict", "reset") or self.running:
            getattr(self, command)(*arguments)

    def submit(self, prompt: tuple[int, ...], num_new_tokens: int) -> None:
        if len(self.running) == self.allocator.config.max_num_reqs:
            return
        self.num_requests += 1
        request = Request(f"r{self.num_requests}", len(prompt), 64)
        request.keys = Tokens(request.request_id, prompt)
        match = self.allocator.match_prefix(request)
        self.allocator.allocate(request, min(num_new_tokens, len(prompt) - match.num_hit_tokens), match)
        if self.allocator.holds(request.request_id):
            self.running.append(request)

    def extend(self, which: int, num_new_tokens: int) -> None:
        request = self.running[which % len(self.running)]
        placed = self.allocator.num_placed_tokens(request.request_id)
        num_new_tokens = min(num_new_tokens, 24 - placed)
        if num_new_tokens:
            request.num_output_tokens = max(0, placed + num_new_tokens - request.num_prompt_tokens)
            self.allocator.release_out_of_window(request.request_id)
            with contextlib.suppress(DoesNotFitError):
                self.allocator.allocate(request, num_new_tokens)

    def rows(self, num_tokens: int) -> np.ndarray:
        names = [request.request_id for request in self.running]
        fitting = [name for name in names if self.allocator.num_placed_tokens(name) + num_tokens <= 24]
        return np.array([self.allocator.row_of(name) for name in fitting], dtype=np.int64)

    def decode(self, num_new_tokens: int) -> None:
        rows = self.rows(num_new_tokens)
        if len(rows):
            self.allocator.append(rows, num_new_tokens)

    def decode_steps(self, num_steps: int) -> None:
        rows = self.rows(num_steps)
        if len(rows) and self.allocator.can_append_several_steps and self.allocator.could_append(rows, num_steps):
            self.allocator.append_steps(rows, num_steps)

    def free(self, which: int) -> None:
        self.allocator.free(self.running.pop(which % len(self.running)).request_id)

    def preempt(self, which: int) -> None:
        self.allocator.preempt(self.running.pop(which % len(self.running)).request_id)

    def fork(self, which: int) -> None:
        if len(self.running) < self.allocator.config.max_num_reqs:
            parent = self.running[which % len(self.running)]
            self.num_requests += 1
            child = Request(f"r{self.num_requests}", parent.num_prompt_tokens, 64, keys=parent.keys)
            child.num_output_tokens = parent.num_output_tokens
            self.allocator.fork(parent.request_id, child)
            self.running.append(child)

    def truncate(self, which: int, num_tokens: int) -> None:
        request = self.running[which % len(self.running)]
        placed = self.allocator.num_placed_tokens(request.request_id)
        row = self.allocator.row_of(request.request_id)
        if not any(skipped[row] for skipped in self.allocator.state.skipped):
            self.allocator.truncate(request.request_id, min(num_tokens, placed))

    def evict(self, blocks: list[int]) -> None:
        self.allocator.evict(blocks)

    def reset(self) -> None:
        if not self.running:
            before = self.allocator.pool.free_queue.order()
            self.allocator.reset_prefix_cache()
            assert self.allocator.pool.free_queue.order() == before


class Witness:
    """Replays the log of a history as it grows, with a new order of the same rule and with the slow one."""

    def __init__(self, history: History, order, slow: SlowOrder) -> None:
        self.history = history
        self.replayed = LedgerState(history.log.created, order)
        self.slow = slow
        self.slowly_replayed = CheckedReplay(LedgerState(history.log.created, slow))

    def follow(self) -> None:
        for commit in list(self.history.log)[self.replayed.next_sequence :]:
            for event in commit.events:
                if isinstance(event, (BlocksAllocated, BlockCopied)):
                    taken = (event.target,) if isinstance(event, BlockCopied) else event.blocks
                    assert not any(self.replayed.pool.ref_cnt(block) for block in taken)
                self.replayed.apply(event)
            self.replayed.next_sequence += 1
            self.slowly_replayed.apply(commit)

    def check(self) -> None:
        state = self.history.allocator.state
        queue = state.pool.free_queue
        order = queue.order()
        assert self.replayed.snapshot() == state.snapshot()
        assert order == self.slow.order()
        assert len(queue) == len(order) == len(set(order))
        counts = state.pool.ref_cnts()
        assert set(order) == {block for block in range(1, NUM_BLOCKS) if not counts[block]}
        is_keyed = [state.pool.key_of(block) is not None for block in order]
        assert is_keyed == sorted(is_keyed)
        for count in (len(order) // 2, 0, len(order), min(1, len(order)), len(order) // 3):
            assert queue.peek(count) == tuple(order[:count])
        assert queue.order() == order


@pytest.mark.parametrize("groups", [ONE_GROUP, TWO_GROUPS], ids=["one group", "two groups"])
@pytest.mark.parametrize("name", ORDERS)
@given(commands=st.lists(EVERYTHING, min_size=25, max_size=60), seed=st.integers(0, 3))
@settings(deadline=None, max_examples=25)
def test_an_order_is_what_its_rule_says_and_what_the_log_rebuilds(name, groups, commands, seed):
    def new_order():
        return BeladyOrder(NUM_BLOCKS, Oracle(seed)) if name == "belady" else make_eviction_order(name, NUM_BLOCKS)

    history = History(name, groups, new_order())
    witness = Witness(history, new_order(), SlowOrder(name, Oracle(seed)))
    for command in commands:
        history.play(*command)
        witness.follow()
        witness.check()
    assert history.log.conservation() is None
    assert history.log.replay(eviction=new_order()).snapshot() == history.allocator.state.snapshot()


@pytest.mark.parametrize("name", ["lru", "lfu", "length-aware"])
@given(commands=st.lists(SERVING, min_size=25, max_size=60))
@settings(deadline=None, max_examples=40)
def test_no_eviction_strands_a_cached_descendant(name, commands):
    history = History(name, ONE_GROUP)
    for command in commands:
        history.play(*command)
        findable = history.allocator.pool.index()
        assert all(len(key) == BLOCK_SIZE or key[:-BLOCK_SIZE] in findable for key in findable)
