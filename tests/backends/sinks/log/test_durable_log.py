"""The log on disk: it holds what happened, says when it wrote it, and keeps a second writer out."""

import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from kvledger.backends.sinks.errors import LogInUseError, LogWriteError
from kvledger.backends.sinks.log.durable_log import Clock, DurableLog
from kvledger.backends.sinks.log.flush_policy import FlushPolicy
from kvledger.backends.sinks.log.reader import LogReader
from kvledger.backends.sinks.log.rows import LoggedCommit, LoggedNote, RequestArrived, RunEnded
from kvledger.core import EventLog
from kvledger.core.errors import InputError, MisuseError
from kvledger.core.events import Commit, RowsAssigned

EVERY_COMMIT = FlushPolicy(every_commits=1)
NEVER_BY_ITSELF = FlushPolicy(every_commits=1 << 30)


@pytest.fixture(scope="module")
def truth(history_of: Callable) -> EventLog:
    return history_of(seed=11, num_commands=300).log


def ticking() -> Clock:
    """10, 20, 30, ..."""
    ticks = itertools.count(10, 10)
    return Clock("simulated", lambda: next(ticks))


def written(directory: Path, log: EventLog, **options) -> DurableLog:
    durable = DurableLog.create(directory, **({"flush": EVERY_COMMIT} | options))
    for commit in log:
        durable.apply(commit)
    return durable


# -- what it holds -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("segment_bytes", [1, 30_000, 1 << 30])
@pytest.mark.parametrize("every_commits", [1, 7])
def test_a_closed_log_holds_every_commit(
    tmp_path: Path, truth: EventLog, segment_bytes: int, every_commits: int
) -> None:
    log = EventLog(list(truth)[:40]) if segment_bytes == 1 else truth
    flush = FlushPolicy(every_commits=every_commits)
    written(tmp_path / "log", log, flush=flush, segment_bytes=segment_bytes).close()
    reader = LogReader(tmp_path / "log")
    assert list(reader.commits()) == list(log)
    assert reader.torn is None
    assert reader.state().snapshot() == log.replay().snapshot()


def test_two_logs_of_one_history_are_the_same_bytes(tmp_path: Path, truth: EventLog) -> None:
    for name in ("one", "two"):
        written(tmp_path / name, truth, segment_bytes=50_000, clock=ticking(), header={"seed": 11}).close()
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "two").iterdir())
    for name in set(files) - {"lock"}:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name


def test_a_log_may_be_read_while_it_is_written(tmp_path: Path, truth: EventLog) -> None:
    durable = DurableLog.create(tmp_path / "log", flush=EVERY_COMMIT, segment_bytes=40_000)
    for number, commit in enumerate(truth):
        durable.apply(commit)
        if number % 25 == 0:
            assert list(LogReader(tmp_path / "log").commits()) == list(truth)[: number + 1]
    durable.close()


def test_a_reader_finds_the_commits_of_a_segment_that_was_closed_behind_its_back(
    tmp_path: Path, truth: EventLog
) -> None:
    durable = written(tmp_path / "log", truth)
    reader = LogReader(tmp_path / "log")
    durable.close()
    assert list(reader.commits()) == list(truth)


def test_header_clock_and_notes_are_found_again(tmp_path: Path, truth: EventLog) -> None:
    durable = DurableLog.create(tmp_path / "log", flush=EVERY_COMMIT, clock=ticking(), header={"command": "replay"})
    arrived, ended = RequestArrived("1", 0.25, 10, 2, (5, 6)), RunEnded({"requests": 1})
    durable.note(arrived)
    durable.apply(truth[0])
    durable.note(ended)
    durable.close()
    reader = LogReader(tmp_path / "log")
    assert (reader.manifest.header, reader.manifest.clock) == ({"command": "replay"}, "simulated")
    assert list(reader.records()) == [
        LoggedNote(arrived, 10, 0),
        LoggedCommit(truth[0], 20),
        LoggedNote(ended, 30, 1),
    ]
    assert [each.note for each in reader.notes()] == [arrived, ended]


# -- time travel -------------------------------------------------------------------------------------------------------


def test_the_state_after_any_commit_is_the_fold_up_to_it(tmp_path: Path, truth: EventLog) -> None:
    written(tmp_path / "log", truth, segment_bytes=60_000).close()
    reader = LogReader(tmp_path / "log")
    assert len(reader.snapshots()) >= 3
    for stop in range(1, len(truth) + 1, 9):
        assert reader.state(stop).snapshot() == truth.replay(stop).snapshot()


def test_a_state_is_rebuilt_from_the_nearest_snapshot(tmp_path: Path, truth: EventLog) -> None:
    written(tmp_path / "log", truth, segment_bytes=60_000).close()
    reader = LogReader(tmp_path / "log")
    expected = truth.replay().snapshot()
    first = reader.manifest.closed[0]
    assert reader.created == truth.created
    (tmp_path / "log" / first.file).rename(tmp_path / "away")
    assert reader.state().snapshot() == expected, "the first segment is not needed behind the second snapshot"


def test_the_state_at_a_time_is_that_of_the_commits_until_then(tmp_path: Path, truth: EventLog) -> None:
    written(tmp_path / "log", truth, clock=ticking(), segment_bytes=60_000).close()
    reader = LogReader(tmp_path / "log")
    assert [reader.commits_until(ns) for ns in (0, 9, 10, 19, 20, 1005)] == [0, 0, 1, 1, 2, 100]
    assert reader.commits_until(10**12) == len(truth)


def test_a_state_that_the_log_does_not_have_is_refused(tmp_path: Path, truth: EventLog) -> None:
    written(tmp_path / "log", truth).close()
    reader = LogReader(tmp_path / "log")
    with pytest.raises(InputError, match=f"has {len(truth)} commits"):
        reader.state(len(truth) + 1)
    with pytest.raises(InputError, match="no clock"):
        reader.commits_until(5)


# -- resuming ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("close_first", [True, False])
def test_a_log_goes_on_after_its_last_commit(tmp_path: Path, truth: EventLog, close_first: bool) -> None:
    half = len(truth) // 2
    first = written(tmp_path / "log", EventLog(list(truth)[:half]), segment_bytes=60_000)
    if close_first:
        first.close()
    else:
        first._lock_file.release()  # as if the process had ended
    second = DurableLog.resume(tmp_path / "log", flush=EVERY_COMMIT, segment_bytes=60_000)
    assert second.next_commit == half
    assert second.recovery.describe() == []
    for commit in list(truth)[half:]:
        second.apply(commit)
    second.close()
    reader = LogReader(tmp_path / "log")
    assert list(reader.commits()) == list(truth)
    assert reader.state().snapshot() == truth.replay().snapshot()


def test_a_commit_out_of_order_is_refused_and_the_log_goes_on(tmp_path: Path, truth: EventLog) -> None:
    durable = written(tmp_path / "log", EventLog(list(truth)[:5]))
    for wrong in (4, 6):
        with pytest.raises(MisuseError, match=f"commit {wrong} cannot follow commit 4"):
            durable.apply(truth[wrong])
    durable.apply(truth[5])
    durable.close()
    with pytest.raises(MisuseError, match="is closed"):
        durable.apply(truth[6])
    assert len(list(LogReader(tmp_path / "log").commits())) == 6


def test_a_log_is_created_only_where_nothing_is(tmp_path: Path, truth: EventLog) -> None:
    written(tmp_path / "log", truth).close()
    with pytest.raises(InputError, match="holds a log already"):
        DurableLog.create(tmp_path / "log", flush=EVERY_COMMIT)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").write_text("keep me")
    with pytest.raises(InputError, match=r"holds mine\.txt already"):
        DurableLog.create(tmp_path / "other", flush=EVERY_COMMIT)
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["mine.txt"]


def test_a_log_goes_on_with_its_own_clock_only(tmp_path: Path, truth: EventLog) -> None:
    written(tmp_path / "log", truth, clock=ticking()).close()
    with pytest.raises(InputError, match="has the clock 'simulated'"):
        DurableLog.resume(tmp_path / "log", flush=EVERY_COMMIT)


@pytest.mark.parametrize("header", [{"x": float("nan")}, {"x": {1, 2}}])
def test_a_header_that_is_no_json_is_refused(tmp_path: Path, header: dict) -> None:
    with pytest.raises(InputError, match="plain JSON values"):
        DurableLog.create(tmp_path / "log", flush=EVERY_COMMIT, header=header)


# -- flush policies ----------------------------------------------------------------------------------------------------


def test_every_commit_is_on_disk_before_the_command_returns(tmp_path: Path, truth: EventLog) -> None:
    durable = DurableLog.create(tmp_path / "log", flush=EVERY_COMMIT)
    for number, commit in enumerate(list(truth)[:20]):
        durable.apply(commit)
        assert len(list(LogReader(tmp_path / "log").commits())) == number + 1
    durable.close()


def test_commits_gather_until_there_are_enough(tmp_path: Path, truth: EventLog) -> None:
    durable = written(tmp_path / "log", EventLog(list(truth)[:25]), flush=FlushPolicy(every_commits=10))
    assert len(list(LogReader(tmp_path / "log").commits())) == 20
    durable.flush()
    assert len(list(LogReader(tmp_path / "log").commits())) == 25
    durable.close()


def test_commits_that_gather_are_bounded_by_their_events(tmp_path: Path, truth: EventLog) -> None:
    flush = FlushPolicy(every_commits=1 << 30, max_gathered_rows=10)
    durable = written(tmp_path / "log", truth, flush=flush)
    num_written = len(list(LogReader(tmp_path / "log").commits()))
    assert 0 < len(truth) - num_written < 10
    durable.close()


def test_a_quiet_log_is_written_in_time(tmp_path: Path, truth: EventLog) -> None:
    durable = written(tmp_path / "log", EventLog(list(truth)[:3]), flush=FlushPolicy(every_ms=20))
    deadline = time.monotonic() + 20
    while len(list(LogReader(tmp_path / "log").commits())) < 3:
        assert time.monotonic() < deadline, "nothing was written although 20 ms are long over"
        time.sleep(0.01)
    durable.close()


def test_several_threads_may_note_and_flush_while_commits_arrive(tmp_path: Path, truth: EventLog) -> None:
    durable = DurableLog.create(tmp_path / "log", flush=FlushPolicy(every_ms=1), segment_bytes=40_000)

    def notes() -> None:
        for i in range(100):
            durable.note(RequestArrived(f"n{i}", 0.0, 1))
            durable.flush()

    thread = threading.Thread(target=notes)
    thread.start()
    for commit in truth:
        durable.apply(commit)
    thread.join()
    durable.close()
    reader = LogReader(tmp_path / "log")
    assert list(reader.commits()) == list(truth)
    assert [each.note.request_id for each in reader.notes()] == [f"n{i}" for i in range(100)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "takes either every_commits or every_ms"),
        ({"every_commits": 1, "every_ms": 5}, "takes either every_commits or every_ms"),
        ({"every_commits": 0}, "every_commits must be above 0"),
        ({"every_ms": -1}, "every_ms must be above 0"),
    ],
)
def test_a_flush_policy_is_one_thing_and_said(options: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        FlushPolicy(**options)


def test_a_flush_policy_is_spelled_on_the_command_line() -> None:
    assert FlushPolicy.parse("commit") == FlushPolicy(every_commits=1)
    assert FlushPolicy.parse("100commits") == FlushPolicy(every_commits=100)
    assert FlushPolicy.parse("2.5ms", fsync=True) == FlushPolicy(every_ms=2.5, fsync=True)
    for text in ("", "ms", "commits", "every day", "0commits", "-3ms"):
        with pytest.raises(InputError):
            FlushPolicy.parse(text)


# -- one writer, a full disk -------------------------------------------------------------------------------------------


def test_a_second_writer_is_refused_and_told_who_the_first_is(tmp_path: Path, truth: EventLog) -> None:
    durable = written(tmp_path / "log", truth)
    with pytest.raises(LogInUseError, match=f"being written by process {os.getpid()}"):
        DurableLog.resume(tmp_path / "log", flush=EVERY_COMMIT)
    durable.close()
    DurableLog.resume(tmp_path / "log", flush=EVERY_COMMIT).close()
    assert list(LogReader(tmp_path / "log").commits()) == list(truth)


def test_a_second_process_is_refused(tmp_path: Path, truth: EventLog) -> None:
    durable = written(tmp_path / "log", truth)
    code = (
        "import sys\n"
        "from kvledger.backends.sinks import DurableLog, FlushPolicy\n"
        "from kvledger.core.errors import KVLedgerError\n"
        "try: DurableLog.resume(sys.argv[1], flush=FlushPolicy(every_commits=1))\n"
        "except KVLedgerError as error: print(error)\n"
    )
    out = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "log")], capture_output=True, text=True, check=True
    )
    assert f"being written by process {os.getpid()}" in out.stdout
    durable.close()


def test_a_full_disk_cuts_nothing_that_was_good_and_loses_nothing_that_was_told(
    tmp_path: Path, truth: EventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    durable = written(tmp_path / "log", EventLog(list(truth)[:10]))
    real = os.pwrite

    def half_then_full(fd: int, data, offset: int) -> int:
        if len(data) > 8:
            return real(fd, data[: len(data) // 2], offset)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(os, "pwrite", half_then_full)
        for commit in list(truth)[10:13]:
            with pytest.raises(LogWriteError, match=r"commits before commit 1[123] .* at byte \d+ .*No space left"):
                durable.apply(commit)
        reader = LogReader(tmp_path / "log")
        assert list(reader.commits()) == list(truth)[:10]
        assert reader.torn is None
    durable.flush()
    for commit in list(truth)[13:]:
        durable.apply(commit)
    durable.close()
    assert list(LogReader(tmp_path / "log").commits()) == list(truth)


def test_a_disk_that_fills_while_a_segment_is_closed_leaves_the_open_one(tmp_path: Path, truth: EventLog) -> None:
    durable = written(tmp_path / "log", truth)
    in_the_way = tmp_path / "log" / "segment-000000.parquet.tmp"
    in_the_way.mkdir()
    with pytest.raises(LogWriteError, match="every commit is written, but the segment could not be closed"):
        durable.close()
    assert list(LogReader(tmp_path / "log").commits()) == list(truth)
    in_the_way.rmdir()
    durable.close()
    assert list(LogReader(tmp_path / "log").commits()) == list(truth)


FILL_UP = """
import resource, signal, sys
from kvledger.backends.sinks import DurableLog, FlushPolicy, LogReader, LogWriteError
from kvledger.core import AllocatorConfig, EventLog, FullAttention, KVCacheAllocator, Request
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
log = EventLog()
allocator = KVCacheAllocator(AllocatorConfig(num_blocks=999, groups=[FullAttention(16)], max_model_len=99999), [log])
durable = DurableLog.create(sys.argv[1], flush=FlushPolicy(every_commits=1))
resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, resource.RLIM_INFINITY))
for i in range(200):
    allocator.allocate(Request(str(i), 20), 20)
failed = 0
for commit in log:
    try:
        durable.apply(commit)
    except LogWriteError as error:
        failed += 1
        message = str(error)
kept = list(LogReader(sys.argv[1]).commits())
assert 0 < failed < len(log) and kept == list(log)[: len(log) - failed], (failed, len(kept))
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
durable.flush()
durable.close()
assert list(LogReader(sys.argv[1]).commits()) == list(log)
print(failed, message)
"""


def test_a_real_limit_on_the_file_is_survived(tmp_path: Path) -> None:
    out = subprocess.run(
        [sys.executable, "-c", FILL_UP, str(tmp_path / "log")], capture_output=True, text=True, timeout=120
    )
    assert out.returncode == 0, out.stderr
    assert "File too large" in out.stdout


def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LogWriteError, match="cannot start a log here"):
        DurableLog.create(tmp_path / "file" / "log", flush=EVERY_COMMIT)


@pytest.mark.parametrize("flush", [EVERY_COMMIT, FlushPolicy(every_ms=1)], ids=["commits", "thread"])
def test_snapshots_of_the_live_state_are_those_of_the_fold(tmp_path: Path, history_of: Callable, flush) -> None:
    durable = DurableLog.create(tmp_path / "log", flush=flush, segment_bytes=30_000)
    history = history_of(seed=5, num_commands=1, sinks=[durable])
    durable.live_state = history.allocator.state
    for _ in range(10):
        history.run(25)
        durable.flush()  # the thread alone may come too late to see more than the end
    durable.close()
    reader = LogReader(tmp_path / "log")
    assert len(reader.snapshots()) > 1
    for commits, _ in reader.snapshots():
        assert reader.state(commits).snapshot() == history.log.replay(commits).snapshot()
    assert list(reader.commits()) == list(history.log)


def test_a_request_whose_name_is_no_text_is_refused(tmp_path: Path, truth: EventLog) -> None:
    durable = written(tmp_path / "log", EventLog(list(truth)[:3]))
    with pytest.raises(InputError, match="commit 3 names a request that is no text"):
        durable.apply(Commit(3, (RowsAssigned(("\ud800",), (0,)),)))
    durable.apply(truth[3])
    durable.close()
    assert list(LogReader(tmp_path / "log").commits()) == list(truth)[:4]


@pytest.mark.parametrize("name", ["written:" + "1" * 96, "head:00000000 crc32:00000000", "prev:00000000 "])
def test_a_request_may_be_named_like_a_check_of_the_log(tmp_path: Path, truth: EventLog, name: str) -> None:
    durable = written(tmp_path / "log", EventLog(list(truth)[:3]))
    durable.note(RequestArrived(name, 0.0, 1))
    durable.apply(truth[3])
    reader = LogReader(tmp_path / "log")
    assert list(reader.commits()) == list(truth)[:4]
    assert [each.note.request_id for each in reader.notes()] == [name]
    durable.close()
    assert [each.note.request_id for each in LogReader(tmp_path / "log").notes()] == [name]
