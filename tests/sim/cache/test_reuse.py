"""Reuse by block size, by distance and by time: each figure beside a count by hand."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvledger.core.errors import InputError
from kvledger.sim.cache.capacity_curve import capacity_curve
from kvledger.sim.cache.lru_curve import lru_curve
from kvledger.sim.cache.prompt_blocks import at_block_size, read_prompt_blocks
from kvledger.sim.cache.reuse import reuse_distances, reuse_times, shared_tokens, working_sets
from kvledger.sim.traces import TraceInfo, TraceRequest, Window, open_trace
from kvledger.sim.traces.derived import ReblockedTrace, reblocked_ids

TRACES = os.environ.get("KVLEDGER_TRACES")


class Timed:
    """Requests held in memory, each with its arrival, prompt length and ids."""

    def __init__(self, *requests: tuple[float, int, tuple[int, ...] | None], block_size: int = 4) -> None:
        self._requests = requests
        self.info = TraceInfo("list", None, "list", "s", block_size, "given", 1.0, Window(0, None))

    def __iter__(self):
        for place, (arrival_s, input_length, hash_ids) in enumerate(self._requests, 1):
            yield TraceRequest(arrival_s, input_length, 1, hash_ids, place)


def b02():
    """240 shared tokens and 60 of its own, twice, known token by token."""
    shared = tuple(range(240))
    return Timed(
        (0.0, 300, shared + tuple(range(1000, 1060))), (1.0, 300, shared + tuple(range(2000, 2060))), block_size=1
    )


@pytest.mark.parametrize(
    ("block_size", "hit_tokens"),
    [(1, 240), (8, 240), (16, 240), (32, 224), (64, 192), (128, 128), (256, 0), (784, 0)],
)
def test_b02_hit_tokens_by_block_size_and_what_is_a_near_miss(block_size, hit_tokens):
    reuse = shared_tokens(read_prompt_blocks(b02())).at(block_size)
    assert reuse.hit_tokens == hit_tokens
    assert reuse.lost_tokens == 240 - hit_tokens
    assert reuse.near_miss_requests == (hit_tokens == 0)


def test_b02_no_shared_prefix_is_no_near_miss():
    alone = Timed((0.0, 300, tuple(range(300))), (1.0, 300, tuple(range(300, 600))), block_size=1)
    reuse = shared_tokens(read_prompt_blocks(alone)).at(256)
    assert (reuse.hit_tokens, reuse.near_miss_requests) == (0, 0)


@st.composite
def tries(draw):
    ids: dict[tuple[int, ...], int] = {}
    requests = []
    now = 0.0
    for content in draw(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=12)):
        now += draw(st.integers(0, 3)) * 0.5
        last = draw(st.integers(1, 4))
        keys = [tuple(content[: i + 1]) for i in range(len(content))]
        if last < 4:
            keys[-1] = (*keys[-1], -last)
        requests.append((now, (len(content) - 1) * 4 + last, tuple(ids.setdefault(key, len(ids)) for key in keys)))
    return Timed(*requests)


@given(tries(), st.sampled_from([1, 2, 3, 4, 5, 8, 12]))
@settings(deadline=None)
def test_the_ceiling_by_block_size_is_that_of_an_infinite_cache_of_such_blocks(trace, block_size):
    prompts = read_prompt_blocks(trace)
    ceiling = lru_curve(at_block_size(prompts, block_size)).infinite
    assert shared_tokens(prompts).at(block_size).hit_tokens == ceiling.full_block_hit_tokens


@given(tries(), st.integers(1, 12))
@settings(deadline=None)
def test_a_prompt_reblocked_has_an_id_for_every_block_and_one_parent_each(trace, block_size):
    parents: dict[int, int] = {}
    for request in ReblockedTrace(trace, block_size):
        assert len(request.hash_ids) == -(-request.input_length // block_size)
        for parent, hash_id in zip((-1, *request.hash_ids), request.hash_ids, strict=False):
            assert parents.setdefault(hash_id, parent) == parent


def test_reblocking_says_where_the_ids_come_from_and_refuses_what_has_none():
    trace = ReblockedTrace(Timed((0.0, 8, (0, 1))), 2)
    assert trace.info.trace_block_size == 2
    assert trace.info.trace_block_size_source == "re-blocked from 4 (given)"
    with pytest.raises(InputError, match="it must be 1 token or more"):
        ReblockedTrace(Timed((0.0, 8, (0, 1))), 0)
    without_ids = Timed((0.0, 8, None))
    without_ids.info.trace_block_size = None
    with pytest.raises(InputError, match="no blocks to re-block"):
        ReblockedTrace(without_ids, 2)


def test_full_blocks_only_gives_no_id_to_what_lies_behind_them():
    assert len(reblocked_ids((5, 6), 150, 64, 16, True)) == 8
    assert len(reblocked_ids((5, 6), 150, 64, 100, True)) == 1
    assert len(reblocked_ids((5, 6), 150, 64, 256, True)) == 0


def test_reuse_distance_is_the_cache_that_it_takes_and_reuse_time_the_clock():
    trace = Timed((0.0, 4, (0,)), (1.0, 4, (1,)), (2.0, 4, (2,)), (10.0, 4, (0,)), (10.5, 4, (0,)), (12.0, 4, (1,)))
    prompts = read_prompt_blocks(trace)
    # 0 after 3 blocks and 10 s, 0 after 1 block and .5 s, 1 after 3 blocks (0, 2 and itself) and 11 s
    assert reuse_distances(lru_curve(prompts), (0.3, 0.5, 1.0)) == {"p30": 1, "p50": 3, "p100": 3}
    assert reuse_times(prompts, (0.3, 0.5, 1.0)) == {"p30": 0.5, "p50": 10.0, "p100": 11.0}


def test_a_trace_without_reuse_has_no_distances_and_no_times():
    prompts = read_prompt_blocks(Timed((0.0, 4, (0,)), (1.0, 4, (1,))))
    assert reuse_distances(lru_curve(prompts)) == {}
    assert reuse_times(prompts) == {}


@given(tries(), st.sampled_from([0.5, 1.0, 2.0]))
@settings(deadline=None)
def test_the_working_set_is_the_distinct_blocks_of_the_last_seconds(trace, window_s):
    requests = list(trace)
    first_s, last_s = requests[0].arrival_s, requests[-1].arrival_s
    duration_s = last_s - first_s
    sets = working_sets(read_prompt_blocks(trace), [window_s])
    if duration_s < window_s or not duration_s:
        assert sets == []
        return

    def distinct(now: float) -> int:
        return len({block for r in requests if now - window_s < r.arrival_s <= now for block in r.hash_ids})

    assert sets[0].max_blocks == max(distinct(r.arrival_s) for r in requests)
    # Arrivals are multiples of .5 s, so the set is constant between them.
    times = np.arange(first_s, last_s, 0.5)
    assert sets[0].mean_blocks == pytest.approx(np.mean([distinct(now) for now in times]))


def test_the_curve_states_reuse_near_misses_and_the_memory_for_most_of_the_ceiling():
    trace = Timed(*((float(i), 12, (0, 1, 10 + i)) for i in range(10)), (20.0, 12, (0, 1, 10)))
    answer = capacity_curve(trace, block_size=16).as_dict()
    assert answer["near_misses"] == {
        "block_size": 16,
        "requests": 10,
        "requests_that_share": 10,
        "lost_tokens": 9 * 8 + 12,
        "lost_rate": (9 * 8 + 12) / 132,
        "unknown_tokens_at_most": 9 * 3,
    }
    answer = capacity_curve(trace).as_dict(bytes_per_block=100)
    enough = answer["for_90_percent_of_ceiling"]
    assert enough["share"] == 0.9
    assert enough["hit_blocks"] >= 0.9 * answer["infinite"]["hit_blocks"]
    assert enough["bytes"] == enough["num_blocks"] * 100
    assert [row["block_size"] for row in answer["by_block_size"]] == [1, 4, 16, 32, 64, 128, 256, 512, 1024]
    assert [row["unknown_tokens"] for row in answer["by_block_size"][:2]] == [27, 27]
    assert answer["reuse"]["working_sets"][0]["max_bytes"] == answer["reuse"]["working_sets"][0]["max_blocks"] * 100
    json.dumps(answer, allow_nan=False)


@pytest.mark.skipif(not TRACES, reason="KVLEDGER_TRACES is not set: no public traces to read")
def test_the_public_conversation_trace_loses_little_at_its_own_size_and_much_above():
    prompts = read_prompt_blocks(open_trace(Path(str(TRACES)) / "mooncake/conversation_trace.jsonl.gz"))
    shared = shared_tokens(prompts)
    rates = {row["block_size"]: row["hit_rate"] for row in shared.table([16, 512, 1024])}
    assert rates[16] == pytest.approx(0.3736, abs=5e-5)
    assert rates[512] == pytest.approx(0.3734, abs=5e-5)
    assert rates[1024] < 0.345
    assert shared.at(512).near_miss_requests == 0
    assert shared.at(1024).near_miss_requests > 7_000
