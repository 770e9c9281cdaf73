"""A trace: a stream of requests that can be read repeatedly, and a tally of what the latest pass found."""

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import attrs


@attrs.frozen
class Turn:
    """The position of a request in its session, for a closed loop: which answers it waits for, and how long after them.

    The turn is sent `think_s` after all of them; if the trace does not record that time, it is sent `gap_s` after the
    last of the requests before it was sent, but never before the answers. Seconds, already divided by the rate scale.
    """

    session: str
    number: int  # among the session's turns, from 1
    waits_for: tuple[int, ...] = ()  # the places of earlier requests; none for a turn that opens a session
    think_s: float | None = None
    gap_s: float | None = None
    answered_s: float | None = None  # recorded time from this request to the answer that the next turn waits for
    is_last: bool = False  # whether no turn is known to follow

    def at_rate(self, rate_scale: float) -> "Turn":
        """The same turn with every time divided by `rate_scale`."""
        times = {"think_s": self.think_s, "gap_s": self.gap_s, "answered_s": self.answered_s}
        return attrs.evolve(self, **{name: each / rate_scale for name, each in times.items() if each is not None})


@attrs.frozen
class TraceRequest:
    """One request. `hash_ids` are the ids of the prompt's blocks, or None if the prompt shares nothing.

    There is one for every block, `ceil(input_length / trace_block_size)` of them (the last may be a partial block), or,
    if the trace's info says `full_blocks_only`, one for every full block.
    """

    arrival_s: float  # from the first request of the window, already divided by the rate scale
    input_length: int
    output_length: int  # may be 0: a prompt alone
    hash_ids: tuple[int, ...] | None
    place: int  # the line in the file, or the number of the request where lines mean nothing, from 1
    turn: Turn | None = attrs.field(default=None, repr=False)  # links it to earlier requests, if sessions are recorded
    priority: int = attrs.field(default=0, repr=False)  # the scheduler's: lower is served first


@attrs.define
class SkippedRows:
    """Rows skipped for one reason: how many, and the first one as an example."""

    num_rows: int
    first_place: int
    first_message: str


@attrs.define
class Window:
    """The measured part of the trace; every figure depends on it, so it is always shown.

    Times are on the trace's own clock, before the rate scale, in seconds after its first usable row.
    """

    skip_first: int
    limit: int | None
    first_place: int | None = None
    last_place: int | None = None
    start_s: float = 0.0
    end_s: float = 0.0

    @property
    def duration_s(self) -> float:
        """Seconds from the first to the last arrival, on the trace's own clock."""
        return self.end_s - self.start_s


@attrs.define
class TraceInfo:
    """Describes a trace and counts what a pass over it found; counts grow during a pass and are final at its end."""

    name: str
    path: str | None
    format: str
    timestamp_unit: str
    trace_block_size: int | None  # tokens that one hash id represents, None without ids
    trace_block_size_source: str | None  # who chose it
    rate_scale: float
    window: Window
    full_blocks_only: bool = False  # the trace has no id for the partial block at the end of a prompt
    links_turns: bool = False  # whether requests may be turns of sessions
    records_think_times: bool = False  # whether turns record how long their client waited after the answer before
    max_concurrency: int | None = None  # requests under way at most: the next is sent when one of them ends
    workload: dict[str, Any] | None = None  # seed and parameters of a built-in workload, None for a file
    arrivals: str | None = None  # where arrival times come from that the file does not record
    tokenizer: str | None = None  # who counted tokens
    about: str | None = None  # another note about the source
    made_from: list[str] = attrs.field(factory=list)  # for each file of a mix, `origin` of its own info
    num_rows_read: int = 0  # usable rows, including those before the window
    num_requests: int = 0
    num_requests_without_hash_ids: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    rows_skipped: dict[str, SkippedRows] = attrs.field(factory=dict)  # reason -> the rows skipped for it
    unused_fields: set[str] = attrs.field(factory=set)
    remarks: dict[str, int] = attrs.field(factory=dict)  # other notes -> how often each happened

    def remark(self, text: str, count: int = 1) -> None:
        """Count something that is not a fault but that readers should know; `text` follows a number in a sentence."""
        self.remarks[text] = self.remarks.get(text, 0) + count

    def origin(self) -> str:
        """The file's name, format, unit and remarks, for a workload that is made from this trace."""
        read = f"{self.name}: {format_and_unit(self.format, self.timestamp_unit)}"
        return "; ".join([read, *(f"{count:,} {text}" for text, count in self.remarks.items())])

    @property
    def claims_reuse(self) -> bool:
        """Whether any request read has block ids; without them a hit rate says nothing about the traffic."""
        return self.num_requests > self.num_requests_without_hash_ids

    @property
    def num_rows_skipped(self) -> int:
        """Rows skipped for any reason."""
        return sum(rows.num_rows for rows in self.rows_skipped.values())

    def as_dict(self) -> dict[str, object]:
        """Everything but the window, and the notes, ready for JSON."""
        out = attrs.asdict(self, filter=lambda field, _: field.name != "window")
        out["unused_fields"] = sorted(self.unused_fields)
        out["notes"] = self.notes()
        return out

    def window_as_dict(self) -> dict[str, object]:
        """The window, ready for JSON."""
        return {**attrs.asdict(self.window), "duration_s": self.window.duration_s, "num_requests": self.num_requests}

    def notes(self) -> list[str]:
        """What a reader of any figure from this trace must know, one sentence per note."""
        out: list[str] = []
        if self.num_requests and not self.claims_reuse:
            out.append("no request carries hash_ids: prompts are taken as unique, so no reuse can be claimed")
        elif self.num_requests_without_hash_ids:
            out.append(
                f"{self.num_requests_without_hash_ids:,} of {self.num_requests:,} requests carry no hash_ids: "
                "their prompts are taken as unique (no reuse)"
            )
        for reason, rows in self.rows_skipped.items():
            out.append(
                f"{rows.num_rows:,} row{'' if rows.num_rows == 1 else 's'} left out ({reason}); "
                f"the first: {rows.first_message}"
            )
        out.extend(f"{count:,} {text}" for text, count in self.remarks.items())
        out.extend(note for note in (self.about, self.arrivals) if note is not None)
        out.extend(self.made_from)
        if self.tokenizer is not None:
            out.append(f"tokens counted by {self.tokenizer}")
        if self.unused_fields:
            out.append(f"fields not used: {', '.join(sorted(self.unused_fields))}")
        return out


@runtime_checkable
class Trace(Protocol):
    """Requests in order of arrival. Each `iter()` is a new pass, and `info` is the tally of the latest pass."""

    @property
    def info(self) -> TraceInfo:
        """The tally of the latest pass; before the first pass, what is known without reading."""
        ...

    def __iter__(self) -> Iterator[TraceRequest]:
        """The requests, one at a time; memory does not grow with the length of the trace."""
        ...


def format_and_unit(format_name: str, timestamp_unit: str) -> str:
    """The format and the unit in which a trace was read, for a report (field report G02)."""
    return f"format {format_name}, timestamps: {timestamp_unit}"


UNITS_PER_SECOND = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}
