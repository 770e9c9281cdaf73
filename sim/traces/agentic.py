"""Coding-assistant conversations (kv-cache-tester and its collections): JSON documents, one a conversation.

A document holds block_size, hash_id_scope and requests with t (seconds on the conversation's own clock), in, out,
hash_ids, think_time, api_time; among them sub-conversations (type "subagent") with requests of their own. A trace is
any number of documents: a file of one, a file of one a line, several files, or a folder of them.

* hash_ids name full blocks only: `in // block_size` of them. The partial block at the end of a prompt has none.
* With scope "local" an id means nothing outside its document, so ids are kept apart per document; "global" ones are
  the same content everywhere. Where the scope is not given, local is taken: it claims the least reuse.
* think_time is how long the client took after the answer before: the next turn waits for that answer.
* No document says when its conversation began. They begin together, or at a rate that the user gives.
"""

import re
from array import array
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from typing import Any

import attrs

from ...core.errors import InputError
from ..random_draws import Draws
from .bad_rows import BadRow, RowError, shown, whole_number
from .conversation import ConversationReader, ConversationRequest, entries_of
from .json_lines import as_object
from .json_values import read_json_values
from .row_checks import RowChecks
from .sessions import TurnRecord
from .trace_format import Row, TraceFormat, TraceSource, always

FIELDS = frozenset(("id", "block_size", "hash_id_scope", "requests"))
SCOPES = ("local", "global")
LARGEST_BLOCK_SIZE = 1_000_000
BLOCK_SIZE = re.compile(rb'"block_size"\s*:\s*(\d{1,7})\b')
LARGEST_GLOBAL_ID = 2**62 - 1
# A request, how many ids it shares with the one before it, and the names of its other ids; None where it has none.
NamedRequest = tuple[ConversationRequest, int, "array[int] | None"]
TOGETHER = (
    "the files do not say when conversations began: they begin together at 0 s, unless --request-rate says how many "
    "begin a second"
)


def matches(lines: Sequence[bytes]) -> bool:
    """Whether the beginning of the file is that of a conversation's document."""
    head = b"\n".join(lines)
    return b'"requests"' in head and any(
        name in head for name in (b'"hash_id_scope"', b'"block_size"', b'"think_time"')
    )


def block_size_of(lines: Sequence[bytes]) -> int | None:
    """What the first document says one id stands for, where it says so at its beginning."""
    found = BLOCK_SIZE.search(b"\n".join(lines))
    return int(found.group(1)) if found and int(found.group(1)) else None


def read_rows(source: TraceSource) -> Iterator[Row | BadRow]:
    """Yield a `Row`, or a `BadRow`, for every request of all conversations, in order of time.

    Memory is that of the conversations that have begun and are not over.
    """
    num_rows = 0
    for row in _merged(source):
        if isinstance(row, BadRow):
            yield row
        else:
            num_rows += 1
            yield (num_rows, *row[1:])


def _merged(source: TraceSource) -> Iterator[Row | BadRow]:
    """Rows of all conversations in order of time, not numbered yet."""
    conversations = _Conversations(source)
    starts = _starts(source)
    under_way: list[tuple[float, int, Row, Iterator[Row]]] = []
    begun = 0
    for start, conversation in zip(starts, conversations, strict=False):
        yield from conversation.bad_rows
        while under_way and under_way[0][0] < start:
            yield _take_first(under_way)
        begun += 1
        _push_next(under_way, begun, conversations.rows(conversation, begun, start))
    while under_way:
        yield _take_first(under_way)
    source.info.remark("conversations", begun)


def _take_first(under_way: list[tuple[float, int, Row, Iterator[Row]]]) -> Row:
    _, number, row, rest = heappop(under_way)
    _push_next(under_way, number, rest)
    return row


def _push_next(under_way: list[tuple[float, int, Row, Iterator[Row]]], number: int, rows: Iterator[Row]) -> None:
    row = next(rows, None)
    if row is not None:
        heappush(under_way, (row[1], number, row, rows))


def _starts(source: TraceSource) -> Iterator[float]:
    """When each conversation begins, seconds: all at 0, or by a Poisson process."""
    draws, now = Draws(source.seed), 0.0
    while True:
        yield now
        if source.request_rate is not None:
            now += draws.exponential(1 / source.request_rate)


@attrs.frozen
class ReadConversation:
    """What came of one document: its bad rows, its requests in order of time, and its own name."""

    bad_rows: list[BadRow]
    requests: list[NamedRequest] = attrs.field(factory=list)
    name: str | None = None


class _Conversations:
    """The conversations of a trace in the order of files and documents."""

    def __init__(self, source: TraceSource) -> None:
        self._source = source
        self._num_local_ids = 0
        self._global_checks = RowChecks(AGENTIC, source.info, 1)

    def __iter__(self) -> Iterator[ReadConversation]:
        for path in self._source.paths:
            for line, document in read_json_values(path):
                where = f"{path}:{line}"
                if isinstance(document, BadRow):
                    yield ReadConversation([attrs.evolve(document, where=where)])
                    continue
                try:
                    yield self._read(document, where)
                except RowError as error:
                    yield ReadConversation([error.at(line, where)])

    def rows(self, read: ReadConversation, conversation: int, start: float) -> Iterator[Row]:
        """Rows of one conversation, not numbered yet; each request is let go once it has been taken."""
        requests, name = read.requests, read.name or str(conversation)
        requests.reverse()
        ids: list[int] = []
        while requests:
            request, num_kept, new_ids = requests.pop()
            record = TurnRecord(
                key=(conversation, request.order),
                after=tuple((conversation, before.order) for before in request.after),
                session=f"{name}{request.stream}",
                number=request.number,
                think_s=request.think_s,
                keeps_own_gap=request.think_s is None,
                answered_s=request.answered_s or 0.0,
                num_waiting=request.num_waiting,
            )
            request.after = ()
            hash_ids = None
            if new_ids is not None:
                ids[num_kept:] = new_ids
                hash_ids = tuple(ids)
            when = start + request.when
            yield 0, when, request.input_length, request.output_length, hash_ids, record, 0

    def _read(self, document: Any, where: str) -> ReadConversation:
        info = self._source.info
        fields = as_object(document)
        info.unused_fields.update(fields.keys() - FIELDS)
        self._check_block_size(fields, where)
        scope = self._scope(fields)
        checks = self._global_checks if scope == "global" else RowChecks(AGENTIC, info, 1)
        reader = ConversationReader(where, info.unused_fields)

        def check(request: ConversationRequest) -> None:
            if scope == "global" and max(request.hash_ids or (), default=0) > LARGEST_GLOBAL_ID:
                raise RowError("huge", "holds an id of 2**62 or more", "hash_ids")
            checks.check((0, 0, request.input_length, request.output_length, request.hash_ids, None, 0))

        requests = reader.read(entries_of(fields), check)
        if reader.num_overlapping:
            info.remark("requests were sent before the answer to the one before them", reader.num_overlapping)
        name = fields.get("id")
        return ReadConversation(reader.bad_rows, self._named(requests, scope), name if isinstance(name, str) else None)

    def _check_block_size(self, fields: dict[str, Any], where: str) -> None:
        expected = self._source.info.trace_block_size
        if "block_size" not in fields:
            if self._source.info.trace_block_size_source == "given":
                return
            raise RowError("missing_field", "is missing; give --trace-block-size", "block_size")
        block_size = whole_number(fields["block_size"], "block_size", LARGEST_BLOCK_SIZE)
        if block_size != expected:
            raise InputError(
                f"{where}: field 'block_size' is {block_size}, but ids of this trace stand for {expected} tokens "
                f"({self._source.info.trace_block_size_source}); one trace has one block size, so read such "
                "conversations apart"
            )

    def _scope(self, fields: dict[str, Any]) -> str:
        scope = fields.get("hash_id_scope")
        if scope is None:
            self._source.info.remark("conversations do not say what their hash ids are compared with: taken as local")
            return "local"
        if scope not in SCOPES:
            raise RowError("unknown_scope", f"is {shown(scope)}; it is local or global", "hash_id_scope")
        return scope

    def _named(self, requests: list[ConversationRequest], scope: str) -> list[NamedRequest]:
        """The same requests with ids that no other document has: odd ones. Global ids become even ones."""
        named: list[NamedRequest] = []
        local: dict[int, int] = {}
        first, latest = self._num_local_ids, ()
        for request in requests:
            ids = request.hash_ids
            if ids is None:
                named.append((request, 0, None))
                continue
            request.hash_ids = None
            num_kept = num_equal(latest, ids)
            rest = ids[num_kept:]
            if scope == "global":
                names = [2 * hash_id for hash_id in rest]
            else:
                names = [2 * (first + local.setdefault(hash_id, len(local))) + 1 for hash_id in rest]
            named.append((request, num_kept, array("q", names)))
            latest = ids
        self._num_local_ids += len(local)
        return named


def num_equal(one: Sequence[int], other: Sequence[int]) -> int:
    """How many of the first items of both are the same."""
    for position, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return position
    return min(len(one), len(other))


AGENTIC = TraceFormat(
    name="agentic",
    title="coding-assistant conversations",
    timestamp_unit="s",
    units_per_second=1,
    block_size_is_settable=True,
    block_size_in=block_size_of,
    full_blocks_only=True,
    fields=("t", "in", "hash_ids"),
    first_line='{"id": ..., "block_size": 64, "hash_id_scope": "local", "requests": [{"t": ..., "in": ...}, ...]}',
    matches=matches,
    links_turns=always,
    records_think_times=always,
    read_rows=read_rows,
    checks_its_rows=True,
    has_one_parent_each=False,
    takes_many_files=True,
    arrivals_unless_given=TOGETHER,
)
