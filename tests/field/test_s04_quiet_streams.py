"""Field report S04: a stream that waits sends comments, and its usage at the end; tools are refused by name."""

# ruff: noqa: F401, F811 (fixtures are imported by name)

import json
import threading

import pytest

from tests.field.served_streams import (
    CHAT,
    COMPLETIONS,
    body_of,
    choices_of,
    letters,
    make_engine,
    make_server,
    slow_steps,
    stream,
    texts_of,
    wait_for,
)

pytestmark = pytest.mark.torch

COMMENT = ": keep-alive"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_s04_a_stream_whose_prompt_is_computed_slowly_sends_comments_and_loses_nothing(make_server, path):
    running = make_server(keep_alive_interval_s=0.05)
    expected = stream(running, path)
    assert COMMENT not in expected
    slow_steps(running, 0.3)
    lines = stream(running, path)
    assert lines.count(COMMENT) >= 6
    first_text = next(place for place, line in enumerate(lines) if line.startswith("data: {") and text_in(line))
    assert COMMENT in lines[:first_text]
    pairs = [[(each["index"], texts_of(each)) for each in choices_of(some)] for some in (expected, lines)]
    assert pairs[0] == pairs[1]
    assert lines[-1] == "data: [DONE]"


def text_in(line):
    return any(map(texts_of, choices_of([line])))


def test_s04_a_stream_that_waits_for_another_request_sends_comments(make_server, wait_for):
    running = make_server(keep_alive_interval_s=0.05, max_num_seqs=1)
    slow_steps(running, 0.1)
    long = threading.Thread(target=stream, args=(running, COMPLETIONS), kwargs={"max_tokens": 10})
    long.start()
    wait_for(lambda: running.engine.stats.num_running == 1)
    lines = stream(running, COMPLETIONS, max_tokens=1)
    long.join()
    assert lines[:5] == [COMMENT] * 5
    assert sum(map(len, map(texts_of, choices_of(lines)))) == 1


def test_s04_steps_longer_than_the_stall_timeout_do_not_end_a_quiet_stream(make_server):
    running = make_server(keep_alive_interval_s=0.05, stall_timeout_s=0.4)
    slow_steps(running, 0.6)
    assert stream(running, COMPLETIONS, max_tokens=2)[-1] == "data: [DONE]"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_s04_usage_comes_last_in_a_stream_with_comments(make_server, path):
    running = make_server(keep_alive_interval_s=0.05)
    slow_steps(running, 0.1)
    lines = stream(running, path, n=2, temperature=1, stream_options={"include_usage": True})
    *others, last = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 12
    assert all(each["usage"] is None for each in others)
    assert COMMENT in lines


def test_s04_a_client_that_leaves_a_quiet_stream_ends_its_request(make_server):
    running = make_server(keep_alive_interval_s=0.05)
    slow_steps(running, 0.3)
    payload = json.dumps(body_of(COMPLETIONS, max_tokens=40)).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(payload)}"
    with running.connection() as connection:
        connection.sendall(f"{head}\r\n\r\n".encode() + payload)
        received = b""
        while b": keep-alive" not in received:
            received += connection.recv(4096)
    running.wait_until_idle()
    assert running.engine.stats.scheduler.num_aborted == 1


def test_s04_tools_are_refused_by_name(make_server):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    status, _, body = make_server().post(CHAT, body_of(CHAT, tools=tools, stream_options={"include_usage": True}))
    assert status == 400
    assert "tools is not supported: this server runs no tools" in json.loads(body)["error"]["message"]


def test_s04_an_interval_of_no_time_is_refused(make_server):
    from kvledger.core import InputError

    with pytest.raises(InputError, match="keep_alive_interval_s is 0"):
        make_server(keep_alive_interval_s=0)
