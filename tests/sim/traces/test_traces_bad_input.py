"""Every kind of bad row is named by file, line and field; refused, or skipped and counted by reason."""

import gzip
import json
import os

import pytest
from kvledger.core.errors import InputError
from kvledger.sim.traces import open_trace

GOOD = {"timestamp": 5, "input_length": 20, "output_length": 5, "hash_ids": [0, 1]}
HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"


def without(field):
    return json.dumps({k: v for k, v in GOOD.items() if k != field})


def with_(**changes):
    return json.dumps({**GOOD, **changes})


BAD_JSON_ROWS = [
    pytest.param('{"timestamp": 5, "input_length": 20,', "not_json", "", id="cut-off"),
    pytest.param("timestamp=5 input_length=20", "not_json", "", id="not-json"),
    pytest.param("[1, 2, 3]", "not_json", "", id="not-an-object"),
    pytest.param("[" * 100_000, "not_json", "", id="nested-too-deeply"),
    pytest.param('{"timestamp": 5, "input_length": 1' + "0" * 5000 + "}", "not_json", "", id="a-number-of-5000-digits"),
    pytest.param(without("timestamp"), "missing_field", "timestamp", id="no-timestamp"),
    pytest.param(without("input_length"), "missing_field", "input_length", id="no-input-length"),
    pytest.param(without("output_length"), "missing_field", "output_length", id="no-output-length"),
    pytest.param(with_(timestamp=-1), "negative", "timestamp", id="negative-timestamp"),
    pytest.param(with_(input_length=-20), "negative", "input_length", id="negative-length"),
    pytest.param(with_(hash_ids=[0, -1]), "negative", "hash_ids[1]", id="negative-id"),
    pytest.param(with_(timestamp=float("nan")), "not_finite", "timestamp", id="nan-timestamp"),
    pytest.param(with_(output_length=float("inf")), "not_finite", "output_length", id="infinite-length"),
    pytest.param(with_(hash_ids=[0, float("nan")]), "not_finite", "hash_ids[1]", id="nan-id"),
    pytest.param(with_(input_length=10**30), "huge", "input_length", id="huge-length"),
    pytest.param(with_(output_length=1e300), "huge", "output_length", id="huge-float-length"),
    pytest.param(with_(timestamp=1.7e18), "huge", "timestamp", id="timestamp-in-nanoseconds"),
    pytest.param(with_(hash_ids=[0, 2**63]), "huge", "hash_ids[1]", id="huge-id"),
    pytest.param(with_(input_length=20.5), "not_whole", "input_length", id="fraction-of-a-token"),
    pytest.param(with_(hash_ids=[0, 1.5]), "not_whole", "hash_ids[1]", id="fraction-of-an-id"),
    pytest.param(with_(input_length="20"), "not_a_number", "input_length", id="length-as-text"),
    pytest.param(with_(output_length=True), "not_a_number", "output_length", id="length-as-truth"),
    pytest.param(with_(timestamp=None), "not_a_number", "timestamp", id="null-timestamp"),
    pytest.param(with_(hash_ids="01"), "not_a_list", "hash_ids", id="ids-as-text"),
    pytest.param(with_(input_length=0, hash_ids=[]), "empty_prompt", "input_length", id="empty-prompt"),
    pytest.param(with_(hash_ids=[0]), "hash_ids_mismatch", "hash_ids", id="too-few-ids"),
    pytest.param(with_(hash_ids=[0, 1, 2]), "hash_ids_mismatch", "hash_ids", id="too-many-ids"),
    pytest.param(with_(hash_ids=[]), "hash_ids_mismatch", "hash_ids", id="no-ids"),
    pytest.param(with_(hash_ids=[1, 0]), "two_parents", "hash_ids[0]", id="ids-in-another-order"),
    pytest.param(with_(hash_ids=[7, 1]), "two_parents", "hash_ids[1]", id="another-parent"),
    pytest.param(with_(hash_ids=[7, 7]), "two_parents", "hash_ids[1]", id="its-own-parent"),
    pytest.param(with_(timestamp=4), "out_of_order", "timestamp", id="earlier-than-the-row-before"),
]

BAD_CSV_ROWS = [
    pytest.param("2023-11-16 18:17:05,10", "missing_field", "", id="too-few-cells"),
    pytest.param("2023-11-16 18:17:05,,10", "missing_field", "ContextTokens", id="empty-cell"),
    pytest.param(",10,10", "missing_field", "TIMESTAMP", id="no-date"),
    pytest.param("yesterday,10,10", "not_a_date", "TIMESTAMP", id="not-a-date"),
    pytest.param("2023-02-30 18:17:05,10,10", "not_a_date", "TIMESTAMP", id="no-such-day"),
    pytest.param("2023-11-16 18:17:05,-10,10", "negative", "ContextTokens", id="negative"),
    pytest.param("2023-11-16 18:17:05,10,nan", "not_finite", "GeneratedTokens", id="nan"),
    pytest.param("2023-11-16 18:17:05,1e30,10", "huge", "ContextTokens", id="huge"),
    pytest.param("2023-11-16 18:17:05,10,1.5", "not_whole", "GeneratedTokens", id="fraction"),
    pytest.param("2023-11-16 18:17:05,ten,10", "not_a_number", "ContextTokens", id="word"),
    pytest.param("2023-11-16 18:17:05,0,10", "empty_prompt", "ContextTokens", id="empty-prompt"),
    pytest.param("2023-11-16 18:17:03,10,10", "out_of_order", "TIMESTAMP", id="earlier"),
]


def lines_around(bad, kind):
    if kind == "json":
        return [json.dumps(GOOD), bad, with_(timestamp=9)]
    return [HEADER, "2023-11-16 18:17:04.5,10,10", bad, "2023-11-16 18:17:06.5,10,10"]


CASES = [
    *(pytest.param(*each.values, "json", id=f"json-{each.id}") for each in BAD_JSON_ROWS),
    *(pytest.param(*each.values, "csv", id=f"csv-{each.id}") for each in BAD_CSV_ROWS),
]


def write(tmp_path, lines):
    path = tmp_path / "trace.txt"
    path.write_text("\n".join(lines))
    return path, (16 if lines[0] != HEADER else None)


@pytest.mark.parametrize(("bad", "reason", "field", "kind"), CASES)
def test_a_bad_row_is_refused_with_its_file_line_and_field(tmp_path, bad, reason, field, kind):
    path, block_size = write(tmp_path, lines_around(bad, kind))
    with pytest.raises(InputError) as refusal:
        list(open_trace(path, trace_block_size=block_size))
    place = 2 if kind == "json" else 3
    assert str(refusal.value).startswith(f"{path}:{place}: field '{field}'" if field else f"{path}:{place}:")
    assert "--on-bad-row skip" in str(refusal.value)


@pytest.mark.parametrize(("bad", "reason", "field", "kind"), CASES)
def test_a_bad_row_is_skipped_and_counted_when_asked(tmp_path, bad, reason, field, kind):
    path, block_size = write(tmp_path, lines_around(bad, kind))
    trace = open_trace(path, trace_block_size=block_size, on_bad_row="skip")
    assert len(list(trace)) == 2, "the rows before and after are kept"
    place = 2 if kind == "json" else 3
    assert {reason: (1, place)} == {
        name: (rows.num_rows, rows.first_place) for name, rows in trace.info.rows_skipped.items()
    }
    assert any(f"1 row left out ({reason})" in note for note in trace.info.notes())


def test_the_ids_of_a_skipped_row_are_forgotten(tmp_path):
    rows = [
        with_(input_length=40, hash_ids=[5, 6, 0]),
        with_(input_length=60, hash_ids=[5, 9, 8, 6]),  # 6 follows 5 above; 9 and 8 are new here and must not stay
        with_(input_length=40, hash_ids=[9, 8, 1]),
    ]
    path, block_size = write(tmp_path, rows)
    trace = open_trace(path, trace_block_size=block_size, on_bad_row="skip")
    assert [request.place for request in trace] == [1, 3]


@pytest.mark.parametrize("scale", [1, 10**6, 2**50], ids=["dense", "sparse", "hashes"])
def test_two_parents_are_found_however_sparse_the_ids_are(tmp_path, scale):
    rows = [
        with_(hash_ids=[scale * 1, scale * 2]),
        with_(hash_ids=[scale * 3, scale * 4]),
        with_(hash_ids=[scale * 3, scale * 2]),
    ]
    path, block_size = write(tmp_path, rows)
    with pytest.raises(InputError, match=rf":3: field 'hash_ids\[1\]' id {scale * 2} follows id {scale * 3} here"):
        list(open_trace(path, trace_block_size=block_size))


def test_many_bad_rows_are_counted_by_reason_with_one_example_each(tmp_path):
    path, block_size = write(tmp_path, [json.dumps(GOOD), *["oops"] * 40, *[with_(input_length=-1)] * 3])
    trace = open_trace(path, trace_block_size=block_size, on_bad_row="skip")
    list(trace)
    assert {name: rows.num_rows for name, rows in trace.info.rows_skipped.items()} == {"not_json": 40, "negative": 3}
    assert trace.info.num_rows_skipped == 43


def test_whole_numbers_written_as_floats_are_read(tmp_path):
    path, block_size = write(tmp_path, [with_(input_length=20.0, timestamp=0.5)])
    assert next(iter(open_trace(path, trace_block_size=block_size))).input_length == 20


def test_a_first_row_that_is_bad_does_not_hide_the_format(tmp_path):
    path, block_size = write(tmp_path, ["garbage", json.dumps(GOOD)])
    with pytest.raises(InputError, match=r"trace\.txt:1: is not JSON"):
        list(open_trace(path, trace_block_size=block_size))
    assert len(list(open_trace(path, trace_block_size=block_size, on_bad_row="skip"))) == 1


@pytest.mark.parametrize(
    "content", [b"", b"\n\n", gzip.compress(b"")], ids=["nothing", "blank-lines", "gzip-of-nothing"]
)
def test_an_empty_file_is_an_error_that_says_so(tmp_path, content):
    (tmp_path / "t").write_bytes(content)
    with pytest.raises(InputError, match="the file is empty"):
        open_trace(tmp_path / "t")


def test_a_header_alone_holds_no_requests(tmp_path):
    path, _ = write(tmp_path, [HEADER])
    with pytest.raises(InputError, match="holds no requests"):
        list(open_trace(path))


def test_a_trace_of_bad_rows_only_is_an_error_even_when_they_are_skipped(tmp_path):
    path, block_size = write(tmp_path, [with_(input_length=-1)] * 3)
    with pytest.raises(InputError, match="every one of its 3 rows is bad"):
        list(open_trace(path, trace_block_size=block_size, on_bad_row="skip"))


def test_a_window_past_the_end_is_an_error_with_the_trace_s_size(tmp_path):
    path, block_size = write(tmp_path, [json.dumps(GOOD)] * 3)
    with pytest.raises(InputError, match="--skip-first 3 leaves nothing: the trace holds 3 requests"):
        list(open_trace(path, trace_block_size=block_size, skip_first=3))


def test_a_cut_off_gzip_is_an_error_not_a_shorter_trace(tmp_path):
    packed = gzip.compress("\n".join(with_(timestamp=i) for i in range(2000)).encode())
    (tmp_path / "t.gz").write_bytes(packed[: len(packed) // 2])
    with pytest.raises(InputError, match=r"t\.gz:\d+: the file is damaged or cut off"):
        list(open_trace(tmp_path / "t.gz", trace_block_size=16, on_bad_row="skip"))


def test_a_path_that_cannot_be_read_is_an_error(tmp_path):
    with pytest.raises(InputError, match=r"nothing\.jsonl: cannot be read as a trace: No such file"):
        open_trace(tmp_path / "nothing.jsonl")
    with pytest.raises(InputError, match="Is a directory"):
        open_trace(tmp_path)


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may read every file")
def test_a_file_without_permission_is_an_error(tmp_path):
    path, _ = write(tmp_path, [HEADER])
    path.chmod(0)
    with pytest.raises(InputError, match="Permission denied"):
        open_trace(path)


def test_an_unknown_format_lists_the_known_ones(tmp_path):
    path, _ = write(tmp_path, ["a;b;c", "1;2;3"])
    with pytest.raises(
        InputError, match=r"trace\.txt:1: no known trace format .*'a;b;c'.*azure: TIMESTAMP.*mooncake: "
    ):
        open_trace(path)


def test_a_qwen_bailian_trace_is_not_taken_for_mooncake_milliseconds(tmp_path):
    path, _ = write(tmp_path, [with_(chat_id=1, parent_chat_id=-1, turn=1, type="text")])
    assert open_trace(path).info.format == "qwen-bailian"


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("on_bad_row", "ignore"),
        ("skip_first", -1),
        ("limit", 0),
        ("rate_scale", 0.0),
        ("rate_scale", float("nan")),
        ("trace_block_size", 0),
    ],
)
def test_an_option_out_of_range_is_refused_by_its_name(tmp_path, option, value):
    path, _ = write(tmp_path, [json.dumps(GOOD)])
    with pytest.raises(InputError, match=f"--{option.replace('_', '-')} is"):
        open_trace(path, **{option: value})


def test_a_trace_block_size_for_a_trace_without_ids_is_refused_rather_than_ignored(tmp_path):
    path, _ = write(tmp_path, [HEADER, "2023-11-16 18:17:04.5,10,10"])
    with pytest.raises(InputError, match="carries no hash ids"):
        open_trace(path, trace_block_size=512)
