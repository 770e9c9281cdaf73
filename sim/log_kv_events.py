"""The KV events that a recorded run would have published, as a stream that can be followed.

A trace has block ids and a live run's log block keys, and neither has tokens, so tokens are made up from those: equal
where they are, and nowhere else.
"""

from collections.abc import Iterator
from pathlib import Path

from ..backends.sinks.kv_event_encoder import KVEventEncoder
from ..backends.sinks.kv_event_file import KVEventFileWriter
from ..backends.sinks.kv_events import KVEventBatch, Wire, encode_batch
from ..backends.sinks.log_reader import LogReader
from ..backends.sinks.log_rows import LoggedCommit, RequestArrived
from ..backends.sinks.request_content import ContentRegistry, RequestContent, SyntheticTokens
from ..core.errors import InputError
from ..core.events import BlocksFreed, Commit, FreeReason, RowsReleased
from .live_keys import KnownKeys, LoggedKeys
from .live_trace import is_live
from .logged_trace import row_of
from .replay import traced_request


def write_kv_events(reader: LogReader, path: Path, wire: Wire) -> int:
    """Write the stream of a log to a file. Returns its batches.

    Raises:
        InputError: the log is neither of a run on a trace nor of a live one.
    """
    trace = reader.manifest.header.get("trace")
    if trace is None and not is_live(reader):
        raise InputError(f"{reader.directory} holds no requests, only commits: there are no tokens to tell of")
    writer = KVEventFileWriter(path)
    count = 0
    try:
        for batch in _batches(reader, wire, trace["trace_block_size"] if trace is not None else None):
            writer.write(count, encode_batch(batch))
            count += 1
    finally:
        writer.close()
    return count


def _batches(reader: LogReader, wire: Wire, trace_block_size: int | None) -> Iterator[KVEventBatch]:
    registry = ContentRegistry()
    encoder = KVEventEncoder(registry, wire)
    block_size = reader.created.hash_block_size
    logged_keys = LoggedKeys(reader) if is_live(reader) else None
    ordinal = 0
    for record in reader.records():
        if isinstance(record, LoggedCommit):
            events = encoder.encode(record.commit)
            if events:
                yield KVEventBatch((record.time_ns or 0) / 1e9, events)
            for request_id in _ended(record.commit):
                registry.discard(request_id)
        elif isinstance(record.note, RequestArrived) and logged_keys is not None:
            keys = KnownKeys(logged_keys.of(record.note))
            registry.add(record.note.request_id, RequestContent(SyntheticTokens(keys, block_size), keys))
        elif isinstance(record.note, RequestArrived):
            request = traced_request(row_of(record.note), ordinal, 0.0, block_size, trace_block_size)
            ordinal += 1
            if request.keys is not None:
                tokens = SyntheticTokens(request.keys, block_size)
                registry.add(request.request_id, RequestContent(tokens, request.keys))


def _ended(commit: Commit) -> Iterator[str]:
    """Requests that gave their blocks back for good: a preempted one comes again."""
    reasons = {event.reason for event in commit.events if isinstance(event, BlocksFreed)}
    if FreeReason.PREEMPTED not in reasons:
        for event in commit.events:
            if isinstance(event, RowsReleased):
                yield from event.requests
