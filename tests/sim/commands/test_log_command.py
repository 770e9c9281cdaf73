"""`kvledger log`: what each sub-command but `verify` says of a log of a real run and of a wrong one."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from kvledger.backends.sinks.log.durable_log import DurableLog
from kvledger.backends.sinks.log.reader import LogReader
from kvledger.backends.sinks.log.rows import LoggedCommit
from kvledger.core.events import BlocksFreed, Commit, FreeReason
from kvledger.sim.logs.run_log import RunLog
from kvledger.sim.traces import open_trace

from tests.sim.recorded_logs import FLUSH, POOL, rewritten

# What version 1 of a log's header said of a run: every parameter of the command, output options included.
HEADER_1 = {
    "trace": ["trace.jsonl"],
    "num_gpu_blocks_override": 40,
    "block_size": 512,
    "gpu_memory_utilization": 0.9,
    "max_num_seqs": 256,
    "max_num_batched_tokens": 8192,
    "async_scheduling": False,
    "kv_cache_memory_bytes": None,
    "requests_out": None,
    "openmetrics_start": None,
    "plots": None,
    "log": "run.log",
    "log_flush": None,
    "json": True,
}


# -- replay ------------------------------------------------------------------------------------------------------------


def without_timing(document: dict[str, Any]) -> str:
    return json.dumps({name: value for name, value in document.items() if name != "timing"})


def test_a_recorded_run_replays_to_the_same_bytes(kvledger, recorded, trace) -> None:
    log, report = recorded
    _, out, err = kvledger("replay", trace, *POOL, "--json")
    assert without_timing(json.loads(out)) == without_timing(report), "recording changes nothing"
    code, out, err = kvledger("log", "replay", log, "--json")
    assert (code, err) == (0, "")
    assert without_timing(json.loads(out)) == without_timing(report)
    assert report["requests"] == {"total": 60, "finished": 60, "rejected": 0, "aborted": 0}
    assert 0 < report["prefix_cache"]["hit_rate"] < 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["--scheduling-policy", "priority", "--preemption-victim", "least-computed"],
        ["--skip-first", "5", "--limit", "20", "--rate-scale", "3.7"],
        ["--eviction", "sieve", "--max-num-seqs", "3", "--max-num-batched-tokens", "700"],
        ["--no-enable-prefix-caching", "--max-model-len", "1500"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_other_runs_replay_to_the_same_bytes_too(kvledger, record, tmp_path, arguments) -> None:
    report = record(tmp_path / "log", *POOL, *arguments)
    code, out, _ = kvledger("log", "replay", str(tmp_path / "log"), "--json")
    assert code == 0
    assert without_timing(json.loads(out)) == without_timing(report)


def test_a_run_again_under_another_pool_is_what_the_trace_gives_there(kvledger, recorded, trace) -> None:
    log, _ = recorded
    other = ["--num-gpu-blocks-override", "15", "--block-size", "512", "--eviction", "fifo"]
    _, direct, _ = kvledger("replay", trace, *other, "--json")
    code, again, err = kvledger("log", "replay", log, *other, "--json")
    assert code == 0
    assert without_timing(json.loads(again)) == without_timing(json.loads(direct))
    assert "--num-gpu-blocks-override 15 (was 40)" in err
    assert "--eviction fifo (was lru)" in err
    assert "fixed: arrivals, prompt and output lengths" in err


def test_an_option_that_chose_the_requests_is_refused(kvledger, recorded) -> None:
    code, out, err = kvledger("log", "replay", recorded[0], "--limit", "5")
    assert (code, out) == (2, "")
    assert "--limit 5 has no effect on an event log" in err
    code, _, err = kvledger("log", "replay", recorded[0], "--no-such-option", "5")
    assert code == 2
    assert "No such option" in err


def test_a_log_that_is_of_no_run_cannot_be_run_again(kvledger, recorded, tmp_path) -> None:
    bare = rewritten(recorded[0], tmp_path / "bare", lambda commit: commit)
    code, _, err = kvledger("log", "replay", bare)
    assert code == 2
    assert "only logs of kvledger replay --log and kvledger serve --log, and recordings of vLLM, can run again" in err


def test_a_run_that_was_killed_replays_as_far_as_its_requests_came(kvledger, trace, tmp_path) -> None:
    source = open_trace(trace)
    options = {**HEADER_1, "trace": [trace]}
    log = RunLog(tmp_path / "log", command="replay", options=options, trace=source, flush=FLUSH)
    rows = iter(log.trace)
    for _ in range(25):
        next(rows)
    log.log.flush()
    code, out, _ = kvledger("log", "replay", str(tmp_path / "log"), "--json")
    _, direct, _ = kvledger("replay", trace, *POOL, "--limit", "25", "--json")
    again, direct = json.loads(out), json.loads(direct)
    assert code == 0
    assert again["requests"] == direct["requests"]
    assert again["ttft_s"] == direct["ttft_s"]
    assert again["trace"]["num_requests"] == 25
    assert again["trace"]["input_tokens"] == direct["trace"]["input_tokens"]
    log.log.close()


def test_a_log_is_a_trace_for_other_commands(kvledger, recorded, trace) -> None:
    sizes = ["--capacities", "10,40", "--json"]
    code, out, _ = kvledger("curve", recorded[0], *sizes)
    assert code == 0
    assert json.loads(out)["points"] == json.loads(kvledger("curve", trace, *sizes)[1])["points"]


# -- diff, at, show, stats, convert ------------------------------------------------------------------------------------


def test_equal_logs_differ_in_nothing(kvledger, recorded, record, tmp_path) -> None:
    record(tmp_path / "again")
    code, out, _ = kvledger("log", "diff", recorded[0], str(tmp_path / "again"))
    assert (code, out) == (0, "the logs are equal\n")


def test_diff_names_the_first_divergence_and_the_state_before_it(kvledger, recorded, record, tmp_path) -> None:
    record(tmp_path / "other", *POOL, "--eviction", "fifo", "--max-num-seqs", "2")
    code, out, _ = kvledger("log", "diff", recorded[0], str(tmp_path / "other"), "--json")
    first = json.loads(out)["first_divergence"]
    assert code == 1
    assert first["commit"] == 0, "the pools differ already"

    def other_block(commit: Commit) -> Commit:
        if commit.sequence != 40:
            return commit
        return Commit(40, (*commit.events, BlocksFreed(FreeReason.ABORTED, (0,), (1,), (0,), ())))

    changed = rewritten(recorded[0], tmp_path / "changed", other_block)
    code, out, _ = kvledger("log", "diff", recorded[0], changed, "--ignore-times", "--json")
    first = json.loads(out)["first_divergence"]
    assert (code, first["commit"], first["times_only"]) == (1, 40, False)
    assert len(first["other"]["events"]) == len(first["one"]["events"]) + 1
    before = first["state_before"]
    assert before["occupancy"]["num_blocks"] == 40
    assert sum(before["occupancy"][part] for part in ("held", "evictable", "clean", "null")) == 40
    code, out, _ = kvledger("log", "diff", recorded[0], changed, "--ignore-times")
    assert code == 1
    assert "equal up to commit 39 and differ in commit 40" in out
    code, out, _ = kvledger("log", "diff", recorded[0], changed, "--json")
    assert json.loads(out)["first_divergence"]["times_only"], "the second one has no clock"


def test_a_log_that_ends_early_differs_where_it_ends(kvledger, recorded, tmp_path) -> None:
    short = DurableLog.create(tmp_path / "short", flush=FLUSH)
    for commit in LogReader(recorded[0]).commits(stop=20):
        short.apply(commit)
    short.close()
    code, out, _ = kvledger("log", "diff", recorded[0], str(tmp_path / "short"), "--ignore-times")
    assert code == 1
    assert "differ in commit 20" in out
    assert "ended before it" in out


def test_the_state_at_a_commit_and_at_a_time(kvledger, recorded) -> None:
    log, report = recorded
    records = [each for each in LogReader(log).records() if isinstance(each, LoggedCommit)]
    middle = records[len(records) // 2]
    code, out, _ = kvledger("log", "at", log, "--commit", str(middle.commit.sequence), "--json")
    state = json.loads(out)
    expected = LogReader(log).state(middle.commit.sequence + 1)
    assert code == 0
    assert state["free_queue"] == expected.pool.free_queue.order()
    assert {name: each["row"] for name, each in state["requests"].items()} == expected.row_of
    last_at_that_time = max(each.commit.sequence for each in records if each.time_ns <= middle.time_ns)
    code, out, _ = kvledger("log", "at", log, "--time", str(middle.time_ns / 1e9), "--json")
    assert json.loads(out)["commit"] == last_at_that_time
    code, out, _ = kvledger("log", "at", log, "--time", str(report["simulated_seconds"]))
    assert f"after commit {records[-1].commit.sequence:,}: 40 blocks (held 0" in out


@pytest.mark.parametrize("arguments", [[], ["--commit", "3", "--time", "1"]])
def test_at_needs_one_place(kvledger, recorded, arguments) -> None:
    code, _, err = kvledger("log", "at", recorded[0], *arguments)
    assert code == 2
    assert "one of them" in err


def test_at_refuses_what_is_not_in_the_log(kvledger, recorded) -> None:
    code, _, err = kvledger("log", "at", recorded[0], "--commit", "1000000")
    assert code == 2
    assert "there is no state after commit 1000000" in err


def test_show_prints_each_event_on_a_line(kvledger, recorded) -> None:
    code, out, _ = kvledger("log", "show", recorded[0], "--first-commit", "1", "--last-commit", "2")
    lines = out.splitlines()
    assert code == 0
    assert lines[0].startswith("commit 1 ") or lines[0].startswith("note")
    assert any(line.startswith("  BlocksAllocated(group=0, rows=(0), counts=(2), blocks=(1, 2)") for line in lines)


def test_show_follows_one_request_through_its_row(kvledger, recorded) -> None:
    code, out, _ = kvledger("log", "show", recorded[0], "--request", "7", "--json")
    records = json.loads(out)["records"]
    assert code == 0
    assert records[0]["note"] == "RequestArrived"
    names = [event["event"] for each in records if "events" in each for event in each["events"]]
    assert {"RowsAssigned", "BlocksAllocated", "TokensPlaced", "BlocksFreed", "RowsReleased"} <= set(names)
    last = records[-1]["events"][-1]
    assert (last["event"], last["requests"]) == ("RowsReleased", ["7"])
    everything = json.loads(kvledger("log", "show", recorded[0], "--json")[1])["records"]
    assert len(records) < len(everything)


def test_show_finds_a_block_and_an_event(kvledger, recorded) -> None:
    _, out, _ = kvledger("log", "show", recorded[0], "--block", "5", "--event", "BlocksFreed", "--json")
    records = json.loads(out)["records"]
    assert records
    for each in records:
        assert any(5 in event.get("blocks", ()) for event in each["events"])
    _, out, _ = kvledger("log", "show", recorded[0], "--limit", "3", "--json")
    assert len(json.loads(out)["records"]) == 3


def test_stats_count_what_is_there(kvledger, recorded) -> None:
    code, out, _ = kvledger("log", "stats", recorded[0], "--json")
    stats = json.loads(out)
    commits = list(LogReader(recorded[0]).commits())
    assert code == 0
    assert stats["commits"] == len(commits)
    assert stats["events"] == sum(len(commit.events) for commit in commits)
    assert stats["notes"] == 61
    assert stats["bytes_per_event"] > 0
    assert stats["header"]["command"] == "replay"
    assert stats["clock"] == "simulated"
    assert "bytes per event" in kvledger("log", "stats", recorded[0])[1]


def test_convert_to_one_parquet_file_and_to_json_lines(kvledger, recorded, tmp_path) -> None:
    code, out, _ = kvledger("log", "convert", recorded[0], str(tmp_path / "log.parquet"), "--to", "parquet", "--json")
    rows = pd.read_parquet(tmp_path / "log.parquet")
    assert (code, json.loads(out)["count"]) == (0, len(rows))
    assert rows["commit"].is_monotonic_increasing
    kvledger("log", "convert", recorded[0], str(tmp_path / "log.jsonl"), "--to", "jsonl")
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line.get("event") for line in lines] == rows["event"].tolist()


def test_converted_to_a_trace_a_log_gives_the_same_curve(kvledger, recorded, trace, tmp_path) -> None:
    code, _, _ = kvledger("log", "convert", recorded[0], str(tmp_path / "again.jsonl"), "--to", "trace")
    sizes = ["--capacities", "10,40", "--json"]
    assert code == 0
    answers = [json.loads(kvledger("curve", path, *sizes)[1]) for path in (trace, str(tmp_path / "again.jsonl"))]
    assert answers[0]["points"] == answers[1]["points"]


@pytest.mark.parametrize("wire", ["vllm", "strict"])
def test_converted_to_kv_events_a_log_can_be_followed(kvledger, recorded, tmp_path, wire) -> None:
    log, report = recorded
    stream = str(tmp_path / "run.kvevents")
    code, out, _ = kvledger("log", "convert", log, stream, "--to", "kv-events", "--wire", wire, "--json")
    assert code == 0
    assert json.loads(out)["count"] > 50
    code, out, _ = kvledger("follow", stream, "--num-gpu-blocks", "40", "--json")
    seen = json.loads(out.splitlines()[-1])
    state = LogReader(log).state()
    assert seen["num_blocks"] == len(list(state.pool.keyed_blocks()))
    assert seen["orphans"] == seen["unknown_removals"] == 0
    assert 512 * seen["hit_blocks"] == report["prefix_cache"]["hits_tokens"], "every request stores its last block"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--to", "csv"], "must be one of parquet, jsonl, trace, kv-events"),
        (["--to", "kv-events", "--wire", "loose"], "--wire is 'loose'"),
        (["--to", "trace", "--wire", "strict"], "--wire strict has no effect on --to trace"),
        (["--to", "parquet"], "exists already"),
    ],
)
def test_convert_refuses_what_it_cannot_do_and_leaves_nothing(kvledger, recorded, tmp_path, arguments, message) -> None:
    target = tmp_path / "out"
    if "parquet" in arguments:
        target.write_text("mine")
    code, _, err = kvledger("log", "convert", recorded[0], str(target), *arguments)
    assert code == 2
    assert message in err
    assert sorted(path.name for path in tmp_path.iterdir()) == (["out"] if "parquet" in arguments else [])


@pytest.mark.parametrize("command", ["show", "verify", "stats", "replay"])
def test_what_is_no_log_is_refused_by_name(kvledger, tmp_path, command) -> None:
    code, _, err = kvledger("log", command, str(tmp_path / "nothing"))
    assert code == 2
    assert "is no directory, so it is no event log" in err
    (tmp_path / "empty").mkdir()
    code, _, err = kvledger("log", command, str(tmp_path / "empty"))
    assert code == 2
    assert "there is no manifest to read" in err


# -- a full disk -------------------------------------------------------------------------------------------------------

LIMITED = """
import resource, sys
from kvledger.sim.commands.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv.pop(1)), resource.RLIM_INFINITY))
sys.argv[0] = "kvledger"
main()
"""


@pytest.mark.parametrize("limit", [3_000, 60_000])
def test_a_command_on_a_full_disk_ends_by_name_and_verify_says_why(
    tmp_path: Path, kvledger, trace: str, limit: int
) -> None:
    command = ["replay", trace, *POOL, "--log", str(tmp_path / "log"), "--log-flush", "commit"]
    out = subprocess.run(
        [sys.executable, "-c", LIMITED, str(limit), *command],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert out.returncode != 0
    assert "Traceback" not in out.stderr
    assert "File too large" in out.stderr
    code, text, _ = kvledger("log", "verify", str(tmp_path / "log"), "--json")
    answer = json.loads(text)
    assert "File too large" in answer["stopped"]
    assert (code, answer["sound"]) == ((0, True) if answer["commits"] else (1, False))
