"""The first divergence of two logs, and the state around it."""

from itertools import zip_longest
from typing import Any

import attrs

from ...backends.sinks.log.reader import LogReader
from ...backends.sinks.log.rows import LoggedCommit
from ...core.ledger.state import LedgerState
from .state import occupancy
from .text import blocks_of, described, plain_record, rows_of


@attrs.frozen
class Divergence:
    """Where two logs part.

    Attributes:
        commit: the first commit that differs; all before it are equal.
        one: that commit in the first log, None where it has ended.
        other: that commit in the second log.
        times_only: whether the events are the same and only the time differs.
    """

    commit: int
    one: LoggedCommit | None
    other: LoggedCommit | None
    times_only: bool


def first_divergence(one: LogReader, other: LogReader, ignore_times: bool = False) -> Divergence | None:
    """The first commit that two logs do not have in common, or None. Reads both side by side, a batch at a time."""
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


def divergence_as_dict(divergence: Divergence | None, one: LogReader) -> dict[str, Any]:
    """The answer of `kvledger log diff --json`."""
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


def _state_before(divergence: Divergence, one: LogReader) -> dict[str, Any] | None:
    """What the differing events are about, as both logs had it before: occupancy, requests, blocks."""
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
        "blocks": {block: _block(state, block) for block in blocks[:64] if block < state.pool.num_blocks},
    }


def _block(state: LedgerState, block: int) -> dict[str, Any]:
    return {"ref_cnt": state.pool.ref_cnt(block), "is_findable": state.pool.key_of(block) is not None}


def describe_divergence(divergence: Divergence) -> list[str]:
    """The two sides, for people."""
    lines = [f"the logs are equal up to commit {divergence.commit - 1} and differ in commit {divergence.commit}"]
    if divergence.times_only:
        lines.append("(the events are the same, the times are not)")
    for name, side in (("first", divergence.one), ("second", divergence.other)):
        lines.append(f"{name} log:")
        lines += [f"  {line}" for line in described(side)] if side else ["  has ended"]
    return lines
