"""A trace: a stream of requests that can be read again and again, and a tally of what a pass over it found."""

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import attrs


@attrs.frozen
class Turn:
    """Where a request stands in its session, for a closed loop: whose answers it waits for, and for how long after.

    `number` counts the session's turns from 1; `is_last` where it is known that none follows. `waits_for` are the
    places of earlier requests (none for a turn that opens a session). Once all of them are answered, the turn is sent
    `think_s` later; where the trace does not record that time, it is sent `gap_s` after the last of them was sent, but
    never before the answers. `answered_s` is the recorded time from this request to the answer that the next turn
    waits for, None where it is not known. Times are in seconds, already divided by the rate scale.
    """

    session: str
    number: int
    waits_for: tuple[int, ...] = ()
    think_s: float | None = None
    gap_s: float | None = None
    answered_s: float | None = None
    is_last: bool = False

    def at_rate(self, rate_scale: float) -> "Turn":
        """The same turn with every time divided by `rate_scale`."""

        def scaled(seconds: float | None) -> float | None:
            return None if seconds is None else seconds / rate_scale

        return attrs.evolve(
            self, think_s=scaled(self.think_s), gap_s=scaled(self.gap_s), answered_s=scaled(self.answered_s)
        )


@attrs.frozen
class TraceRequest:
    """One request. `arrival_s` counts from the first request of the window, already divided by the rate scale.

    `hash_ids` are the ids of the prompt's blocks, or None where the prompt is shared with nobody: one for every block,
    `ceil(input_length / trace_block_size)` of them (the last may be a partial block), or, where the trace's info says
    `full_blocks_only`, one for every full block. `output_length` may be 0 (a prompt alone). `place` is the line in the
    file, or the number of the request where lines mean nothing, from 1. `turn` says how it hangs together with earlier
    requests, None where the trace does not know; `priority` is the scheduler's (lower is served first).
    """

    arrival_s: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] | None
    place: int
    turn: Turn | None = attrs.field(default=None, repr=False)
    priority: int = attrs.field(default=0, repr=False)


@attrs.define
class SkippedRows:
    """Rows left out for one reason: how many, and the first of them as an example."""

    num_rows: int
    first_place: int
    first_message: str


@attrs.define
class Window:
    """The part of the trace that was measured; every figure depends on it, so it is always shown.

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
    """What a trace is and what a pass over it found; the counts grow while a pass runs and are final when it ends.

    `trace_block_size` is the number of tokens that one hash id stands for, None where there are no ids;
    `trace_block_size_source` says who chose it. With `full_blocks_only` the trace has no id for the partial block at
    the end of a prompt. `links_turns` says whether requests may be turns of sessions, `records_think_times` whether
    turns know how long their client waited after the answer before. `workload` holds the seed and the parameters of a
    built-in workload, None for a file; `arrivals` says where times come from that the file does not record,
    `tokenizer` who counted tokens, `about` what else is to be said of the source. `num_rows_read` counts usable rows,
    those before the window too; `rows_skipped` maps a reason to the rows left out for it; `remarks` maps what else is
    to be known to how often it happened.
    """

    name: str
    path: str | None
    format: str
    timestamp_unit: str
    trace_block_size: int | None
    trace_block_size_source: str | None
    rate_scale: float
    window: Window
    full_blocks_only: bool = False
    links_turns: bool = False
    records_think_times: bool = False
    workload: dict[str, Any] | None = None
    arrivals: str | None = None
    tokenizer: str | None = None
    about: str | None = None
    num_rows_read: int = 0
    num_requests: int = 0
    num_requests_without_hash_ids: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    rows_skipped: dict[str, SkippedRows] = attrs.field(factory=dict)
    unused_fields: set[str] = attrs.field(factory=set)
    remarks: dict[str, int] = attrs.field(factory=dict)

    def remark(self, text: str, count: int = 1) -> None:
        """Count something that is no fault but has to be known; `text` follows a number in a sentence."""
        self.remarks[text] = self.remarks.get(text, 0) + count

    @property
    def claims_reuse(self) -> bool:
        """Whether any request read carries block ids; without them a hit rate says nothing about the traffic."""
        return self.num_requests > self.num_requests_without_hash_ids

    @property
    def num_rows_skipped(self) -> int:
        """Rows left out, whatever the reason."""
        return sum(rows.num_rows for rows in self.rows_skipped.values())

    def as_dict(self) -> dict[str, Any]:
        """Everything but the window, ready for JSON."""
        out = attrs.asdict(self, filter=lambda field, _: field.name != "window")
        out["unused_fields"] = sorted(self.unused_fields)
        return out

    def window_as_dict(self) -> dict[str, Any]:
        """The window, ready for JSON."""
        return {**attrs.asdict(self.window), "duration_s": self.window.duration_s, "num_requests": self.num_requests}

    def notes(self) -> list[str]:
        """What a reader of any figure from this trace must know, one sentence each."""
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
        if self.about is not None:
            out.append(self.about)
        if self.arrivals is not None:
            out.append(self.arrivals)
        if self.tokenizer is not None:
            out.append(f"tokens counted by {self.tokenizer}")
        if self.unused_fields:
            out.append(f"fields not used: {', '.join(sorted(self.unused_fields))}")
        return out


@runtime_checkable
class Trace(Protocol):
    """Requests in order of arrival. Each `iter()` is a fresh pass, and `info` is the latest pass's tally."""

    @property
    def info(self) -> TraceInfo:
        """The tally of the latest pass; before the first one, what is known without reading."""
        ...

    def __iter__(self) -> Iterator[TraceRequest]:
        """The requests, one at a time; memory does not grow with the trace."""
        ...


# The units in which traces count time.

UNITS_PER_SECOND = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}
