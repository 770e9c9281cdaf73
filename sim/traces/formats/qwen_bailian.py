"""Qwen-Bailian JSONL: one request a line, with the ids of its prompt's blocks of 16 tokens. Timestamps are seconds.

Fields (KVCache Cache in the Wild, ATC'25): chat_id, parent_chat_id (-1 for the first of a chat), timestamp,
input_length, output_length, type, turn, hash_ids. Every request is complete in itself: a later turn's prompt holds
the whole chat. How long users thought is not recorded, only when requests were sent.

The trace's blocks are said to be hashed one by one, so an id may name a content wherever it stands. A cached block
is its content *and* all before it, so one id after different prefixes is told apart here (see `PrefixNames`).
"""

from array import array
from collections.abc import Iterator, Sequence
from typing import Any

from ..bad_rows import BadRow, RowError, hash_ids, num_tokens, shown, timestamp, whole_number
from ..format import Row, TraceFormat, TraceSource, always
from ..sessions import TurnRecord
from ..trace import TraceInfo
from .rows import read_objects, required

# Ids that name a content become ids that name a content after one prefix, which is what a prefix cache looks up.

_UNSEEN = -2
_NO_PARENT = -1
FIRST_NEW_NAME = 1 << 62


class PrefixNames:
    """Renames an id wherever it follows another prefix than where it was first seen.

    An id keeps its name after the prefix of its first occurrence, so a trace whose ids have one parent each comes out
    as it is. Costs 8 bytes an id where ids are dense, and a dict entry for each that is sparse or renamed.
    """

    def __init__(self, info: TraceInfo) -> None:
        self._info = info
        self._dense = array("q")
        self._sparse: dict[int, int] = {}
        self._num_seen = 0
        self._renamed: dict[tuple[int, int], int] = {}

    def renamed(self, hash_ids: tuple[int, ...]) -> tuple[int, ...]:
        """The same ids, those that follow an unusual prefix under new names. `RowError` for ids from 2**62 on."""
        if hash_ids:
            largest = max(hash_ids)
            if largest >= FIRST_NEW_NAME:
                raise RowError("huge", f"holds {largest}; ids of this format are below 2**62", "hash_ids")
            self._make_room(largest)
        parent = _NO_PARENT
        names: list[int] | None = None
        for position, hash_id in enumerate(hash_ids):
            name = self._name_after(parent, hash_id)
            if name != hash_id:
                if names is None:
                    names = list(hash_ids[:position])
                names.append(name)
            elif names is not None:
                names.append(name)
            parent = name
        return hash_ids if names is None else tuple(names)

    def _name_after(self, parent: int, hash_id: int) -> int:
        dense = self._dense
        is_dense = hash_id < len(dense)
        known = dense[hash_id] if is_dense else _UNSEEN
        if known == _UNSEEN and self._sparse:
            known = self._sparse.get(hash_id, _UNSEEN)
        if known == parent:
            return hash_id
        if known == _UNSEEN:
            if is_dense:
                dense[hash_id] = parent
            else:
                self._sparse[hash_id] = parent
            self._num_seen += 1
            return hash_id
        key = (parent, hash_id)
        name = self._renamed.get(key)
        if name is None:
            name = self._renamed[key] = FIRST_NEW_NAME + len(self._renamed)
            self._info.remark("blocks have an id that was seen after another prefix; they are told apart")
        return name

    def _make_room(self, largest: int) -> None:
        """Grow the dense table to hold `largest`, unless ids are so sparse that it would be mostly empty."""
        size = len(self._dense)
        if largest >= size and largest < 1024 + 8 * (self._num_seen + 1):
            self._dense.extend([_UNSEEN] * (largest + 1 + largest // 4 - size))


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
