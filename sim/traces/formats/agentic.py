"""Coding-assistant conversations (kv-cache-tester and its collections): JSON documents, one a conversation.

A document holds block_size, hash_id_scope and requests with t (seconds on the conversation's own clock), in, out,
hash_ids, think_time, api_time; some entries are sub-conversations (type "subagent") with requests of their own. A trace
is any number of documents: one file with one document or with one a line, several files, or a folder of them.

* hash_ids name full blocks only: `in // block_size` of them. The partial block at the end of a prompt has no id.
* With scope "local" an id means nothing outside its document, so ids of different documents never match; a "global" id
  is the same content everywhere. Without a scope, local is assumed: it claims the least reuse.
* think_time is how long the client took after the answer before: the next turn waits for that answer.
* No document says when its conversation began. They begin together, or at a rate that the user gives.
"""

import re
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

import attrs

from ....core.errors import InputError
from ...random_draws import Draws
from .. import rows
from ..checks import RowChecks
from ..format import TraceFormat, TraceSource, trace_formats
from ..lines import read_json_values
from ..rows import BadRow, Row, RowError, TurnRecord

REQUEST_FIELDS = frozenset(("t", "type", "in", "out", "hash_ids", "think_time", "api_time"))
SUB_CONVERSATION_FIELDS = frozenset(("t", "type", "duration_ms", "status", "requests"))
REQUEST_TYPES = ("n", "s")
SUB_CONVERSATION = "subagent"
# The status of a sub-conversation that its parent did not wait for.
IN_BACKGROUND = "async_launched"
# Times are recorded in whole seconds: an answer up to this much later than a request counts as earlier than it.
ROUNDING_S = 1.0


@attrs.define(eq=False)
class ConversationRequest:
    """One request. Times are seconds on the conversation's clock; `when` is `t`, or later if the request waited."""

    order: int
    t: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] | None
    think_time: float | None
    api_time: float | None
    when: float = 0.0
    stream: str = ""
    number: int = 1
    after: "tuple[ConversationRequest, ...]" = ()
    think_s: float | None = None
    answered_s: float | None = None
    num_waiting: int = 0

    @property
    def end_s(self) -> float:
        """The time of its answer, as far as recorded; never before it was sent."""
        return self.t + (self.api_time or 0.0)


class ConversationReader:
    """Reads the requests of one conversation, in order of time, and links each to the answers that it waited for.

    Faults are collected in `bad_rows`, names of fields that are not read in `unused_fields`.
    """

    def __init__(self, where: str, unused_fields: set[str], check: Callable[[ConversationRequest], None]) -> None:
        """`check` raises `RowError` for a request that cannot be used, before it is linked."""
        self._where = where
        self._unused_fields = unused_fields
        self._check = check
        self._order = 0
        self.bad_rows: list[BadRow] = []
        self.num_overlapping = 0

    def read(self, entries: list[Any]) -> list[ConversationRequest]:
        """The requests that can be used, linked to each other, in order of `when`."""
        items = self._parsed(entries, "requests", 0.0)
        requests: list[ConversationRequest] = []
        self._link(items, (), "", requests)
        for request in requests:
            for before in request.after:
                before.num_waiting += 1
        return sorted(requests, key=lambda request: (request.when, request.order))

    # -- parsing -----------------------------------------------------------------------------------------------------

    def _parsed(self, entries: list[Any], path: str, clock: float) -> "list[_Item]":
        items: list[_Item] = []
        latest = 0.0
        for index, entry in enumerate(entries):
            where = f"{path}[{index}]"
            try:
                entry = rows.as_object(entry)
                if entry.get("type") == SUB_CONVERSATION:
                    items.append(self._sub_conversation(entry, where, clock))
                    continue
                request = self._request(entry, clock)
                if request.t < latest:
                    raise RowError("out_of_order", f"is {request.t}, earlier than the request before it", "t")
                self._check(request)
                latest = request.t
                items.append(request)
            except RowError as error:
                self.bad_rows.append(error.at(0, f"{self._where}: {where}"))
        return items

    def _request(self, entry: dict[str, object], clock: float) -> ConversationRequest:
        if entry.get("type", REQUEST_TYPES[0]) not in REQUEST_TYPES:
            known = f"requests ({', '.join(REQUEST_TYPES)}) or {SUB_CONVERSATION}"
            raise RowError("unknown_type", f"is {rows.shown(entry['type'])}; entries are {known}", "type")
        self._unused_fields.update(entry.keys() - REQUEST_FIELDS)
        ids = entry.get("hash_ids")
        self._order += 1
        return ConversationRequest(
            order=self._order,
            t=clock + rows.timestamp(rows.required(entry, "t"), "t", 1),
            input_length=rows.num_tokens(rows.required(entry, "in"), "in"),
            output_length=rows.num_tokens(rows.required(entry, "out"), "out"),
            hash_ids=None if ids is None else rows.hash_ids(ids, "hash_ids"),
            think_time=rows.optional_seconds(entry, "think_time"),
            api_time=(api_time := rows.optional_seconds(entry, "api_time")),
            answered_s=api_time,
        )

    def _sub_conversation(self, entry: dict[str, object], where: str, clock: float) -> "_SubConversation":
        self._unused_fields.update(entry.keys() - SUB_CONVERSATION_FIELDS)
        requests = entries_of(entry)
        t = rows.timestamp(rows.required(entry, "t"), "t", 1)
        duration_ms = entry.get("duration_ms")
        end = None if duration_ms is None else clock + t + rows.finite_number(duration_ms, "duration_ms") / 1_000
        # Most recordings keep one clock; a sub-conversation whose first request would precede it has its own clock.
        first = requests[0].get("t") if requests and isinstance(requests[0], dict) else None
        has_own_clock = isinstance(first, int | float) and first < t
        items = self._parsed(requests, f"{where}.requests", clock + t if has_own_clock else clock)
        return _SubConversation(items, end, entry.get("status") == IN_BACKGROUND)

    # -- linking -----------------------------------------------------------------------------------------------------

    def _link(
        self,
        items: "list[_Item]",
        opened_by: tuple[ConversationRequest, ...],
        stream: str,
        out: list[ConversationRequest],
    ) -> "list[_Pending]":
        """Link the requests of one list; return those whose answers no request in the list has waited for."""
        pending: list[_Pending] = []
        after = opened_by
        previous: ConversationRequest | None = None
        number = num_children = 0
        for item in items:
            if isinstance(item, _SubConversation):
                num_children += 1
                child = self._link(item.items, (previous,) if previous else opened_by, f"{stream}/{num_children}", out)
                if not item.is_in_background:
                    pending.extend((request, max(end_s, item.end_s or 0.0)) for request, end_s in child)
                continue
            answered = tuple(request for request, end_s in pending if end_s <= item.t + ROUNDING_S)
            if answered:
                after = answered
                pending = [each for each in pending if each[0] not in answered]
            elif pending:
                self.num_overlapping += 1
            number += 1
            item.stream, item.number, item.after = stream, number, after
            _set_times(item, is_plain=len(after) == 1 and after[0] is previous)
            out.append(item)
            pending.append((item, item.end_s))
            previous = item
        return pending


@attrs.frozen(eq=False)
class _SubConversation:
    items: "list[_Item]"
    end_s: float | None
    is_in_background: bool


_Item = ConversationRequest | _SubConversation
# A request whose answer no other request has waited for yet, and the time of the answer.
_Pending = tuple[ConversationRequest, float]


def _set_times(request: ConversationRequest, is_plain: bool) -> None:
    """Set how long after the answers before it a request was sent, if the recording says so.

    A recorded think time counts from the last answer whose end was recorded. If the answer before has no recorded end
    and the think time is not shorter than the time since that request, it counts from an earlier answer and is ignored.
    """
    after = request.after
    request.when = max((before.when for before in after), default=0.0)
    request.when = max(request.when, request.t)
    if not after:
        return
    gap_s = request.t - max(before.t for before in after)
    ends_are_known = all(before.api_time is not None for before in after)
    if is_plain and request.think_time is not None and (ends_are_known or request.think_time < gap_s):
        request.think_s = request.think_time
    elif ends_are_known:
        request.think_s = max(0.0, request.t - max(before.end_s for before in after))
    if request.think_s is not None:
        latest = max(after, key=lambda before: before.end_s)
        until_answer = request.t - request.think_s - latest.t
        latest.answered_s = max(latest.answered_s or 0.0, until_answer)


def entries_of(document: dict[str, object]) -> list[Any]:
    """The entries of a conversation or a sub-conversation. Raises `RowError` if it has no list of them."""
    return rows.as_list(rows.required(document, "requests"), "requests", "requests")


FIELDS = frozenset(("id", "block_size", "hash_id_scope", "requests"))
SCOPES = ("local", "global")
LARGEST_BLOCK_SIZE = 1_000_000
BLOCK_SIZE = re.compile(rb'"block_size"\s*:\s*(\d{1,7})\b')
LARGEST_GLOBAL_ID = 2**62 - 1
# A request, how many ids it shares with the request before it, and its other ids; None where it has no ids.
NamedRequest = tuple[ConversationRequest, int, "array[int] | None"]
TOGETHER = (
    "the files do not say when conversations began: they begin together at 0 s, unless --request-rate says how many "
    "begin a second"
)


@trace_formats.register("agentic")
class Agentic(TraceFormat):
    """Coding-assistant conversations."""

    title = "coding-assistant conversations"
    timestamp_unit = "s"
    units_per_second = 1
    block_size_is_settable = True
    full_blocks_only = True
    fields = ("t", "in", "hash_ids")
    has_turns = True
    has_think_times = True
    first_line = '{"id": ..., "block_size": 64, "hash_id_scope": "local", "requests": [{"t": ..., "in": ...}, ...]}'
    checks_its_rows = True
    takes_many_files = True
    arrivals_unless_given = TOGETHER

    def matches(self, lines: Sequence[bytes]) -> bool:
        head = b"\n".join(lines)
        return b'"requests"' in head and any(
            name in head for name in (b'"hash_id_scope"', b'"block_size"', b'"think_time"')
        )

    def block_size_in(self, lines: Sequence[bytes]) -> int | None:
        found = BLOCK_SIZE.search(b"\n".join(lines))
        return int(found.group(1)) if found and int(found.group(1)) else None

    def read_rows(self, source: TraceSource) -> Iterator[Row | BadRow]:
        """Yield a row for every request of all conversations, in order of time.

        Memory holds the conversations that have begun and are not over.
        """
        number = count(1)
        for row in _merged(_Conversations(source, self), source):
            yield row if isinstance(row, BadRow) else (next(number), *row[1:])


def _merged(conversations: "_Conversations", source: TraceSource) -> Iterator[Row | BadRow]:
    """Rows of all conversations in order of time, not numbered yet."""
    read: deque[ReadConversation] = deque()
    begun = 0

    def starts() -> Iterator[float]:
        """Conversations begin all at 0, or by a Poisson process."""
        nonlocal begun
        draws, now = Draws(source.seed), 0.0
        for conversation in conversations:
            begun += 1
            read.append(conversation)
            yield now
            if source.request_rate is not None:
                now += draws.exponential(1 / source.request_rate)

    def open_conversation(number: int, start: float) -> Iterator[tuple[float, Row | BadRow]]:
        return conversations.rows(read.popleft(), number + 1, start)

    for _, row in rows.merge_sessions(starts(), open_conversation):
        yield row
    source.info.remark("conversations", begun)


@attrs.frozen
class ReadConversation:
    """One document after reading: its bad rows, its requests in order of time, and its own name."""

    bad_rows: list[BadRow]
    requests: list[NamedRequest] = attrs.field(factory=list)
    name: str | None = None


class _Conversations:
    """The conversations of a trace in the order of files and documents."""

    def __init__(self, source: TraceSource, trace_format: TraceFormat) -> None:
        self._source = source
        self._format = trace_format
        self._num_local_ids = 0
        self._global_checks = RowChecks(trace_format, source.info, 1)

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

    def rows(self, read: ReadConversation, conversation: int, start: float) -> Iterator[tuple[float, Row | BadRow]]:
        """(time, row) of one conversation, not numbered; each request is dropped from memory once it was yielded."""
        yield from ((start, row) for row in read.bad_rows)
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
            yield when, (0, when, request.input_length, request.output_length, hash_ids, record, 0)

    def _read(self, document: Any, where: str) -> ReadConversation:
        info = self._source.info
        fields = rows.as_object(document)
        info.unused_fields.update(fields.keys() - FIELDS)
        self._check_block_size(fields, where)
        scope = self._scope(fields)
        checks = self._global_checks if scope == "global" else RowChecks(self._format, info, 1)

        def check(request: ConversationRequest) -> None:
            if scope == "global" and max(request.hash_ids or (), default=0) > LARGEST_GLOBAL_ID:
                raise RowError("huge", "holds an id of 2**62 or more", "hash_ids")
            checks.check((0, 0, request.input_length, request.output_length, request.hash_ids, None, 0))

        reader = ConversationReader(where, info.unused_fields, check)
        requests = reader.read(entries_of(fields))
        if reader.num_overlapping:
            info.remark("requests were sent before the answer to the one before them", reader.num_overlapping)
        name = fields.get("id")
        return ReadConversation(reader.bad_rows, self._named(requests, scope), name if isinstance(name, str) else None)

    def _check_block_size(self, fields: dict[str, object], where: str) -> None:
        expected = self._source.info.trace_block_size
        if "block_size" not in fields:
            if self._source.info.trace_block_size_source == "given":
                return
            raise RowError("missing_field", "is missing; give --trace-block-size", "block_size")
        block_size = rows.whole_number(fields["block_size"], "block_size", LARGEST_BLOCK_SIZE)
        if block_size != expected:
            raise InputError(
                f"{where}: field 'block_size' is {block_size}, but ids of this trace stand for {expected} tokens "
                f"({self._source.info.trace_block_size_source}); one trace has one block size, so read such "
                "conversations apart"
            )

    def _scope(self, fields: dict[str, object]) -> str:
        scope = fields.get("hash_id_scope")
        if scope is None:
            self._source.info.remark("conversations do not say what their hash ids are compared with: taken as local")
            return "local"
        if scope not in SCOPES:
            raise RowError("unknown_scope", f"is {rows.shown(scope)}; it is local or global", "hash_id_scope")
        return scope

    def _named(self, requests: list[ConversationRequest], scope: str) -> list[NamedRequest]:
        """The requests with new ids: odd ids that no other document has; global ids become even."""
        named: list[NamedRequest] = []
        local: dict[int, int] = {}
        first, latest = self._num_local_ids, ()
        for request in requests:
            ids = request.hash_ids
            if ids is None:
                named.append((request, 0, None))
                continue
            request.hash_ids = None
            num_kept = _num_equal(latest, ids)
            rest = ids[num_kept:]
            if scope == "global":
                names = [2 * hash_id for hash_id in rest]
            else:
                names = [2 * (first + local.setdefault(hash_id, len(local))) + 1 for hash_id in rest]
            named.append((request, num_kept, array("q", names)))
            latest = ids
        self._num_local_ids += len(local)
        return named


def _num_equal(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common prefix."""
    for position, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return position
    return min(len(one), len(other))
