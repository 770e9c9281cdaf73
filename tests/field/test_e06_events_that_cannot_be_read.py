"""E06: an event that cannot be read is counted by its type, and the rest of its message applies; a message that cannot
be read clears the view, as a gap does (verl-project/uni-agent#216; sglang#40684).
"""

import msgspec
import pytest
from kvledger.backends.sinks.kv_events.file import read_kv_event_file
from kvledger.backends.sinks.kv_events.schema import decode_batch

from tests.field.kv_streams import digest, removed_map, stored_map

MOVED = {"type": "BlockMoved", "block_hashes": [digest(1)], "from": "GPU", "to": "CPU"}


@pytest.mark.parametrize("unknown", [MOVED, ["BlockMoved", [digest(1)], "GPU", "CPU"]], ids=["map", "array"])
def test_e06_the_removal_beside_an_unknown_event_counts(follow, unknown) -> None:
    seen = follow(
        (1.0, [stored_map([1, 2])]),
        (2.0, [removed_map([2]), unknown]),
        (3.0, [stored_map([3], parent=1)]),
    )
    assert seen.figures("num_blocks", "removed", "orphans") == (2, 1, 0)
    assert seen["unknown_events"] == {"BlockMoved": 1}
    assert seen["stream"]["undecodable"] == 0


def test_e06_a_stored_event_with_other_fields_is_counted_and_nothing_else_changes(follow) -> None:
    odd = stored_map([2], parent=1, token_ids=[[1, 2], [3, 4]])
    seen = follow((1.0, [stored_map([1]), odd, stored_map([5])]))
    assert seen.figures("num_blocks", "unknown_events") == (2, {"BlockStored": 1})


@pytest.mark.parametrize(
    "illegible, tag",
    [
        ({"type": "BlockRemoved", "block_hashes": "all"}, "BlockRemoved"),
        (["BlockRemoved", None], "BlockRemoved"),
        ({"block_hashes": [digest(1)]}, "(no type)"),
        (7, "(no type)"),
    ],
)
def test_e06_a_removal_that_cannot_be_read_leaves_no_block_that_may_be_gone(follow, illegible, tag: str) -> None:
    seen = follow((1.0, [stored_map([1, 2])]), (2.0, [illegible, stored_map([3])]))
    assert seen.figures("num_blocks", "unknown_events") == (1, {tag: 1})
    assert seen["twice_memory"]["blocks_not_computed_again"] == 0


def test_e06_a_message_that_cannot_be_read_clears_the_view(follow) -> None:
    seen = follow((1.0, [stored_map([1, 2])]), b"\x07", (3.0, [stored_map([3], parent=2)]))
    assert seen.figures("num_blocks", "orphans", "hit_blocks") == (1, 1, 0)
    assert seen["stream"]["undecodable"] == 1


def test_e06_a_recording_keeps_what_could_not_be_read(follow, tmp_path) -> None:
    record = tmp_path / "again.kve"
    batches = ((1.0, [stored_map([1, 2])]), (2.0, [removed_map([2]), MOVED]))
    seen = follow(*batches, options=("--record", str(record)))
    assert seen["num_blocks"] == 1
    (_, second) = [payload for _, payload in read_kv_event_file(record)]
    assert msgspec.msgpack.decode(second)[1][1] == MOVED
    assert decode_batch(second) == decode_batch(msgspec.msgpack.encode(list(batches[1])))
