"""One or two random damages to many small logs: everything is there, or a refusal by name that has changed nothing.

The one other outcome is a lost end: an open segment that was cut short is read up to the cut, and reader, writer and
`verify` all say that the commits behind it had been written.
"""

import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
from kvledger.backends.sinks.errors import LogDamagedError
from kvledger.backends.sinks.log.durable_log import Clock, DurableLog
from kvledger.backends.sinks.log.flush_policy import FlushPolicy
from kvledger.backends.sinks.log.reader import LogReader
from kvledger.backends.sinks.log.rows import Record, RequestArrived
from kvledger.core.errors import KVLedgerError
from kvledger.sim.logs.verification import verify_log

NUM_LOGS = 24


@attrs.frozen
class SmallLog:
    """A log on disk and all that was written to it."""

    directory: Path
    records: list[Record]
    is_closed: bool


@pytest.fixture(scope="module")
def logs(history_of: Callable, tmp_path_factory: pytest.TempPathFactory) -> list[SmallLog]:
    """Closed and unclosed, of one and of several segments, several of one history, header and clock."""
    root = tmp_path_factory.mktemp("small")
    out = []
    for number in range(NUM_LOGS):
        chance = random.Random(number)
        commits = list(history_of(seed=number % 5, num_commands=12 + number % 3 * 8).log)
        ticks = iter(range(10**9))
        clock = Clock("unix", lambda ticks=ticks: next(ticks)) if number % 4 else None
        header = {"command": "test"} if number % 2 else {}
        flush = FlushPolicy(every_commits=1 + number % 3)
        size = chance.choice([5_000, 12_000, 1 << 30])
        log = DurableLog.create(root / str(number), flush=flush, clock=clock, header=header, segment_bytes=size)
        for commit in commits:
            if chance.random() < 0.3:
                log.note(RequestArrived(f"n{commit.sequence}", 0.0, 1))
            log.apply(commit)
        log.flush()
        if number % 3 == 0:
            log.close()
        else:
            log._lock_file.release()  # as if the process had ended
        out.append(SmallLog(root / str(number), list(LogReader(root / str(number)).records()), number % 3 == 0))
    return out


# -- damages -----------------------------------------------------------------------------------------------------------


def flip(path: Path, chance: random.Random, _: list[SmallLog]) -> None:
    data = bytearray(path.read_bytes())
    if data:
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def truncate(path: Path, chance: random.Random, _: list[SmallLog]) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: chance.randrange(len(data) + 1)])


def zero(path: Path, chance: random.Random, _: list[SmallLog]) -> None:
    data = bytearray(path.read_bytes())
    start = chance.randrange(len(data) + 1)
    stop = chance.choice([len(data), min(len(data), start + 512)])
    data[start:stop] = bytes(stop - start)
    path.write_bytes(data)


def duplicate(path: Path, chance: random.Random, _: list[SmallLog]) -> None:
    number = chance.randrange(6)
    name = chance.choice(
        [f"segment-{number:06}.parquet", f"segment-{number:06}.arrows", f"snapshot-{number:06}.json.zst", "x.bin"]
    ) + chance.choice(["", "", ".tmp"])
    target = path.with_name(name)
    if not target.exists():
        shutil.copy(path, target)


def swap(path: Path, chance: random.Random, _: list[SmallLog]) -> None:
    other = chance.choice(sorted(path.parent.iterdir()))
    if path != other and not other.is_dir():
        mine, theirs = path.read_bytes(), other.read_bytes() if other.exists() else b""
        path.write_bytes(theirs)
        other.unlink()
        other.write_bytes(mine)


def delete(path: Path, _: random.Random, __: list[SmallLog]) -> None:
    path.unlink()


def append_twice(path: Path, _: random.Random, __: list[SmallLog]) -> None:
    path.write_bytes(path.read_bytes() * 2)


def make_directory(path: Path, _: random.Random, __: list[SmallLog]) -> None:
    path.unlink()
    path.mkdir()


def make_dangling_link(path: Path, _: random.Random, __: list[SmallLog]) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def foreign_file(path: Path, chance: random.Random, others: list[SmallLog]) -> None:
    source = chance.choice(others).directory / path.name
    if source.exists():
        shutil.copy(source, path)


def foreign_manifest(path: Path, chance: random.Random, others: list[SmallLog]) -> None:
    manifest = path.parent / "manifest.json"
    if not manifest.is_dir() and not manifest.is_symlink():
        shutil.copy(chance.choice(others).directory / "manifest.json", manifest)


def batches_out_of_place(path: Path, chance: random.Random, _: list[SmallLog]) -> None:
    """Remove, repeat or swap whole batches of the open segment; often the last one."""
    for stream in path.parent.glob("*.arrows"):
        try:
            reader = LogReader(path.parent)
            placed = [each for each in reader.batches() if each.path == stream]
        except KVLedgerError:
            return
        if not placed:
            return
        data = stream.read_bytes()
        parts = [data[each.offset : each.offset + each.size_bytes] for each in placed]
        at = chance.choice([chance.randrange(len(parts)), len(parts) - 1])
        match chance.randrange(3):
            case 0:
                parts = parts[:at] + parts[at + chance.randrange(1, 3) :]
            case 1:
                parts.insert(at, parts[at])
            case _:
                parts[at], parts[0] = parts[0], parts[at]
        stream.write_bytes(data[: placed[0].offset] + b"".join(parts))


DAMAGES = [
    *(flip, truncate, zero, duplicate, swap, delete, append_twice, make_directory, make_dangling_link),
    *(foreign_file, foreign_manifest, batches_out_of_place),
]


def damaged(log: SmallLog, directory: Path, chance: random.Random, others: list[SmallLog]) -> list[str]:
    """Copy a log and damage the copy; return what was done."""
    shutil.copytree(log.directory, directory)
    done = []
    for _ in range(chance.choice([1, 1, 2])):
        files = [path for path in sorted(directory.iterdir()) if path.is_file()]
        segments = [path for path in files if path.name.startswith("segment-")]
        if files:
            path = chance.choice(chance.choice([files, segments or files]))
            damage = chance.choice(DAMAGES)
            damage(path, chance, others)
            done.append(f"{damage.__name__} {path.name}")
    return done


# -- outcomes ----------------------------------------------------------------------------------------------------------


def content(directory: Path) -> dict[str, Any]:
    """Every name in a folder with its bytes, its target if it is a link, or None if it is a directory."""
    return {
        path.name: path.readlink() if path.is_symlink() else path.read_bytes() if path.is_file() else None
        for path in directory.iterdir()
    }


def outcome_of(log: SmallLog, directory: Path) -> str:
    """Return "exact", "refused" or "end lost"; anything else is an `AssertionError` or the error of a stack trace."""
    before = content(directory)
    refused = torn = None
    read: list[Record] = []
    try:
        reader = LogReader(directory)
        read.extend(reader.records())  # keeps what came before a refusal
        torn = reader.torn
    except KVLedgerError as error:
        refused = error
    assert read == log.records[: len(read)], "other records than were written"
    if refused is None and len(read) < len(log.records):
        assert not log.is_closed, "a closed log lost its end"
        assert torn is not None and torn.first_lost is not None, "commits are lost without a word"
        assert "had been written there and are lost" in torn.describe()
    try:
        found = verify_log(LogReader(directory))
        assert refused is None or not found.is_sound, "verify calls a log sound that readers refuse"
        assert (found.torn is None) == (torn is None) or not found.is_sound, "verify does not say what readers say"
        assert found.is_sound or refused is not None or (found.fault and found.fault.kind in ("empty", "damage")), found
        unsound = not found.is_sound and found.fault is not None and found.fault.kind == "damage"
    except KVLedgerError as error:
        assert refused is not None, f"verify refuses what readers read: {error}"
        unsound = True
    assert content(directory) == before, "reading has changed the log"
    clock = Clock("unix", lambda: 0) if LogReader(log.directory).manifest.clock else None
    try:
        writer = DurableLog.resume(directory, flush=FlushPolicy(every_commits=1), clock=clock)
    except KVLedgerError as error:
        assert content(directory) == before, f"resume has changed the log before it refused it: {error}"
        assert refused is not None or isinstance(error, LogDamagedError), error
        return "refused"
    assert refused is None and not unsound, f"the writer goes on after a log that is refused: {refused}"
    lost = writer.recovery.torn is not None and writer.recovery.torn.first_lost is not None
    assert lost == (len(read) < len(log.records)), "the writer does not say what is lost"
    writer.close()
    again = LogReader(directory)
    assert list(again.records()) == read
    assert verify_log(again).is_sound or not any(True for _ in again.commits())
    return "end lost" if lost else "exact"


@pytest.mark.parametrize("num_cases", [100, pytest.param(1200, marks=pytest.mark.slow)])
def test_a_damaged_log_is_exact_or_refused_by_name_and_unchanged(
    logs: list[SmallLog], tmp_path: Path, num_cases: int
) -> None:
    outcomes: Counter[str] = Counter()
    failures = []
    for case in range(num_cases):
        chance = random.Random(f"corruption {case}")
        log = logs[chance.randrange(NUM_LOGS)]
        others = [each for each in logs if each is not log]
        directory = tmp_path / f"case{case}"
        done = damaged(log, directory, chance, others)
        try:
            outcomes[outcome_of(log, directory)] += 1
        except Exception as error:
            failures.append(f"case {case} ({log.directory.name}: {', '.join(done)}): {type(error).__name__}: {error}")
        shutil.rmtree(directory)
    print(dict(outcomes), len(failures))
    assert not failures, f"{len(failures)} of {num_cases}\n" + "\n".join(failures[:20])
    assert outcomes["exact"] > num_cases // 20
    assert outcomes["refused"] > num_cases // 3
