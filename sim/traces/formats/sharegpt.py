"""ShareGPT JSON: conversations as text; every answer in one is a request whose prompt is all that came before it.

A file is an array of `{"id": ..., "conversations": [{"from": "human" | "gpt" | "system", "value": ...}, ...]}`, or
one of these a line. It holds no token counts, so a tokenizer has to be named, and no times: conversations begin at a
rate that the user gives, or all at once, and each turn follows the answer before it immediately. Messages are tokenized
one by one and without a chat template. Block ids come from the text, so it is known what conversations share.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from ....core.errors import InputError
from ...random_draws import Draws
from ..format import TraceFormat, TraceSource, trace_formats
from ..lines import read_json_values
from ..rows import BadRow, Row, RowError, TurnRecord, as_list, as_object, required, shown
from ..text import HOW_TO_NAME_ONE, TextBlocks, Tokenizer

FIELDS = frozenset(("id", "conversations"))
MESSAGE_FIELDS = frozenset(("from", "value"))
ANSWERS = ("gpt", "assistant", "chatgpt", "bing", "bard", "model")
PROMPTS = ("human", "user", "system", "tool", "function")
AT_ONCE = (
    "the file records no times: conversations begin together at 0 s, unless --request-rate says how many begin a "
    "second; each turn follows the answer before it without delay"
)


@trace_formats.register("sharegpt")
class ShareGPT(TraceFormat):
    """ShareGPT JSON."""

    title = "ShareGPT JSON"
    timestamp_unit = "none (the file records no times)"
    units_per_second = 1
    text_block_size = 16
    block_size_is_settable = True
    fields = ("none", "input_length", "hash_ids")
    has_turns = True
    has_think_times = True
    first_line = '[{"id": ..., "conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}]}, ...]'
    has_one_parent_each = True
    needs_tokenizer = True
    arrivals_unless_given = AT_ONCE

    def matches(self, lines: Sequence[bytes]) -> bool:
        head = b"\n".join(lines)
        return b'"conversations"' in head and b'"from"' in head

    def read_rows(self, source: TraceSource) -> Iterator[Row | BadRow]:
        tokenizer, block_size = source.tokenizer, source.info.trace_block_size
        if tokenizer is None or block_size is None:
            raise InputError(f"{source.path}: ShareGPT holds text and no token counts; {HOW_TO_NAME_ONE}")
        draws, now, num_rows = Draws(source.seed), 0.0, 0
        for line, value in read_json_values(source.path):
            if isinstance(value, BadRow):
                yield value
                continue
            try:
                messages = _messages(value, source.info.unused_fields)
            except RowError as error:
                yield error.at(line)
                continue
            exchanges = _exchanges(messages, tokenizer, block_size)
            for number, (num_input, ids, num_output) in enumerate(exchanges, 1):
                num_rows += 1
                turn = TurnRecord(
                    key=(line, number),
                    after=((line, number - 1),) if number > 1 else (),
                    session=str(line),
                    number=number,
                    think_s=0.0,
                    answered_s=0.0,
                    num_waiting=0 if number == len(exchanges) else 1,
                )
                yield num_rows, now, num_input, num_output, ids, turn, 0
            if not exchanges:
                source.info.remark("conversations hold no answered prompt and were left out")
            elif source.request_rate is not None:
                now += draws.exponential(1 / source.request_rate)


def _exchanges(
    messages: list[tuple[bool, str]], tokenizer: Tokenizer, block_size: int
) -> list[tuple[int, tuple[int, ...], int]]:
    """(prompt tokens, ids of its blocks, answer tokens) of every answered prompt."""
    text = TextBlocks(block_size)
    exchanges: list[tuple[int, tuple[int, ...], int]] = []
    for is_answer, words in messages:
        tokens = tokenizer.encode(words)
        if is_answer and text.num_tokens:
            exchanges.append((text.num_tokens, text.ids(), len(tokens)))
        text.extend(tokens)
    return exchanges


def _messages(value: Any, unused_fields: set[str]) -> list[tuple[bool, str]]:
    """(is it an answer, text) of every message."""
    conversation = as_object(value)
    unused_fields.update(conversation.keys() - FIELDS)
    messages = as_list(required(conversation, "conversations"), "conversations", "messages")
    return [_message(message, f"conversations[{index}]", unused_fields) for index, message in enumerate(messages)]


def _message(message: Any, where: str, unused_fields: set[str]) -> tuple[bool, str]:
    if not isinstance(message, dict):
        raise RowError("not_a_message", f"{shown(message)} is not a message", where)
    for field in ("from", "value"):
        if field not in message:
            raise RowError("missing_field", "is missing", f"{where}.{field}")
        if not isinstance(message[field], str):
            raise RowError("not_text", f"{shown(message[field])} is not text", f"{where}.{field}")
    if message["from"] not in (*ANSWERS, *PROMPTS):
        raise RowError(
            "unknown_role", f"{shown(message['from'])} is none of {', '.join((*PROMPTS, *ANSWERS))}", f"{where}.from"
        )
    unused_fields.update(message.keys() - MESSAGE_FIELDS)
    return message["from"] in ANSWERS, message["value"]
