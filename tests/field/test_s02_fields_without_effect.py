"""Field report S02: labels that clients send with every request are accepted; what changes the output is refused."""

# ruff: noqa: F401, F811 (fixtures are imported by name)

import json
import logging

import pytest

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

LABELS = {
    "user": "u",
    "prompt_cache_key": "s",
    "prompt_cache_options": {"mode": "explicit"},
    "prompt_cache_retention": "24h",
    "safety_identifier": "hash",
    "metadata": {"a": "b"},
    "store": True,
    "service_tier": "flex",
    "request_id": "r",
    "session_id": "s",
    "trace_id": "t",
    "parallel_tool_calls": True,
}


@pytest.fixture
def running(make_server):
    return make_server()


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_s02_each_label_is_accepted_has_no_effect_and_is_named(running, path):
    expected = answer(running, path)
    assert "x-ignored-fields" not in expected[0]
    for name, value in LABELS.items():
        headers, texts = answer(running, path, **{name: value})
        assert headers["x-ignored-fields"] == name
        assert texts == expected[1]
    headers, _ = answer(running, path, **LABELS)
    assert headers["x-ignored-fields"] == ", ".join(sorted(LABELS))


def answer(running, path, **more):
    status, headers, body = running.post(path, body_of(path, stream=False, **more))
    assert status == 200, body
    return headers, [choice.get("text") or choice["message"]["content"] for choice in json.loads(body)["choices"]]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_s02_a_stream_names_them_as_well(running, path):
    assert running.post(path, body_of(path, user="u"))[1]["x-ignored-fields"] == "user"
    plain, labelled = stream(running, path), stream(running, path, **LABELS)
    assert list(map(texts_of, choices_of(plain))) == list(map(texts_of, choices_of(labelled)))


def test_s02_null_is_as_good_as_left_out(running):
    assert "x-ignored-fields" not in answer(running, CHAT, user=None)[0]


def test_s02_the_log_names_each_field_once(make_server, caplog, monkeypatch):
    running = make_server(log_level="info")
    logger = logging.getLogger("uvicorn.error")
    monkeypatch.setattr(logger, "handlers", [*logger.handlers, caplog.handler])  # the server's log does not propagate
    monkeypatch.setattr(logger, "propagate", False)
    for more in ({"user": "u"}, {"user": "v"}, {"user": "u", "store": True}, {"store": False}):
        answer(running, CHAT, **more)
    said = [record.getMessage() for record in caplog.records if "no effect" in record.getMessage()]
    assert [line.rpartition(": ")[2] for line in said] == ["user", "store"]


CHANGES_OUTPUT = {
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
    "tool_choice": "required",
    "response_format": {"type": "json_object"},
    "guided_json": {"type": "object"},
    "structured_outputs": {"json": {}},
    "stop_sequences": ["x"],
    "reasoning_effort": "high",
    "temprature": 0.5,
    "top_a": 0.2,
}


@pytest.mark.parametrize("name", CHANGES_OUTPUT)
def test_s02_what_could_change_the_output_stays_refused_by_name(running, name):
    status, headers, body = running.post(CHAT, body_of(CHAT, **{name: CHANGES_OUTPUT[name], "user": "u"}))
    assert (status, json.loads(body)["error"]["param"]) == (400, name)
    assert "x-ignored-fields" not in headers


@pytest.mark.parametrize(
    ("name", "neutral", "other"),
    [("skip_special_tokens", True, False), ("include_stop_str_in_output", False, True)],
)
def test_s02_what_this_server_does_anyway_may_be_asked_for(running, name, neutral, other):
    assert answer(running, COMPLETIONS, **{name: neutral})[1] == answer(running, COMPLETIONS)[1]
    status, _, body = running.post(COMPLETIONS, body_of(COMPLETIONS, **{name: other}))
    assert (status, json.loads(body)["error"]["param"]) == (400, name)


@pytest.mark.parametrize("name", ["tool_choice", "function_call"])
def test_s02_the_automatic_choice_of_no_tool_is_no_choice(running, name):
    assert answer(running, CHAT, **{name: "auto"})[1] == answer(running, CHAT)[1]
