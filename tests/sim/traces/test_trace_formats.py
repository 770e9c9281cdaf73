"""Formats by rows: what each reader makes of its units, its sessions and its ids, and how a file is recognised."""

import json
from pathlib import Path

import pytest
from kvledger.core.errors import InputError
from kvledger.sim.cache.lru_curve import lru_curve
from kvledger.sim.cache.prompt_blocks import read_prompt_blocks
from kvledger.sim.traces import open_trace, trace_formats
from kvledger.sim.traces.format import TraceFormat
from kvledger.sim.traces.lines import read_lines

BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45.5,ChatGPT,1087,230,1317,Conversation log
"""
BURSTGPT_SESSIONS = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
0,a,2.5,ChatGPT,10,5,15,Conversation log
1,b,3,ChatGPT,20,5,25,Conversation log
10,a,4,ChatGPT,30,5,35,Conversation log
11,,1,ChatGPT,7,5,12,API log
"""
VIDUR = "arrived_at,num_prefill_tokens,num_decode_tokens\n0.0,591,140\n0.125,547,248\n"
VIDUR_SESSIONS = "request_id,arrived_at,num_prefill_tokens,num_decode_tokens,session_id\n1,0,32,8,7\n2,1.5,16,4,7\n"
QWEN = [
    {"chat_id": 5, "parent_chat_id": -1, "timestamp": 1.5, "input_length": 40, "output_length": 3, "turn": 1},
    {"chat_id": 9, "parent_chat_id": 5, "timestamp": 61.25, "input_length": 70, "output_length": 4, "turn": 2},
]
QWEN[0] |= {"type": "text", "hash_ids": [10, 11, 12]}
QWEN[1] |= {"type": "text", "hash_ids": [10, 11, 13, 14, 15]}


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "trace.txt"
    path.write_text(text)
    return path


def jsonl(tmp_path: Path, *rows: dict) -> Path:
    return write(tmp_path, "".join(json.dumps(row) + "\n" for row in rows))


def lengths(trace) -> list[tuple[float, int, int]]:
    return [(request.arrival_s, request.input_length, request.output_length) for request in trace]


def test_burstgpt_timestamps_are_seconds_and_claim_no_reuse(tmp_path):
    trace = open_trace(write(tmp_path, BURSTGPT))
    assert lengths(trace) == [(0.0, 472, 18), (40.5, 1087, 230)]
    assert (trace.info.format, trace.info.timestamp_unit) == ("burstgpt", "s")
    assert not trace.info.claims_reuse
    assert not trace.info.records_think_times
    assert "fields not used: Log Type, Model" in trace.info.notes()


def test_burstgpt_sessions_wait_for_the_answer_and_think(tmp_path):
    trace = open_trace(write(tmp_path, BURSTGPT_SESSIONS))
    first, other, second, alone = trace
    assert trace.info.records_think_times
    assert (first.turn.session, first.turn.number, first.turn.waits_for) == ("a", 1, ())
    assert (second.turn.session, second.turn.number, second.turn.waits_for) == ("a", 2, (first.place,))
    assert second.turn.think_s == 7.5
    assert second.turn.answered_s == 4.0
    assert other.turn.session == "b"
    assert alone.turn is None


def test_vidur_arrives_in_seconds_with_sessions_where_it_has_them(tmp_path):
    assert lengths(open_trace(write(tmp_path, VIDUR))) == [(0.0, 591, 140), (0.125, 547, 248)]
    first, second = open_trace(write(tmp_path, VIDUR_SESSIONS))
    assert second.turn.waits_for == (first.place,)
    assert (second.turn.think_s, second.turn.gap_s) == (None, 1.5), "it records no answers, so no think time is known"


def test_qwen_bailian_counts_seconds_and_blocks_of_16_and_links_chats(tmp_path):
    trace = open_trace(jsonl(tmp_path, *QWEN))
    first, second = trace
    assert (first.arrival_s, second.arrival_s) == (0.0, 59.75)
    assert (first.hash_ids, second.hash_ids) == ((10, 11, 12), (10, 11, 13, 14, 15))
    assert (trace.info.format, trace.info.timestamp_unit, trace.info.trace_block_size) == ("qwen-bailian", "s", 16)
    assert (first.turn.session, second.turn.session) == ("5", "5")
    assert (second.turn.waits_for, second.turn.number) == ((1,), 2)
    assert (second.turn.think_s, second.turn.gap_s) == (None, 59.75)


def test_qwen_bailian_ids_that_name_a_content_alone_are_told_apart_by_prefix(tmp_path):
    row = QWEN[0]
    rows = [
        {**row, "chat_id": 1, "input_length": 48, "hash_ids": [1, 2, 3]},
        {**row, "chat_id": 2, "input_length": 48, "hash_ids": [9, 2, 3]},  # 2 and 3 after another prefix
        {**row, "chat_id": 3, "input_length": 64, "hash_ids": [9, 2, 3, 4]},  # the same other prefix
        {**row, "chat_id": 4, "input_length": 48, "hash_ids": [1, 2, 3]},
    ]
    trace = open_trace(jsonl(tmp_path, *rows))
    ids = [request.hash_ids for request in trace]
    assert ids[0] == ids[3] == (1, 2, 3)
    assert ids[1][0] == 9
    assert not set(ids[1]) & set(ids[0])
    assert ids[2][:3] == ids[1]
    assert trace.info.remarks == {"blocks have an id that was seen after another prefix; they are told apart": 2}
    prompts = read_prompt_blocks(trace)
    assert lru_curve(prompts).infinite.hit_blocks == 3 + 3


@pytest.mark.parametrize("scale", [1, 10**6, 2**50], ids=["dense", "sparse", "hashes"])
def test_ids_are_told_apart_however_sparse_they_are(tmp_path, scale):
    row = {**QWEN[0], "input_length": 32}
    rows = [{**row, "hash_ids": [scale * a, scale * b]} for a, b in ((1, 2), (3, 2), (1, 2), (3, 2))]
    ids = [request.hash_ids for request in open_trace(jsonl(tmp_path, *rows))]
    assert ids[0] == ids[2] == (scale, 2 * scale)
    assert ids[1] == ids[3] != ids[0]
    assert ids[1][1] != 2 * scale


@pytest.mark.parametrize(("unit", "second"), [("s", 1.0), ("ms", 0.001), ("us", 1e-6), ("ns", 1e-9)])
def test_another_unit_can_be_named_and_is_echoed(tmp_path, unit, second):
    path = write(tmp_path, VIDUR.replace("0.125", "1"))
    trace = open_trace(path, timestamp_unit=unit)
    assert [arrival for arrival, _, _ in lengths(trace)] == [0.0, second]
    assert trace.info.timestamp_unit == unit


def test_think_times_are_scaled_with_the_rate(tmp_path):
    _, _, second, _ = open_trace(write(tmp_path, BURSTGPT_SESSIONS), rate_scale=2.0)
    assert (second.arrival_s, second.turn.think_s, second.turn.answered_s, second.turn.gap_s) == (5.0, 3.75, 2.0, 5.0)


def test_a_turn_waits_for_the_last_usable_turn_before_it(tmp_path):
    text = BURSTGPT_SESSIONS.replace("10,a,4,ChatGPT,30,5,35", "10,a,4,ChatGPT,0,5,5") + "20,a,1,G,4,1,5,API log\n"
    trace = open_trace(write(tmp_path, text), on_bad_row="skip")
    last = list(trace)[-1]
    assert (last.turn.waits_for, last.turn.number, last.turn.think_s) == ((2,), 2, 17.5)


def test_a_session_that_was_silent_for_a_day_is_over(tmp_path):
    text = VIDUR_SESSIONS + "3,90000,16,4,7\n"
    *_, last = open_trace(write(tmp_path, text))
    assert (last.turn.waits_for, last.turn.number) == ((), 1)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (BURSTGPT, "burstgpt"),
        (BURSTGPT_SESSIONS, "burstgpt"),
        (VIDUR, "vidur"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,1,1\n", "azure"),
        (json.dumps(QWEN[0]), "qwen-bailian"),
        ('{"timestamp": 0, "input_length": 1, "output_length": 1}', "mooncake"),
        ('{"arrival_s": 0, "input_tokens": 1, "output_tokens": 1}', "log"),
        ('{"timestamp": 0, "unit": "s", "input_tokens": 1, "output_tokens": 1, "hash_ids": [1]}', "log"),
        ('{"id": "a", "block_size": 64, "requests": [{"t": 0, "in": 3, "out": 1, "hash_ids": []}]}', "agentic"),
    ],
)
def test_a_file_is_recognised_by_its_content(tmp_path, text, name):
    assert open_trace(write(tmp_path, text)).info.format == name


def test_every_format_is_named_and_says_what_its_lines_look_like():
    ours = ("azure", "burstgpt", "vidur", "qwen-bailian", "agentic", "sharegpt", "log", "mooncake")
    assert trace_formats.names() == ours
    for each in trace_formats:
        assert each.title
        assert each.first_line


def test_a_format_that_is_added_is_found_by_its_content_before_formats_that_accept_more(tmp_path):
    class TabSeparated(TraceFormat):
        title, timestamp_unit, units_per_second = "tab-separated", "s", 1
        first_line = "arrival<TAB>input_length: prompt<TAB>output"

        def matches(self, lines):
            return lines[0].count(b"\t") == 2

        def read_rows(self, source):
            for place, line in read_lines(source.path):
                when, num_input, num_output = line.split(b"\t")
                yield place, float(when), int(num_input.split()[-1]), int(num_output), None, None, 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace_formats, "_entries", {**trace_formats._entries, "tabs": TabSeparated})
        trace = open_trace(write(tmp_path, '0.5\t"input_length": 10\t4\n2\t"input_length": 0\t4\n'), on_bad_row="skip")
        requests = list(trace)
    assert trace.info.format == "tabs"
    assert [(one.arrival_s, one.input_length, one.output_length) for one in requests] == [(0.0, 10, 4)]
    assert trace.info.rows_skipped["empty_prompt"].num_rows == 1


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (BURSTGPT, {"tokenizer": "chars:4"}, "--tokenizer chars:4 has no effect"),
        (BURSTGPT, {"request_rate": 2.0}, "--request-rate 2 has no effect: BurstGPT CSV records arrivals"),
        (BURSTGPT, {"request_rate": 0.0}, "--request-rate is 0.0; it must be"),
        (BURSTGPT, {"seed": 3}, "--seed 3 has no effect on a trace file"),
        (BURSTGPT, {"timestamp_unit": "h"}, "--timestamp-unit is 'h'; it is one of s, ms, us, ns"),
        (BURSTGPT, {"trace_block_size": 16}, "--trace-block-size 16 has no effect: BurstGPT CSV carries no hash ids"),
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens\n",
            {"timestamp_unit": "s"},
            "--timestamp-unit s has no effect: Azure LLM inference CSV times are wall-clock dates",
        ),
    ],
)
def test_an_option_without_effect_on_the_format_is_refused(tmp_path, text, options, message):
    with pytest.raises(InputError, match=message):
        open_trace(write(tmp_path, text), **options)


def test_several_files_of_a_format_of_one_file_are_refused(tmp_path):
    path = write(tmp_path, VIDUR)
    with pytest.raises(InputError, match="Vidur CSV is one file a trace; 2 were given"):
        open_trace([path, path])
    with pytest.raises(InputError, match="no trace file was given"):
        open_trace([])
