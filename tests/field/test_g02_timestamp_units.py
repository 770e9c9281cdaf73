"""Field report G02: the same fields in another unit. Reports say what was read, and ask where values do not fit."""

import json

import pytest
from kvledger.core.errors import InputError
from kvledger.sim.traces import open_trace

SECONDS = (0, 1.5, 3.25)
SINCE_1970 = (1718000000.5, 1718000002.0, 1718000003.75)
POOL = ("--num-gpu-blocks-override", "4000")
FRACTION = "timestamps have a fraction, finer than the ms in which this format is read"


def trace_file(tmp_path, *timestamps, name="trace.jsonl", **more):
    rows = [{"timestamp": each, "input_length": 256, "output_length": 12, **more} for each in timestamps]
    path = tmp_path / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path, **options):
    """Arrivals in seconds, and the notes."""
    trace = open_trace(path, **options)
    return [request.arrival_s for request in trace], trace.info.notes()


@pytest.mark.parametrize("timestamps", [SECONDS, SINCE_1970])
def test_g02_seconds_named_as_such_are_exact_and_leave_no_doubt(tmp_path, timestamps):
    arrivals, notes = read(trace_file(tmp_path, *timestamps), timestamp_unit="s")
    assert arrivals == [0, 1.5, 3.25]
    assert not any("timestamp" in note for note in notes)


@pytest.mark.parametrize(("timestamps", "count"), [(SECONDS, 2), (SINCE_1970, 2), ((0.25, 1, 2), 1)])
def test_g02_fractions_below_the_unit_are_counted_and_the_unit_is_asked_for(tmp_path, timestamps, count):
    arrivals, notes = read(trace_file(tmp_path, *timestamps))
    assert arrivals[-1] < 0.01
    (doubt,) = [note for note in notes if FRACTION in note]
    assert doubt.startswith(f"{count} ")
    assert "--timestamp-unit s (--timestamp-unit ms confirms ms)" in doubt


@pytest.mark.parametrize(
    ("first", "options", "said"),
    [
        (1718000000, {}, "is read in ms, which is 1970-01-20 if it counts from 1970; in s it is 2024-06-10."),
        (1718000000123, {}, None),
        (0, {}, None),
        (1718000000, {"timestamp_unit": "ms"}, None),
        (999_999_000, {}, "in s it is 2001-09-09."),
        (500_000_000, {}, None),
    ],
)
def test_g02_a_date_that_only_fits_another_unit_is_said(tmp_path, first, options, said):
    _, notes = read(trace_file(tmp_path, first, first + 1000), **options)
    doubts = [note for note in notes if "the first" in note]
    assert len(doubts) == (said is not None)
    if said is not None:
        assert said in doubts[0] and "Name the unit: --timestamp-unit s or ms" in doubts[0]


def test_g02_whole_milliseconds_and_seconds_with_fractions_are_what_their_formats_hold(tmp_path):
    assert not any("timestamp" in note for note in read(trace_file(tmp_path, 0, 1500, 3250.0))[1])
    chat = {"chat_id": 1, "parent_chat_id": -1, "turn": 1, "type": "text"}
    arrivals, notes = read(trace_file(tmp_path, 1718000000.25, 1718000001.5, **chat))
    assert arrivals == [0, 1.25] and not any("timestamp" in note for note in notes)


def test_g02_a_unit_that_no_date_can_have_is_refused_with_the_option(tmp_path):
    with pytest.raises(InputError, match=r"another unit.*--timestamp-unit"):
        read(trace_file(tmp_path, 1718000000123, chat_id=1, parent_chat_id=-1, turn=1))


@pytest.mark.parametrize(
    "command",
    [
        ("replay", *POOL),
        ("curve",),
        ("fleet", *POOL, "--replicas", "2"),
        ("size", *POOL, "--slo-ttft-p99", "5"),
        ("ab", *POOL, "--b", "block-size=32"),
        ("block-size", *POOL),
        ("sampling", "--n", "2"),
        ("compare", "--kv-cache-tokens", "2000", "--max-model-len", "512"),
        ("sweep", "--set", "num-gpu-blocks-override=4000", "--grid", "block-size=16,32"),
    ],
    ids=lambda command: command[0],
)
def test_g02_every_text_report_names_format_and_unit_and_repeats_the_doubt(kvledger, tmp_path, command):
    name, *options = command
    code, out, err = kvledger(name, str(trace_file(tmp_path, *SECONDS)), *options)
    assert (code, err) == (0, "")
    assert "Trace: trace.jsonl, format mooncake, timestamps: ms\n" in out
    assert FRACTION in " ".join(out.split())
    _, out, _ = kvledger(name, str(trace_file(tmp_path, *SECONDS)), *options, *unit_option(name))
    assert "Trace: trace.jsonl, format mooncake, timestamps: s\n" in out
    assert "have a fraction" not in out


def unit_option(command):
    return ("--set", "timestamp-unit=s") if command == "sweep" else ("--timestamp-unit", "s")


def test_g02_the_optimum_names_them_too(kvledger, tmp_path):
    path = trace_file(tmp_path, 0, 1000, 2000, hash_ids=[7])
    code, out, err = kvledger("optimum", str(path), *POOL, "--block-size", "16")
    assert (code, err) == (0, "")
    assert "Trace: trace.jsonl, format mooncake, timestamps: ms\n" in out


def test_g02_a_study_names_them_in_its_title(kvledger, tmp_path):
    options = ("--model", "llama-3.1-8b", "--gpu", "H100", "--output", str(tmp_path / "report"))
    code, out, _ = kvledger("study", str(trace_file(tmp_path, *SECONDS)), *options)
    assert code == 0
    assert "KV-cache study of trace.jsonl (format mooncake, timestamps: ms)" in out
    assert FRACTION in " ".join(out.split())


@pytest.mark.parametrize("source", ["--fit", "--workload"])
def test_g02_workloads_made_from_a_file_say_how_it_was_read(kvledger, tmp_path, monkeypatch, source):
    trace_file(tmp_path, *SECONDS)
    monkeypatch.chdir(tmp_path)
    given = "trace.jsonl" if source == "--fit" else "trace.jsonl*0.5+conversation"
    code, out, err = kvledger("curve", source, given)
    assert (code, err) == (0, "")
    assert "trace.jsonl: format mooncake, timestamps: ms; 2 " + FRACTION in " ".join(out.split())
