"""Verifies a log: checksums, replay, conservation of blocks, invariants. Also finds where two logs differ."""

from collections.abc import Callable, Iterator
from itertools import zip_longest
from typing import Any, NoReturn

import attrs
from kvledger.testing import INVARIANTS, InvariantViolation, violations

from ...backends.sinks.errors import LogDamagedError
from ...backends.sinks.log.reader import LogReader
from ...backends.sinks.log.rows import LoggedCommit, LoggedNote
from ...core.errors import CorruptLedgerError, KVLedgerError
from ...core.events import Commit, PoolCreated
from ...core.ledger.audit import ConservationAudit, ConservationFault
from ...core.ledger.event_log import can_be_restored, restore_snapshot, take_snapshot
from ...core.ledger.replay_checks import CheckedReplay
from ...core.ledger.state import LedgerState
from ..figures import Document
from .text import blocks_of, described, occupancy, plain_record, rows_of

# Checking the invariants visits every block. One check per pool/8 commits costs about as much as the replay itself.
BLOCKS_PER_COMMIT = 8


@attrs.frozen
class Fault:
    """The first fault of a log, the first affected commit (None if damage hides it), and the damaged file and byte.

    `kind` is "damage" (bytes on disk), "conservation" (a block lost or counted twice), "replay" (an event that is
    illegal after the events before it), "invariant", "snapshot" (differs from the fold), or "empty" (no commits).
    """

    kind: str
    commit: int | None
    description: str
    path: str | None = None
    offset: int | None = None


@attrs.define
class Verification:
    """The result of verifying a log."""

    commits: int = 0
    events: int = 0
    notes: int = 0
    snapshots: int = 0
    checked_every: int = 1
    fault: Fault | None = None
    torn: str | None = None
    stopped: str | None = None

    @property
    def is_sound(self) -> bool:
        """Whether there is no fault. A torn tail, where a writer was interrupted, is not a fault."""
        return self.fault is None

    def describe(self) -> list[str]:
        """The result in a few lines of text."""
        counted = (
            f"{self.commits:,} commits with {self.events:,} events, {self.notes:,} notes, {self.snapshots} snapshots"
        )
        names = ", ".join(invariant.name for invariant in INVARIANTS)
        lines = [counted, f"invariants checked every {self.checked_every:,} commits and at the end: {names}"]
        if self.torn is not None:
            lines.append(f"{self.torn}: a writer was interrupted there, or is still writing")
        if self.stopped is not None:
            lines.append(self.stopped)
        if self.fault is None:
            return [*lines, "sound: every checksum matches, every commit applies, every invariant holds"]
        return [*lines, f"NOT SOUND ({self.fault.kind}): {self.fault.description}"]

    def to_json(self) -> Document:
        """The document of `--json`."""
        counts = {name: getattr(self, name) for name in ("commits", "events", "notes", "snapshots")}
        return {
            "sound": self.is_sound,
            **counts,
            "invariants": [invariant.name for invariant in INVARIANTS],
            "checked_every": self.checked_every,
            "first_bad_commit": self.fault.commit if self.fault else None,
            "fault": attrs.asdict(self.fault) if self.fault else None,
            "torn": self.torn,
            "stopped": self.stopped,
        }


def verify_log(
    reader: LogReader, checked_every: int | None = None, on_progress: Callable[[int], None] = lambda count: None
) -> Verification:
    """Verify a log in one pass and constant memory, to its end or to the first fault.

    Compares every byte with its checksum, audits and applies every commit, and compares every snapshot with the fold.
    The invariants of the property-test kit are checked after every `checked_every`-th commit (every `num_blocks / 8`
    unless given) and after the last. If one is broken, the commits since the last good check are checked one by one to
    find the first.
    """
    return _Verifier(reader, checked_every, on_progress).run()


class _Verifier:
    def __init__(self, reader: LogReader, checked_every: int | None, on_progress: Callable[[int], None]) -> None:
        self._reader = reader
        self._wanted_every = checked_every
        self._on_progress = on_progress
        self._found = Verification()
        self._replay: CheckedReplay | None = None
        self._audit: ConservationAudit | None = None
        self._good: Document | None = None
        self._since_good: list[Commit] = []
        self._snapshots = dict(reader.snapshots())

    def run(self) -> Verification:
        found = self._found
        try:
            for record in self._reader.records():
                if isinstance(record, LoggedNote):
                    found.notes += 1
                    continue
                self._commit(record)
                if not found.commits % 256:
                    self._on_progress(found.commits)
            self._check_invariants()
            if self._replay is None and not found.fault:
                self._fail("empty", 0, self._why_empty())
        except LogDamagedError as error:
            found.fault = Fault("damage", error.commit, str(error), error.path.name, error.offset)
        except _FaultFound as fault:
            found.fault = fault.fault
        except CorruptLedgerError as error:
            found.fault = Fault("replay", found.commits, str(error))
        if self._reader.torn is not None:
            found.torn = self._reader.torn.describe()
        found.stopped = self._reader.stopped
        return found

    def _why_empty(self) -> str:
        if self._reader.stopped is not None:
            return f"the log has no commits: {self._reader.stopped}"
        if self._reader.manifest.open_segment is not None:
            return "the log has no commits: its writer has written none yet, or ended before it wrote one"
        return "the log has no commits, so there is no pool to rebuild"

    def _commit(self, record: LoggedCommit) -> None:
        commit = record.commit
        replay, audit = self._fold(commit)
        try:
            audit.apply(commit)
        except CorruptLedgerError as error:
            self._fail("conservation", commit.sequence, str(error))
        if audit.balance.difference:
            fault = ConservationFault(commit.sequence, audit.balance, audit.miscounted_blocks())
            self._fail("conservation", commit.sequence, fault.describe())
        try:
            replay.apply(commit)
        except (KVLedgerError, LookupError, ValueError) as error:
            self._fail("replay", commit.sequence, f"commit {commit.sequence} cannot be applied: {error}")
        self._found.commits += 1
        self._found.events += len(commit.events)
        self._since_good.append(commit)
        if len(self._since_good) >= self._found.checked_every:
            self._check_invariants()
        self._check_snapshot()

    def _fold(self, commit: Commit) -> tuple[CheckedReplay, ConservationAudit]:
        if self._replay is None or self._audit is None:
            created = commit.events[0] if commit.events else None
            if not isinstance(created, PoolCreated):
                self._fail("replay", 0, "the log does not begin with PoolCreated, so there is no pool to rebuild")
            self._replay, self._audit = CheckedReplay(LedgerState(created)), ConservationAudit(created)
            self._found.checked_every = self._wanted_every or max(1, created.num_blocks // BLOCKS_PER_COMMIT)
        return self._replay, self._audit

    def _check_invariants(self) -> None:
        if self._replay is None or not self._since_good:
            return
        state = self._replay.state
        for violation in _violations(state):
            last = self._since_good[-1].sequence
            self._fail("invariant", last, f"after commit {last}: {violation}")
        if can_be_restored(state.created) and self._found.checked_every > 1:
            self._good = take_snapshot(state)
        self._since_good.clear()

    def _first_violation_since_good(self) -> Fault | None:
        """Check the commits since the last good check one by one."""
        if self._replay is None or not self._since_good:
            return None
        created = self._replay.state.created
        if self._good is not None:
            replay = CheckedReplay(restore_snapshot(created, self._good))
        else:
            # No check was good yet, or the eviction order cannot be restored: start from the first commit.
            replay = CheckedReplay(LedgerState(created))
            for commit in self._reader.commits(stop=self._since_good[0].sequence):
                replay.apply(commit)
        for commit in self._since_good:
            replay.apply(commit)
            for violation in _violations(replay.state):
                return Fault("invariant", commit.sequence, f"after commit {commit.sequence}: {violation}")
        return None

    def _check_snapshot(self) -> None:
        path = self._snapshots.get(self._found.commits)
        if path is None or self._replay is None:
            return
        state = self._replay.state
        if self._reader.load_snapshot(path).snapshot() != state.snapshot():
            before = self._found.commits
            self._fail("snapshot", before, f"{path.name} is not the state before commit {before}")
        self._found.snapshots += 1

    def _fail(self, kind: str, commit: int, description: str) -> NoReturn:
        """Report this fault, or an invariant broken before it, between two checks."""
        raise _FaultFound(self._first_violation_since_good() or Fault(kind, commit, description))


def _violations(state: Any) -> Iterator[InvariantViolation]:
    """The kit's check; it imports this package by its full name, so a type checker sees another `LedgerState`."""
    return violations(state)


class _FaultFound(Exception):
    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.description)
        self.fault = fault


@attrs.frozen
class Divergence:
    """The first commit in which two logs differ, as it is in each (None if a log ended before it).

    `times_only`: the events are equal, and the times differ.
    """

    commit: int
    one: LoggedCommit | None
    other: LoggedCommit | None
    times_only: bool


def first_divergence(one: LogReader, other: LogReader, ignore_times: bool = False) -> Divergence | None:
    """The first commit in which two logs differ, or None. Reads both batch by batch."""
    for mine, theirs in zip_longest(_commits(one), _commits(other)):
        if mine is not None and theirs is not None:
            same_events = mine.commit == theirs.commit
            if same_events and (ignore_times or mine.time_ns == theirs.time_ns):
                continue
            return Divergence(mine.commit.sequence, mine, theirs, same_events)
        present = mine or theirs
        assert present is not None
        return Divergence(present.commit.sequence, mine, theirs, False)
    return None


def _commits(reader: LogReader):
    return (record for record in reader.records() if isinstance(record, LoggedCommit))


def divergence_as_dict(divergence: Divergence | None, one: LogReader) -> Document:
    """The document of `kvledger log diff --json`."""
    if divergence is None:
        return {"equal": True, "first_divergence": None}
    return {
        "equal": False,
        "first_divergence": {
            "commit": divergence.commit,
            "times_only": divergence.times_only,
            "one": plain_record(divergence.one) if divergence.one else None,
            "other": plain_record(divergence.other) if divergence.other else None,
            "state_before": _state_before(divergence, one),
        },
    }


def _state_before(divergence: Divergence, one: LogReader) -> Document | None:
    """The common state before the difference: occupancy, and the requests and blocks that the events name."""
    if not divergence.commit:
        return None
    state = one.state(divergence.commit)
    sides = [side for side in (divergence.one, divergence.other) if side is not None]
    events = [event for side in sides for event in side.commit.events]
    rows = sorted({row for event in events for row in rows_of(event)})
    blocks = sorted({block for event in events for block in blocks_of(event)} - {0})
    return {
        "occupancy": occupancy(state),
        "next_free": list(state.pool.free_queue.order()[:16]),
        "requests": {
            str(state.request_of[row]): {
                "row": row,
                "num_placed_tokens": state.placed[row],
                "num_blocks": [table.count(row) for table in state.tables],
            }
            for row in rows
            if state.request_of[row] is not None
        },
        "blocks": {
            block: {"ref_cnt": state.pool.ref_cnt(block), "is_findable": state.pool.key_of(block) is not None}
            for block in blocks[:64]
            if block < state.pool.num_blocks
        },
    }


def describe_divergence(divergence: Divergence) -> list[str]:
    """Describe the difference as lines of text."""
    lines = [f"the logs are equal up to commit {divergence.commit - 1} and differ in commit {divergence.commit}"]
    if divergence.times_only:
        lines.append("(the events are equal, the times differ)")
    for name, side in (("first", divergence.one), ("second", divergence.other)):
        lines.append(f"{name} log:")
        lines += [f"  {line}" for line in described(side)] if side else ["  ended before it"]
    return lines
