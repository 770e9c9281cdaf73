"""Reading public trace formats: units, windows, line endings, compression, and what a pass reports."""

import gzip
import json
import os
import re
import tracemalloc
from pathlib import Path

import pytest
from kvledger.core.errors import InputError
from kvledger.sim.traces import Trace, TraceRequest, open_trace, trace_formats

MOONCAKE_ROWS = [
    {"timestamp": 0, "input_length": 1030, "output_length": 7, "hash_ids": [0, 1, 2]},
    {"timestamp": 27, "input_length": 512, "output_length": 1, "hash_ids": [0]},
    {"timestamp": 3000, "input_length": 1025, "output_length": 0, "hash_ids": [0, 1, 3]},
]
AZURE_LINES = [
    "TIMESTAMP,ContextTokens,GeneratedTokens",
    "2023-11-16 18:17:03.9799600,4808,10",
    "2023-11-16 18:17:04.0319601,3180,8",
]


def jsonl(path: Path, rows=MOONCAKE_ROWS, end: str = "\n", last: str = "\n") -> Path:
    path.write_bytes((end.join(json.dumps(row) for row in rows) + last).encode())
    return path


def public_trace(name: str) -> Path:
    root = os.environ.get("KVLEDGER_TRACES")
    if not root:
        pytest.skip("KVLEDGER_TRACES names no directory of public traces")
    path = Path(root) / name
    if not path.exists():
        pytest.skip(f"{path} is not there")
    return path


def test_mooncake_timestamps_are_milliseconds_and_count_from_the_first_request(tmp_path):
    rows = [{**row, "timestamp": row["timestamp"] + 5000} for row in MOONCAKE_ROWS]
    assert [request.arrival_s for request in open_trace(jsonl(tmp_path / "t.jsonl", rows))] == [0.0, 0.027, 3.0]


def test_a_request_carries_its_lengths_ids_and_line(tmp_path):
    first = next(iter(open_trace(jsonl(tmp_path / "t.jsonl"))))
    assert first == TraceRequest(arrival_s=0.0, input_length=1030, output_length=7, hash_ids=(0, 1, 2), place=1)


@pytest.mark.parametrize(
    ("end", "last"), [("\n", "\n"), ("\r\n", "\r\n"), ("\n", ""), ("\r\n", ""), ("\n\n", "\n\n\n")]
)
def test_line_endings_and_a_missing_last_newline_do_not_matter(tmp_path, end, last):
    requests = list(open_trace(jsonl(tmp_path / "t.jsonl", end=end, last=last)))
    assert [request.input_length for request in requests] == [1030, 512, 1025]


def test_gzip_is_told_by_content_not_by_name(tmp_path):
    plain = jsonl(tmp_path / "plain.gz")
    packed = tmp_path / "packed.jsonl"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert list(open_trace(plain)) == list(open_trace(packed))


def test_a_byte_order_mark_is_not_part_of_the_first_row(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(MOONCAKE_ROWS[0]).encode())
    assert len(list(open_trace(path))) == 1


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_azure_rows_keep_a_hundred_nanoseconds_and_claim_no_reuse(tmp_path, end):
    path = tmp_path / "azure.csv"
    path.write_bytes(end.join(AZURE_LINES).encode())
    trace = open_trace(path)
    requests = list(trace)
    assert requests[0] == TraceRequest(0.0, 4808, 10, None, 2)
    assert requests[1].arrival_s == 0.0520001
    assert trace.info.format == "azure"
    assert not trace.info.claims_reuse
    assert "no reuse can be claimed" in trace.info.notes()[0]


@pytest.mark.parametrize(
    ("first", "second", "seconds"),
    [
        ("2024-05-10 00:00:00.009930+00:00", "2024-05-10 00:00:01+00:00", 0.99007),
        ("2024-05-10T23:59:59.5Z", "2024-05-11T02:00:00.5+02:00", 1.0),
        ("2024-02-28 23:59:59", "2024-02-29 00:00:00.000000001", 1.000000001),
    ],
)
def test_azure_2024_dates_carry_zones_and_fewer_decimals(tmp_path, first, second, seconds):
    path = tmp_path / "azure.csv"
    path.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{first},1,1\n{second},1,1\n")
    assert [request.arrival_s for request in open_trace(path)] == [0.0, seconds]


def test_azure_columns_may_stand_in_any_order_beside_others(tmp_path):
    path = tmp_path / "azure.csv"
    path.write_text("Region,GeneratedTokens,TIMESTAMP,ContextTokens\neu,10,2023-11-16 18:17:03,4808\n")
    trace = open_trace(path)
    assert list(trace) == [TraceRequest(0.0, 4808, 10, None, 2)]
    assert trace.info.notes()[-1] == "fields not used: Region"


def test_the_window_is_cut_rebased_and_echoed(tmp_path):
    rows = [{"timestamp": 1000 * i, "input_length": 5, "output_length": 1, "hash_ids": [i]} for i in range(10)]
    trace = open_trace(jsonl(tmp_path / "t.jsonl", rows), skip_first=3, limit=4)
    assert [request.arrival_s for request in trace] == [0.0, 1.0, 2.0, 3.0]
    assert trace.info.window_as_dict() == {
        "skip_first": 3,
        "limit": 4,
        "first_place": 4,
        "last_place": 7,
        "start_s": 3.0,
        "end_s": 6.0,
        "duration_s": 3.0,
        "num_requests": 4,
    }


def test_a_rate_scale_of_two_halves_the_time_between_arrivals(tmp_path):
    trace = open_trace(jsonl(tmp_path / "t.jsonl"), rate_scale=2.0)
    assert [request.arrival_s for request in trace] == [0.0, 0.0135, 1.5]
    assert trace.info.window.duration_s == 3.0, "the window stays on the trace's own clock"


def test_every_iteration_is_a_fresh_pass_with_a_fresh_tally(tmp_path):
    trace = open_trace(jsonl(tmp_path / "t.jsonl"))
    assert list(trace) == list(trace)
    assert (trace.info.num_requests, trace.info.input_tokens, trace.info.output_tokens) == (3, 2567, 8)


def test_a_pass_that_stops_early_tallies_what_it_read(tmp_path):
    trace = open_trace(jsonl(tmp_path / "t.jsonl"))
    next(iter(trace))
    assert trace.info.num_requests == 1


def test_nothing_behind_the_window_is_read_or_told(tmp_path):
    rows = [MOONCAKE_ROWS[0], {**MOONCAKE_ROWS[1], "timestamp": -1}, MOONCAKE_ROWS[1], {"tail": 1}]
    trace = open_trace(jsonl(tmp_path / "t.jsonl", rows), limit=2, on_bad_row="skip")
    assert [request.place for request in trace] == [1, 3]
    assert (trace.info.num_rows_skipped, trace.info.unused_fields) == (1, set())


def test_rows_ahead_of_a_damaged_place_are_given_before_the_error(tmp_path):
    rows = [{"timestamp": i, "input_length": 5, "output_length": 1, "hash_ids": [i]} for i in range(2_000)]
    whole = jsonl(tmp_path / "t.jsonl", rows).read_bytes()
    path = tmp_path / "t.gz"
    path.write_bytes(gzip.compress(whole)[:-5_000])
    trace = open_trace(path)
    with pytest.raises(InputError) as refusal:
        list(trace)
    num_given = trace.info.num_requests
    assert f"{path}:{num_given + 1}: the file is damaged or cut off after line {num_given:,}" in str(refusal.value)
    assert num_given > 100


def test_a_row_without_hash_ids_is_a_prompt_nobody_shares_and_this_is_said(tmp_path):
    rows = [{k: v for k, v in MOONCAKE_ROWS[0].items() if k != "hash_ids"}, MOONCAKE_ROWS[1]]
    trace = open_trace(jsonl(tmp_path / "t.jsonl", rows))
    assert [request.hash_ids for request in trace] == [None, (0,)]
    assert trace.info.notes() == ["1 of 2 requests carry no hash_ids: their prompts are taken as unique (no reuse)"]


def test_fields_that_are_not_read_are_named(tmp_path):
    trace = open_trace(jsonl(tmp_path / "t.jsonl", [{**MOONCAKE_ROWS[0], "session": 3, "priority": 1}]))
    list(trace)
    assert trace.info.notes() == ["fields not used: priority, session"]


def test_the_format_can_be_named(tmp_path):
    assert len(list(open_trace(jsonl(tmp_path / "t.jsonl"), format="mooncake"))) == 3
    with pytest.raises(InputError, match=r"t\.jsonl:1: is not the header of Azure"):
        open_trace(tmp_path / "t.jsonl", format="azure")
    with pytest.raises(
        InputError,
        match=re.escape(f"unknown trace format 'parquet'; known: {', '.join(trace_formats.names())}"),
    ):
        open_trace(tmp_path / "t.jsonl", format="parquet")


def test_reading_holds_a_few_bytes_an_id_and_no_rows(tmp_path):
    num_rows, ids_a_row = 2_000, 20
    path = tmp_path / "t.jsonl"
    with path.open("w") as file:
        for i in range(num_rows):
            ids = list(range(i * ids_a_row, (i + 1) * ids_a_row))
            file.write(
                json.dumps({"timestamp": i, "input_length": 512 * 20, "output_length": 1, "hash_ids": ids}) + "\n"
            )
    tracemalloc.start()
    try:
        assert sum(1 for _ in open_trace(path)) == num_rows
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # 8 bytes an id for its parent, twice while that table grows; the rows themselves would take over 60
    assert peak_bytes < 200_000 + 24 * num_rows * ids_a_row


def test_a_file_trace_satisfies_the_protocol(tmp_path):
    assert isinstance(open_trace(jsonl(tmp_path / "t.jsonl")), Trace)


def test_the_public_conversation_trace_is_read_whole():
    trace = open_trace(public_trace("mooncake/conversation_trace.jsonl.gz"))
    arrivals = {request.arrival_s for request in trace}
    assert len(arrivals) == 1180
    info = trace.info
    assert (info.num_requests, info.input_tokens, info.output_tokens) == (12_031, 144_793_823, 4_122_048)
    assert (info.window.end_s, info.notes()) == (3536.999, [])


def test_the_public_azure_code_trace_is_read_whole():
    trace = open_trace(public_trace("azure/AzureLLMInferenceTrace_code.csv.gz"))
    assert sum(1 for _ in trace) == 8_819
    assert round(trace.info.input_tokens / 8_819, 1) == 2047.8
    assert round(trace.info.output_tokens / 8_819, 1) == 27.9
