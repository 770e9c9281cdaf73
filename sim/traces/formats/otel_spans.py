"""OpenTelemetry spans with token counts, as OTLP JSON (field report G05): each span of a request is a request.

A document is `{"resourceSpans": [{"scopeSpans": [{"spans": [...]}]}]}`; a file holds one, or one a line, as the
collector's file exporter writes them. Read of a span:

* startTimeUnixNano, endTimeUnixNano: the request's arrival, and the end of its answer.
* attributes gen_ai.usage.input_tokens and gen_ai.usage.output_tokens, or the names of older conventions (TOKENS).
* attribute gen_ai.conversation.id or session.id: spans with the same one are turns of one session, in order of time.

Spans are exported when they end, so they are sorted by start here, which holds all of them in memory. A span whose
descendants carry token counts too (an agent's, or a client's around a server's) counts the same tokens again and is
left out, and so is a span that was exported twice.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import attrs

from ..format import TraceFormat, TraceSource, trace_formats
from ..lines import read_json_values
from ..rows import BadRow, Row, RowError, TurnRecord, as_list, as_object, num_tokens, required, shown, timestamp
from ..trace import UNITS_PER_SECOND

NANOSECONDS = UNITS_PER_SECOND["ns"]
# Input and output tokens: OpenTelemetry's conventions for generative AI, their names before 2025, OpenInference's.
TOKENS = (
    ("gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens"),
    ("gen_ai.usage.prompt_tokens", "gen_ai.usage.completion_tokens"),
    ("llm.token_count.prompt", "llm.token_count.completion"),
)
SESSIONS = ("gen_ai.conversation.id", "session.id")
NO_TOKENS = "spans carry no token counts and are no requests"
COUNTED_BELOW = "spans carry the token counts of spans below them and were left out"
TWICE = "spans were exported twice and count once"
Name = tuple[str, str]  # trace id and span id


@attrs.frozen
class SpanRequest:
    """A span with token counts. Times are nanoseconds since 1970."""

    name: Name
    start_ns: int
    end_ns: int
    input_length: int
    output_length: int
    session: str | None


@trace_formats.register("otel-spans")
class OtelSpans(TraceFormat):
    """OpenTelemetry spans as OTLP JSON."""

    title = "OpenTelemetry spans (OTLP JSON)"
    timestamp_unit = "ns since 1970"
    units_per_second = NANOSECONDS
    fields = ("startTimeUnixNano", TOKENS[0][0], "hash_ids")
    first_line = '{"resourceSpans": [{"scopeSpans": [{"spans": [{"startTimeUnixNano": ..., "attributes": [...]}]}]}]}'
    takes_many_files = True

    def matches(self, lines: Sequence[bytes]) -> bool:
        return b'"resourceSpans"' in b"\n".join(lines)

    def links_turns(self, lines: Sequence[bytes]) -> bool:
        head = b"\n".join(lines)
        return any(b'"%s"' % name.encode() in head for name in SESSIONS)

    def records_think_times(self, lines: Sequence[bytes]) -> bool:
        return self.links_turns(lines)

    def read_rows(self, source: TraceSource) -> Iterator[Row | BadRow]:
        """Yield the bad spans, then a row for each request in order of its start, numbered from 1."""
        spans = _Spans()
        for path in source.paths:
            for line, document in read_json_values(path):
                yield from spans.read(document, line, f"{path}:{line}")
        for text, count in spans.left_out().items():
            source.info.remark(text, count)
        for number, request in enumerate(spans.requests(), start=1):
            answered_s = (request.end_ns - request.start_ns) / NANOSECONDS
            session = request.session
            if session is None:  # a session of its own, so that its duration is kept
                turn = TurnRecord(key=number, session=str(number), answered_s=answered_s, num_waiting=0)
            else:
                turn = TurnRecord(key=session, after=(session,), session=session, answered_s=answered_s)
            yield number, request.start_ns, request.input_length, request.output_length, None, turn, 0


class _Spans:
    """All spans of a trace: who is whose parent, and which are requests."""

    def __init__(self) -> None:
        self._parents: dict[Name, Name] = {}
        self._found: dict[Name, SpanRequest] = {}
        self._num_left_out: Counter[str] = Counter()

    def read(self, document: Any, line: int, where: str) -> Iterator[BadRow]:
        """Add the spans of a document; yield the bad ones."""
        if isinstance(document, BadRow):
            yield attrs.evolve(document, where=where)
            return
        try:
            spans = list(_spans_of(document))
        except RowError as error:
            yield error.at(line, where)
            return
        for span in spans:
            try:
                self._add(as_object(span))
            except RowError as error:
                name = span.get("spanId") if isinstance(span, dict) else span
                yield error.at(line, f"{where}: span {shown(name)}")

    def requests(self) -> list[SpanRequest]:
        """The spans whose token counts no span below them repeats, in order of their start."""
        above = self._above_others()
        return sorted(
            (span for name, span in self._found.items() if name not in above),
            key=lambda span: (span.start_ns, span.name),
        )

    def left_out(self) -> dict[str, int]:
        """Why spans are no requests, and how many."""
        counts = self._num_left_out + Counter({COUNTED_BELOW: len(self._above_others())})
        return {text: count for text, count in counts.items() if count}

    def _above_others(self) -> set[Name]:
        """Requests with a request below them, through any number of other spans."""
        above: set[Name] = set()
        seen: set[Name] = set()
        for name in self._found:
            parent = self._parents.get(name)
            while parent is not None and parent not in seen:
                seen.add(parent)
                if parent in self._found:
                    above.add(parent)
                parent = self._parents.get(parent)
        return above

    def _add(self, span: dict[str, object]) -> None:
        name = (str(required(span, "traceId")), str(required(span, "spanId")))
        if span.get("parentSpanId"):
            self._parents[name] = (name[0], str(span["parentSpanId"]))
        attributes = _attributes(span)
        for fields in TOKENS:
            if fields[0] in attributes or fields[1] in attributes:
                break
        else:
            self._num_left_out[NO_TOKENS] += 1
            return
        if name in self._found:
            self._num_left_out[TWICE] += 1
            return
        num_input, num_output = (num_tokens(required(attributes, field), field) for field in fields)
        if num_input == 0:
            raise RowError("empty_prompt", "is 0: there is no prompt to serve", fields[0])
        start_ns, end_ns = (_nanoseconds(span, field) for field in ("startTimeUnixNano", "endTimeUnixNano"))
        if end_ns < start_ns:
            raise RowError("out_of_order", f"is {end_ns}, earlier than the start {start_ns}", "endTimeUnixNano")
        session = next((str(attributes[field]) for field in SESSIONS if attributes.get(field)), None)
        self._found[name] = SpanRequest(name, start_ns, end_ns, num_input, num_output, session)


def _spans_of(document: Any) -> Iterator[Any]:
    """The spans of a document. Raises `RowError` if its lists are not there."""
    resources = as_list(required(as_object(document), "resourceSpans"), "resourceSpans", "resources")
    for resource in resources:
        for scope in as_list(as_object(resource).get("scopeSpans", []), "scopeSpans", "scopes"):
            yield from as_list(as_object(scope).get("spans", []), "spans", "spans")


def _attributes(span: dict[str, object]) -> dict[str, Any]:
    """The attributes with numbers or text, by name. OTLP JSON writes 64-bit integers as text."""
    found: dict[str, Any] = {}
    for attribute in as_list(span.get("attributes", []), "attributes", "attributes"):
        attribute = as_object(attribute)
        value = as_object(attribute.get("value", {}))
        if "intValue" in value:
            found[str(attribute.get("key"))] = _integer(value["intValue"], str(attribute.get("key")))
        elif "doubleValue" in value or "stringValue" in value:
            found[str(attribute.get("key"))] = value.get("doubleValue", value.get("stringValue"))
    return found


def _nanoseconds(span: dict[str, object], field: str) -> int:
    return int(timestamp(_integer(required(span, field), field), field, NANOSECONDS))


def _integer(value: Any, field: str) -> Any:
    """An integer that may be written as text; other values are left to the checks of the field."""
    if not isinstance(value, str):
        return value
    try:
        return int(value)
    except ValueError:
        raise RowError("not_a_number", f"{shown(value)} is not a number", field) from None
