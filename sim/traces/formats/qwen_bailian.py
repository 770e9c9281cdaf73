"""Qwen-Bailian JSONL: one request a line, with the ids of its prompt's blocks of 16 tokens. Timestamps are seconds.

Fields (KVCache Cache in the Wild, ATC'25): chat_id, parent_chat_id (-1 for the first of a chat), timestamp,
input_length, output_length, type, turn, hash_ids. Every request is complete in itself: a later turn's prompt holds
the whole chat. Only the times of requests are recorded, not how long users thought.

The trace's blocks are said to be hashed one by one, so one id may stand for a content after any prefix. A cached block
is its content *and* everything before it, so this reader distinguishes one id after different prefixes (`PrefixNames`).
"""

from array import array
from collections.abc import Iterator, Sequence

from ..checks import NO_PARENT, UNSEEN, make_room
from ..format import TraceFormat, TraceSource, trace_formats
from ..lines import read_objects
from ..rows import BadRow, Row, RowError, TurnRecord, hash_ids, required, shown, timed_lengths, whole_number
from ..trace import TraceInfo

FIRST_NEW_NAME = 1 << 62
FIELDS = frozenset(
    ("chat_id", "parent_chat_id", "timestamp", "input_length", "output_length", "type", "turn", "hash_ids")
)
NO_PARENT_CHAT = -1
LARGEST_TURN = 1_000_000


class PrefixNames:
    """Renames an id wherever it follows a different prefix than at its first occurrence.

    An id keeps its name after the prefix of its first occurrence, so a trace whose ids have one parent each comes out
    unchanged. Costs 8 bytes an id where ids are dense, and a dict entry for each id that is sparse or renamed.
    """

    def __init__(self, info: TraceInfo) -> None:
        self._info = info
        self._dense = array("q")
        self._sparse: dict[int, int] = {}
        self._num_seen = 0
        self._renamed: dict[tuple[int, int], int] = {}

    def renamed(self, hash_ids: tuple[int, ...]) -> tuple[int, ...]:
        """The same ids, with new names after unusual prefixes. Raises `RowError` for ids from 2**62 on."""
        if hash_ids:
            largest = max(hash_ids)
            if largest >= FIRST_NEW_NAME:
                raise RowError("huge", f"holds {largest}; ids of this format are below 2**62", "hash_ids")
            make_room(self._dense, largest, self._num_seen)
        parent = NO_PARENT
        names: list[int] | None = None
        for position, hash_id in enumerate(hash_ids):
            name = self._name_after(parent, hash_id)
            if names is None and name != hash_id:
                names = list(hash_ids[:position])
            if names is not None:
                names.append(name)
            parent = name
        return hash_ids if names is None else tuple(names)

    def _name_after(self, parent: int, hash_id: int) -> int:
        dense = self._dense
        is_dense = hash_id < len(dense)
        known = dense[hash_id] if is_dense else UNSEEN
        if known == UNSEEN and self._sparse:
            known = self._sparse.get(hash_id, UNSEEN)
        if known == parent:
            return hash_id
        if known == UNSEEN:
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


@trace_formats.register("qwen-bailian")
class QwenBailian(TraceFormat):
    """Qwen-Bailian JSONL."""

    title = "Qwen-Bailian JSONL"
    timestamp_unit = "s"
    units_per_second = 1
    unit_is_settable = True
    trace_block_size = 16
    block_size_is_settable = True
    has_turns = True
    first_line = '{"chat_id": ..., "parent_chat_id": ..., "timestamp": ..., "input_length": ..., "hash_ids": [...]}'
    has_one_parent_each = True

    def matches(self, lines: Sequence[bytes]) -> bool:
        return any(b'"chat_id"' in line or b'"parent_chat_id"' in line for line in lines)

    def read_rows(self, source: TraceSource) -> Iterator[Row | BadRow]:
        names = PrefixNames(source.info)

        def parse(place: int, row: dict[str, object]) -> Row:
            lengths, ids = timed_lengths(row, source.units_per_second), row.get("hash_ids")
            return place, *lengths, None if ids is None else names.renamed(hash_ids(ids)), _turn(row), 0

        return read_objects(source, FIELDS, parse)


def _turn(row: dict[str, object]) -> TurnRecord:
    chat, parent = _chat_id(row, "chat_id"), _chat_id(row, "parent_chat_id")
    number = whole_number(required(row, "turn"), "turn", LARGEST_TURN)
    if parent == NO_PARENT_CHAT:
        return TurnRecord(key=chat, session=str(chat), number=number)
    return TurnRecord(key=chat, after=(parent,), number=number)


def _chat_id(row: dict[str, object], field: str) -> int:
    value = required(row, field)
    if type(value) is not int:
        raise RowError("not_a_number", f"{shown(value)} is not a chat's number", field)
    return value
