"""E03: an event is a tagged map or a tagged array, in one stream too; a stream that cannot be read at all is an error
(kthena#1535/#1549; sglang#40684; llm-d-kv-cache#661; llm-d-router#2944; vllm#42892).
"""

import msgspec
import pytest
from kvledger.backends.sinks.kv_events.schema import AllBlocksCleared, BlockRemoved, BlockStored, decode_batch

from tests.field.kv_streams import digest, stored_map

ARRAYS = (
    (1.0, [["BlockStored", [digest(1), digest(2)], None, list(range(8)), 4, None, "GPU"]]),
    (2.0, [["BlockRemoved", [digest(2)], "GPU"]]),
)


def test_e03_arrays_are_followed(follow) -> None:
    seen = follow(*ARRAYS)
    assert seen.figures("stored", "removed", "num_blocks", "requests") == (2, 1, 1, 1)
    assert seen["stream"]["undecodable"] == 0
    assert [row["input_length"] for row in seen.rows] == [8]


def test_e03_maps_and_arrays_are_followed_in_one_batch(follow) -> None:
    array = ["BlockStored", [digest(2)], digest(1), list(range(4, 8)), 4, None, "GPU"]
    seen = follow((1.0, [stored_map([1]), array]))
    assert seen.figures("num_blocks", "requests", "orphans") == (2, 1, 0)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_e03_servers_of_two_versions_are_followed_in_one_stream(follow, order) -> None:
    batches = [(1.0, [stored_map([5, 6])]), *ARRAYS[:1]]
    seen = follow(*(batches[place] for place in order))
    assert seen.figures("num_blocks", "requests") == (4, 2)


def test_e03_an_array_may_have_fewer_fields_than_we_know_or_more() -> None:
    short = ["BlockStored", [7, 8], 6, [1, 2], 1]
    long = [
        "BlockStored",
        [9],
        None,
        [3],
        1,
        5,
        "CPU",
        "lora",
        [None],
        2,
        "mamba",
        64,
        "LOCAL",
        "a",
        "session",
        "newer",
    ]
    events = decode_batch(msgspec.msgpack.encode([1, [short, long, ["AllBlocksCleared"], ["BlockRemoved", [7]]], 3]))
    assert events.data_parallel_rank == 3
    assert list(events.events) == [
        BlockStored([7, 8], 6, [1, 2], 1),
        BlockStored([9], None, [3], 1, 5, "CPU", "lora", [None], 2, "mamba", 64, "LOCAL", "a", "session"),
        AllBlocksCleared(),
        BlockRemoved([7]),
    ]


def test_e03_a_stream_of_which_no_message_can_be_read_ends_with_the_reason_of_the_first(follow) -> None:
    seen = follow(b"\x07", msgspec.msgpack.encode({"ts": 1.0}))
    assert (seen.code, seen.out) == (2, [])
    assert "none of 2 messages" in seen.err
    assert "message 0: 1 bytes are no batch of KV events: Expected `array`, got `int`" in seen.err


def test_e03_a_stream_of_which_no_event_can_be_read_ends_with_the_reason_of_the_first(follow) -> None:
    seen = follow((1.0, [["Stored", [1]]]), (2.0, [{"type": "BlockPainted"}]))
    assert (seen.code, seen.out) == (2, [])
    assert "none of 2 events" in seen.err
    assert "the first is 'Stored': unknown type 'Stored'" in seen.err


def test_e03_a_stream_that_can_be_read_in_part_is_reported(follow) -> None:
    seen = follow(b"\x07", *ARRAYS)
    assert (seen.code, seen["num_blocks"], seen["stream"]["undecodable"]) == (0, 1, 1)
