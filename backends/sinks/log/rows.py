"""The rows of a log, one an event: their schema (docs/event_log.md), and the notes that stand between commits."""

import json
from typing import Any, Final, TypeAlias

import attrs
import pyarrow as pa

from ....core import cache_kinds
from ....core.cache_kinds import CacheKind
from ....core.errors import CorruptLedgerError
from ....core.events import Commit, Key, PoolCreated
from ....core.types import StepLoad

LAYOUT_VERSION: Final = 1

# The list columns and the type of their entries, in the order in which they stand in a row.
LIST_COLUMNS: Final[dict[str, pa.DataType]] = {
    "requests": pa.utf8(),
    "rows": pa.int32(),
    "counts": pa.int64(),
    "blocks": pa.int32(),
    "keys": pa.binary(),
    "groups": pa.int32(),
    "starts": pa.int32(),
    "stops": pa.int32(),
    "indices": pa.int32(),
    "parents": pa.binary(),
    "first_positions": pa.int64(),
}

ROW_SCHEMA: Final = pa.schema(
    [
        pa.field("commit", pa.int64(), nullable=False),
        pa.field("time_ns", pa.int64()),
        pa.field("event", pa.utf8()),
        pa.field("group", pa.int32()),
        pa.field("reason", pa.utf8()),
        *(pa.field(name, pa.list_(entries)) for name, entries in LIST_COLUMNS.items()),
        pa.field("arrival_s", pa.float64()),
        pa.field("detail", pa.utf8()),
    ]
)


@attrs.frozen
class RequestArrived:
    """A note: a request reached the engine. With these, what was recorded can be run again under other settings.

    Attributes:
        request_id: its name in the events that follow.
        arrival_s: when it arrived, in seconds of the run.
        num_prompt_tokens: tokens of its prompt.
        num_output_tokens: tokens that it goes on to produce; None where nobody knows beforehand.
        prompt_keys: the ids of its prompt's blocks at the trace's block size; empty where nothing is shared.
        facts: whatever else the run wants to find again, as plain JSON values.
    """

    request_id: str
    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int | None = None
    prompt_keys: tuple[Key, ...] = ()
    facts: dict[str, Any] = attrs.field(factory=dict)


@attrs.frozen
class RunEnded:
    """A note: the run is over; what is known only then, as plain JSON values."""

    facts: dict[str, Any]


@attrs.frozen
class RequestEnded:
    """A note of a live run: a request has ended, or is about to be aborted by the commits that follow.

    Attributes:
        request_id: which.
        reason: "stop", "length" or "abort".
        num_output_tokens: tokens that it has produced.
        output_keys: the keys of its complete blocks behind those of its prompt.
    """

    request_id: str
    reason: str
    num_output_tokens: int
    output_keys: tuple[Key, ...] = ()


@attrs.frozen
class StepComputed:
    """A note of a live run: the step that the commits before it allocated was computed.

    Attributes:
        nanoseconds: how long that took.
        load: what it computed.
        stopped: rows whose request ended with it although more tokens were allowed.
        slots_crc32: checksum of the slots that it wrote, as the device had them; None where none was taken.
    """

    nanoseconds: int
    load: StepLoad
    stopped: tuple[int, ...] = ()
    slots_crc32: int | None = None


Note: TypeAlias = RequestArrived | RequestEnded | StepComputed | RunEnded
NOTE_NAMES: Final = frozenset([each.__name__ for each in (RequestArrived, RequestEnded, StepComputed, RunEnded)])


def next_commit_after(batch: pa.RecordBatch) -> int:
    """The commit that follows a batch: a note at its end carries that number itself."""
    last = batch.num_rows - 1
    return batch.column("commit")[last].as_py() + (batch.column("event")[last].as_py() not in NOTE_NAMES)


@attrs.frozen
class LoggedCommit:
    """One commit as a log holds it.

    Attributes:
        commit: the commit.
        time_ns: when, on the log's clock; None without a clock.
    """

    commit: Commit
    time_ns: int | None


@attrs.frozen
class LoggedNote:
    """One note as a log holds it.

    Attributes:
        note: what was noted.
        time_ns: when, on the log's clock; None without a clock.
        next_commit: the sequence number of the commit after it.
    """

    note: Note
    time_ns: int | None
    next_commit: int


Record: TypeAlias = LoggedCommit | LoggedNote


def pool_as_json(created: PoolCreated) -> str:
    """Everything that `PoolCreated` says, as JSON text."""
    plain = attrs.asdict(created, recurse=False)
    plain["groups"] = [{"kind": type(kind).__name__, **attrs.asdict(kind)} for kind in created.groups]  # pyright: ignore[reportArgumentType]
    return json.dumps(plain)


def pool_from_json(text: str) -> PoolCreated:
    """The `PoolCreated` that `pool_as_json` wrote.

    Raises:
        CorruptLedgerError: a field or a cache kind that this version does not know.
    """
    plain = json.loads(text)
    try:
        plain["groups"] = tuple([_kind(each) for each in plain["groups"]])
        return PoolCreated(**plain)
    except (TypeError, KeyError, ValueError) as error:
        raise CorruptLedgerError(f"this kvledger cannot read the pool {text}: {error}") from error


def _kind(plain: dict[str, Any]) -> CacheKind:
    name = plain.pop("kind")
    known = {
        kind.__name__: kind
        for kind in (
            cache_kinds.FullAttention,
            cache_kinds.CompressedState,
            cache_kinds.SlidingWindow,
            cache_kinds.ChunkedLocal,
            cache_kinds.SequenceState,
        )
    }
    if name not in known:
        raise KeyError(f"no cache kind {name!r}")
    return known[name](**plain)
