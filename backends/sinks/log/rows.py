"""The rows of a log, one per event: their schema (docs/event_log.md), and the notes between commits."""

import json
from pathlib import Path
from typing import Any, Final, TypeAlias

import attrs
import pyarrow as pa

from ....core.cache_kinds import CacheKind, ChunkedLocal, CompressedState, FullAttention, SequenceState, SlidingWindow
from ....core.errors import CorruptLedgerError
from ....core.events import Commit, Key, PoolCreated
from ....core.types import StepLoad

# The list columns and the type of their entries, in the order of a row.
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
CACHE_KINDS: Final[dict[str, type[CacheKind]]] = {
    kind.__name__: kind for kind in (FullAttention, CompressedState, SlidingWindow, ChunkedLocal, SequenceState)
}


@attrs.frozen
class RequestArrived:
    """A note: a request reached the engine. With these notes a recorded run can be run again under other settings.

    Attributes:
        request_id: its id in the events that follow.
        arrival_s: arrival time, in seconds since the start of the run.
        num_prompt_tokens: tokens of its prompt.
        num_output_tokens: tokens that it will produce; None if unknown in advance.
        prompt_keys: the ids of its prompt's blocks at the trace's block size; empty where nothing is shared.
        facts: other facts that the run needs later, as plain JSON values.
    """

    request_id: str
    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int | None = None
    prompt_keys: tuple[Key, ...] = ()
    facts: dict[str, Any] = attrs.field(factory=dict)


@attrs.frozen
class RunEnded:
    """A note: the run is over. `facts` are known only then, as plain JSON values."""

    facts: dict[str, Any]


@attrs.frozen
class RequestEnded:
    """A note of a live run: a request has ended, or the commits that follow abort it.

    Attributes:
        request_id: its id.
        reason: "stop", "length" or "abort".
        num_output_tokens: tokens that it has produced.
        output_keys: the keys of its complete blocks after those of its prompt.
    """

    request_id: str
    reason: str
    num_output_tokens: int
    output_keys: tuple[Key, ...] = ()


@attrs.frozen
class StepComputed:
    """A note of a live run: the step that the commits before it allocated was computed.

    Attributes:
        nanoseconds: how long it took.
        load: what it computed.
        stopped: rows whose request ended with this step although more tokens were allowed.
        slots_crc32: checksum of the slots that it wrote, as the device had them; None if none was taken.
    """

    nanoseconds: int
    load: StepLoad
    stopped: tuple[int, ...] = ()
    slots_crc32: int | None = None


Note: TypeAlias = RequestArrived | RequestEnded | StepComputed | RunEnded
NOTE_NAMES: Final = frozenset([each.__name__ for each in (RequestArrived, RequestEnded, StepComputed, RunEnded)])


@attrs.frozen
class StoredBatch:
    """One batch of rows and its location on disk, which errors about it name."""

    batch: pa.RecordBatch
    path: Path
    offset: int
    size_bytes: int


def next_commit_after(batch: pa.RecordBatch) -> int:
    """Return the commit that follows a batch. A note at its end carries that number itself."""
    last = batch.num_rows - 1
    return batch.column("commit")[last].as_py() + (batch.column("event")[last].as_py() not in NOTE_NAMES)


@attrs.frozen
class LoggedCommit:
    """One commit as a log holds it; `time_ns` is on the log's clock, None without a clock."""

    commit: Commit
    time_ns: int | None


@attrs.frozen
class LoggedNote:
    """One note as a log holds it.

    Attributes:
        note: the note.
        time_ns: its time on the log's clock; None without a clock.
        next_commit: the sequence number of the commit after it.
    """

    note: Note
    time_ns: int | None
    next_commit: int


Record: TypeAlias = LoggedCommit | LoggedNote


def pool_as_json(created: PoolCreated) -> str:
    """Return every field of `PoolCreated` as JSON text."""
    plain = attrs.asdict(created, recurse=False)
    plain["groups"] = [{"kind": type(kind).__name__, **attrs.asdict(kind)} for kind in created.groups]  # pyright: ignore[reportArgumentType]
    return json.dumps(plain)


def pool_from_json(text: str) -> PoolCreated:
    """Return the `PoolCreated` that `pool_as_json` wrote.

    Raises:
        CorruptLedgerError: it has a field or a cache kind that this version does not know.
    """
    plain = json.loads(text)
    try:
        plain["groups"] = tuple([CACHE_KINDS[each.pop("kind")](**each) for each in plain["groups"]])
        return PoolCreated(**plain)
    except (TypeError, KeyError, ValueError) as error:
        raise CorruptLedgerError(f"this kvledger cannot read the pool {text}: {error}") from error
