"""Damage of every kind, at random places: what is read is a whole prefix, or a refusal that names the place."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from kvledger.backends.sinks.errors import LogDamagedError
from kvledger.backends.sinks.log.durable_log import DurableLog
from kvledger.backends.sinks.log.flush_policy import FlushPolicy
from kvledger.backends.sinks.log.reader import LogReader
from kvledger.core import EventLog
from kvledger.core.errors import KVLedgerError
from kvledger.core.events import Commit
from kvledger.core.ledger.replay_checks import CheckedReplay
from kvledger.core.ledger.state import LedgerState

EVERY_COMMIT = FlushPolicy(every_commits=1)


@pytest.fixture(scope="module")
def truth(history_of: Callable) -> EventLog:
    return history_of(seed=21, num_commands=160).log


@pytest.fixture(scope="module")
def pristine(truth: EventLog, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Closed segments, snapshots and an open segment, left by a process that ended without a word."""
    directory = tmp_path_factory.mktemp("pristine") / "log"
    durable = DurableLog.create(directory, flush=FlushPolicy(every_commits=3), segment_bytes=60_000)
    for commit in truth:
        durable.apply(commit)
    durable.flush()
    durable._lock_file.release()
    names = sorted(path.name for path in directory.iterdir())
    assert len([name for name in names if name.endswith(".parquet")]) >= 2
    assert len([name for name in names if name.endswith(".arrows")]) == 1
    return directory


@pytest.fixture
def log_dir(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "log"))


def open_segment(directory: Path) -> Path:
    (path,) = directory.glob("*.arrows")
    return path


def marks(stream: bytes) -> range:
    """The bytes of the two marks of how much was written."""
    at = stream.index(b"written:") + len(b"written:")
    return range(at, at + 96)


def read_prefix(directory: Path, truth: EventLog) -> tuple[list[Commit], KVLedgerError | None]:
    """What a reader gets before it ends or is refused; always a prefix of what happened."""
    commits: list[Commit] = []
    error = None
    try:
        commits.extend(LogReader(directory).commits())  # keeps what came before a refusal
    except KVLedgerError as refusal:
        error = refusal
    assert commits == list(truth)[: len(commits)]
    return commits, error


def check_outcome(directory: Path, truth: EventLog) -> str:
    """Exact recovery or a named refusal, for a reader and for the next writer."""
    commits, error = read_prefix(directory, truth)
    before = {path.name: path.read_bytes() for path in directory.iterdir() if path.name != "lock"}
    try:
        durable = DurableLog.resume(directory, flush=EVERY_COMMIT)
    except LogDamagedError as refusal:
        assert str(refusal.path.parent) == str(directory)
        assert f"byte {refusal.offset}" in str(refusal)
        after = {path.name: path.read_bytes() for path in directory.iterdir() if path.name != "lock"}
        assert after == before, "a refusal has changed the log"
        return "refused"
    durable._lock_file.release()
    assert error is None, "the writer goes on after a log that readers refuse"
    assert durable.next_commit == len(commits)
    if len(commits) < len(truth):
        assert durable.recovery.torn is not None
        assert durable.recovery.describe()
    reader = LogReader(directory)
    assert list(reader.commits()) == commits
    state = LedgerState(truth.created)
    replay = CheckedReplay(state)
    for commit in commits:
        replay.apply(commit)
    assert not commits or reader.state().snapshot() == state.snapshot()
    return "whole" if len(commits) == len(truth) else "recovered"


# -- the open segment --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", range(8))
def test_an_open_segment_cut_anywhere_recovers_to_its_last_whole_batch(
    pristine: Path, tmp_path: Path, truth: EventLog, part: int
) -> None:
    chance = random.Random(part)
    size = open_segment(pristine).stat().st_size
    outcomes = set()
    for i in range(12):
        directory = Path(shutil.copytree(pristine, tmp_path / f"log{i}"))
        path = open_segment(directory)
        keep = chance.randrange(size)
        path.write_bytes(path.read_bytes()[:keep])
        outcome = check_outcome(directory, truth)
        outcomes.add(outcome)
        assert outcome in ("recovered", "refused")
        if outcome == "recovered":
            kept = list(directory.glob("dropped-*.bin"))
            assert sum(each.stat().st_size for each in kept) + open_segment(directory).stat().st_size == keep
        shutil.rmtree(directory)
    assert "recovered" in outcomes


@pytest.mark.parametrize("part", range(10))
def test_a_flipped_bit_is_found_wherever_it_is(pristine: Path, tmp_path: Path, truth: EventLog, part: int) -> None:
    chance = random.Random(100 + part)
    for i in range(20):
        directory = Path(shutil.copytree(pristine, tmp_path / f"log{i}"))
        path = chance.choice(sorted(each for each in directory.iterdir() if each.name != "lock"))
        data = bytearray(path.read_bytes())
        place = chance.randrange(len(data))
        data[place] ^= 1 << chance.randrange(8)
        path.write_bytes(data)
        outcome = check_outcome(directory, truth)
        if path.suffix != ".arrows":
            assert outcome == "refused"
        elif place not in marks(bytes(data)):
            assert outcome in ("refused", "recovered"), f"byte {place} of {path.name}"
        else:
            assert outcome == "whole"
        shutil.rmtree(directory)


def test_every_bit_of_a_small_segment_is_guarded(tmp_path: Path, truth: EventLog) -> None:
    durable = DurableLog.create(tmp_path / "log", flush=EVERY_COMMIT)
    for commit in list(truth)[:2]:
        durable.apply(commit)
    path = open_segment(tmp_path / "log")
    whole = path.read_bytes()
    durable._lock_file.release()
    for place in range(0, len(whole), 11):
        data = bytearray(whole)
        data[place] ^= 1 << (place % 8)
        path.write_bytes(data)
        commits, error = read_prefix(tmp_path / "log", truth)
        if place in marks(whole):  # the other mark is used
            assert (len(commits), error) == (2, None)
        else:
            assert error is not None or len(commits) < 2, f"byte {place}"


@pytest.mark.parametrize("damage", ["duplicate", "swap", "remove"])
def test_whole_batches_out_of_place_are_refused_with_their_commit(log_dir: Path, truth: EventLog, damage: str) -> None:
    path = open_segment(log_dir)
    reader = LogReader(log_dir)
    placed = [each for each in reader.batches() if each.path == path]
    data = path.read_bytes()
    head = data[: placed[0].offset]
    parts = [data[each.offset : each.offset + each.size_bytes] for each in placed]
    at = len(parts) // 2
    first_bad = {"duplicate": parts[: at + 1] + parts[at:], "remove": parts[:at] + parts[at + 1 :]}
    swapped = [*parts[:at], parts[at + 1], parts[at], *parts[at + 2 :]]
    path.write_bytes(head + b"".join(first_bad.get(damage, swapped)))
    _, error = read_prefix(log_dir, truth)
    assert isinstance(error, LogDamagedError)
    assert (error.path, error.offset) == (path, placed[at + (damage == "duplicate")].offset)
    expected = placed[at + (damage == "duplicate")].batch.column("commit")[0].as_py()
    assert error.commit == expected
    assert f"belongs (byte {error.offset}, from commit {expected} on)" in str(error)
    assert check_outcome(log_dir, truth) == "refused"


def test_zeros_behind_the_last_batch_are_a_torn_end(log_dir: Path, truth: EventLog) -> None:
    with open_segment(log_dir).open("ab") as file:
        file.write(bytes(5000))
    reader = LogReader(log_dir)
    assert list(reader.commits()) == list(truth)
    assert reader.torn is not None
    assert reader.torn.num_bytes == 5000
    durable = DurableLog.resume(log_dir, flush=EVERY_COMMIT)
    assert durable.next_commit == len(truth)
    assert "5,000 bytes" in durable.recovery.describe()[0]
    durable.close()
    assert list(LogReader(log_dir).commits()) == list(truth)


def test_garbage_behind_the_last_batch_is_refused(log_dir: Path, truth: EventLog) -> None:
    path = open_segment(log_dir)
    size = path.stat().st_size
    with path.open("ab") as file:
        file.write(b"not a message at all")
    commits, error = read_prefix(log_dir, truth)
    assert commits == list(truth)
    assert isinstance(error, LogDamagedError)
    assert (error.offset, error.commit) == (size, len(truth))


def test_a_batch_whose_length_was_damaged_is_not_taken_for_a_torn_end(log_dir: Path, truth: EventLog) -> None:
    """In the last batch too: its head has a checksum of its own."""
    path = open_segment(log_dir)
    last = [each for each in LogReader(log_dir).batches() if each.path == path][-1]
    data = bytearray(path.read_bytes())
    for place in range(4, 8):
        damaged = bytearray(data)
        damaged[last.offset + place] ^= 0x10
        path.write_bytes(damaged)
        _, error = read_prefix(log_dir, truth)
        assert isinstance(error, LogDamagedError), f"byte {place} of the head"
        assert error.offset == last.offset


# -- segments, snapshots and the manifest ------------------------------------------------------------------------------


def test_a_missing_segment_is_named(log_dir: Path, truth: EventLog) -> None:
    for path in [*sorted(log_dir.glob("segment-*"))]:
        away = path.rename(log_dir.parent / path.name)
        _, error = read_prefix(log_dir, truth)
        assert isinstance(error, LogDamagedError)
        assert error.path == path
        assert "missing" in error.reason
        assert error.commit is not None
        assert check_outcome(log_dir, truth) == "refused"
        away.rename(path)


def test_swapped_segments_are_refused(log_dir: Path, truth: EventLog) -> None:
    one, other, *_ = sorted(log_dir.glob("*.parquet"))
    one.rename(log_dir / "x")
    other.rename(one)
    (log_dir / "x").rename(other)
    commits, error = read_prefix(log_dir, truth)
    assert commits == []
    assert isinstance(error, LogDamagedError)
    assert (error.path, error.commit) == (one, 0)


def test_a_copy_of_a_segment_under_another_number_is_refused(log_dir: Path, truth: EventLog) -> None:
    shutil.copy(sorted(log_dir.glob("*.parquet"))[0], log_dir / "segment-000099.parquet")
    _, error = read_prefix(log_dir, truth)
    assert isinstance(error, LogDamagedError)
    assert "not part of the log" in error.reason
    assert check_outcome(log_dir, truth) == "refused"


def test_an_open_segment_of_another_place_is_refused(log_dir: Path, truth: EventLog) -> None:
    path = open_segment(log_dir)
    other = DurableLog.create(log_dir.parent / "other", flush=EVERY_COMMIT)
    other.apply(truth[0])
    shutil.copy(open_segment(log_dir.parent / "other"), path)
    other.close()
    _, error = read_prefix(log_dir, truth)
    assert isinstance(error, LogDamagedError)
    assert "this is segment 0, from commit 0 on" in error.reason


def test_damage_in_a_closed_segment_names_the_row_group(tmp_path: Path, truth: EventLog, monkeypatch) -> None:
    monkeypatch.setattr("kvledger.backends.sinks.log.parquet.ROW_GROUP_ROWS", 60)
    durable = DurableLog.create(tmp_path / "log", flush=EVERY_COMMIT)
    for commit in truth:
        durable.apply(commit)
    durable.close()
    (path,) = (tmp_path / "log").glob("*.parquet")
    groups = list(LogReader(tmp_path / "log").batches())
    assert len(groups) > 3
    whole = path.read_bytes()
    for placed in groups:
        data = bytearray(whole)
        data[placed.offset + placed.size_bytes // 2] ^= 1
        path.write_bytes(data)
        commits, error = read_prefix(tmp_path / "log", truth)
        assert commits == []
        assert isinstance(error, LogDamagedError)
        assert (error.offset, error.commit) == (placed.offset, placed.batch.column("commit")[0].as_py())
        assert f"the row group of commits {error.commit} to" in error.reason


def test_a_damaged_snapshot_is_named_and_can_be_deleted(log_dir: Path, truth: EventLog) -> None:
    _, path = LogReader(log_dir).snapshots()[-1]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    with pytest.raises(LogDamagedError, match="delete it, and the state is rebuilt") as refusal:
        LogReader(log_dir).state()
    assert refusal.value.path == path
    path.unlink()
    assert LogReader(log_dir).state().snapshot() == truth.replay().snapshot()


def test_a_damaged_or_foreign_manifest_is_named(log_dir: Path, truth: EventLog) -> None:
    path = log_dir / "manifest.json"
    plain = json.loads(path.read_bytes())
    for text, reason in (
        (json.dumps(plain | {"next_commit": 0}), "does not match its checksum"),
        ("{", "no JSON"),
        ("[]", "not the manifest of an event log"),
        (json.dumps({"format": "something else"}), "not the manifest of an event log"),
    ):
        path.write_text(text)
        _, error = read_prefix(log_dir, truth)
        assert isinstance(error, LogDamagedError)
        assert reason in error.reason
        assert check_outcome(log_dir, truth) == "refused"
    path.unlink()
    _, error = read_prefix(log_dir, truth)
    assert isinstance(error, LogDamagedError)
    assert "no manifest" in error.reason
