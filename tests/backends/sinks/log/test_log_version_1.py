"""Logs of layout version 1 (kvledger 0.1), kept in `version_1/`: they are read, verified and continued as they are.

Both hold 8 commits and 2 notes of one history; `unclosed` was left without being closed.
"""

import json
import shutil
from pathlib import Path

import pytest
from kvledger.backends.sinks.errors import LogDamagedError
from kvledger.backends.sinks.log.durable_log import Clock, DurableLog
from kvledger.backends.sinks.log.flush_policy import FlushPolicy
from kvledger.backends.sinks.log.reader import LogReader
from kvledger.core.events import Commit
from kvledger.sim.logs.verification import verify_log

KEPT = Path(__file__).with_name("version_1")
CLOCK = Clock("unix", lambda: 1_000)
FLUSH = FlushPolicy(every_commits=1)


@pytest.fixture(params=["closed", "unclosed"])
def old_log(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return Path(shutil.copytree(KEPT / request.param, tmp_path / "log"))


def test_an_old_log_is_read_and_verified(old_log: Path) -> None:
    found = verify_log(LogReader(old_log))
    assert (found.is_sound, found.commits, found.notes) == (True, 8, 2)
    assert (found.torn, found.stopped) == (None, None)
    assert list(LogReader(old_log).commits()) == list(LogReader(KEPT / "closed").commits())


def test_an_old_log_goes_on_in_its_own_layout(old_log: Path) -> None:
    before = list(LogReader(old_log).commits())
    log = DurableLog.resume(old_log, flush=FLUSH, clock=CLOCK, segment_bytes=9_000)
    assert log.recovery.describe() == []
    more = [Commit(number, ()) for number in range(8, 20)]
    for commit in more:
        log.apply(commit)
    log.close()
    manifest = json.loads((old_log / "manifest.json").read_bytes())
    assert manifest["layout_version"] == 1
    assert "log_id" not in manifest
    assert not any("snapshot_crc32" in segment for segment in manifest["closed"])
    reader = LogReader(old_log)
    assert list(reader.commits()) == before + more
    assert len(reader.manifest.closed) > 2
    assert verify_log(LogReader(old_log)).is_sound


def test_a_torn_end_of_an_old_log_is_cut_off_and_kept(tmp_path: Path) -> None:
    directory = Path(shutil.copytree(KEPT / "unclosed", tmp_path / "log"))
    (stream,) = directory.glob("*.arrows")
    stream.write_bytes(stream.read_bytes()[:-10])
    log = DurableLog.resume(directory, flush=FLUSH, clock=CLOCK)
    (said,) = log.recovery.describe()
    assert "no whole batch: dropped, and kept as dropped-000001-" in said
    log.close()
    assert verify_log(LogReader(directory)).commits == log.next_commit < 8


def test_a_later_layout_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    DurableLog.create(tmp_path / "log", flush=FLUSH).close()
    monkeypatch.setattr("kvledger.backends.sinks.log.manifest.READABLE_VERSIONS", (1,))
    with pytest.raises(LogDamagedError, match="the log has layout version 2; this kvledger reads 1"):
        LogReader(tmp_path / "log")
