"""Recorded cache events of vLLM 0.32 beside the op traces they belong to: ours say the same (golden/events)."""

from pathlib import Path
from typing import Any

import pytest
from kvledger.core.events import (
    BlockCopied,
    BlocksAllocated,
    BlocksCached,
    BlocksUncached,
    CacheReset,
    Commit,
)

from tests.parity.golden import golden_dir
from tests.parity.recorded import STREAM, Recorded, read_jsonl

EVENTS_FILES = sorted((golden_dir() / "events").glob("*.jsonl.gz"))
WIRE_KIND = {"full": "full_attention", "sliding": "sliding_window", "chunked": "chunked_local_attention"}


class SmallInts:
    """Numbers keys in first-seen order, as the recording did."""

    def __init__(self) -> None:
        self.seen: dict[Any, int] = {}

    def __call__(self, key: Any) -> int | None:
        return None if key is None else self.seen.setdefault(key, len(self.seen))


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


def wire_events(commit: Commit, recorded: Recorded, number: SmallInts) -> list[dict[str, Any]]:
    """What vLLM would publish for one commit."""
    out: list[dict[str, Any]] = []
    for event in commit.events:
        if isinstance(event, BlocksAllocated):
            groups = event.lost_groups or (0,) * len(event.lost_keys)
            lost = [(key, group) for key, group in zip(event.lost_keys, groups, strict=True) if key is not None]
            out += [{"t": "removed", "hashes": [number(key)], "group": group} for key, group in lost]
        elif isinstance(event, BlockCopied) and event.lost_key is not None:
            out.append({"t": "removed", "hashes": [number(event.lost_key)], "group": event.lost_group})
        elif isinstance(event, BlocksUncached):
            pairs = zip(event.keys, event.groups, strict=True)
            out += [{"t": "removed", "hashes": [number(key)], "group": group} for key, group in pairs]
        elif isinstance(event, CacheReset):
            out.append({"t": "cleared"})
        elif isinstance(event, BlocksCached):
            out.append(stored(event, recorded, number))
    return out


def stored(event: BlocksCached, recorded: Recorded, number: SmallInts) -> dict[str, Any]:
    (row,), (start,), (stop,), (parent,) = event.rows, event.starts, event.stops, event.parents
    group = recorded.header["groups"][event.group]
    size = group["block_size"]
    request = recorded.requests[int(recorded.allocator.state.request_of[row])]
    hashes = [number(key) for key in event.keys]
    return {
        "t": "stored",
        "hashes": hashes,
        "parent": number(parent),
        "tokens": token_runs(request.keys.tokens[start * size : stop * size]),
        "block_size": size,
        "group": event.group,
        "kind": WIRE_KIND[group["kind"]],
        "window": group.get("sliding_window"),
    }


@pytest.mark.parametrize("path", EVENTS_FILES, ids=lambda path: path.name.removesuffix(".jsonl.gz"))
def test_recorded_events_reproduce_event_for_event(path: Path, record_property) -> None:
    header, *lines = read_jsonl(path)
    expected = {line["i"]: line["events"] for line in lines}
    ops_header, *operations = read_jsonl(golden_dir() / "ops" / f"{header['for_ops']}.jsonl.gz")
    recorded = Recorded(ops_header)
    number = SmallInts()
    compared = 0
    for op in operations:
        before = len(recorded.log)
        recorded.run([op])
        ours = [event for commit in list(recorded.log)[before:] for event in wire_events(commit, recorded, number)]
        theirs = expected.pop(op["i"], [])
        assert ours == [{key: event.get(key) for key in mine} for event, mine in zip(theirs, ours, strict=True)], op
        compared += len(theirs)
    assert not expected
    record_property("events_compared", compared)
