"""The requests of a recorded run as a trace: arrivals, lengths and prompts as recorded, everything else free.

An event log is recognised here without pyarrow, which only reading it needs.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...backends.sinks.log.manifest import MANIFEST
from ...core.errors import InputError
from .trace import SkippedRows, TraceInfo, TraceRequest, Turn, Window

if TYPE_CHECKING:
    from ...backends.sinks.log.reader import LogReader
    from ...backends.sinks.log.rows import RequestArrived

ABORTED = "requests were aborted; they are taken with the output that they had produced"
UNENDED = "requests have no end in the log; they are taken without output"
ABOUT = (
    "a live run: block ids stand for the prompts' block hashes; what a request generates is found again only where the "
    "run's later prompts contain it"
)


def the_event_log(trace: str | Path | Sequence[str | Path]) -> Path | None:
    """The path given as a trace if it is a single directory that holds an event log; else None."""
    given = [trace] if isinstance(trace, str | Path) else trace
    return Path(given[0]) if len(given) == 1 and (Path(given[0]) / MANIFEST).is_file() else None


def need_log_libraries() -> None:
    """Raise `InputError` with what to install unless logs can be read and written."""
    try:
        import pyarrow  # noqa: F401
    except ModuleNotFoundError:
        raise InputError("event logs need pyarrow: pip install 'kvledger[log]'") from None


def open_event_log(directory: str | Path) -> "LogReader":
    """Open a log. Raises `InputError` if it or a library is not there, and `LogDamagedError` if it is damaged."""
    need_log_libraries()
    from ...backends.sinks.log.reader import LogReader

    return LogReader(directory)


def is_live(reader: "LogReader") -> bool:
    """Whether the log is of a live engine: ours, or vLLM."""
    from ...backends.serving.engine.recording import COMMAND, RECORDED_VLLM

    return reader.manifest.header.get("command") in (COMMAND, RECORDED_VLLM)


def open_logged_trace(directory: str | Path, **chosen: Any) -> "LoggedTrace | LiveTrace":
    """The trace of a recorded run. `chosen` are the options that select or change requests; None: not given.

    Raises:
        InputError: one of them is given, since the log holds the requests after them; or the log is of no such run.
    """
    for name, value in chosen.items():
        if value is not None:
            name = {"trace_format": "format"}.get(name, name)
            raise InputError(
                f"--{name.replace('_', '-')} {value} has no effect on an event log, which holds the requests of one "
                "run as they came; leave it out"
            )
    reader = open_event_log(directory)
    return LiveTrace(reader) if is_live(reader) else LoggedTrace(reader)


class LoggedTrace:
    """A `Trace` of the requests in the log of a simulated run, in their order.

    Its info is that of the recorded trace; if the run did not end, it is counted from the requests in the log.
    """

    def __init__(self, reader: "LogReader") -> None:
        """Read what the log recorded. Raises `InputError` if it is not the log of a run on a trace."""
        from ...backends.sinks.log.rows import RunEnded

        self._reader = reader
        header = reader.manifest.header
        if "trace" not in header:
            raise InputError(
                f"{reader.directory} does not say which requests led to it: only the log of a run on a trace "
                "(kvledger replay --log) can be run again"
            )
        ended = [each.note for each in reader.notes() if isinstance(each.note, RunEnded)]
        at_end = ended[-1].facts.get("trace") if ended else None
        self._has_ended = bool(at_end)
        self._recorded_info: Any = at_end or header["trace"]
        self.info: TraceInfo = restored_info(self._recorded_info)

    def __iter__(self) -> Iterator[TraceRequest]:
        self.info = info = restored_info(self._recorded_info)
        for row in map(row_of, _arrived(self._reader)):
            if not self._has_ended:
                _count(info, row)
            yield row


def _arrived(reader: "LogReader") -> Iterator["RequestArrived"]:
    from ...backends.sinks.log.rows import RequestArrived

    return (logged.note for logged in reader.notes() if isinstance(logged.note, RequestArrived))


def row_of(note: "RequestArrived") -> TraceRequest:
    """The trace row that a note recorded."""
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
    """The `TraceInfo` that `plain_info` wrote."""
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


class LiveTrace:
    """A `Trace` of the requests in the log of a live engine, in the order of their arrival."""

    def __init__(self, reader: "LogReader") -> None:
        self._reader = reader
        self._block_size = reader.created.hash_block_size
        self.info = self._new_info()

    def __iter__(self) -> Iterator[TraceRequest]:
        """The requests, one at a time; all notes are read first."""
        self.info = info = self._new_info()
        outputs = self._outputs()
        numbers: dict[bytes, int] = {}
        first_s = 0.0
        # The samples of a prompt reach the scheduler later than they arrived.
        for place, note in enumerate(sorted(_arrived(self._reader), key=lambda note: note.arrival_s), start=1):
            if place == 1:
                first_s = info.window.start_s = note.arrival_s
            num_outputs, reason = next(outputs.get(note.request_id, iter(())), (0, "none"))
            if reason in ("abort", "error"):
                info.remark(ABORTED)
            elif reason == "none":
                info.remark(UNENDED)
            row = TraceRequest(
                arrival_s=max(note.arrival_s - first_s, 0.0),
                input_length=note.num_prompt_tokens,
                output_length=num_outputs,
                hash_ids=self._block_ids(note, numbers),
                place=place,
                priority=note.facts["priority"],
            )
            _count(info, row)
            info.window.end_s = note.arrival_s
            yield row

    def _outputs(self) -> dict[str, Iterator[tuple[int, str]]]:
        """By request id, the output tokens and the reason of each end: a later request may reuse the id."""
        from ...backends.sinks.log.rows import RequestEnded

        ends: defaultdict[str, list[tuple[int, str]]] = defaultdict(list)
        for logged in self._reader.notes():
            if isinstance(logged.note, RequestEnded):
                ends[logged.note.request_id].append((logged.note.num_output_tokens, logged.note.reason))
        return {request_id: iter(each) for request_id, each in ends.items()}

    def _block_ids(self, note: "RequestArrived", numbers: dict[bytes, int]) -> tuple[int, ...] | None:
        """Numbers for the block hashes of its full blocks; None for a prompt whose blocks may not be shared."""
        if not note.prompt_keys and note.num_prompt_tokens >= self._block_size:
            return None
        from ...backends.sinks.log.keys import encode_key

        return tuple([numbers.setdefault(encode_key(key), len(numbers)) for key in note.prompt_keys])

    def _new_info(self) -> TraceInfo:
        return TraceInfo(
            name=self._reader.directory.name,
            path=str(self._reader.directory),
            format="log of a live run",
            timestamp_unit="s",
            trace_block_size=self._block_size,
            trace_block_size_source="the run's hash blocks",
            rate_scale=1.0,
            window=Window(skip_first=0, limit=None),
            full_blocks_only=True,
            about=ABOUT,
        )
