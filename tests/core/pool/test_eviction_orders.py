"""What each eviction order does, worked out by hand: prompts are words, a block holds a letter, its key the prefix."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvledger.core import AllocatorConfig, BlockPool, EventLog, FullAttention, InputError, KVCacheAllocator, Request
from kvledger.core.pool.eviction_order import EvictionOrder, make_eviction_order
from kvledger.core.pool.policies.belady import BeladyOrder, FutureUses

NAMES = ["lru", "fifo", "lfu", "s3fifo", "sieve", "length-aware"]


def prefixes(word: str) -> list[str]:
    return [word[: i + 1] for i in range(len(word))]


class Server:
    """A pool that serves one word at a time: adopts what it finds, takes the rest, caches it, frees all tail first."""

    def __init__(self, num_usable_blocks: int, order: str | EvictionOrder) -> None:
        num_blocks = num_usable_blocks + 1
        self.pool = BlockPool(
            num_blocks, 1, make_eviction_order(order, num_blocks) if isinstance(order, str) else order
        )

    def hold(self, word: str) -> list[int]:
        keys = prefixes(word)
        held: list[int] = []
        while len(held) < len(keys) and (block := self.pool.find(keys[len(held)])) is not None:
            held.append(block)
        self.pool.adopt(held)
        start = len(held)
        if start < len(keys):
            new = self.pool.free_queue.peek(len(keys) - start)
            self.pool.take(new)
            self.pool.cache(0, new, keys[start:], range(start, len(keys)))
            held += new
        return held

    def serve(self, *words: str) -> None:
        for word in words:
            self.pool.release(self.hold(word)[::-1])

    def order(self) -> list:
        """The keys of the queued blocks, the next one to be taken first; None where there is no key."""
        return [self.pool.key_of(block) for block in self.pool.free_queue.order()]

    def keyed(self) -> list:
        return [key for key in self.order() if key is not None]


def test_lru_is_the_default_order_and_hits_refresh():
    server = Server(4, "lru")
    server.serve("a", "b", "a")
    assert server.order() == [None, None, "b", "a"]


def test_fifo_goes_by_the_first_caching_and_a_hit_changes_nothing():
    server = Server(4, "fifo")
    server.serve("a", "b", "a")
    assert server.order() == [None, None, "a", "b"]


def test_fifo_takes_the_deeper_of_two_blocks_cached_together():
    server = Server(4, "fifo")
    server.serve("xyz", "b")
    assert server.order() == ["xyz", "xy", "x", "b"]


@pytest.mark.parametrize(
    ("name", "num_usable_blocks", "words"),
    [
        ("fifo", 3, ["a", "ab", "c", "d"]),
        ("sieve", 3, ["a", "ab", "ab", "c", "d", "e"]),
        ("s3fifo", 10, ["a", "ab", *"cdefghij", "k"]),
    ],
)
def test_orders_by_age_strand_what_was_cached_behind_an_older_prefix(name, num_usable_blocks, words):
    server = Server(num_usable_blocks, name)
    server.serve(*words)
    assert server.pool.find("a") is None
    assert server.pool.find("ab") is not None


def test_lfu_counts_uses_while_in_the_cache_and_breaks_ties_by_recency():
    server = Server(3, "lfu")
    server.serve("a", "a", "b", "c")
    assert server.order() == ["b", "c", "a"]
    server.serve("b", "b", "c")
    assert server.order() == ["a", "c", "b"]
    server.serve("d", "d", "d")
    assert server.order() == ["c", "b", "d"]
    server.serve("a")
    assert server.order() == ["a", "b", "d"]


def test_length_aware_takes_the_deepest_and_breaks_ties_by_recency():
    server = Server(6, "length-aware")
    server.serve("uvw", "x", "yz", "uv")
    assert server.order() == ["uvw", "yz", "uv", "x", "y", "u"]


def test_sieve_spares_what_was_used_since_the_hand_passed():
    server = Server(4, "sieve")
    server.serve("a", "b", "c", "d", "a", "c")
    assert server.order() == ["b", "d", "a", "c"]
    server.serve("e")  # the hand clears a, evicts b, and waits at c
    assert server.order() == ["d", "e", "a", "c"]
    server.serve("f")  # it clears c, evicts d, and waits at e
    assert server.order() == ["e", "f", "a", "c"]
    server.serve("a", "g")  # it evicts e and waits at f
    assert server.order() == ["f", "g", "c", "a"]
    server.serve("hi")  # it evicts f and g and is round
    assert server.order() == ["c", "hi", "h", "a"]


def test_sieve_passes_over_a_referenced_block_and_keeps_its_mark():
    server = Server(3, "sieve")
    server.serve("a", "b", "c", "a")
    held = server.hold("a")
    server.serve("d")
    assert server.order() == ["c", "d"]
    server.pool.release(held)
    server.serve("ef")
    assert server.order() == ["ef", "e", "a"]


def test_s3fifo_lets_one_time_blocks_pass_through_the_small_queue():
    server = Server(10, "s3fifo")
    server.serve("a", "a", "a", *"bcdefghij")
    assert server.order() == [*"bcdefghij", "a"]
    server.serve("k")
    assert server.order() == [*"cdefghijk", "a"]


def test_s3fifo_lets_a_remembered_block_into_the_main_queue():
    server = Server(10, "s3fifo")
    server.serve(*"abcdefghij", "k", "a")  # k pushes a out, a comes back and pushes b out
    assert server.order() == [*"cdefghijk", "a"]
    server.serve("k", "k", *"lmnopqrs")
    assert server.order() == [*"lmnopqrs", "a", "k"]


def test_s3fifo_needs_two_uses_to_move_a_block_and_forgets_them_then():
    server = Server(10, "s3fifo")
    server.serve(*"aaaabbbccdefghij")
    server.serve("k")  # a and b move to the main queue, c was used once only and goes
    assert server.order() == [*"defghijk", "a", "b"]


def test_s3fifo_takes_from_the_main_queue_while_the_small_one_is_under_its_share():
    server = Server(20, "s3fifo")  # the small queue's share is 2
    letters = "abcdefghijklmnopqrst"
    server.serve(*letters, *letters, *letters)
    server.serve("A")  # all but the last move to the main queue, and the first of them goes
    assert server.order() == [*letters[1:], "A"]
    server.serve("B")  # t moves too, which leaves one block in the small queue, so the main queue gives b
    assert server.order() == ["A", *letters[2:], "B"]


def test_s3fifo_counts_three_uses_at_most():
    server = Server(10, "s3fifo")
    letters = "abcdefghij"
    server.serve(*(letters * 3), "k")
    assert server.order() == ["k", *letters[1:]]
    server.serve(*"bbbbbbbb", *"ccc")
    assert server.order() == ["k", *"defghij", "b", "c"]


def test_belady_takes_what_is_used_latest_and_among_equals_what_was_released_first():
    words = ["a", "b", "cd", "b", "a"]
    server = Server(6, BeladyOrder(7, FutureUses(prefixes(word) for word in words)))
    server.serve(*words[:3])
    assert server.order() == [None, None, "cd", "c", "a", "b"]
    server.serve("b")
    assert server.order() == [None, None, "cd", "c", "b", "a"]


@given(words=st.lists(st.text("ab", min_size=1, max_size=5), max_size=30))
@settings(deadline=None)
def test_belady_strands_nothing_if_uses_come_as_foretold(words):
    server = Server(6, BeladyOrder(7, FutureUses(prefixes(word) for word in words)))
    for word in words:
        server.serve(word)
        findable = server.pool.index()
        assert all(len(key) == 1 or key[:-1] in findable for key in findable)


def test_belady_goes_by_the_latest_answer_for_every_block_of_a_key():
    answers = {"a": 5, "b": 7}
    pool = BlockPool(4, 1, BeladyOrder(4, lambda key: answers[key]))
    pool.take((1, 2, 3))
    pool.cache(0, (1, 2), ("a", "b"), (0, 0))
    pool.release((1, 2))
    assert pool.free_queue.order() == [2, 1]
    answers["a"] = math.inf
    pool.cache(0, (3,), ("a",), (0,))
    assert pool.free_queue.order() == [1, 2]


def test_the_uses_to_come_are_told_by_the_questions_asked_so_far():
    future = FutureUses(["abc", "ab", "x", "a"])
    assert [future(key) for key in "abc"] == [3, 4, math.inf]
    assert [future(key) for key in "ab"] == [6, math.inf]
    assert future("output") == math.inf
    assert future("a") == math.inf


def test_a_request_that_was_not_served_leaves_no_use_behind():
    future = FutureUses(["a", "b", "ab", "a"])
    assert future("a") == 2
    assert future("b") == 3
    assert future("a") == 4  # the third request
    assert future("a") == math.inf  # the fourth, although b was never asked for again


@pytest.mark.parametrize("name", NAMES)
def test_unkeyed_blocks_go_first_as_a_stack(name):
    server = Server(5, name)
    server.serve("a")
    held = server.pool.free_queue.peek(2)
    server.pool.take(held)
    assert held == (2, 3)
    server.pool.release((3, 2))
    assert server.pool.free_queue.order() == [3, 2, 4, 5, 1]


@pytest.mark.parametrize("name", [name for name in NAMES if name != "lru"])
def test_a_queued_block_that_loses_its_key_goes_behind_the_other_unkeyed_ones(name):
    server = Server(5, name)
    server.serve("a", "b", "c")
    server.pool.apply_uncache((server.pool.find("b"),))
    assert server.order() == [None, None, None, "a", "c"]
    assert server.pool.free_queue.order() == [4, 5, 2, 1, 3]


@pytest.mark.parametrize("name", NAMES)
def test_a_reset_leaves_the_order_as_it_was(name):
    server = Server(6, name)
    server.serve("ab", "cd", "ab", "e")
    before = server.pool.free_queue.order()
    server.pool.apply_reset()
    assert server.pool.free_queue.order() == before
    assert server.keyed() == []


@pytest.mark.parametrize("name", NAMES)
def test_an_order_stays_right_over_many_uses_of_one_block(name):
    server = Server(2, name)
    server.serve("z", "a")
    (cold,) = server.pool.free_queue.peek(1)
    for _ in range(200):
        assert server.pool.free_queue.peek(1) == (cold,)
        server.serve("a")
    assert server.order() == ["z", "a"]
    assert server.pool.free_queue.peek(2) == tuple(server.pool.free_queue.order())


@pytest.mark.parametrize("name", [name for name in NAMES if name != "lru"])
def test_a_copy_on_write_takes_the_next_block_and_replays(name):
    log = EventLog()
    config = AllocatorConfig(6, [FullAttention(2)], max_model_len=10, max_num_reqs=2, eviction=name)
    allocator = KVCacheAllocator(config, [log])
    parent, child = Request("parent", 3, 8), Request("child", 3, 8)
    allocator.allocate(parent, 3)
    allocator.fork("parent", child)
    (next_block,) = allocator.pool.free_queue.peek(1)
    allocator.allocate(parent, 1)
    assert allocator.block_ids("parent")[0][1] == next_block != allocator.block_ids("child")[0][1]
    assert log.replay().snapshot() == allocator.state.snapshot()


def test_belady_cannot_be_made_from_its_name():
    with pytest.raises(InputError, match=r"needs the future.*BeladyOrder"):
        make_eviction_order("belady", 8)
    with pytest.raises(InputError, match="needs the future"):
        KVCacheAllocator(AllocatorConfig(8, [FullAttention(2)], max_model_len=8, eviction="belady"))


def test_an_unknown_order_is_refused_with_the_known_ones():
    with pytest.raises(
        InputError, match=r"unknown eviction policy 'mru'; known: lru, fifo, lfu, s3fifo, sieve, length-aware"
    ):
        make_eviction_order("mru", 8)


@pytest.mark.parametrize("name", NAMES)
def test_an_order_is_recorded_under_the_name_that_makes_it(name):
    assert make_eviction_order(name, 8).name == name
