"""`kvledger log`: what each sub-command says of a log of a real run, of a damaged one and of a wrong one."""

import json
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import typer
from kvledger.backends.sinks.durable_log import DurableLog
from kvledger.backends.sinks.flush_policy import FlushPolicy
from kvledger.backends.sinks.log_reader import LogReader
from kvledger.backends.sinks.log_rows import LoggedCommit
from kvledger.core import AllocatorConfig, FullAttention, KVCacheAllocator, Request
from kvledger.core.events import BlocksFreed, Commit, FreeReason, PrefixAdopted, RowsAssigned, RowsReleased
from kvledger.sim.cli import build_app, main
from kvledger.sim.log_verification import verify_log
from kvledger.sim.run_log import RunLog
from kvledger.sim.traces import open_trace

POOL = ["--num-gpu-blocks-override", "40", "--block-size", "512"]
FLUSH = FlushPolicy(every_commits=16)


@pytest.fixture
def kvledger(monkeypatch, capsys) -> Callable[..., tuple[int, str, str]]:
    """Run the command line; return (exit code, standard output, standard error)."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["kvledger", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run


@pytest.fixture(scope="session")
def trace(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Conversations that grow and come back, more than the pool holds."""
    path = tmp_path_factory.mktemp("trace") / "turns.jsonl"
    rows = []
    for i in range(60):
        turns = i // 12 + 1
        rows.append(
            {
                "timestamp": 400 * i,
                "input_length": 512 * turns + 37 * (i % 12) + 1,
                "output_length": 20 + i % 7,
                "hash_ids": [1000 * (i % 12) + t for t in range(turns)] + [100_000 + i],
            }
        )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def options_of(arguments: list[str]) -> dict[str, Any]:
    """The parameters of `kvledger replay` as given and by default."""
    command = typer.main.get_command(build_app()).commands["replay"]  # pyright: ignore[reportAttributeAccessIssue]
    return command.make_context("replay", [*arguments]).params


@pytest.fixture(scope="session")
def record(trace: str) -> Callable[..., dict[str, Any]]:
    """Run `kvledger replay` in-process with a log of the run; returns the JSON that it prints."""

    def run(directory: Path, *arguments: str) -> dict[str, Any]:
        given = [trace, *(arguments or POOL), "--log", str(directory), "--log-flush", "50ms", "--json"]
        command = typer.main.get_command(build_app()).commands["replay"]  # pyright: ignore[reportAttributeAccessIssue]
        printed: list[dict[str, Any]] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("kvledger.sim.console.print_json", printed.append)
            with command.make_context("replay", given) as context:
                command.invoke(context)
        return printed[0]

    return run


@pytest.fixture(scope="session")
def recorded(record: Callable, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """(the log of a run, the report of the run)."""
    directory = tmp_path_factory.mktemp("recorded") / "run.log"
    return str(directory), record(directory)


def rewritten(source: str, target: Path, change: Callable[[Commit], Commit]) -> str:
    """A log like another one but for what `change` makes of its commits, with checksums that match."""
    log = DurableLog.create(target, flush=FLUSH)
    for commit in LogReader(source).commits():
        log.apply(change(commit))
    log.close()
    return str(target)


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
    assert "only the logs of kvledger replay --log and kvledger serve --log can be run again" in err


def test_a_run_that_was_killed_replays_as_far_as_its_requests_came(kvledger, trace, tmp_path) -> None:
    source = open_trace(trace)
    log = RunLog(tmp_path / "log", command="replay", options=options_of([trace, *POOL]), trace=source, flush=FLUSH)
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


# -- verify ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [[], ["--checked-every", "1"], ["--checked-every", "1000000"]], ids=len)
def test_a_sound_log_verifies(kvledger, recorded, every) -> None:
    code, out, err = kvledger("log", "verify", recorded[0], *every, "--json")
    answer = json.loads(out)
    assert (code, err) == (0, "")
    assert answer["sound"]
    assert answer["first_bad_commit"] is None
    assert answer["commits"] == len(list(LogReader(recorded[0]).commits()))
    assert answer["notes"] == 61
    assert {"conservation", "ref_counts", "index_points_both_ways"} <= set(answer["invariants"])
    code, out, _ = kvledger("log", "verify", recorded[0], *every)
    assert code == 0
    assert "sound: every checksum matches" in out


@pytest.mark.parametrize("every", ["1", "7", "100000"])
def test_a_leak_is_named_with_its_commit(kvledger, recorded, tmp_path, every) -> None:
    bad: list[int] = []

    def lose_a_block(commit: Commit) -> Commit:
        freed = [event for event in commit.events if isinstance(event, BlocksFreed) and event.blocks]
        if bad or commit.sequence < 50 or not freed:
            return commit
        bad.append(commit.sequence)
        event = freed[0]
        less = event._replace(blocks=tuple(event.blocks)[1:], counts=(event.counts[0] - 1,))
        return Commit(commit.sequence, tuple(less if each is event else each for each in commit.events))

    log = rewritten(recorded[0], tmp_path / "leak", lose_a_block)
    code, out, _ = kvledger("log", "verify", log, "--checked-every", every, "--json")
    answer = json.loads(out)
    assert code == 1
    assert not answer["sound"]
    assert answer["first_bad_commit"] == bad[0]
    assert answer["fault"]["kind"] == "conservation"
    assert "leak" in answer["fault"]["description"]


@pytest.mark.parametrize("every", ["1", "5", "100000"])
def test_a_block_adopted_in_place_of_another_is_found_out_when_it_is_given_back(
    kvledger, recorded, tmp_path, every
) -> None:
    """Found at two places a block may be, if ids name content alone; then each of the two is given back."""
    forged: list[str] = []
    released: list[int] = []
    request_in: dict[int, str] = {}

    def adopt_one_twice(commit: Commit) -> Commit:
        for event in commit.events:
            if isinstance(event, RowsAssigned):
                request_in.update(zip(event.rows, event.requests, strict=True))
            elif isinstance(event, RowsReleased) and forged and forged[0] in event.requests:
                released.append(commit.sequence)
        adopted = [event for event in commit.events if isinstance(event, PrefixAdopted) and len(event.blocks) > 1]
        if forged or commit.sequence < 30 or not adopted:
            return commit
        event = adopted[0]
        forged.append(request_in[event.row])
        twice = event._replace(blocks=(event.blocks[0], event.blocks[0], *event.blocks[2:]))
        return Commit(commit.sequence, tuple(twice if each is event else each for each in commit.events))

    log = rewritten(recorded[0], tmp_path / "twice", adopt_one_twice)
    code, out, _ = kvledger("log", "verify", log, "--checked-every", every, "--json")
    answer = json.loads(out)
    assert code == 1
    assert answer["first_bad_commit"] == released[0]
    assert "double free" in answer["fault"]["description"]


def repeated_ids(directory: Path) -> str:
    """The log of requests whose blocks are named by their content alone, so that one stands at several places."""
    config = AllocatorConfig(num_blocks=14, groups=[FullAttention(16)], max_model_len=256, max_num_reqs=2)
    log = DurableLog.create(directory, flush=FLUSH)
    allocator = KVCacheAllocator(config, [log])
    for number, words in enumerate(["aab", "aaab", "aabaa", "baa", "aaaaaa"] * 4):
        request = Request(str(number), 16 * len(words) + 1, keys=ContentKeys(words))
        match = allocator.match_prefix(request)
        assert allocator.allocate(request, request.num_tokens - match.num_hit_tokens, match) is not None
        if number % 3 == 1:
            allocator.fork(str(number), Request("fork", request.num_tokens, keys=ContentKeys(words)))
            allocator.truncate("fork", 16 * len(words) - 4)
            assert allocator.append(np.array([allocator.row_of("fork")]))
            allocator.free("fork")
        if number % 4 == 2:
            allocator.evict(allocator.block_ids(str(number))[0])
        allocator.free(str(number))
    log.close()
    return str(directory)


class ContentKeys:
    def __init__(self, words: str) -> None:
        self._words = words

    def keys(self, start: int, stop: int) -> str:
        return self._words[start:stop]


@pytest.mark.parametrize("every", ["1", "1000"])
def test_a_log_of_requests_that_hold_one_block_at_several_places_verifies(kvledger, tmp_path, every) -> None:
    log = repeated_ids(tmp_path / "log")
    adopted = [e.blocks for c in LogReader(log).commits() for e in c.events if isinstance(e, PrefixAdopted)]
    assert any(len(set(blocks)) < len(blocks) for blocks in adopted)
    code, out, err = kvledger("log", "verify", log, "--checked-every", every, "--json")
    assert (code, json.loads(out)["fault"], err) == (0, None, "")
    code, out, _ = kvledger("log", "diff", log, repeated_ids(tmp_path / "again"))
    assert (code, out) == (0, "the logs are equal\n")


@pytest.mark.parametrize("every", ["1", "5", "100000"])
def test_a_broken_invariant_is_traced_to_its_commit_whatever_is_sampled(kvledger, tmp_path, every) -> None:
    """Who gives back a neighbour's block in place of its own keeps the sum: only the invariants see it."""
    bad: list[int] = []

    def give_back_a_neighbours(commit: Commit) -> Commit:
        if bad or commit.sequence < 30 or not isinstance(commit.events[-1], RowsReleased):
            return commit
        state = LogReader(sound).state(commit.sequence)
        freed = commit.events[0]
        held = {block for row in state.row_of.values() for block in state.tables[0].blocks(row)}
        theirs = sorted(held.difference(freed.blocks))
        if not theirs:
            return commit
        bad.append(commit.sequence)
        return Commit(commit.sequence, (freed._replace(blocks=(theirs[0], *freed.blocks[1:])), *commit.events[1:]))

    sound = repeated_ids(tmp_path / "sound")
    log = rewritten(sound, tmp_path / "theirs", give_back_a_neighbours)
    code, out, _ = kvledger("log", "verify", log, "--checked-every", every, "--json")
    answer = json.loads(out)
    assert code == 1
    assert answer["first_bad_commit"] == bad[0]
    assert answer["fault"]["kind"] == "invariant"
    assert "ref_counts" in answer["fault"]["description"]


def test_a_block_that_is_given_back_at_one_of_its_two_places_is_a_leak(kvledger, tmp_path) -> None:
    bad: list[int] = []

    def give_back_once(commit: Commit) -> Commit:
        freed, released = commit.events[0], commit.events[-1]
        ends_alone = isinstance(released, RowsReleased) and released.requests != ("fork",)
        if bad or not ends_alone or len(set(freed.blocks)) == len(freed.blocks):
            return commit
        bad.append(commit.sequence)
        blocks = tuple(dict.fromkeys(freed.blocks))
        return Commit(commit.sequence, (freed._replace(blocks=blocks, counts=(len(blocks),)), *commit.events[1:]))

    log = rewritten(repeated_ids(tmp_path / "sound"), tmp_path / "leak", give_back_once)
    code, out, _ = kvledger("log", "verify", log, "--json")
    answer = json.loads(out)
    assert (code, answer["first_bad_commit"], answer["fault"]["kind"]) == (1, bad[0], "conservation")
    assert "leak" in answer["fault"]["description"]


def test_an_event_that_cannot_follow_is_named(kvledger, recorded, tmp_path) -> None:
    def free_twice(commit: Commit) -> Commit:
        finished = [each for each in commit.events if isinstance(each, BlocksFreed)]
        if commit.sequence != 60 and not (commit.sequence > 60 and finished):
            return commit
        return Commit(commit.sequence, (*commit.events, BlocksFreed(FreeReason.FINISHED, (0,), (0,), (1,), (39,))))

    log = rewritten(recorded[0], tmp_path / "bad", free_twice)
    code, out, _ = kvledger("log", "verify", log, "--json")
    answer = json.loads(out)
    assert code == 1
    assert answer["first_bad_commit"] == 60
    assert answer["fault"]["kind"] in ("conservation", "replay")


def test_damage_is_named_with_file_offset_and_commit(kvledger, recorded, tmp_path) -> None:
    log = rewritten(recorded[0], tmp_path / "log", lambda commit: commit)
    (path,) = Path(log).glob("*.parquet")
    data = bytearray(path.read_bytes())
    data[2000] ^= 1
    path.write_bytes(data)
    code, out, _ = kvledger("log", "verify", log, "--json")
    fault = json.loads(out)["fault"]
    assert code == 1
    assert (fault["kind"], fault["path"], fault["commit"], fault["offset"]) == ("damage", path.name, 0, 4)


def test_a_torn_tail_is_reported_and_no_fault(kvledger, recorded, tmp_path) -> None:
    durable = DurableLog.create(tmp_path / "log", flush=FlushPolicy(every_commits=1))
    for commit in list(LogReader(recorded[0]).commits())[:10]:
        durable.apply(commit)
    (path,) = (tmp_path / "log").glob("*.arrows")
    path.write_bytes(path.read_bytes()[:-10])
    code, out, _ = kvledger("log", "verify", str(tmp_path / "log"), "--json")
    answer = json.loads(out)
    assert (code, answer["sound"], answer["commits"]) == (0, True, 9)
    assert "no whole batch" in answer["torn"]


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
    assert "has ended" in out


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
    assert "bytes an event" in kvledger("log", "stats", recorded[0])[1]


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


def test_verification_holds_no_more_of_a_longer_log(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("kvledger.backends.sinks.parquet_segment.ROW_GROUP_ROWS", 500)
    peaks = []
    for num_requests in (200, 1600):
        directory = tmp_path / str(num_requests)
        with DurableLog.create(directory, flush=FLUSH) as log:
            config = AllocatorConfig(num_blocks=100, groups=[FullAttention(16)], max_model_len=160)
            allocator = KVCacheAllocator(config, [log])
            for number in range(num_requests):
                allocator.allocate(Request(str(number), 100), 100)
                allocator.free(str(number))
        verify_log(LogReader(directory))  # what is imported and cached is paid for before
        tracemalloc.start()
        found = verify_log(LogReader(directory))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert (found.is_sound, found.commits) == (True, 2 * num_requests + 1)
    assert peaks[1] < 1.2 * peaks[0], peaks
