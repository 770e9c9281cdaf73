"""Dirty input of each kind, for each reader: named by file, line and field; refused, or skipped and counted."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from kvledger.core.errors import InputError
from kvledger.sim.traces import open_trace

BURSTGPT_HEADER = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type"
BURSTGPT_GOOD = "5,s,2,ChatGPT,20,5,25,API log"
VIDUR_HEADER = "arrived_at,num_prefill_tokens,num_decode_tokens,session_id"
VIDUR_GOOD = "5,20,5,a"
QWEN_GOOD = {
    "chat_id": 7,
    "parent_chat_id": -1,
    "timestamp": 5.0,
    "input_length": 20,
    "output_length": 5,
    "type": "text",
    "turn": 1,
    "hash_ids": [0, 1],
}
LOG_GOOD = {"arrival_s": 5.0, "input_tokens": 20, "output_tokens": 5, "hash_ids": [0, 1], "session": "a"}

CSV_FAULTS: list[tuple[str, dict[int, str], str, str]] = [
    ("empty-time", {0: ""}, "missing_field", "time"),
    ("word-for-a-time", {0: "soon"}, "not_a_number", "time"),
    ("negative-time", {0: "-1"}, "negative", "time"),
    ("nan-time", {0: "nan"}, "not_finite", "time"),
    ("time-in-nanoseconds", {0: "1.7e18"}, "huge", "time"),
    ("earlier-than-the-row-before", {0: "4"}, "out_of_order", "time"),
    ("empty-prompt-cell", {1: ""}, "missing_field", "prompt"),
    ("no-prompt", {1: "0"}, "empty_prompt", "prompt"),
    ("negative-prompt", {1: "-3"}, "negative", "prompt"),
    ("fraction-of-a-token", {1: "2.5"}, "not_whole", "prompt"),
    ("huge-prompt", {1: "1" + "0" * 12}, "huge", "prompt"),
    ("word-for-an-answer", {2: "many"}, "not_a_number", "answer"),
    ("infinite-answer", {2: "inf"}, "not_finite", "answer"),
]
FIELDS = {
    "burstgpt": {"time": "Timestamp", "prompt": "Request tokens", "answer": "Response tokens"},
    "vidur": {"time": "arrived_at", "prompt": "num_prefill_tokens", "answer": "num_decode_tokens"},
}


def burstgpt_row(changes: dict[int, str]) -> str:
    when, prompt, answer = (changes.get(i, good) for i, good in enumerate(("5", "20", "5")))
    total = str(int(prompt) + 5) if prompt.isdigit() else "25"
    return f"{when},s,2,ChatGPT,{prompt},{answer},{total},API log"


def vidur_row(changes: dict[int, str]) -> str:
    return ",".join((*(changes.get(i, good) for i, good in enumerate(("5", "20", "5"))), "a"))


def csv_cases():
    rows: dict[str, Callable[[dict[int, str]], str]] = {"burstgpt": burstgpt_row, "vidur": vidur_row}
    for format_name, row in rows.items():
        for fault, changes, reason, field in CSV_FAULTS:
            yield pytest.param(
                format_name, row(changes), reason, FIELDS[format_name][field], id=f"{format_name}-{fault}"
            )
    yield pytest.param("burstgpt", "5,s,2,ChatGPT,20", "missing_field", "", id="burstgpt-cut-off")
    yield pytest.param("burstgpt", "5,s,2,G,20,0,20,log", "empty_answer", "Response tokens", id="burstgpt-no-answer")
    yield pytest.param("burstgpt", "5,s,2,G,0,0,0,log", "empty_prompt", "Request tokens", id="burstgpt-no-tokens")
    yield pytest.param("burstgpt", "5,s,2,G,20,5,26,log", "total_mismatch", "Total tokens", id="burstgpt-wrong-total")
    yield pytest.param("burstgpt", "5,s,-2,G,20,5,25,log", "negative", "Elapsed time", id="burstgpt-negative-elapsed")
    yield pytest.param("burstgpt", "5,s,x,G,20,5,25,log", "not_a_number", "Elapsed time", id="burstgpt-odd-elapsed")
    yield pytest.param("vidur", "5,20", "missing_field", "", id="vidur-cut-off")
    yield pytest.param("vidur", '5,20,5,"a', "broken_quote", "", id="vidur-open-quote")
    yield pytest.param("vidur", '5,20,5,"' + "a" * 200_000, "broken_quote", "", id="vidur-endless-quote")


def qwen(**changes) -> str:
    return json.dumps({**QWEN_GOOD, **changes})


def log(**changes) -> str:
    return json.dumps({**LOG_GOOD, **changes})


def without(row: dict, *fields: str) -> str:
    return json.dumps({name: value for name, value in row.items() if name not in fields})


JSON_CASES = [
    pytest.param("qwen-bailian", '{"chat_id": 7, "parent', "not_json", "", id="qwen-cut-off"),
    pytest.param("qwen-bailian", "[7]", "not_json", "", id="qwen-not-an-object"),
    pytest.param("qwen-bailian", without(QWEN_GOOD, "chat_id"), "missing_field", "chat_id", id="qwen-no-chat"),
    pytest.param("qwen-bailian", without(QWEN_GOOD, "parent_chat_id"), "missing_field", "parent_chat_id", id="qwen-np"),
    pytest.param("qwen-bailian", without(QWEN_GOOD, "timestamp"), "missing_field", "timestamp", id="qwen-no-time"),
    pytest.param("qwen-bailian", without(QWEN_GOOD, "turn"), "missing_field", "turn", id="qwen-no-turn"),
    pytest.param("qwen-bailian", qwen(chat_id="7"), "not_a_number", "chat_id", id="qwen-chat-as-text"),
    pytest.param("qwen-bailian", qwen(turn=1.5), "not_whole", "turn", id="qwen-half-a-turn"),
    pytest.param("qwen-bailian", qwen(timestamp=-1), "negative", "timestamp", id="qwen-negative-time"),
    pytest.param("qwen-bailian", qwen(timestamp=1.7e12), "huge", "timestamp", id="qwen-milliseconds"),
    pytest.param("qwen-bailian", qwen(timestamp=4), "out_of_order", "timestamp", id="qwen-earlier"),
    pytest.param("qwen-bailian", qwen(input_length=0, hash_ids=[]), "empty_prompt", "input_length", id="qwen-empty"),
    pytest.param("qwen-bailian", qwen(output_length=None), "not_a_number", "output_length", id="qwen-null-answer"),
    pytest.param("qwen-bailian", qwen(hash_ids=[0]), "hash_ids_mismatch", "hash_ids", id="qwen-too-few-ids"),
    pytest.param("qwen-bailian", qwen(hash_ids=[0, "1"]), "not_a_number", "hash_ids[1]", id="qwen-id-as-text"),
    pytest.param("qwen-bailian", qwen(hash_ids=[0, 2**62]), "huge", "hash_ids", id="qwen-huge-id"),
    pytest.param("log", '{"arrival_s": 5', "not_json", "", id="log-cut-off"),
    pytest.param("log", without(LOG_GOOD, "arrival_s"), "missing_field", "arrival_s", id="log-no-time"),
    pytest.param("log", without(LOG_GOOD, "input_tokens"), "missing_field", "input_tokens", id="log-no-input"),
    pytest.param("log", without(LOG_GOOD, "output_tokens"), "missing_field", "output_tokens", id="log-no-output"),
    pytest.param("log", log(arrival_s=float("nan")), "not_finite", "arrival_s", id="log-nan-time"),
    pytest.param("log", log(arrival_s=1.7e12), "huge", "arrival_s", id="log-milliseconds"),
    pytest.param("log", log(arrival_s=4), "out_of_order", "arrival_s", id="log-earlier"),
    pytest.param("log", log(input_tokens=-1), "negative", "input_tokens", id="log-negative-input"),
    pytest.param("log", log(input_tokens=0, hash_ids=[]), "empty_prompt", "input_tokens", id="log-empty"),
    pytest.param("log", log(output_tokens="5"), "not_a_number", "output_tokens", id="log-output-as-text"),
    pytest.param("log", log(hash_ids=[0]), "hash_ids_mismatch", "hash_ids", id="log-too-few-ids"),
    pytest.param("log", log(hash_ids=[1, 0]), "two_parents", "hash_ids[0]", id="log-ids-in-another-order"),
    pytest.param("log", log(session=[1]), "not_a_name", "session", id="log-session-as-list"),
    pytest.param("log", log(duration_s=-1), "negative", "duration_s", id="log-negative-duration"),
    pytest.param("log", log(think_time_s="2"), "not_a_number", "think_time_s", id="log-think-time-as-text"),
    pytest.param("log", log(duration_s=10**400), "huge", "duration_s", id="log-duration-of-400-digits"),
    pytest.param("log", log(cache_salt=""), "empty_salt", "cache_salt", id="log-empty-salt"),
    pytest.param("log", log(cache_salt=3), "not_text", "cache_salt", id="log-salt-as-number"),
    pytest.param("log", log(priority=1.5), "not_a_number", "priority", id="log-half-a-priority"),
    pytest.param(
        "log",
        json.dumps({"arrival_s": 5, "prompt": "hello", "output_tokens": 1}),
        "no_tokenizer",
        "prompt",
        id="log-text",
    ),
    pytest.param(
        "log",
        json.dumps({"timestamp": 5, "input_tokens": 9, "output_tokens": 1}),
        "no_unit",
        "timestamp",
        id="log-no-unit",
    ),
    pytest.param(
        "log",
        json.dumps({"timestamp": 5, "unit": "min", "input_tokens": 9, "output_tokens": 1}),
        "unknown_unit",
        "unit",
        id="log-unknown-unit",
    ),
]


def lines_around(format_name: str, bad: str) -> list[str]:
    """The bad row on line 3, with good ones before and after."""
    if format_name == "burstgpt":
        return [BURSTGPT_HEADER, BURSTGPT_GOOD, bad, BURSTGPT_GOOD.replace("5,", "9,", 1)]
    if format_name == "vidur":
        return [VIDUR_HEADER, VIDUR_GOOD, bad, VIDUR_GOOD.replace("5,", "9,", 1)]
    if format_name == "qwen-bailian":
        return [qwen(), "", bad, qwen(timestamp=9)]
    return [log(), "", bad, log(arrival_s=9)]


def opened(tmp_path: Path, format_name: str, bad: str, **options):
    path = tmp_path / "trace.txt"
    path.write_text("\n".join(lines_around(format_name, bad)))
    block_size = 16 if format_name == "log" else None
    return path, open_trace(path, format=format_name, trace_block_size=block_size, **options)


CASES = [*csv_cases(), *JSON_CASES]


@pytest.mark.parametrize(("format_name", "bad", "reason", "field"), CASES)
def test_a_bad_row_is_refused_with_its_file_line_and_field(tmp_path, format_name, bad, reason, field):
    path, trace = opened(tmp_path, format_name, bad)
    with pytest.raises(InputError) as refusal:
        list(trace)
    assert str(refusal.value).startswith(f"{path}:3: field '{field}'" if field else f"{path}:3:")
    assert "--on-bad-row skip" in str(refusal.value)


@pytest.mark.parametrize(("format_name", "bad", "reason", "field"), CASES)
def test_a_bad_row_is_skipped_and_counted_when_asked(tmp_path, format_name, bad, reason, field):
    _, trace = opened(tmp_path, format_name, bad, on_bad_row="skip")
    assert len(list(trace)) == 2, "the rows before and after are kept"
    assert {name: (rows.num_rows, rows.first_place) for name, rows in trace.info.rows_skipped.items()} == {
        reason: (1, 3)
    }


def test_hash_ids_in_a_log_need_a_block_size(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text(log())
    with pytest.raises(InputError, match=r"log\.jsonl:1: field 'hash_ids' .* give --trace-block-size"):
        list(open_trace(path))
    with pytest.raises(InputError, match=r"log\.jsonl:1: field 'hash_ids' .* give --trace-block-size"):
        list(open_trace(path, tokenizer="chars:4"))
    assert next(iter(open_trace(path, trace_block_size=16))).hash_ids == (0, 1)


def test_burstgpt_zero_rows_are_counted_by_what_is_zero(tmp_path):
    path = tmp_path / "burst.csv"
    header = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
    rows = ["1,G,0,0,0,API log", "2,G,10,0,10,API log", "3,G,10,0,10,API log", "4,G,10,2,12,API log"]
    path.write_text("\n".join([header, *rows]))
    trace = open_trace(path, on_bad_row="skip")
    assert [request.arrival_s for request in trace] == [0.0]
    assert {name: rows.num_rows for name, rows in trace.info.rows_skipped.items()} == {
        "empty_prompt": 1,
        "empty_answer": 2,
    }
    assert any("2 rows left out (empty_answer)" in note for note in trace.info.notes())


@pytest.mark.parametrize("format_name", ["burstgpt", "vidur"])
def test_a_header_of_another_format_is_refused_when_one_is_named(tmp_path, format_name):
    path = tmp_path / "trace.csv"
    path.write_text("a,b,c\n1,2,3\n")
    with pytest.raises(InputError, match=r"trace\.csv:1: is not the header of"):
        open_trace(path, format=format_name)
