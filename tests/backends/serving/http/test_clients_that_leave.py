"""Clients that leave, stall or come too many, and a server that is told to end: nothing is held, nobody waits."""

import json
import socket
import threading
import time

import pytest

COMPLETIONS = "/v1/completions"
LONG = {"prompt": "a", "max_tokens": 60, "ignore_eos": True, "temperature": 0}


def slow_steps(running, seconds):
    """Every step of the engine takes so long."""
    running.engine._runner.on_step = lambda step: time.sleep(seconds)


def start(running, body, receive_buffer=None):
    """Send a request and read nothing."""
    connection = socket.socket()
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.settimeout(20)
    connection.connect(("127.0.0.1", running.port))
    payload = json.dumps(body).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n"
    connection.sendall(f"{head}content-length: {len(payload)}\r\n\r\n".encode() + payload)
    return connection


def events_of(body):
    """The documents of a stream, chunked transfer undone; the end mark is left out."""
    lines = [line for line in body.split(b"\r\n") if line.startswith(b"data: ")]
    return [json.loads(line[6:]) for line in b"".join(lines).split(b"\n\n") if line[6:] not in (b"", b"[DONE]")]


def test_a_client_that_leaves_mid_stream_ends_its_request(make_server, wait_for):
    running = make_server()
    slow_steps(running, 0.02)
    connection = start(running, {**LONG, "stream": True})
    assert connection.recv(4096).startswith(b"HTTP/1.1 200")
    connection.close()
    running.wait_until_idle()
    stats = running.engine.stats
    assert stats.scheduler.num_aborted == 1 and stats.num_steps < 60
    assert b'kvledger:client_disconnects_total{engine="0",model_name="honest"} 1.0' in running.get("/metrics")[2]


def test_a_client_that_leaves_while_it_waits_for_a_whole_answer_ends_all_of_its_choices(make_server, wait_for):
    running = make_server()
    slow_steps(running, 0.02)
    connection = start(running, {**LONG, "n": 3})
    wait_for(lambda: running.engine.stats.num_running == 3)
    connection.close()
    running.wait_until_idle()
    assert running.engine.stats.scheduler.num_aborted == 3


def test_a_client_that_leaves_while_it_is_queued_ends_its_request(make_server, wait_for):
    running = make_server(max_num_seqs=1)
    slow_steps(running, 0.02)
    first = start(running, LONG)
    wait_for(lambda: running.engine.stats.num_running == 1)
    second = start(running, LONG)
    wait_for(lambda: running.engine.stats.num_queued == 1)
    second.close()
    wait_for(lambda: running.engine.stats.num_queued == 0)
    assert running.answer(first)[0] == 200
    first.close()
    running.wait_until_idle()


def test_one_client_that_does_not_read_holds_up_nobody_else(make_server):
    running = make_server(stall_timeout_s=30, send_buffer=8192)
    # Logprobs of all tokens make an answer of several hundred KiB, which no buffer on the way holds.
    big = {**LONG, "n": 8, "logprobs": 20, "stream": True}
    stalled = start(running, big, receive_buffer=4096)
    others = [running.post(COMPLETIONS, {"prompt": "b", "max_tokens": 20, "ignore_eos": True})[0] for _ in range(5)]
    assert others == [200] * 5
    time.sleep(0.2)
    assert running.engine.stats.num_unended == 0  # its own request has ended as well, and holds no block
    assert running.engine.allocator.pool.num_held_blocks == 0
    assert running.server.gate.num_open == 1
    status, _, body = running.answer(stalled)  # it reads at last, and misses nothing
    assert status == 200
    choices = [choice for document in events_of(body) for choice in document["choices"]]
    assert sum(len(choice["logprobs"]["tokens"]) for choice in choices) == 8 * 60
    stalled.close()
    running.wait_until_idle()


def test_a_reader_that_never_reads_is_cut_off(make_server, wait_for):
    running = make_server(stall_timeout_s=0.3, send_buffer=8192)
    stalled = start(running, {**LONG, "n": 8, "logprobs": 20, "stream": True}, receive_buffer=4096)
    wait_for(lambda: running.server.gate.num_open == 1)
    running.wait_until_idle()
    with stalled, pytest.raises(ConnectionResetError):
        running.answer(stalled)


def test_a_reader_that_is_slow_but_moves_is_not_cut_off(make_server):
    running = make_server(stall_timeout_s=0.4, send_buffer=8192)
    slow = start(running, {**LONG, "n": 8, "logprobs": 20, "stream": True}, receive_buffer=65536)
    received = b""
    while chunk := slow.recv(16384):
        received += chunk
        time.sleep(0.03)
    assert received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    slow.close()
    running.wait_until_idle()


def test_a_full_queue_is_answered_with_429_and_when_to_come_again(make_server, wait_for):
    import openai

    running = make_server(max_num_seqs=1, max_queued_requests=1)
    slow_steps(running, 0.02)
    held = [start(running, LONG)]
    wait_for(lambda: running.engine.stats.num_running == 1)
    held.append(start(running, LONG))
    wait_for(lambda: running.engine.stats.num_queued == 1)
    status, headers, body = running.post(COMPLETIONS, {"prompt": "a"})
    assert (status, headers["retry-after"]) == (429, "1")
    assert json.loads(body)["error"]["code"] == "queue_full"
    with pytest.raises(openai.RateLimitError):
        running.openai().completions.create(model="honest", prompt="a")
    # A client that comes again as it is told is served.
    assert running.openai(max_retries=5).completions.create(model="honest", prompt="a", max_tokens=1).choices
    for connection in held:
        assert running.answer(connection)[0] == 200
        connection.close()


def test_choices_are_all_queued_or_none(make_server, wait_for):
    running = make_server(max_num_seqs=1, max_queued_requests=3)
    slow_steps(running, 0.02)
    first = start(running, LONG)
    wait_for(lambda: running.engine.stats.num_running == 1)
    second = start(running, LONG)
    wait_for(lambda: running.engine.stats.num_queued == 1)
    assert running.post(COMPLETIONS, {"prompt": "a", "n": 3})[0] == 429
    wait_for(lambda: running.engine.stats.num_queued == 1)
    for connection in (first, second):
        connection.close()
    running.wait_until_idle()


def test_more_open_requests_than_allowed_are_refused_without_reading_them(make_server, wait_for):
    running = make_server(max_open_requests=2)
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 9\r\n\r\n"
    idle = [running.connection() for _ in range(2)]
    for connection in idle:
        connection.sendall(head.encode())
    wait_for(lambda: running.server.gate.num_open == 2)
    assert running.post(COMPLETIONS, {"prompt": "a"})[0] == 429
    assert running.get("/health")[0] == 200
    for connection in idle:
        connection.close()
    running.wait_until_idle()


def test_a_server_that_is_told_to_end_finishes_what_it_has_begun(make_server, wait_for):
    running = make_server()
    slow_steps(running, 0.01)
    connection = start(running, {**LONG, "stream": True})
    wait_for(lambda: running.engine.stats.num_running == 1)
    running.process.handle_exit(2, None)
    status, _, body = running.answer(connection)
    assert status == 200
    assert events_of(body)[-1]["choices"][0]["finish_reason"] == "length"
    running.thread.join(20)
    assert not running.thread.is_alive() and running.engine.allocator.pool.num_held_blocks == 0
    connection.close()


def test_a_server_that_ends_takes_no_new_request_on_a_connection_that_is_there(make_server, wait_for):
    running = make_server()
    slow_steps(running, 0.02)
    busy = start(running, LONG)
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 15\r\n"
    late = running.connection()
    late.sendall(head.encode())
    wait_for(lambda: running.engine.stats.num_running == 1)
    running.server.gate.is_draining = True
    late.sendall(b'\r\n{"prompt": "a"}')
    status, _, body = running.answer(late)
    assert (status, json.loads(body)["error"]["code"]) == (503, "shutting_down")
    health = running.get("/health")
    assert (health[0], json.loads(health[2])) == (503, {"status": "shutting down"})
    assert running.answer(busy)[0] == 200
    for connection in (busy, late):
        connection.close()


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("signals", [1, 2])
def test_what_is_not_finished_in_time_is_aborted_and_its_client_told(make_server, wait_for, streams, signals):
    running = make_server(drain_timeout_s=0.2 if signals == 1 else 60)
    slow_steps(running, 0.05)
    connection = start(running, {**LONG, "stream": streams})
    wait_for(lambda: running.engine.stats.num_running == 1)
    for _ in range(signals):
        running.process.handle_exit(2, None)
    status, _, body = running.answer(connection)
    if streams:
        assert status == 200 and events_of(body)[-1]["error"]["code"] == "shutting_down"
        assert b"data: [DONE]" in body
    else:
        assert status == 503 and json.loads(body)["error"]["code"] == "shutting_down"
    running.thread.join(20)
    assert not running.thread.is_alive() and running.engine.allocator.pool.num_held_blocks == 0
    connection.close()


def test_a_reader_that_does_not_read_does_not_keep_a_server_from_ending(make_server, wait_for, monkeypatch):
    monkeypatch.setattr("kvledger.backends.serving.http.process.READERS_GRACE_S", 0.3)
    running = make_server(stall_timeout_s=60, send_buffer=8192)
    with start(running, {**LONG, "n": 8, "logprobs": 20, "stream": True}, receive_buffer=4096):
        wait_for(lambda: running.engine.stats.scheduler.num_finished == 8)
        running.process.handle_exit(15, None)
        running.thread.join(5)
        assert not running.thread.is_alive()


def test_an_engine_that_fails_tells_its_clients_and_ends_the_server(make_server, wait_for):
    running = make_server()
    slow_steps(running, 0.02)
    running.engine._runner.fail_at_step = 5
    connections = [start(running, {**LONG, "stream": streams}) for streams in (False, True)]
    status, _, body = running.answer(connections[0])
    assert status == 500
    error = json.loads(body)["error"]
    assert error["code"] == "engine_failed" and "device is gone" not in error["message"]
    assert events_of(running.answer(connections[1])[2])[-1]["error"]["code"] == "engine_failed"
    for connection in connections:
        connection.close()
    running.thread.join(20)
    assert not running.thread.is_alive()
    assert "device is gone" in str(running.engine.failure)
    assert running.engine.allocator.pool.num_held_blocks == 0


def test_many_clients_at_once_are_all_answered(make_server):
    running = make_server(num_blocks=60, max_open_requests=64, max_queued_requests=64)
    statuses = []

    def ask(number):
        statuses.append(
            running.post(COMPLETIONS, {"prompt": f"{number}", "max_tokens": 8, "stream": number % 2 == 0})[0]
        )

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert statuses == [200] * 40
    running.wait_until_idle()
