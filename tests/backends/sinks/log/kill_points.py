"""Kills writers of a log between any two system calls, and opens what each left behind. Run by test_log_kills.

    python kill_points.py DIRECTORY POLICIES

DIRECTORY/truth holds the whole log. A writer creates a log, closes several segments, closes the log, resumes it, ends
without closing it, resumes it again behind a torn end, and closes it. POLICIES is a JSON list of objects like

    {"flush": "commit", "fsync": false, "segment_bytes": 9000, "first": 3, "every": 97}

Under each, the writer runs once to its end, which counts its system calls that touch the log's folder, and is then
killed before call 3, 100, 197, ...; where that is a write, also after half of it. After some, the writer that resumes
the log is killed too, at a random one of its first 60 calls.
Prints one JSON object per run.
"""

import io
import json
import os
import random
import shutil
import signal
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvledger.backends.sinks.errors import LogDamagedError
from kvledger.backends.sinks.log.durable_log import DurableLog
from kvledger.backends.sinks.log.flush_policy import FlushPolicy
from kvledger.backends.sinks.log.manifest import stream_name
from kvledger.backends.sinks.log.reader import LogReader
from kvledger.core.events import Commit
from kvledger.sim.logs.verification import verify_log

FLUSH_EVERY = 7  # commits, under a policy that flushes by time
Promise = struct.Struct("<q")
real_write = os.write
real_pwrite = os.pwrite


class SystemCalls:
    """Counts this process's calls that touch files, and kills it before call `point`, or halfway through that write."""

    def __init__(self, point: int | None, half: bool) -> None:
        self.point, self.half = point, half
        self.names: list[str] = []

    def count(self, name: str, do_half: Callable[[], object] | None = None) -> None:
        if len(self.names) == self.point:
            if self.half and do_half is not None:
                do_half()
            os.kill(os.getpid(), signal.SIGKILL)
        self.names.append(name)

    def install(self) -> None:
        calls = self

        def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                calls.count(name)
                return function(*args, **kwargs)

            return call

        def pwrite(fd: int, data: Any, offset: int) -> int:
            calls.count("write", lambda: real_pwrite(fd, bytes(data)[: len(data) // 2], offset))
            return real_pwrite(fd, data, offset)

        class CountedFile(io.FileIO):
            def write(self, data: Any) -> int:
                half = bytes(data)[: len(data) // 2]
                calls.count("write", lambda: real_write(self.fileno(), half))
                return super().write(data)

            def close(self) -> None:
                if not self.closed:
                    calls.count("close")
                super().close()

        real_open = io.open

        def open_file(path: Any, mode: str = "r", buffering: int = -1, *args: Any, **kwargs: Any) -> Any:
            calls.count("open")
            if mode != "wb":
                return real_open(path, mode, buffering, *args, **kwargs)
            file = CountedFile(path, "w")
            return file if buffering == 0 else io.BufferedWriter(file)

        os.open, os.close = counted("open", os.open), counted("close", os.close)
        os.fsync, os.ftruncate = counted("fsync", os.fsync), counted("truncate", os.ftruncate)
        os.replace, os.unlink = counted("rename", os.replace), counted("unlink", os.unlink)
        os.mkdir = counted("mkdir", os.mkdir)
        os.pwrite = pwrite
        io.open = open_file


def write(log: DurableLog, commits: list[Commit], policy: FlushPolicy, promise: Callable[[int], None]) -> None:
    """Log commits, and tell after each how many the policy promises to be there whatever happens."""
    before = log.next_commit
    for done, commit in enumerate(commits, 1):
        log.apply(commit)
        if policy.every_commits is not None:
            promise(before + max(0, done - policy.every_commits + 1))
        elif done % FLUSH_EVERY == 0:
            log.flush()
            promise(before + done)


def whole_life(directory: Path, commits: list[Commit], options: Any, promise: Callable[[int], None]) -> None:
    third = len(commits) // 3
    policy = options["flush"]
    log = DurableLog.create(directory, **options)
    write(log, commits[:third], policy, promise)
    log.close()
    promise(third)
    log = DurableLog.resume(directory, **options)
    write(log, commits[third : 2 * third], policy, promise)
    log.flush()
    promise(2 * third)
    log._stop.set()
    if log._thread is not None:
        log._thread.join()
    log._lock_file.release()  # as if the process had ended; the kernel would have closed the file
    number = log._manifest.open_segment
    assert number is not None
    fd = os.open(directory / stream_name(number), os.O_WRONLY | os.O_APPEND)
    real_write(fd, b"\xff\xff\xff\xff\x00\x04")
    os.close(fd)
    log = DurableLog.resume(directory, **options)
    write(log, commits[2 * third :], policy, promise)
    log.close()
    promise(len(commits))


def in_a_child(point: int | None, half: bool, body: Callable[[Callable[[int], None]], None]) -> tuple[bool, int, list]:
    """Run `body` in a child; return whether it was killed, its last promise, and the names of its calls."""
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(read_fd)
            calls = SystemCalls(point, half)
            calls.install()
            body(lambda number: real_write(write_fd, Promise.pack(number)) and None)
            os.set_blocking(write_fd, True)
            real_write(write_fd, Promise.pack(-1) + json.dumps(calls.names).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(write_fd)
    promised, names = 0, []
    with os.fdopen(read_fd, "rb") as pipe:
        while data := pipe.read(Promise.size):
            (number,) = Promise.unpack(data)
            if number < 0:
                names = json.loads(pipe.read())
            else:
                promised = number
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the writer failed although nothing stood in its way"
    return os.WIFSIGNALED(status), promised, names


def outcome(case: dict[str, Any], directory: Path, commits: list[Commit]) -> dict[str, Any]:
    policy = FlushPolicy.parse(case["flush"], fsync=case["fsync"])
    options: Any = {"flush": policy, "segment_bytes": case["segment_bytes"]}
    killed, promised, names = in_a_child(
        case.get("point"), case.get("half", False), lambda promise: whole_life(directory, commits, options, promise)
    )
    result = {**case, "killed": killed, "promised": promised, "names": names}

    def resume(promise: Callable[[int], None]) -> None:
        log = DurableLog.resume(directory, **options)
        write(log, commits[log.next_commit :], policy, promise)

    try:
        if case.get("again") is not None and (directory / "manifest.json").exists():
            result["killed_again"], later, _ = in_a_child(case["again"], case["half"], resume)
            promised = max(promised, later)
        if (directory / "manifest.json").exists():
            read = list(LogReader(directory).commits())
            found = verify_log(LogReader(directory))
            assert found.is_sound or (found.fault is not None and found.fault.kind == "empty" and not read), found
            log = DurableLog.resume(directory, **options)
        else:
            try:
                LogReader(directory)
                raise AssertionError("a log without a manifest was opened")
            except (LogDamagedError, ValueError):
                read = []
            log = DurableLog.create(directory, **options)
        assert read == commits[: len(read)], "other commits than were written"
        assert log.next_commit == len(read), "the writer and the reader disagree"
        assert len(read) >= promised, f"{promised} commits were promised, {len(read)} are there"
        result["lost"] = log.recovery.torn is not None and log.recovery.torn.first_lost is not None
        assert not result["lost"], "the log says that commits are lost"
        for commit in commits[len(read) :]:
            log.apply(commit)
        log.close()
        reader = LogReader(directory)
        assert list(reader.commits()) == commits
        found = verify_log(LogReader(directory))
        assert found.is_sound, found
        left = [path.name for path in directory.iterdir() if path.suffix in (".tmp", ".arrows")]
        assert not left, left
        result |= {"segments": len(reader.manifest.closed), "error": None}
    except Exception as error:
        return result | {"error": f"{type(error).__name__}: {error}"}
    shutil.rmtree(directory)
    return result


def cases_of(policy: dict[str, Any], names: list[str], first: int, every: int) -> Iterator[dict[str, Any]]:
    """Yield every `every`-th point of a whole run, from `first` on, and the points that are also done by half."""
    for point in range(first, len(names), every):
        again = random.Random(point).randrange(60) if point % 5 == 0 else None
        yield {**policy, "point": point, "half": False, "again": again}
        # Parquet files are hundreds of writes in a row; every fourth of those is also done by half.
        if names[point] == "write" and (names[point - 1] != "write" or point % 4 == 0):
            yield {**policy, "point": point, "half": True, "again": None}


def main() -> None:
    root = Path(sys.argv[1])
    commits = list(LogReader(root / "truth").commits())
    for number, policy in enumerate(json.loads(sys.argv[2])):
        first, every = policy.pop("first"), policy.pop("every")
        whole = outcome(policy, root / f"whole{number}", commits)
        print(json.dumps(whole), flush=True)
        for case in cases_of(policy, whole.pop("names"), first, every):
            point = f"{number}-{case['point']}-{case['half']}"
            print(json.dumps(outcome(case, root / point, commits)), flush=True)


if __name__ == "__main__":
    main()
