"""A request log as plain JSONL: one request a line, under the names below, for logs of any server.

| field | | meaning |
|---|---|---|
| arrival_s | one of the two | arrival time in seconds |
| timestamp | | the same in the unit that `unit` on the line, or --timestamp-unit, names: s, ms, us or ns |
| input_tokens, output_tokens | or text | its lengths |
| prompt, output | | its text instead, counted by --tokenizer |
| hash_ids | optional | ids of the prompt's blocks, --trace-block-size tokens each (the last may be partial) |
| session | optional | requests with the same session are its turns, in their order |
| duration_s | optional | seconds from its arrival to its last token; think times are derived from it |
| think_time_s | optional | seconds from the answer before it in its session to its arrival |
| cache_salt | optional | prompts under different salts share nothing |
| priority | optional | lower is served first, with the priority scheduling policy |
"""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

from .. import rows
from ..format import TraceFormat, TraceSource, trace_formats
from ..lines import read_objects
from ..rows import BadRow, Row, RowError, TurnRecord
from ..text import HOW_TO_NAME_ONE, TextBlocks, Tokenizer
from ..trace import UNITS_PER_SECOND

FIELDS = frozenset(
    (
        *("arrival_s", "timestamp", "unit", "input_tokens", "output_tokens", "prompt", "output", "hash_ids"),
        *("session", "duration_s", "think_time_s", "cache_salt", "priority"),
    )
)
OWN_FIELDS = (b'"arrival_s"', b'"input_tokens"', b'"output_tokens"', b'"prompt"')
NANOSECONDS = UNITS_PER_SECOND["ns"]
TEXT_BLOCK_SIZE = 16
LARGEST_PRIORITY = 1 << 31


@trace_formats.register("log")
class RequestLog(TraceFormat):
    """A request log as JSONL. Rows are in nanoseconds, whatever the unit of their line."""

    title = "request log as JSONL"
    timestamp_unit = "s (arrival_s), or what each line says"
    units_per_second = NANOSECONDS
    unit_is_settable = True
    converts_units = True
    text_block_size = TEXT_BLOCK_SIZE
    block_size_is_settable = True
    fields = ("arrival_s", "input_tokens", "hash_ids")
    first_line = '{"arrival_s": ..., "input_tokens": ..., "output_tokens": ..., "session": ...}'

    def matches(self, lines: Sequence[bytes]) -> bool:
        return any(line.startswith(b"{") and field in line for line in lines for field in OWN_FIELDS)

    def links_turns(self, lines: Sequence[bytes]) -> bool:
        return b'"session"' in b"\n".join(lines)

    def records_think_times(self, lines: Sequence[bytes]) -> bool:
        head = b"\n".join(lines)
        return self.links_turns(lines) and (b'"duration_s"' in head or b'"think_time_s"' in head)

    def read_rows(self, source: TraceSource) -> Iterator[Row | BadRow]:
        return read_objects(source, FIELDS, _Parser(source).row)


class _Parser:
    def __init__(self, source: TraceSource) -> None:
        self._source = source
        self._block_size = source.info.trace_block_size or TEXT_BLOCK_SIZE

    def row(self, place: int, row: dict[str, object]) -> Row:
        salt = _text(row, "cache_salt")
        if salt == "":
            raise RowError("empty_salt", "is empty: leave it out, or name the tenant", "cache_salt")
        when = self._nanoseconds(row)
        if "input_tokens" in row or "prompt" not in row:
            num_input = rows.num_tokens(rows.required(row, "input_tokens"), "input_tokens")
            ids = row.get("hash_ids")
            blocks = None if ids is None else self._given_ids(ids, salt)
        else:
            text = TextBlocks(self._block_size, salt)
            text.extend(self._tokenizer("prompt").encode(str(_text(row, "prompt"))))
            num_input, blocks = text.num_tokens, text.ids()
        if "output_tokens" in row or "output" not in row:
            num_output = rows.num_tokens(rows.required(row, "output_tokens"), "output_tokens")
        else:
            num_output = len(self._tokenizer("output").encode(str(_text(row, "output"))))
        return place, when, num_input, num_output, blocks, _turn(row), _priority(row)

    def _given_ids(self, ids: Any, salt: str | None) -> tuple[int, ...]:
        if self._source.info.trace_block_size_source != "given":
            raise RowError(
                "no_block_size",
                "are there, and nothing says for how many tokens one stands: give --trace-block-size",
                "hash_ids",
            )
        return _salted(rows.hash_ids(ids), salt)

    def _tokenizer(self, field: str) -> Tokenizer:
        if self._source.tokenizer is None:
            raise RowError("no_tokenizer", f"is text, and nothing says how to count it: {HOW_TO_NAME_ONE}", field)
        return self._source.tokenizer

    def _nanoseconds(self, row: dict[str, object]) -> int:
        if "arrival_s" in row:
            return round(rows.timestamp(row["arrival_s"], "arrival_s", 1) * NANOSECONDS)
        if "timestamp" not in row:
            raise RowError("missing_field", "is missing, and so is timestamp with its unit", "arrival_s")
        unit = row.get("unit", self._source.timestamp_unit)
        if unit is None:
            raise RowError(
                "no_unit",
                "has no unit: give --timestamp-unit s, ms, us or ns, or a field unit on the line",
                "timestamp",
            )
        if not isinstance(unit, str) or unit not in UNITS_PER_SECOND:
            raise RowError("unknown_unit", f"{rows.shown(unit)} is none of {', '.join(UNITS_PER_SECOND)}", "unit")
        when = rows.timestamp(row["timestamp"], "timestamp", UNITS_PER_SECOND[unit])
        return round(when * (NANOSECONDS // UNITS_PER_SECOND[unit]))


def _turn(row: dict[str, object]) -> TurnRecord | None:
    session = row.get("session")
    if session is None:
        return None
    if type(session) not in (str, int):
        raise RowError("not_a_name", f"{rows.shown(session)} is neither text nor a whole number", "session")
    return TurnRecord(
        key=session,
        after=(session,),
        think_s=rows.optional_seconds(row, "think_time_s"),
        answered_s=rows.optional_seconds(row, "duration_s"),
    )


def _text(row: dict[str, object], field: str) -> str | None:
    value = row.get(field)
    if value is not None and not isinstance(value, str):
        raise RowError("not_text", f"{rows.shown(value)} is not text", field)
    return value


def _priority(row: dict[str, object]) -> int:
    value = row.get("priority", 0)
    if type(value) is not int or abs(value) > LARGEST_PRIORITY:
        raise RowError("not_a_number", f"{rows.shown(value)} is not a whole number within 2**31", "priority")
    return value


def _salted(ids: tuple[int, ...], salt: str | None) -> tuple[int, ...]:
    """Other ids for the same blocks; one salt always gives the same ones."""
    if salt is None:
        return ids
    key = hashlib.blake2b(salt.encode(), digest_size=16).digest()
    return tuple(
        int.from_bytes(hashlib.blake2b(hash_id.to_bytes(8, "big"), key=key, digest_size=8).digest(), "big")
        & rows.MAX_HASH_ID
        for hash_id in ids
    )
