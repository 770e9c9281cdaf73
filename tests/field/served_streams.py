"""What field reports about serving share: a real server on the loopback, and its streams as clients see them."""

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server needs fastapi")
pytest.importorskip("transformers", reason="the server needs transformers")

from tests.backends.serving.conftest import make_engine
from tests.backends.serving.http.conftest import _wait_for as wait_for
from tests.backends.serving.http.conftest import letters, make_server

__all__ = [
    "CHAT",
    "COMPLETIONS",
    "HELLO",
    "body_of",
    "choices_of",
    "letters",
    "make_engine",
    "make_server",
    "slow_steps",
    "stream",
    "texts_of",
    "wait_for",
]

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Say hello in one short sentence."}]
PROMPTS = {CHAT: {"messages": HELLO}, COMPLETIONS: {"prompt": "hello"}}


def body_of(path: str, **more: Any) -> dict[str, Any]:
    """A greedy request of six tokens, as a stream."""
    return {**PROMPTS[path], "temperature": 0, "max_tokens": 6, "ignore_eos": True, "stream": True, **more}


def stream(running: Any, path: str, **more: Any) -> list[str]:
    """The lines of a stream, without those of the transfer; `running` is a server of `make_server`."""
    status, headers, sent = running.post(path, body_of(path, **more))
    assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    lines = [line.strip() for line in sent.decode().split("\n")]
    return [line for line in lines if line.startswith(("data:", ":"))]


def choices_of(lines: list[str]) -> Iterator[dict[str, Any]]:
    """The choices of all chunks, in order."""
    for line in lines:
        if line.startswith("data: {"):
            yield from json.loads(line[6:])["choices"]


def texts_of(choice: dict[str, Any]) -> str:
    """The text of a chunk's choice, of either endpoint."""
    return choice["delta"].get("content") or "" if "delta" in choice else choice["text"]


def slow_steps(running: Any, seconds: float) -> None:
    """Make every step of the engine take this long."""
    running.engine._runner.on_step = lambda step: time.sleep(seconds)
