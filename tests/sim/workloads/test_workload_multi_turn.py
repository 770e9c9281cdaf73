from itertools import pairwise

import attrs
import pytest
from kvledger.core.errors import InputError
from kvledger.sim.workloads.multi_turn import MultiTurnParameters, Stage, multi_turn_requests

SMALL = MultiTurnParameters(
    unique_system_prompts=3,
    users_per_system_prompt=2,
    system_prompt_tokens=100,
    question_tokens=60,
    output_tokens=40,
    stages=(Stage(10.0, 3.0), Stage(5.0, 8.0)),
)


def _requests(seed: int = 0, **changes):
    return list(multi_turn_requests(attrs.evolve(SMALL, **changes), seed))


@pytest.mark.parametrize("arrivals", ["random", "even"])
def test_each_stage_holds_the_requests_of_its_rate_in_order(arrivals: str):
    times = [request[0] for request in _requests(arrivals=arrivals)]
    assert times == sorted(times)
    assert sum(time < 10 for time in times) == 30
    assert sum(10 <= time < 15 for time in times) == 40


def test_even_arrivals_have_equal_gaps():
    times = [request[0] for request in _requests(arrivals="even")][:30]
    assert {round(later - earlier, 9) for earlier, later in pairwise(times)} == {round(1 / 3, 9)}


def test_random_arrivals_bunch_like_independent_ones():
    stage = (Stage(1_000.0, 20.0),)
    times = [request[0] for request in _requests(stages=stage)]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert variance == pytest.approx(mean**2, rel=0.05)


def test_sessions_take_turns():
    # Six sessions, each with prompt ids of its own behind the shared ones.
    ids = [request[3] for request in _requests()]
    assert len(set(ids)) == len(set(ids[:6])) == 6
    assert ids[:6] == ids[6:12]


def test_sessions_of_a_system_prompt_share_its_full_blocks_only():
    first = [request[3] for request in _requests()][:6]
    assert {len(ids) for ids in first} == {10}
    shared = {ids[:6] for ids in first}
    assert len(shared) == 3
    rest = [hash_id for ids in first for hash_id in ids[6:]]
    assert len(rest) == len(set(rest))


def test_a_fresh_turn_shares_the_system_prompt_and_nothing_else():
    requests = _requests(turns="fresh")
    questions = [hash_id for request in requests for hash_id in request[3][6:]]
    assert len(questions) == len(set(questions))
    assert len({request[3][:6] for request in requests}) == 3
    assert {request[1] for request in requests} == {160}


def test_a_resent_turn_begins_with_the_turn_before_until_the_session_is_full():
    turns = _requests(turns="resent", max_input_length=400)[::6]
    assert [request[1] for request in turns[:4]] == [160, 260, 360, 160]
    assert turns[1][3][:10] == turns[0][3]
    assert turns[2][3][:16] == turns[1][3][:16] != turns[3][3][:16]
    assert turns[3][3][:6] == turns[0][3][:6]


def test_one_seed_gives_one_stream_and_another_seed_another():
    assert _requests(seed=7) == _requests(seed=7)
    assert _requests(seed=7) != _requests(seed=8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"unique_system_prompts": 0}, "unique_system_prompts is 0"),
        ({"output_tokens": -1}, "output_tokens is -1"),
        ({"turns": "merged"}, "turns is 'merged'; it must be one of 'repeated', 'fresh', 'resent'"),
        ({"arrivals": "bursts"}, "arrivals is 'bursts'"),
        ({"stages": ()}, "at least one stage"),
        ({"turns": "resent", "max_input_length": 100}, "first prompt of 160 tokens exceeds max_input_length 100"),
    ],
)
def test_parameters_out_of_range_are_refused_by_name(changes: dict, message: str):
    with pytest.raises(InputError, match=message):
        attrs.evolve(SMALL, **changes)


@pytest.mark.parametrize(("duration_s", "rate"), [(0.0, 1.0), (1.0, -2.0), (float("inf"), 1.0), (1.0, float("nan"))])
def test_a_stage_without_time_or_rate_is_refused(duration_s: float, rate: float):
    with pytest.raises(InputError, match="a stage's"):
        Stage(duration_s, rate)
