"""Recorded cache events of vLLM 0.32 beside the op traces they belong to: our encoder says the same (golden/events)."""

from pathlib import Path
from typing import Any

import pytest
from kvledger.backends.sinks.kv_events.content import ListedTokens, RequestContent
from kvledger.backends.sinks.kv_events.encoder import KVEventEncoder
from kvledger.backends.sinks.kv_events.schema import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
    KVEventBatch,
    decode_batch,
    encode_batch,
)

from tests.parity.golden import golden_dir
from tests.parity.recorded import STREAM, Recorded, read_jsonl

EVENTS_FILES = sorted((golden_dir() / "events").glob("*.jsonl.gz"))


class SmallInts:
    """Numbers hashes in first-seen order, as the recording did: those of an event before its parent."""

    def __init__(self) -> None:
        self.seen: dict[Any, int] = {}

    def __call__(self, key: Any) -> int | None:
        return None if key is None else self.seen.setdefault(key, len(self.seen))


class RecordedContents:
    """The tokens and keys of the recorded requests."""

    def __init__(self, recorded: Recorded) -> None:
        self.recorded = recorded

    def content_of(self, request_id: str) -> RequestContent:
        keys = self.recorded.requests[int(request_id)].keys
        return RequestContent(ListedTokens(keys.tokens), keys)


def token_runs(tokens: list[int]) -> list[list[int]]:
    """Tokens as [stream, start, length] runs."""
    runs: list[list[int]] = []
    for token in tokens:
        stream, index = divmod(token, STREAM)
        if runs and runs[-1][0] == stream and runs[-1][1] + runs[-1][2] == index:
            runs[-1][2] += 1
        else:
            runs.append([stream, index, 1])
    return runs


def as_recorded(event: KVCacheEvent, number: SmallInts) -> dict[str, Any]:
    """An event in the form of the recording, every field of it."""
    if isinstance(event, AllBlocksCleared):
        return {"t": "cleared"}
    hashes = [number(each) for each in event.block_hashes]
    if isinstance(event, BlockRemoved):
        return {"t": "removed", "hashes": hashes, "group": event.group_idx, "medium": event.medium}
    assert isinstance(event, BlockStored)
    return {
        "t": "stored",
        "hashes": hashes,
        "parent": number(event.parent_block_hash),
        "tokens": token_runs(event.token_ids),
        "block_size": event.block_size,
        "group": event.group_idx,
        "kind": event.kv_cache_spec_kind,
        "window": event.kv_cache_spec_sliding_window,
        "medium": event.medium,
        "extra_keys": event.extra_keys,
        "lora_id": event.lora_id,
        "lora_name": event.lora_name,
    }


@pytest.mark.parametrize("path", EVENTS_FILES, ids=lambda path: path.name.removesuffix(".jsonl.gz"))
def test_recorded_events_reproduce_event_for_event(path: Path, record_property) -> None:
    header, *lines = read_jsonl(path)
    expected = {line["i"]: line["events"] for line in lines}
    ops_header, *operations = read_jsonl(golden_dir() / "ops" / f"{header['for_ops']}.jsonl.gz")
    recorded = Recorded(ops_header)
    encoder = KVEventEncoder(RecordedContents(recorded), wire="vllm")
    assert encoder.encode(recorded.log[0]) == []
    number = SmallInts()
    compared = 0
    for op in operations:
        before = len(recorded.log)
        recorded.run([op])
        events = [event for commit in list(recorded.log)[before:] for event in encoder.encode(commit)]
        batch = decode_batch(encode_batch(KVEventBatch(0.0, events)))
        assert batch.events == events
        ours = [as_recorded(event, number) for event in batch.events]
        theirs = expected.pop(op["i"], [])
        assert ours == theirs, op
        compared += len(theirs)
    assert not expected
    record_property("events_compared", compared)
