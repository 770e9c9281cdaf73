"""Hit rate against capacity: the published table to four digits, and one pass equal to a run at every capacity."""

import os
from collections.abc import Iterable
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvledger.core.errors import InputError
from kvledger.sim.cache.capacity_curve import capacity_curve, series_up_to
from kvledger.sim.cache.lru_curve import lru_curve
from kvledger.sim.cache.policies import policy_names, replay_policy
from kvledger.sim.cache.prompt_blocks import read_prompt_blocks
from kvledger.sim.engine.arrivals import TraceKeySource
from kvledger.sim.traces import TraceInfo, TraceRequest, Window, open_trace
from kvledger.sim.traces.derived import ReblockedTrace
from kvledger.sim.workloads.builtin import open_workload

SIZES = (1_000, 5_000, 10_000, 30_000, 50_000, 100_000)
# Share of the conversation trace's blocks that hit at SIZES and with an infinite cache.
BLOCK_HIT_RATES = {
    "lru": (0.0445, 0.1118, 0.2116, 0.3257, 0.3546, 0.3637, 0.3664),
    "fifo": (0.0445, 0.1067, 0.1840, 0.2983, 0.3376, 0.3586, 0.3664),
    "lfu": (0.0481, 0.0923, 0.1317, 0.2760, 0.3439, 0.3631, 0.3664),
    "length-aware": (0.0555, 0.0767, 0.1059, 0.1947, 0.2510, 0.3280, 0.3664),
    "belady": (0.1792, 0.3397, 0.3664, 0.3664, 0.3664, 0.3664, 0.3664),
    "optimum": (0.1907, 0.3412, 0.3664, 0.3664, 0.3664, 0.3664, 0.3664),
}
LRU_TOKEN_HIT_RATES = (0.0454, 0.1140, 0.2157, 0.3322, 0.3615, 0.3708, 0.3736)
LRU_FULL_BLOCK_TOKEN_HIT_RATES = (0.0454, 0.1139, 0.2156, 0.3319, 0.3613, 0.3706, 0.3734)
BLOCK_SIZE = 4


class ListTrace:
    """Requests held in memory, with the interface of a trace."""

    def __init__(
        self, requests: Iterable[tuple[int, tuple[int, ...] | None]], trace_block_size: int | None = BLOCK_SIZE
    ):
        self._requests = list(requests)
        self.info = TraceInfo("list", None, "list", "s", trace_block_size, "given", 1.0, Window(0, None))

    def __iter__(self):
        for place, (input_length, hash_ids) in enumerate(self._requests, start=1):
            yield TraceRequest(0.0, input_length, 1, hash_ids, place)


@st.composite
def tries(draw, max_blocks: int = 6, max_requests: int = 14) -> ListTrace:
    """Prompts over a small alphabet; a block's id stands for its whole prefix, a last block may be partial."""
    ids: dict[tuple[int, ...], int] = {}
    requests: list[tuple[int, tuple[int, ...] | None]] = []
    prompts = st.lists(st.integers(0, 2), min_size=1, max_size=max_blocks)
    for content in draw(st.lists(prompts, min_size=1, max_size=max_requests)):
        last = draw(st.integers(1, BLOCK_SIZE))
        length = (len(content) - 1) * BLOCK_SIZE + last
        keys = [tuple(content[: i + 1]) for i in range(len(content))]
        if last < BLOCK_SIZE:
            keys[-1] = (*keys[-1], -last)
        requests.append((length, tuple(ids.setdefault(key, len(ids)) for key in keys)))
    return ListTrace(requests)


def lru_by_hand(requests: Iterable[tuple[int, list]], num_blocks: int, block_size: int) -> tuple[int, int, int]:
    """A run at one capacity, a list of the resident blocks with the most recent first: no stack, no tree."""
    resident: list = []
    hit_blocks = hit_tokens = full_hits = 0
    for input_length, keys in requests:
        hits = 0
        while hits < len(keys) and keys[hits] in resident:
            hits += 1
        hit_blocks += hits
        hit_tokens += min(hits * block_size, input_length)
        full_hits += min(hits, (input_length - 1) // block_size)
        kept = [key for key in resident if key not in keys]
        resident = (list(keys) + kept)[:num_blocks]
    return hit_blocks, hit_tokens, full_hits * block_size


def lists(trace) -> list[tuple[int, list]]:
    return [(request.input_length, list(request.hash_ids)) for request in trace]


def in_smaller_blocks(trace, size: int) -> list[tuple[int, list]]:
    """Every trace block cut into blocks of `size`; the blocks of a partial one carry its length in their keys."""
    out = []
    for request in trace:
        keys = []
        for i, hash_id in enumerate(request.hash_ids):
            num_tokens = min(BLOCK_SIZE, request.input_length - i * BLOCK_SIZE)
            keys.extend((hash_id, num_tokens, at) for at in range(0, num_tokens, size))
        out.append((request.input_length, keys))
    return out


def in_larger_blocks(trace, group: int) -> list[tuple[int, list]]:
    """Trace blocks taken `group` at a time; what is left over at the end is a partial block."""
    return [
        (request.input_length, [request.hash_ids[i : i + group] for i in range(0, len(request.hash_ids), group)])
        for request in trace
    ]


def in_blocks_as_the_engine_has(trace, size: int) -> list[tuple[int, list]]:
    """Full blocks under the engine's own keys, and the partial one at the end under its last id and its length."""
    out = []
    for ordinal, request in enumerate(trace):
        source = TraceKeySource(request.hash_ids, request.input_length, ordinal, size, BLOCK_SIZE)
        keys = list(source.keys(0, request.input_length // size))
        if request.input_length % size:
            keys.append((request.hash_ids[-1], request.input_length % BLOCK_SIZE))
        out.append((request.input_length, keys))
    return out


def triple(point) -> tuple[int, int, int]:
    return point.hit_blocks, point.hit_tokens, point.full_block_hit_tokens


@given(tries())
@settings(deadline=None)
def test_one_pass_equals_a_separate_run_at_every_capacity(trace):
    curve = lru_curve(read_prompt_blocks(trace))
    for num_blocks in range(1, 40):
        assert triple(curve.at(num_blocks)) == lru_by_hand(lists(trace), num_blocks, BLOCK_SIZE)


@given(tries(), st.sampled_from([1, 2]))
@settings(deadline=None)
def test_one_pass_is_exact_where_a_trace_block_is_cut_into_smaller_ones(trace, size):
    curve = lru_curve(read_prompt_blocks(trace, size))
    for num_blocks in range(1, 60, 3):
        assert triple(curve.at(num_blocks)) == lru_by_hand(in_smaller_blocks(trace, size), num_blocks, size)


@given(tries(), st.sampled_from([2, 3]))
@settings(deadline=None)
def test_one_pass_is_exact_where_trace_blocks_are_grouped_into_larger_ones(trace, group):
    curve = lru_curve(read_prompt_blocks(trace, BLOCK_SIZE * group))
    for num_blocks in range(1, 25):
        by_hand = lru_by_hand(in_larger_blocks(trace, group), num_blocks, BLOCK_SIZE * group)
        assert triple(curve.at(num_blocks)) == by_hand


@given(tries())
@settings(deadline=None)
def test_lru_by_replay_equals_the_one_pass(trace):
    prompts = read_prompt_blocks(trace)
    curve = lru_curve(prompts)
    for num_blocks in range(1, 30):
        assert replay_policy(prompts, "lru", num_blocks) == curve.at(num_blocks)


@pytest.mark.parametrize("num_blocks", [50, 700, 5_000])
def test_lru_by_replay_equals_the_one_pass_over_a_long_trace(num_blocks):
    prompts = read_prompt_blocks(open_workload("conversation", limit=1_000))
    assert replay_policy(prompts, "lru", num_blocks) == lru_curve(prompts).at(num_blocks)


@given(tries(), st.integers(1, 20))
@settings(deadline=None)
def test_no_policy_serves_more_than_the_optimum_nor_the_optimum_more_than_the_ceiling(trace, num_blocks):
    prompts = read_prompt_blocks(trace)
    hits = {policy: replay_policy(prompts, policy, num_blocks).hit_blocks for policy in policy_names()}
    assert max(hits.values()) == hits["optimum"] <= lru_curve(prompts).infinite.hit_blocks


@given(tries())
@settings(deadline=None)
def test_every_policy_reaches_the_ceiling_where_all_blocks_fit(trace):
    prompts = read_prompt_blocks(trace)
    ceiling = lru_curve(prompts).infinite
    for policy in policy_names():
        assert triple(replay_policy(prompts, policy, prompts.num_distinct_blocks)) == triple(ceiling)


@given(tries(max_blocks=3, max_requests=6), st.integers(1, 4))
@settings(max_examples=50, deadline=None)
def test_the_optimum_is_what_trying_every_choice_finds(trace, num_blocks):
    best: dict[frozenset, int] = {frozenset(): 0}
    for _, keys in lists(trace):
        following: dict[frozenset, int] = {}
        for cached, hits in best.items():
            served = next((i for i, key in enumerate(keys) if key not in cached), len(keys))
            candidates = sorted(cached | set(keys))
            for kept in combinations(candidates, min(num_blocks, len(candidates))):
                following[frozenset(kept)] = max(following.get(frozenset(kept), 0), hits + served)
        best = following
    assert replay_policy(read_prompt_blocks(trace), "optimum", num_blocks).hit_blocks == max(best.values())


@given(tries())
@settings(deadline=None)
def test_more_memory_never_lowers_the_lru_curve(trace):
    curve = lru_curve(read_prompt_blocks(trace))
    for counts in (curve.hit_blocks, curve.hit_tokens, curve.full_block_hit_tokens):
        assert all(counts[:-1] <= counts[1:])


@pytest.mark.parametrize("policy", policy_names())
def test_a_prompt_larger_than_the_cache_keeps_its_first_blocks(policy):
    trace = ListTrace([(20, (0, 1, 2, 3, 4)), (20, (0, 1, 2, 3, 4))])
    assert replay_policy(read_prompt_blocks(trace), policy, 3).hit_blocks == 3


def test_sieve_spares_a_block_asked_for_since_the_hand_passed_once_only():
    prompts = read_prompt_blocks(ListTrace([(4, (block,)) for block in [0, 1, 2, 0, 3, 4, 0, 5, 0]]))
    # 0 is marked and spared; the hand stays beyond it, so that 3, 4 and 5 take the places of 1, 2 and 3
    assert replay_policy(prompts, "sieve", 3).hit_blocks == 3
    assert replay_policy(prompts, "fifo", 3).hit_blocks == 2


def test_s3fifo_lets_a_block_that_it_remembers_into_the_main_queue():
    scan = list(range(100, 130))
    prompts = read_prompt_blocks(ListTrace([(4, (block,)) for block in [*range(10), 10, 0, *scan, 0]]))
    # 10 pushes 0 out of the small queue; asked for while remembered, 0 joins the main queue and outlives the scan
    assert replay_policy(prompts, "s3fifo", 10).hit_blocks == 1
    assert replay_policy(prompts, "fifo", 10).hit_blocks == 0


def test_a_prompt_without_ids_takes_room_but_never_hits():
    shared, unique = (8, (0, 1)), (12, None)
    alone = lru_curve(read_prompt_blocks(ListTrace([shared, shared])))
    crowded = lru_curve(read_prompt_blocks(ListTrace([shared, unique, unique, shared])))
    assert alone.at(2).hit_blocks == 2
    assert [crowded.at(n).hit_blocks for n in (6, 7, 8)] == [0, 1, 2]


def test_a_trace_without_a_block_size_needs_one_for_the_cache():
    trace = ListTrace([(20, None)], trace_block_size=None)
    with pytest.raises(InputError, match="give the cache's with --block-size"):
        read_prompt_blocks(trace)
    assert read_prompt_blocks(trace, 16).num_distinct_blocks == 2


@given(tries(), st.sampled_from([3, 5, 6, 7, 10]))
@settings(deadline=None)
def test_one_pass_is_exact_at_block_sizes_that_do_not_divide(trace, size):
    curve = lru_curve(read_prompt_blocks(trace, size))
    for num_blocks in range(1, 30, 2):
        assert triple(curve.at(num_blocks)) == lru_by_hand(in_blocks_as_the_engine_has(trace, size), num_blocks, size)


@given(tries(), st.sampled_from([1, 2, 3, 4, 5, 8]))
@settings(deadline=None)
def test_a_reblocked_trace_has_the_same_curve(trace, size):
    direct = lru_curve(read_prompt_blocks(trace, size))
    reblocked = lru_curve(read_prompt_blocks(ReblockedTrace(trace, size)))
    for num_blocks in range(1, 30, 2):
        assert triple(direct.at(num_blocks)) == triple(reblocked.at(num_blocks))


def test_only_lru_is_offered_below_the_trace_s_own_block_size():
    with pytest.raises(InputError, match=r"at the trace's own --block-size \(4\) or a multiple; at 2 only lru"):
        capacity_curve(ListTrace([(8, (0, 1))]), block_size=2, policies=["lru", "fifo"])


def test_ids_that_are_no_trie_are_refused():
    with pytest.raises(InputError, match="request 2: one of its block ids was seen before"):
        read_prompt_blocks(ListTrace([(8, (0, 1)), (8, (2, 1))]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policies": ["lru", "mru"]}, "--policy mru: the policies are lru, fifo"),
        ({"policies": []}, "--policy is empty"),
        ({"capacities": [1000, 0]}, "--capacities holds 0"),
        ({"capacities": []}, "--capacities is empty"),
    ],
)
def test_an_option_that_cannot_be_used_is_refused(options, message):
    with pytest.raises(InputError, match=message):
        capacity_curve(ListTrace([(8, (0, 1))]), **options)


def test_every_capacity_asked_for_is_answered_in_order():
    curve = capacity_curve(ListTrace([(8, (0, 1))] * 2), capacities=[10**9, 3, 1, 3], policies=["lru", "optimum"])
    for points in curve.policies.values():
        assert [point.num_blocks for point in points] == [10**9, 3, 1, 3]
        assert [point.hit_blocks for point in points] == [2, 2, 1, 2]


def test_sizes_not_asked_for_reach_the_ceiling_in_steps_of_1_2_5():
    assert series_up_to(31_435) == [200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000]
    assert series_up_to(1) == [1]


def test_the_working_set_names_the_capacity_for_a_share_of_the_ceiling():
    trace = ListTrace([(4, (i,)) for i in range(10)] + [(4, (i,)) for i in range(10)])
    curve = capacity_curve(trace)
    assert curve.working_set()["lru_blocks_for_share_of_ceiling"] == {
        "50%": 10,
        "90%": 10,
        "95%": 10,
        "99%": 10,
        "100%": 10,
    }
    assert curve.lru.at(9).hit_blocks == 0
    assert curve.working_set()["near_miss_tokens"] == 40, "vLLM computes the last token, and so the whole block"


@pytest.fixture(scope="module")
def conversation():
    root = os.environ.get("KVLEDGER_TRACES")
    path = Path(root or ".") / "mooncake/conversation_trace.jsonl.gz"
    if not root or not path.exists():
        pytest.skip("KVLEDGER_TRACES names no directory with mooncake/conversation_trace.jsonl.gz")
    return read_prompt_blocks(open_trace(path))


def test_the_conversation_trace_gives_the_published_lru_table_in_one_pass(conversation):
    curve = lru_curve(conversation)
    points = [*map(curve.at, SIZES), curve.infinite]
    blocks, tokens = conversation.num_block_events, conversation.input_tokens
    assert tuple(round(point.hit_blocks / blocks, 4) for point in points) == BLOCK_HIT_RATES["lru"]
    assert tuple(round(point.hit_tokens / tokens, 4) for point in points) == LRU_TOKEN_HIT_RATES
    assert tuple(round(point.full_block_hit_tokens / tokens, 4) for point in points) == LRU_FULL_BLOCK_TOKEN_HIT_RATES
    assert (blocks, conversation.num_distinct_blocks) == (288_500, 182_790)


@pytest.mark.parametrize("policy", [policy for policy in BLOCK_HIT_RATES if policy != "lru"])
def test_the_conversation_trace_gives_the_published_table_for_policy(conversation, policy):
    sizes = (*SIZES, conversation.num_distinct_blocks)
    hits = [replay_policy(conversation, policy, num_blocks).hit_blocks for num_blocks in sizes]
    assert tuple(round(each / conversation.num_block_events, 4) for each in hits) == BLOCK_HIT_RATES[policy]
