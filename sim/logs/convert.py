"""Converts a log to one Parquet file, JSON lines, a trace of its requests, or the KV events it would have published."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import cast

import pyarrow.parquet as pq

from ...backends.sinks.kv_events.content import ContentRegistry, RequestContent, SyntheticTokens
from ...backends.sinks.log.keys import encode_key
from ...backends.sinks.log.reader import LogReader
from ...backends.sinks.log.rows import ROW_SCHEMA, LoggedCommit, RequestArrived
from ...core.errors import InputError
from ...core.events import BlocksFreed, Commit, FreeReason, RowsReleased
from ..engine.arrivals import traced_request
from ..figures import Document
from ..traces.logged import LiveTrace, is_live, row_of
from .live_rerun import KnownKeys, LoggedKeys


def _to_kv_events(reader: LogReader, path: Path, wire: str) -> int:
    """Write the KV events that a run would have published, as a stream to follow; one row is a batch."""
    try:
        from ...backends.sinks.kv_events.encoder import KVEventEncoder
        from ...backends.sinks.kv_events.file import KVEventFileWriter
        from ...backends.sinks.kv_events.schema import WIRES, KVEventBatch, Wire, encode_batch
    except ModuleNotFoundError as error:
        raise InputError(f"KV events need {error.name}: pip install 'kvledger[events]'") from None
    if wire not in WIRES:
        raise InputError(f"--wire is {wire!r}; it must be one of {', '.join(WIRES)}")
    trace = reader.manifest.header.get("trace")
    if trace is None and not is_live(reader):
        raise InputError(f"{reader.directory} holds no requests, only commits, so the tokens of KV events are unknown")
    registry, block_size = ContentRegistry(), reader.created.hash_block_size
    encoder = KVEventEncoder(registry, cast(Wire, wire))
    logged_keys = LoggedKeys(reader) if is_live(reader) else None
    count = ordinal = 0
    with closing(KVEventFileWriter(path)) as writer:
        for record in reader.records():
            if isinstance(record, LoggedCommit):
                if events := encoder.encode(record.commit):
                    writer.write(count, encode_batch(KVEventBatch((record.time_ns or 0) / 1e9, events)))
                    count += 1
                for request_id in _ended(record.commit):
                    registry.discard(request_id)
            elif isinstance(record.note, RequestArrived):
                if logged_keys is not None:
                    keys = KnownKeys(logged_keys.of(record.note))
                else:
                    trace_block_size = None if trace is None else trace["trace_block_size"]
                    keys = traced_request(row_of(record.note), ordinal, 0.0, block_size, trace_block_size).keys
                    ordinal += 1
                if keys is not None:
                    registry.add(record.note.request_id, RequestContent(SyntheticTokens(keys, block_size), keys))
    return count


def _ended(commit: Commit) -> Iterator[str]:
    """Requests that released their blocks for good; a preempted request runs again."""
    reasons = {event.reason for event in commit.events if isinstance(event, BlocksFreed)}
    if FreeReason.PREEMPTED not in reasons:
        for event in commit.events:
            if isinstance(event, RowsReleased):
                yield from event.requests


def convert_log(reader: LogReader, form: str, target: str | Path, wire: str | None = None) -> int:
    """Write a log to `target` in another form, atomically. Returns the number of rows, requests or batches written.

    `wire` is the encoding of KV events, "vllm" unless given; other forms do not take it.

    Raises InputError: an unknown form, a target that exists, or a log without such data.
    """
    forms: dict[str, Callable[[LogReader, Path], int]] = {
        "parquet": _to_parquet,
        "jsonl": _to_jsonl,
        "trace": _to_trace,
        "kv-events": lambda reader, path: _to_kv_events(reader, path, wire or "vllm"),
    }
    if form not in forms:
        raise InputError(f"--to is {form!r}; it must be one of {', '.join(forms)}")
    if wire is not None and form != "kv-events":
        raise InputError(f"--wire {wire} has no effect on --to {form}; leave it out")
    path = Path(target)
    if path.exists():
        raise InputError(f"{path} exists already; give another name")
    temporary = path.with_name(path.name + ".tmp")
    try:
        count = forms[form](reader, temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return count


def _to_parquet(reader: LogReader, path: Path) -> int:
    """Write one Parquet file with the rows of docs/event_log.md."""
    count = 0
    with pq.ParquetWriter(path, ROW_SCHEMA, compression="zstd") as writer:
        for placed in reader.batches():
            writer.write_batch(placed.batch)
            count += placed.batch.num_rows
    return count


def _to_jsonl(reader: LogReader, path: Path) -> int:
    """Write one JSON object per row, named by the columns, without empty columns; block hashes are as in the rows."""
    return _write_lines(path, _plain_rows(reader))


def _plain_rows(reader: LogReader) -> Iterator[Document]:
    for placed in reader.batches():
        for row in placed.batch.to_pylist():
            for name in ("keys", "parents"):
                row[name] = [None if key is None else key.decode("latin-1") for key in row[name]]
            yield {name: value for name, value in row.items() if value is not None and value != []}


def _to_trace(reader: LogReader, path: Path) -> int:
    """Write a Mooncake trace of the requests: milliseconds, lengths, and the block ids of prompts that have any."""
    count = _write_lines(path, _mooncake_rows(reader))
    if not count:
        raise InputError(f"{reader.directory} holds no requests, only commits, so it cannot become a trace")
    return count


def _mooncake_rows(reader: LogReader) -> Iterator[Document]:
    if is_live(reader):
        for row in LiveTrace(reader):
            yield _mooncake_row(row.arrival_s, row.input_length, row.output_length, row.hash_ids)
        return
    numbers: dict[bytes, int] = {}
    for logged in reader.notes():
        note = logged.note
        if isinstance(note, RequestArrived):
            ids = [
                key if type(key) is int and key >= 0 else numbers.setdefault(encode_key(key), len(numbers))
                for key in note.prompt_keys
            ]
            yield _mooncake_row(note.arrival_s, note.num_prompt_tokens, note.num_output_tokens or 0, ids or None)


def _mooncake_row(arrival_s: float, num_input: int, num_output: int, ids: Sequence[int] | None) -> Document:
    row: Document = {"timestamp": arrival_s * 1e3, "input_length": num_input, "output_length": num_output}
    return row if ids is None else {**row, "hash_ids": list(ids)}


def _write_lines(path: Path, rows: Iterator[Document]) -> int:
    count = 0
    with path.open("w") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            count += 1
    return count
