"""Field report G04: later turns have a `delay` after the answer before, instead of a timestamp."""

import json

import pytest
from kvledger.core.errors import InputError
from kvledger.sim import Scenario, open_trace
from kvledger.sim.scenario.replay import replay_scenario

FIRST = {"session_id": "a", "timestamp": 0, "input_length": 1024, "output_length": 20, "hash_ids": [1, 2]}
LATER = {"session_id": "a", "delay": 2000, "input_length": 1536, "output_length": 20, "hash_ids": [1, 2, 3]}
OTHER = {"session_id": "b", "timestamp": 500, "input_length": 512, "output_length": 20, "hash_ids": [1]}
POOL = {"num_gpu_blocks_override": 4000, "block_size": 512}


def trace_file(tmp_path, *rows):
    path = tmp_path / "sessions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def replayed(path, **options):
    """By number of the request: (arrival in seconds, end in seconds)."""
    result = replay_scenario(Scenario(trace=[str(path)], **POOL, **options), keep_requests=True)
    return {int(row["request_id"]): (row["arrival_s"], row["arrival_s"] + row["e2e_s"]) for row in result.requests}


def test_g04_the_format_is_found_and_has_two_sessions(tmp_path):
    trace = open_trace(trace_file(tmp_path, FIRST, LATER, OTHER))
    first, other, later = trace
    assert (trace.info.format, trace.info.timestamp_unit, trace.info.trace_block_size) == (
        "mooncake-sessions",
        "ms",
        512,
    )
    assert [each.turn.session for each in (first, other, later)] == ["a", "b", "a"]
    assert (later.turn.number, later.turn.waits_for, later.turn.think_s) == (2, (first.place,), 2.0)
    assert [each.input_length for each in (first, other, later)] == [1024, 512, 1536]


@pytest.mark.parametrize("order", [(FIRST, LATER, OTHER), (FIRST, OTHER, LATER), (OTHER, FIRST, LATER)])
def test_g04_the_second_turn_comes_two_seconds_after_the_first_answer(tmp_path, order):
    served = replayed(trace_file(tmp_path, *order))
    assert served[1][0] == 0 and served[2][0] == 0.5
    assert served[3][0] == pytest.approx(served[1][1] + 2, abs=1e-9)
    assert served[1][1] > 0.05  # the answer takes time, so the turn is not merely at its delay


def test_g04_on_the_command_line_the_loop_is_closed(kvledger, tmp_path):
    path = trace_file(tmp_path, FIRST, LATER, OTHER)
    code, out, err = kvledger("replay", path, "--num-gpu-blocks-override", 4000, "--block-size", 512, "--json")
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert document["trace"]["format"] == "mooncake-sessions"
    assert document["assumptions"]["arrivals"].startswith("closed loop")
    assert document["prefix_cache"]["hit_rate"] == pytest.approx(1024 / 3072)  # the second turn finds the first


def test_g04_an_open_loop_says_what_it_assumes_of_delays(tmp_path):
    path = trace_file(tmp_path, FIRST, LATER, OTHER)
    assert replayed(path, closed_loop=False)[3][0] == 2.0
    trace = open_trace(path)
    list(trace)
    assert any("in an open loop, as if that answer had taken no time" in note for note in trace.info.notes())


def test_g04_delays_add_up_over_a_long_session_and_share_the_unit_of_timestamps(tmp_path):
    turns = [{"session_id": 7, "delay": 0.5, "input_length": 100, "output_length": 1} for _ in range(30)]
    path = trace_file(tmp_path, {**OTHER, "session_id": 7, "timestamp": 1}, *turns)
    requests = list(open_trace(path, timestamp_unit="s"))
    assert [request.arrival_s for request in requests] == [index / 2 for index in range(31)]
    assert [request.turn.number for request in requests] == list(range(1, 32))
    assert {request.turn.think_s for request in requests[1:]} == {0.5}


def test_g04_sessions_with_timestamps_only_have_gaps_and_no_think_times(tmp_path):
    later = {key: value for key, value in LATER.items() if key != "delay"} | {"timestamp": 3000}
    trace = open_trace(trace_file(tmp_path, FIRST, later, OTHER))
    *_, second = trace
    assert not trace.info.records_think_times
    assert (second.turn.think_s, second.turn.gap_s, second.arrival_s) == (None, 3.0, 3.0)


def test_g04_a_turn_with_both_times_is_recorded_at_one_and_waits_for_the_other(tmp_path):
    *_, later = open_trace(trace_file(tmp_path, FIRST, {**LATER, "timestamp": 9000}, OTHER))
    assert (later.arrival_s, later.turn.think_s) == (9.0, 2.0)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([LATER], r":1: field 'timestamp' is missing: the first turn of a session needs one"),
        ([FIRST, {**LATER, "session_id": None}], r":2: field 'session_id' is missing: a delay follows a turn"),
        ([FIRST, {**LATER, "delay": -1}], r":2: field 'delay' -1 is negative"),
        ([OTHER, {**OTHER, "timestamp": 400}], r":2: field 'timestamp' is 400, earlier than the turn before"),
        ([{**FIRST, "session_id": [1]}], r":1: field 'session_id' \[1\] is neither text nor a whole number"),
        ([OTHER, {**FIRST, "hash_ids": [1]}], r":2: field 'hash_ids' has 1 ids for an input_length of 1,024"),
        ([{**FIRST, "timestamp": 900}, {**OTHER, "input_length": 0, "hash_ids": []}], r":2: field 'input_length' is 0"),
    ],
)
def test_g04_a_turn_that_nothing_places_is_refused_with_its_line(tmp_path, rows, message):
    with pytest.raises(InputError, match=message):
        list(open_trace(trace_file(tmp_path, *rows)))


def test_g04_plain_mooncake_lines_stay_plain(tmp_path):
    row = {key: value for key, value in FIRST.items() if key != "session_id"}
    assert open_trace(trace_file(tmp_path, row)).info.format == "mooncake"
