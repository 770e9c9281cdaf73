"""A disk that fills: the writer ends with a named error, all before it is readable, and `verify` says why it ends."""

import errno
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kvledger.backends.sinks.errors import LogDamagedError, LogWriteError
from kvledger.backends.sinks.log.durable_log import DurableLog
from kvledger.backends.sinks.log.flush_policy import FlushPolicy
from kvledger.backends.sinks.log.reader import LogReader
from kvledger.core.events import Commit
from kvledger.sim.logs.verification import verify_log

NO_SPACE = "No space left on device"


class Disk:
    """Takes a number of bytes; a write beyond it is cut short, and the next one fails.

    Overwriting bytes in place needs no space, as on a real device, unless `refuses_all`: it then takes none at all.
    """

    def __init__(self, num_bytes: float, refuses_all: bool) -> None:
        self.left, self.refuses_all = num_bytes, refuses_all
        self.taken = 0

    def take(self, wanted: int, grown: int) -> int:
        """Return how many of `wanted` bytes may be written; `grown` of them make the file longer."""
        needed = wanted if self.refuses_all else grown
        if needed and self.left <= 0:
            raise OSError(errno.ENOSPC, NO_SPACE)
        granted = int(min(needed, self.left))
        self.left -= granted
        self.taken += granted
        return wanted - needed + granted

    def install(self, patch: pytest.MonkeyPatch) -> None:
        disk, real_pwrite, real_open = self, os.pwrite, io.open

        def pwrite(fd: int, data: Any, offset: int) -> int:
            grown = min(len(data), max(0, offset + len(data) - os.fstat(fd).st_size))
            return real_pwrite(fd, bytes(data)[: disk.take(len(data), grown)], offset)

        class LimitedFile(io.FileIO):
            def write(self, data: Any) -> int:
                return super().write(bytes(data)[: disk.take(len(data), len(data))])

        def open_file(path: Any, mode: str = "r", buffering: int = -1, *args: Any, **kwargs: Any) -> Any:
            if mode != "wb":
                return real_open(path, mode, buffering, *args, **kwargs)
            file = LimitedFile(path, "w")
            return file if buffering == 0 else io.BufferedWriter(file)

        patch.setattr(os, "pwrite", pwrite)
        patch.setattr(io, "open", open_file)


def fill(directory: Path, commits: list[Commit], flush: FlushPolicy) -> tuple[int, LogWriteError | None]:
    """Log commits until the disk is full; return how many were written when `apply` returned, and the error."""
    written = 0
    try:
        with DurableLog.create(directory, flush=flush, segment_bytes=9_000) as log:
            for done, commit in enumerate(commits, 1):
                log.apply(commit)
                written = max(0, done + 1 - (flush.every_commits or 1))
    except LogWriteError as error:
        return written, error
    return written, None


@pytest.mark.parametrize("num_sizes", [12, pytest.param(150, marks=pytest.mark.slow)])
@pytest.mark.parametrize("refuses_all", [False, True], ids=["space", "all"])
@pytest.mark.parametrize("every_commits", [1, 4])
def test_a_full_disk_is_a_named_end_with_everything_before_it(
    tmp_path: Path, history_of: Callable, every_commits: int, refuses_all: bool, num_sizes: int
) -> None:
    commits = list(history_of(seed=31, num_commands=24, pool="hybrid").log)
    flush = FlushPolicy(every_commits=every_commits)
    with pytest.MonkeyPatch.context() as patch:
        disk = Disk(float("inf"), refuses_all)
        disk.install(patch)
        assert fill(tmp_path / "whole", commits, flush)[1] is None
    not_started = ended = 0
    for number in range(num_sizes):
        directory = tmp_path / str(number)
        with pytest.MonkeyPatch.context() as patch:
            Disk(disk.taken * number // num_sizes, refuses_all).install(patch)
            written, error = fill(directory, commits, flush)
        assert error is not None
        assert NO_SPACE in str(error)
        if not (directory / "manifest.json").exists():
            not_started += 1
            assert "cannot start a log here" in str(error)
            with pytest.raises(LogDamagedError, match="before it had started the log: create it again"):
                LogReader(directory)
            DurableLog.create(directory, flush=flush).close()
            continue
        ended += 1
        read = list(LogReader(directory).commits())
        assert read == commits[: len(read)]
        assert len(read) >= written
        found = verify_log(LogReader(directory))
        assert found.stopped is not None
        assert f"the writer stopped before commit {len(read)} ({NO_SPACE})" in found.stopped
        assert found.is_sound == bool(read)
        if not read:
            assert found.fault is not None
            assert found.fault.kind == "empty"
            assert NO_SPACE in found.fault.description
        assert found.stopped in "\n".join(found.describe())
        log = DurableLog.resume(directory, flush=flush, segment_bytes=9_000)
        assert log.next_commit == len(read)
        for commit in commits[len(read) :]:
            log.apply(commit)
        log.close()
        assert list(LogReader(directory).commits()) == commits
        found = verify_log(LogReader(directory))
        assert (found.is_sound, found.stopped) == (True, None)
        assert not list(directory.glob("stopped-*"))
    assert not_started >= 1
    assert ended >= num_sizes // 2


def test_a_log_that_goes_on_after_the_disk_was_full_forgets_it(tmp_path: Path, history_of: Callable) -> None:
    commits = list(history_of(seed=31, num_commands=24).log)
    log = DurableLog.create(tmp_path / "log", flush=FlushPolicy(every_commits=1))
    for refuses_all in (False, True):
        first = log.next_commit
        with pytest.MonkeyPatch.context() as patch:
            Disk(0, refuses_all).install(patch)
            with pytest.raises(LogWriteError, match=NO_SPACE):
                log.apply(commits[first])
            reader = LogReader(tmp_path / "log")
            assert list(reader.commits()) == commits[:first]
            assert reader.stopped is not None
        log.flush()
        reader = LogReader(tmp_path / "log")
        assert list(reader.commits()) == commits[: first + 1]
        assert reader.stopped is None
    log.close()
