"""Kills writers of a log with SIGKILL, many times over, and says what each of them left behind. Run by test_log_crash.

    python crash_campaign.py DIRECTORY CASES.json

DIRECTORY/truth holds the whole log. Each case is {"name", "every_commits" or "every_ms", "segment_bytes"} and either
"operation" (die at the n-th write, rename, removal or truncation; a write is cut short first) or "after_ms".
Prints one JSON object a case.
"""

import json
import os
import random
import signal
import struct
import sys
import time
from pathlib import Path

from kvledger.backends.sinks.log.durable_log import DurableLog
from kvledger.backends.sinks.log.flush_policy import FlushPolicy
from kvledger.backends.sinks.log.reader import LogReader
from kvledger.core.events import Commit

Progress = struct.Struct("<qq")


class DieAt:
    """Counts the operations on files, and ends the process in the middle of the n-th one."""

    def __init__(self, operation: int, seed: int) -> None:
        self.left = operation
        self.chance = random.Random(seed)

    def wrap(self, function, cut_short=None):
        def wrapped(*args, **kwargs):
            self.left -= 1
            if self.left < 0:
                if cut_short is not None:
                    cut_short(*args)
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return wrapped

    def install(self) -> None:
        real_pwrite = os.pwrite

        def half_a_write(fd: int, data, offset: int) -> None:
            real_pwrite(fd, bytes(data)[: self.chance.randrange(len(data) + 1)], offset)

        os.pwrite = self.wrap(os.pwrite, half_a_write)
        os.ftruncate = self.wrap(os.ftruncate)
        os.fsync = self.wrap(os.fsync)
        Path.replace = self.wrap(Path.replace)
        Path.unlink = self.wrap(Path.unlink)


def write_until_killed(case: dict, directory: Path, commits: list[Commit], progress_fd: int) -> None:
    flush = FlushPolicy(every_commits=case.get("every_commits"), every_ms=case.get("every_ms"))
    if "operation" in case:
        DieAt(case["operation"], case["operation"]).install()
    log = DurableLog.create(directory, flush=flush, segment_bytes=case["segment_bytes"])
    os.write(progress_fd, Progress.pack(0, 0))
    for number, commit in enumerate(commits):
        log.apply(commit)
        if case.get("pause_us"):
            time.sleep(case["pause_us"] / 1e6)
        if case.get("every_commits"):
            whole = (number + 1) // case["every_commits"] * case["every_commits"]
            os.write(progress_fd, Progress.pack(number + 1, whole))
    log.close()
    os.write(progress_fd, Progress.pack(len(commits), len(commits)))


def killed(case: dict, directory: Path, commits: list[Commit]) -> tuple[bool, int]:
    """Whether the writer was killed (it may have finished first), and how many commits it had flushed before."""
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)
    child = os.fork()
    if child == 0:
        try:
            os.close(read_fd)
            write_until_killed(case, directory, commits, write_fd)
        finally:
            os._exit(0)
    os.close(write_fd)
    if "after_ms" in case:
        os.read(read_fd, Progress.size)  # the log is open: the time runs from here
        time.sleep(case["after_ms"] / 1e3)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    flushed = 0
    while data := os.read(read_fd, Progress.size * 256):
        flushed = Progress.unpack(data[-Progress.size :])[1]
    os.close(read_fd)
    return os.WIFSIGNALED(status), flushed


def outcome(case: dict, directory: Path, commits: list[Commit]) -> dict:
    was_killed, flushed = killed(case, directory, commits)
    result = {"name": case["name"], "killed": was_killed, "flushed": flushed}
    options = {"flush": FlushPolicy(every_commits=20), "segment_bytes": 100_000}
    if (directory / "manifest.json").exists():
        read = list(LogReader(directory).commits())
        log = DurableLog.resume(directory, **options)
    else:
        read = []
        log = DurableLog.create(directory, **options)
    recovered = log.next_commit
    for commit in commits[recovered:]:
        log.apply(commit)
    log.close()
    reader = LogReader(directory)
    whole = list(reader.commits()) == commits
    same_state = all(reader.state(commits_before) for commits_before, _ in reader.snapshots()[:1])
    return result | {
        "recovered": recovered,
        "is_prefix": read == commits[:recovered],
        "goes_on": whole and same_state,
        "torn": log.recovery.torn is not None,
        "kept": sorted(path.name for path in directory.iterdir() if path.suffix in (".tmp", ".arrows")),
    }


def main() -> None:
    root = Path(sys.argv[1])
    commits = list(LogReader(root / "truth").commits())
    for number, case in enumerate(json.loads(Path(sys.argv[2]).read_text())):
        print(json.dumps(outcome(case, root / f"case{number}", commits)), flush=True)


if __name__ == "__main__":
    main()
