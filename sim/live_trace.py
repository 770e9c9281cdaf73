"""The requests of a live run as a trace: arrivals, lengths and prompts as they were, everything else free."""

from collections.abc import Iterator

from ..backends.serving.recorded_run import COMMAND
from ..backends.sinks.log_keys import encode_key
from ..backends.sinks.log_reader import LogReader
from ..backends.sinks.log_rows import RequestArrived, RequestEnded
from .traces.trace import TraceInfo, TraceRequest, Window

ABORTED = "requests were aborted; they are taken with the output that they had produced"
UNENDED = "requests have no end in the log; they are taken without output"
ABOUT = (
    "a live run: block ids stand for the prompts' block hashes; what a request generates is found again only where the "
    "run's later prompts contain it"
)


def is_live(reader: LogReader) -> bool:
    """Whether a log was written by a live engine."""
    return reader.manifest.header.get("command") == COMMAND


class LiveTrace:
    """A `Trace` of the requests that a live engine noted, in the order of their arrival.

    Attributes:
        info: the tally of the latest pass.
    """

    def __init__(self, reader: LogReader) -> None:
        """`reader` reads the log of a live run."""
        self._reader = reader
        self._block_size = reader.created.hash_block_size
        self.info = self._new_info()

    def __iter__(self) -> Iterator[TraceRequest]:
        """The requests, one at a time; all that was noted of them is read first."""
        self.info = info = self._new_info()
        outputs = self._outputs()
        numbers: dict[bytes, int] = {}
        first_s = 0.0
        arrived = [logged.note for logged in self._reader.notes() if isinstance(logged.note, RequestArrived)]
        # The samples of a prompt reach the scheduler later than they arrived.
        for place, note in enumerate(sorted(arrived, key=lambda note: note.arrival_s), start=1):
            if place == 1:
                first_s = info.window.start_s = note.arrival_s
                info.window.first_place = 1
            num_outputs, reason = next(outputs[note.request_id], (0, "none"))
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
            info.num_requests = info.num_rows_read = info.window.last_place = place
            info.input_tokens += row.input_length
            info.output_tokens += row.output_length
            info.num_requests_without_hash_ids += row.hash_ids is None
            info.window.end_s = note.arrival_s
            yield row

    def _outputs(self) -> dict[str, Iterator[tuple[int, str]]]:
        """By request id, the output tokens and the reason of each end: an id may be used again afterwards."""
        ends: dict[str, list[tuple[int, str]]] = {}
        for logged in self._reader.notes():
            note = logged.note
            if isinstance(note, RequestArrived):
                ends.setdefault(note.request_id, [])
            elif isinstance(note, RequestEnded):
                ends.setdefault(note.request_id, []).append((note.num_output_tokens, note.reason))
        return {request_id: iter(each) for request_id, each in ends.items()}

    def _block_ids(self, note: RequestArrived, numbers: dict[bytes, int]) -> tuple[int, ...] | None:
        """Numbers for the keys of its full blocks; None for a prompt whose blocks may not be shared."""
        if not note.prompt_keys and note.num_prompt_tokens >= self._block_size:
            return None
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
