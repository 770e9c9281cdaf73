"""Field report S01: the chunk with the finish reason holds nothing else, so a client may stop at it."""

# ruff: noqa: F401, F811 (fixtures are imported by name)

import json

import pytest

from tests.backends.serving.http.conftest import LETTERS
from tests.field.served_streams import (
    CHAT,
    COMPLETIONS,
    body_of,
    choices_of,
    letters,
    make_engine,
    make_server,
    stream,
    texts_of,
)

pytestmark = pytest.mark.torch

LETTER_IDS = {letter: index for index, letter in enumerate(LETTERS)}
EMPTY = {CHAT: {"delta": {}}, COMPLETIONS: {"text": ""}}


def ended(running, path, **more):
    """The chunks before the end, and the end; there is one."""
    *before, end = choices_of(stream(running, path, **more))
    assert all(each["finish_reason"] is None for each in before)
    assert end == {"index": 0, **EMPTY[path], "logprobs": end["logprobs"], "finish_reason": end["finish_reason"]}
    assert not any((end["logprobs"] or {}).values())  # lists of completions are there, and empty
    return before, end["finish_reason"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_s01_six_tokens_come_before_an_empty_end(make_server, path):
    running = make_server()
    before, reason = ended(running, path)
    assert reason == "length"
    pieces = [texts_of(each) for each in before]
    assert len([piece for piece in pieces if piece]) == 6 and len("".join(pieces)) == 6  # a token is a letter here


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_s01_nothing_is_lost_against_the_whole_answer(make_server, path):
    running = make_server()
    before, reason = ended(running, path, max_tokens=17)
    (whole,) = json.loads(running.post(path, body_of(path, max_tokens=17, stream=False))[2])["choices"]
    assert "".join(map(texts_of, before)) == (whole["message"]["content"] if path == CHAT else whole["text"])
    assert reason == whole["finish_reason"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("by", ["stop_text", "stop_token"])
def test_s01_an_answer_that_ends_by_itself_ends_alike(make_server, path, by):
    running = make_server()
    pieces = [texts_of(each) for each in ended(running, path, max_tokens=12)[0]]
    last = next(letter for letter in "".join(pieces)[3:] if letter)
    stop = {"stop": [last]} if by == "stop_text" else {"stop_token_ids": [LETTER_IDS[last]]}
    before, reason = ended(running, path, max_tokens=12, **stop)
    assert reason == "stop"
    shown = "".join(map(texts_of, before))
    assert "".join(pieces).startswith(shown) and len(shown) < 12


@pytest.mark.parametrize(("path", "logprobs"), [(CHAT, {"logprobs": True}), (COMPLETIONS, {"logprobs": 1})])
def test_s01_log_probabilities_come_before_the_end_too(make_server, path, logprobs):
    before, _ = ended(make_server(), path, **logprobs)
    key = "content" if path == CHAT else "tokens"
    assert sum(len(each["logprobs"][key]) for each in before if each["logprobs"]) == 6
