"""One coding-assistant conversation: its requests in order of time, each knowing whose answers it waited for.

A conversation is a list of requests and of sub-conversations between them, which hold requests of their own (and may
hold sub-conversations). A request waits for the answer before it in its list; the first one of a sub-conversation for
the request that stands before the sub-conversation; the request after sub-conversations for those that had ended by
then. What the recording shows to have been sent before an answer did not wait for it.
"""

from collections.abc import Callable
from typing import Any

import attrs

from .bad_rows import BadRow, RowError, finite_number, hash_ids, num_tokens, shown, timestamp
from .json_lines import as_object, required

REQUEST_FIELDS = frozenset(("t", "type", "in", "out", "hash_ids", "think_time", "api_time"))
SUB_CONVERSATION_FIELDS = frozenset(("t", "type", "duration_ms", "status", "requests"))
REQUEST_TYPES = ("n", "s")
SUB_CONVERSATION = "subagent"
# A sub-conversation that its parent did not wait for.
IN_BACKGROUND = "async_launched"
# Times are recorded in whole seconds: an answer up to this much later than the request after it came before it.
ROUNDING_S = 1.0


@attrs.define(eq=False)
class ConversationRequest:
    """One request. Times are seconds on the conversation's clock; `when` is `t`, or later if it waits so long."""

    where: str
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
        """When its answer was there, as far as is recorded; never before it was sent."""
        return self.t + (self.api_time or 0.0)


# Asked of every request before it is linked; raises `RowError` for one that cannot be used.
UsableCheck = Callable[[ConversationRequest], None]


class ConversationReader:
    """Reads the requests of one conversation; faults are kept as `bad_rows`, names of fields not read in a set."""

    def __init__(self, where: str, unused_fields: set[str]) -> None:
        self._where = where
        self._unused_fields = unused_fields
        self._order = 0
        self.bad_rows: list[BadRow] = []
        self.num_overlapping = 0

    def read(self, entries: list[Any], usable: UsableCheck) -> list[ConversationRequest]:
        """The requests that pass `usable`, linked to each other, in order of `when`."""
        items = self._parsed(entries, "requests", 0.0, usable)
        requests: list[ConversationRequest] = []
        self._link(items, (), "", requests)
        for request in requests:
            for before in request.after:
                before.num_waiting += 1
        return sorted(requests, key=lambda request: (request.when, request.order))

    # -- parsing -----------------------------------------------------------------------------------------------------

    def _parsed(self, entries: list[Any], path: str, clock: float, usable: UsableCheck) -> "list[_Item]":
        items: list[_Item] = []
        latest = 0.0
        for index, entry in enumerate(entries):
            where = f"{path}[{index}]"
            try:
                entry = as_object(entry)
                if entry.get("type") == SUB_CONVERSATION:
                    items.append(self._sub_conversation(entry, where, clock, usable))
                    continue
                request = self._request(entry, where, clock)
                if request.t < latest:
                    raise RowError("out_of_order", f"is {request.t}, earlier than the request before it", "t")
                usable(request)
                latest = request.t
                items.append(request)
            except RowError as error:
                self.bad_rows.append(error.at(0, f"{self._where}: {where}"))
        return items

    def _request(self, entry: dict[str, Any], where: str, clock: float) -> ConversationRequest:
        if entry.get("type", REQUEST_TYPES[0]) not in REQUEST_TYPES:
            raise RowError(
                "unknown_type",
                f"is {shown(entry['type'])}; entries are requests ({', '.join(REQUEST_TYPES)}) or {SUB_CONVERSATION}",
                "type",
            )
        self._unused_fields.update(entry.keys() - REQUEST_FIELDS)
        ids = entry.get("hash_ids")
        self._order += 1
        return ConversationRequest(
            where=f"{self._where}: {where}",
            order=self._order,
            t=clock + timestamp(required(entry, "t"), "t", 1),
            input_length=num_tokens(required(entry, "in"), "in"),
            output_length=num_tokens(required(entry, "out"), "out"),
            hash_ids=None if ids is None else hash_ids(ids, "hash_ids"),
            think_time=_seconds(entry, "think_time"),
            api_time=(api_time := _seconds(entry, "api_time")),
            answered_s=api_time,
        )

    def _sub_conversation(
        self, entry: dict[str, Any], where: str, clock: float, usable: UsableCheck
    ) -> "_SubConversation":
        self._unused_fields.update(entry.keys() - SUB_CONVERSATION_FIELDS)
        requests = required(entry, "requests")
        if not isinstance(requests, list):
            raise RowError("not_a_list", f"{shown(requests)} is not a list of requests", "requests")
        t = timestamp(required(entry, "t"), "t", 1)
        duration_ms = entry.get("duration_ms")
        end = None if duration_ms is None else clock + t + finite_number(duration_ms, "duration_ms") / 1_000
        # Most recordings keep one clock; where a request would come before its sub-conversation, it has its own.
        first = requests[0].get("t") if requests and isinstance(requests[0], dict) else None
        has_own_clock = isinstance(first, int | float) and first < t
        items = self._parsed(requests, f"{where}.requests", clock + t if has_own_clock else clock, usable)
        return _SubConversation(items, end, entry.get("status") == IN_BACKGROUND)

    # -- linking -----------------------------------------------------------------------------------------------------

    def _link(
        self,
        items: "list[_Item]",
        opened_by: tuple[ConversationRequest, ...],
        stream: str,
        out: list[ConversationRequest],
    ) -> "list[_Pending]":
        """Link the requests of one list; returns those whose answers nobody in it has waited for."""
        pending: list[_Pending] = []
        after = opened_by
        previous: ConversationRequest | None = None
        number = num_children = 0
        for item in items:
            if isinstance(item, _SubConversation):
                num_children += 1
                child = self._link(item.items, (previous,) if previous else opened_by, f"{stream}/{num_children}", out)
                if not item.is_in_background:
                    pending.extend(attrs.evolve(each, end_s=max(each.end_s, item.end_s or 0.0)) for each in child)
                continue
            answered = [each for each in pending if each.end_s <= item.t + ROUNDING_S]
            if answered:
                after = tuple(each.request for each in answered)
                pending = [each for each in pending if each not in answered]
            elif pending:
                self.num_overlapping += 1
            number += 1
            item.stream, item.number, item.after = stream, number, after
            _set_times(item, is_plain=len(after) == 1 and after[0] is previous)
            out.append(item)
            pending.append(_Pending(item, item.end_s))
            previous = item
        return pending


@attrs.frozen(eq=False)
class _SubConversation:
    items: "list[_Item]"
    end_s: float | None
    is_in_background: bool


@attrs.frozen(eq=False)
class _Pending:
    """A request whose answer is still to be waited for, and when it was there."""

    request: ConversationRequest
    end_s: float


_Item = ConversationRequest | _SubConversation


def _set_times(request: ConversationRequest, is_plain: bool) -> None:
    """How long after the answers before it a request was sent, where the recording tells.

    A recorded think time counts from the last answer whose end was recorded: where the answer before has none and the
    think time is not shorter than the time since that request, it belongs to an earlier one and says nothing.
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


def _seconds(entry: dict[str, Any], field: str) -> float | None:
    value = entry.get(field)
    return None if value is None else float(finite_number(value, field))


def entries_of(document: Any) -> list[Any]:
    """The entries of a conversation document. Raises `RowError` where it holds no list of them."""
    requests = required(as_object(document), "requests")
    if not isinstance(requests, list):
        raise RowError("not_a_list", f"{shown(requests)} is not a list of requests", "requests")
    return requests
