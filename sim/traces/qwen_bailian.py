"""Qwen-Bailian JSONL: one request a line, with the ids of its prompt's blocks of 16 tokens. Timestamps are seconds.

Fields (KVCache Cache in the Wild, ATC'25): chat_id, parent_chat_id (-1 for the first of a chat), timestamp,
input_length, output_length, type, turn, hash_ids. Every request is complete in itself: a later turn's prompt holds
the whole chat. How long users thought is not recorded, only when requests were sent.

The trace's blocks are said to be hashed one by one, so an id may name a content wherever it stands. A cached block
is its content *and* all before it, so one id after different prefixes is told apart here (see `PrefixNames`).
"""

from collections.abc import Iterator, Sequence
from typing import Any

from .bad_rows import BadRow, RowError, hash_ids, num_tokens, shown, timestamp, whole_number
from .json_lines import read_objects, required
from .prefix_names import PrefixNames
from .sessions import TurnRecord
from .trace_format import Row, TraceFormat, TraceSource, always

FIELDS = frozenset(
    ("chat_id", "parent_chat_id", "timestamp", "input_length", "output_length", "type", "turn", "hash_ids")
)
NO_PARENT = -1
LARGEST_TURN = 1_000_000


def matches(lines: Sequence[bytes]) -> bool:
    """Whether any of the lines carries the fields that only this format has."""
    return any(b'"chat_id"' in line or b'"parent_chat_id"' in line for line in lines)


def read_rows(source: TraceSource) -> Iterator[Row | BadRow]:
    """Yield a `Row`, or a `BadRow`, for every line."""
    names = PrefixNames(source.info)

    def parse(place: int, row: dict[str, Any]) -> Row:
        when = required(row, "timestamp")
        num_input = required(row, "input_length")
        num_output = required(row, "output_length")
        ids = row.get("hash_ids")
        return (
            place,
            timestamp(when, "timestamp", source.units_per_second),
            num_tokens(num_input, "input_length"),
            num_tokens(num_output, "output_length"),
            None if ids is None else names.renamed(hash_ids(ids, "hash_ids")),
            _turn(row),
            0,
        )

    return read_objects(source, FIELDS, parse)


def _turn(row: dict[str, Any]) -> TurnRecord:
    chat, parent = _chat_id(row, "chat_id"), _chat_id(row, "parent_chat_id")
    number = whole_number(required(row, "turn"), "turn", LARGEST_TURN)
    if parent == NO_PARENT:
        return TurnRecord(key=chat, session=str(chat), number=number)
    return TurnRecord(key=chat, after=(parent,), number=number)


def _chat_id(row: dict[str, Any], field: str) -> int:
    value = required(row, field)
    if type(value) is not int:
        raise RowError("not_a_number", f"{shown(value)} is not a chat's number", field)
    return value


QWEN_BAILIAN = TraceFormat(
    name="qwen-bailian",
    title="Qwen-Bailian JSONL",
    timestamp_unit="s",
    units_per_second=1,
    unit_is_settable=True,
    trace_block_size=16,
    block_size_is_settable=True,
    first_line='{"chat_id": ..., "parent_chat_id": ..., "timestamp": ..., "input_length": ..., "hash_ids": [...]}',
    matches=matches,
    links_turns=always,
    read_rows=read_rows,
    has_one_parent_each=True,
)
