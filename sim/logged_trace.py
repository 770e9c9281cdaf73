"""The requests of a recorded run as a trace again: arrivals, lengths and prompts as they were, everything else free."""

from collections.abc import Iterator
from typing import Any

from ..backends.sinks.log_reader import LogReader
from ..backends.sinks.log_rows import RequestArrived, RunEnded
from ..core.errors import InputError
from .traces.trace import SkippedRows, TraceInfo, TraceRequest, Turn, Window


class LoggedTrace:
    """A `Trace` of the requests that a log noted, in their order.

    Attributes:
        info: of the trace that was recorded; where the run did not end, counted from the requests in the log.
    """

    def __init__(self, reader: LogReader) -> None:
        """Find out what the log recorded.

        Raises:
            InputError: it is not the log of a run on a trace.
        """
        self._reader = reader
        header = reader.manifest.header
        if "trace" not in header:
            raise InputError(
                f"{reader.directory} does not say which requests led to it: only the log of a run on a trace "
                "(kvledger replay --log) can be run again"
            )
        self._at_start: dict[str, Any] = header["trace"]
        ended = [each.note for each in reader.notes() if isinstance(each.note, RunEnded)]
        self._at_end: dict[str, Any] | None = ended[-1].facts.get("trace") if ended else None
        self.info: TraceInfo = restored_info(self._at_end or self._at_start)

    def __iter__(self) -> Iterator[TraceRequest]:
        """The requests, one at a time."""
        self.info = info = restored_info(self._at_end or self._at_start)
        for logged in self._reader.notes():
            if isinstance(logged.note, RequestArrived):
                row = row_of(logged.note)
                if self._at_end is None:
                    _count(info, row)
                yield row


def row_of(note: RequestArrived) -> TraceRequest:
    """The row of a trace that was noted."""
    hash_ids: Any = note.prompt_keys or (() if "hash_ids" in note.facts else None)
    turn = note.facts.get("turn")
    return TraceRequest(
        arrival_s=note.arrival_s,
        input_length=note.num_prompt_tokens,
        output_length=note.num_output_tokens or 0,
        hash_ids=hash_ids,
        place=int(note.request_id),
        turn=None if turn is None else Turn(**turn | {"waits_for": tuple(turn["waits_for"])}),
        priority=note.facts.get("priority", 0),
    )


def restored_info(plain: dict[str, Any]) -> TraceInfo:
    """The `TraceInfo` that `plain_info` wrote down."""
    rows_skipped = {reason: SkippedRows(**each) for reason, each in plain["rows_skipped"].items()}
    return TraceInfo(
        **plain
        | {
            "window": Window(**plain["window"]),
            "rows_skipped": rows_skipped,
            "unused_fields": set(plain["unused_fields"]),
            "remarks": dict(plain["remarks"]),
        }
    )


def _count(info: TraceInfo, row: TraceRequest) -> None:
    window = info.window
    if not info.num_requests:
        window.first_place = row.place
    info.num_requests += 1
    info.num_rows_read = window.skip_first + info.num_requests
    info.input_tokens += row.input_length
    info.output_tokens += row.output_length
    info.num_requests_without_hash_ids += row.hash_ids is None
    window.last_place = row.place
    window.end_s = window.start_s + row.arrival_s * info.rate_scale
