"""Coding-assistant conversations: ids of their own, full blocks only, think times, and conversations inside others."""

import gzip
import json
import os
from pathlib import Path

import pytest
from kvledger.core.errors import InputError
from kvledger.sim.cache.lru_curve import lru_curve
from kvledger.sim.cache.prompt_blocks import read_prompt_blocks
from kvledger.sim.engine.arrivals import TraceKeySource
from kvledger.sim.traces import TraceRequest, open_trace

TRACES = os.environ.get("KVLEDGER_TRACES")


def request(t: float, num_blocks: int = 1, first_id: int = 1, **fields) -> dict:
    ids = list(range(first_id, first_id + num_blocks))
    return {"t": t, "type": "n", "in": 64 * num_blocks + 5, "out": 10, "hash_ids": ids, **fields}


def sub_conversation(t: float, requests: list[dict], **fields) -> dict:
    return {"t": t, "type": "subagent", "agent_id": "x", "status": "completed", "requests": requests, **fields}


def document(requests: list[dict], name: str = "one", **fields) -> dict:
    return {"id": name, "block_size": 64, "hash_id_scope": "local", "requests": requests, **fields}


def write(path: Path, *documents: dict, indent: int | None = None) -> Path:
    path.write_text("\n".join(json.dumps(each, indent=indent) for each in documents))
    return path


def read(tmp_path: Path, *requests: dict) -> list[TraceRequest]:
    return list(open_trace(write(tmp_path / "c.json", document(list(requests)))))


def waits(requests: list[TraceRequest]) -> list[tuple[int, ...]]:
    return [each.turn.waits_for for each in requests]


def test_a_conversation_is_read_in_seconds_with_full_blocks_only(tmp_path):
    trace = open_trace(write(tmp_path / "c.json", document([request(0.0, 3), request(2.5, 4)])))
    first, second = trace
    assert (first.arrival_s, first.input_length, first.output_length, len(first.hash_ids)) == (0.0, 197, 10, 3)
    assert (second.arrival_s, len(second.hash_ids)) == (2.5, 4)
    assert second.hash_ids[:3] == first.hash_ids
    assert trace.info.full_blocks_only
    assert (trace.info.trace_block_size, trace.info.trace_block_size_source) == (64, "stated in the file")


def test_local_ids_mean_nothing_in_another_conversation(tmp_path):
    path = write(tmp_path / "c.jsonl", document([request(0, 3)], "a"), document([request(0, 3), request(9, 3)], "b"))
    prompts = read_prompt_blocks(open_trace(path))
    assert lru_curve(prompts).infinite.hit_blocks == 3
    assert prompts.num_distinct_blocks == 6


def test_global_ids_are_the_same_content_everywhere(tmp_path):
    documents = [document([request(0, 3)], name, hash_id_scope="global") for name in ("a", "b")]
    prompts = read_prompt_blocks(open_trace(write(tmp_path / "c.jsonl", *documents)))
    assert lru_curve(prompts).infinite.hit_blocks == 3


def test_an_unstated_scope_is_taken_as_local_and_this_is_said(tmp_path):
    documents = [document([request(0, 3)], name) for name in ("a", "b")]
    for each in documents:
        del each["hash_id_scope"]
    trace = open_trace(write(tmp_path / "c.jsonl", *documents))
    ids = [each.hash_ids for each in trace]
    assert not set(ids[0]) & set(ids[1])
    assert "2 conversations do not say what their hash ids are compared with: taken as local" in trace.info.notes()


@pytest.mark.parametrize("indent", [None, 2], ids=["a-line-each", "across-lines"])
def test_documents_may_stand_on_a_line_each_or_across_lines(tmp_path, indent):
    path = write(tmp_path / "c.json", document([request(0)], "a"), document([request(1)], "b"), indent=indent)
    assert [each.turn.session for each in open_trace(path)] == ["a", "b"]


def test_a_folder_is_one_trace_of_many_conversations_merged_by_time(tmp_path):
    write(tmp_path / "b.json", document([request(0), request(5)], "b"))
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(json.dumps(document([request(1), request(7)], "a")).encode()))
    (tmp_path / "README.md").write_text("not a trace")
    trace = open_trace(tmp_path)
    assert [(each.turn.session, each.arrival_s) for each in trace] == [("b", 0.0), ("a", 1.0), ("b", 5.0), ("a", 7.0)]
    assert [each.place for each in trace] == [1, 2, 3, 4]
    assert trace.info.name == tmp_path.name
    notes = trace.info.notes()
    assert any("1 files of the folder were not read" in note and "README.md" in note for note in notes)
    assert "2 conversations" in notes
    assert any("they begin together at 0 s" in note for note in notes)


def test_several_files_are_one_trace(tmp_path):
    paths = [write(tmp_path / f"{name}.json", document([request(0)], name)) for name in "ab"]
    assert [each.turn.session for each in open_trace(paths)] == ["a", "b"]
    assert open_trace(paths).info.name == "2 files"


def test_conversations_can_begin_at_a_rate_that_a_seed_fixes(tmp_path):
    documents = [document([request(0), request(30)], f"c{i}") for i in range(200)]
    path = write(tmp_path / "c.jsonl", *documents)
    trace = open_trace(path, request_rate=2.0, seed=4)
    requests = list(trace)
    assert requests == list(open_trace(path, request_rate=2.0, seed=4))
    assert requests != list(open_trace(path, request_rate=2.0, seed=5))
    assert [each.arrival_s for each in requests] == sorted(each.arrival_s for each in requests)
    starts = [each.arrival_s for each in requests if each.turn.number == 1]
    assert len(starts) / starts[-1] == pytest.approx(2.0, rel=0.2)
    seconds = [each.arrival_s for each in requests if each.turn.number == 2]
    assert seconds == pytest.approx([start + 30 for start in starts])
    assert trace.info.arrivals == ("the file records no arrivals: 2 a second come by a Poisson process, seed 4")


def test_the_next_turn_waits_for_the_answer_and_thinks(tmp_path):
    first, second, third = read(
        tmp_path,
        request(0, api_time=5.2, think_time=0.0),
        request(9, api_time=3.4, think_time=3.0),
        request(20, think_time=8.0),
    )
    assert waits([first, second, third]) == [(), (1,), (2,)]
    assert [each.turn.think_s for each in (first, second, third)] == [None, 3.0, 8.0]
    assert first.turn.answered_s == 6.0, "up to the time from which the next turn's think time counts"
    assert (second.turn.is_last, third.turn.is_last) == (False, True)


def test_a_think_time_that_counts_from_an_earlier_answer_is_not_taken_for_one_after_the_last(tmp_path):
    # The answer to the second request was not recorded; the third one's think time counts from the first answer.
    _, second, third = read(
        tmp_path, request(0, api_time=2.0), request(10, think_time=8.0), request(500, think_time=498.0)
    )
    assert second.turn.think_s == 8.0
    assert (third.turn.think_s, third.turn.gap_s) == (None, 490.0)


def test_without_think_times_they_follow_from_the_answers(tmp_path):
    _, second, third = read(tmp_path, request(0, api_time=2.0), request(10), request(15))
    assert second.turn.think_s == 8.0
    assert (third.turn.think_s, third.turn.gap_s) == (None, 5.0)


def test_a_sub_conversation_starts_after_its_parent_s_answer_and_is_waited_for(tmp_path):
    requests = read(
        tmp_path,
        request(0, 2, api_time=2.0),
        sub_conversation(3.0, [request(3, 1, 50, api_time=4.0), request(10, 2, 50, api_time=5.0)]),
        sub_conversation(3.0, [request(4, 1, 90, api_time=1.0)]),
        request(20, 3, api_time=1.0),
    )
    assert [each.arrival_s for each in requests] == [0.0, 3.0, 4.0, 10.0, 20.0]
    parent, first, other, second, after = requests
    assert waits(requests) == [(), (1,), (1,), (2,), (1, 4, 3)]
    assert [each.turn.session for each in requests] == ["one", "one/1", "one/2", "one/1", "one"]
    assert (first.turn.think_s, other.turn.think_s, second.turn.think_s) == (1.0, 2.0, 3.0)
    assert after.turn.think_s == 5.0, "after the last of the answers, at 15 s"
    assert (parent.turn.number, after.turn.number) == (1, 2)


def test_sub_conversations_nest_and_share_the_conversation_s_ids(tmp_path):
    inner = sub_conversation(4.0, [request(4, 1, 1, api_time=1.0)])
    requests = read(
        tmp_path,
        request(0, 2, 1, api_time=1.0),
        sub_conversation(2.0, [request(2, 2, 1, api_time=1.0), inner, request(8, 1, 1, api_time=1.0)]),
        request(12, 2, 1),
    )
    assert [each.turn.session for each in requests] == ["one", "one/1", "one/1/1", "one/1", "one"]
    assert waits(requests) == [(), (1,), (2,), (2, 3), (1, 4)]
    assert requests[1].hash_ids == requests[0].hash_ids


def test_a_sub_conversation_on_a_clock_of_its_own_is_moved_to_its_place(tmp_path):
    requests = read(
        tmp_path, request(0, api_time=1.0), sub_conversation(30.0, [request(0.0, 1, 50), request(4.0, 1, 60)])
    )
    assert [each.arrival_s for each in requests] == [0.0, 30.0, 34.0]


def test_what_ran_in_the_background_is_not_waited_for(tmp_path):
    background = sub_conversation(3.0, [request(3, 1, 50, api_time=2.0)], status="async_launched", duration_ms=None)
    requests = read(tmp_path, request(0, api_time=2.0), background, request(20))
    assert waits(requests) == [(), (1,), (1,)]


def test_a_request_sent_before_the_answer_before_it_did_not_wait_for_that(tmp_path):
    path = write(
        tmp_path / "c.json",
        document([request(0, api_time=2.0), request(5, api_time=20.0), request(8, api_time=2.0), request(40)]),
    )
    trace = open_trace(path)
    requests = list(trace)
    assert waits(requests) == [(), (1,), (1,), (2, 3)]
    assert "1 requests were sent before the answer to the one before them" in trace.info.notes()


def test_a_prompt_s_partial_block_is_unique_to_its_request():
    with_tail = TraceKeySource((7, 8), 64 * 2 + 40, 0, 16, 64)
    keys = with_tail.keys(0, 10)
    again = TraceKeySource((7, 8), 64 * 2 + 40, 1, 16, 64).keys(0, 10)
    assert keys[:8] == again[:8]
    assert not set(keys[8:]) & set(again[8:])


@pytest.mark.parametrize(("block_size", "hits"), [(64, 3), (16, 12), (128, 1), (192, 1), (256, 0)])
def test_blocks_of_another_size_are_made_of_full_blocks(tmp_path, block_size, hits):
    path = write(tmp_path / "c.json", document([request(0, 3), request(9, 3)]))
    prompts = read_prompt_blocks(open_trace(path), block_size)
    point = lru_curve(prompts).infinite
    assert point.hit_blocks == hits
    assert point.hit_tokens == point.full_block_hit_tokens == hits * block_size


def test_a_prompt_below_one_block_takes_no_block(tmp_path):
    short = {"t": 1.0, "in": 20, "out": 1, "hash_ids": []}
    prompts = read_prompt_blocks(
        open_trace(write(tmp_path / "c.json", document([short, request(2), {**short, "t": 2.5}, request(3)])))
    )
    assert (prompts.num_block_events, prompts.num_requests) == (2, 4)
    assert lru_curve(prompts).infinite.hit_blocks == 1


BAD = [
    ({"t": 3.0, "in": 64, "out": 1, "hash_ids": []}, "hash_ids_mismatch", "requests[1]", "hash_ids"),
    ({"t": 3.0, "in": 20, "out": 1, "hash_ids": [1]}, "hash_ids_mismatch", "requests[1]", "hash_ids"),
    ({"t": 3.0, "in": 0, "out": 1, "hash_ids": []}, "empty_prompt", "requests[1]", "in"),
    ({"t": 3.0, "in": 64, "out": 1, "hash_ids": [-1]}, "negative", "requests[1]", "hash_ids[0]"),
    ({"t": 3.0, "out": 1, "hash_ids": []}, "missing_field", "requests[1]", "in"),
    ({"t": "3", "in": 64, "out": 1, "hash_ids": [1]}, "not_a_number", "requests[1]", "t"),
    ({"t": 3.0, "in": 64, "out": float("nan"), "hash_ids": [1]}, "not_finite", "requests[1]", "out"),
    ({"t": 3.0, "in": 64, "out": 1.5, "hash_ids": [1]}, "not_whole", "requests[1]", "out"),
    ({"t": 3.0, "in": 64, "out": 1, "hash_ids": [1], "think_time": -2}, "negative", "requests[1]", "think_time"),
    ({"t": 3.0, "in": 64, "out": 1, "hash_ids": [1], "api_time": "x"}, "not_a_number", "requests[1]", "api_time"),
    ({"t": 3.0, "type": "z", "in": 64, "out": 1, "hash_ids": [1]}, "unknown_type", "requests[1]", "type"),
    ({"t": 0.5, "in": 64, "out": 1, "hash_ids": [1]}, "out_of_order", "requests[1]", "t"),
    ({"t": 3.0, "in": 128, "out": 1, "hash_ids": [9, 1]}, "two_parents", "requests[1]", "hash_ids[1]"),
    ("a request", "not_json", "requests[1]", ""),
    ({"t": 3.0, "type": "subagent"}, "missing_field", "requests[1]", "requests"),
    ({"t": 3.0, "type": "subagent", "requests": {}}, "not_a_list", "requests[1]", "requests"),
    (
        {"t": 3.0, "type": "subagent", "requests": [{"t": 3.0, "in": 0, "out": 1}]},
        "empty_prompt",
        "requests[1].requests[0]",
        "in",
    ),
]


@pytest.mark.parametrize(("bad", "reason", "where", "field"), BAD, ids=lambda value: str(value)[:30])
def test_a_bad_request_is_named_by_file_line_entry_and_field(tmp_path, bad, reason, where, field):
    path = write(tmp_path / "c.jsonl", document([request(0)]), document([request(1), bad, request(5)], "two"))
    with pytest.raises(InputError) as refusal:
        list(open_trace(path))
    named = f"{path}:2: {where}:" + (f" field '{field}'" if field else "")
    assert str(refusal.value).startswith(named)
    trace = open_trace(path, on_bad_row="skip")
    assert len(list(trace)) == 3
    assert {name: rows.num_rows for name, rows in trace.info.rows_skipped.items()} == {reason: 1}


BAD_DOCUMENTS = [
    ('{"id": "x", "block_size": 64, "requests": [{"t": 0', "not_json", ""),
    ('["x"]', "not_json", ""),
    (json.dumps({"id": "x", "block_size": 64}), "missing_field", "requests"),
    (json.dumps({"block_size": 64, "requests": {}}), "not_a_list", "requests"),
    (json.dumps(document([request(0)], hash_id_scope="world")), "unknown_scope", "hash_id_scope"),
    (json.dumps(document([request(0)], block_size="64")), "not_a_number", "block_size"),
    (json.dumps({"requests": [request(0)]}), "missing_field", "block_size"),
]


@pytest.mark.parametrize(("bad", "reason", "field"), BAD_DOCUMENTS, ids=lambda value: str(value)[:30])
def test_a_bad_document_is_named_and_the_others_are_read(tmp_path, bad, reason, field):
    path = tmp_path / "c.jsonl"
    path.write_text("\n".join([json.dumps(document([request(0)])), bad, json.dumps(document([request(1)], "three"))]))
    with pytest.raises(InputError) as refusal:
        list(open_trace(path))
    assert str(refusal.value).startswith(f"{path}:2:" + (f" field '{field}'" if field else ""))
    trace = open_trace(path, on_bad_row="skip")
    assert [each.turn.session for each in trace] == ["one", "three"]
    assert {name: rows.num_rows for name, rows in trace.info.rows_skipped.items()} == {reason: 1}


def test_conversations_of_another_block_size_are_refused(tmp_path):
    path = write(tmp_path / "c.jsonl", document([request(0)]), document([request(0)], block_size=16))
    with pytest.raises(InputError, match=r"c\.jsonl:2: field 'block_size' is 16, but ids of this trace stand for 64"):
        list(open_trace(path, on_bad_row="skip"))


def test_a_folder_without_conversations_is_an_error(tmp_path):
    with pytest.raises(InputError, match=r"Is a directory, and no \.json or \.jsonl file"):
        open_trace(tmp_path)


def test_the_public_conversations_reuse_as_an_independent_count_says():
    if not TRACES or not (Path(TRACES) / "agentic").exists():
        pytest.skip("KVLEDGER_TRACES names no directory with public coding-assistant conversations")
    folder = Path(TRACES) / "agentic"
    num_blocks = num_hits = 0
    for path in sorted(folder.iterdir()):
        seen: set[int] = set()
        for each in json.loads(gzip.decompress(path.read_bytes()))["requests"]:
            ids = each["hash_ids"]
            num_blocks += len(ids)
            num_hits += next((i for i, hash_id in enumerate(ids) if hash_id not in seen), len(ids))
            seen.update(ids)
    prompts = read_prompt_blocks(open_trace(folder))
    assert prompts.num_requests == 751
    assert (prompts.num_block_events, lru_curve(prompts).infinite.hit_blocks) == (num_blocks, num_hits)
