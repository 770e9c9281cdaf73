"""Hundreds of requests at once on a pool that is too small for them, from clients of every temper."""

import asyncio
import gc
import json
import random
import tracemalloc

import pytest
from kvledger.backends.serving.live_request import LiveRequest

TEMPERS = (
    "whole", "stream", "chat", "chat stream", "several", "leaves early", "leaves mid-stream", "slow", "malformed",
    "oversized", "too long", "unfinished body", "no http",
)  # fmt: skip
PREFIXES = ("Once upon a time there was", "The quick brown fox jumps", "It was a dark and stormy night")


def body_of(temper, dice):
    """Path and body of a request."""
    prompt = dice.choice(PREFIXES)[: dice.randrange(8, 27)] + " abcdefgh"[: dice.randrange(9)]
    settings = {"max_tokens": dice.randrange(1, 28), "temperature": dice.choice((0, 1.0)), "ignore_eos": True}
    if dice.random() < 0.3:
        settings["cache_salt"] = dice.choice(("red", "blue"))
    if temper.startswith("chat"):
        prompt = prompt[:20]
        messages = [{"role": "user", "content": prompt}]
        return "/v1/chat/completions", {"messages": messages, "stream": temper != "chat", **settings}
    body = {"prompt": prompt, "stream": temper in ("stream", "leaves mid-stream", "slow"), **settings}
    if temper == "several":
        body |= {"n": 3, "stream": dice.random() < 0.5}
    if temper.startswith("leaves"):
        body["max_tokens"] = 30
    if temper == "too long":
        body["max_tokens"] = 500
    if temper == "oversized":
        body["prompt"] = "a" * 30_000
    return "/v1/completions", body


async def send(port, temper, dice):
    """One client; returns the status that it was given, or what it did."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        if temper == "no http":
            writer.write(b"\x16\x03\x01 is this the right port?\r\n\r\n")
            return await status_of(reader)
        path, body = body_of(temper, dice)
        payload = b'{"prompt": "a", ' if temper == "malformed" else json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n"
        writer.write(f"{head}content-length: {len(payload)}\r\n\r\n".encode())
        if temper == "unfinished body":
            writer.write(payload[:-3])
            await writer.drain()
            await asyncio.sleep(0.01)
            return "left"
        writer.write(payload)
        await writer.drain()
        if temper == "leaves early":
            await asyncio.sleep(dice.random() * 0.1)
            return "left"
        if temper == "leaves mid-stream":
            await reader.read(dice.randrange(1, 1500))
            return "left"
        return await status_of(reader, pause_s=0.005 if temper == "slow" else 0)
    finally:
        writer.close()


async def status_of(reader, pause_s=0.0):
    """The status; the whole answer has been read, and is as long as it says."""
    answer = b""
    while chunk := await reader.read(256 if pause_s else 65536):
        answer += chunk
        await asyncio.sleep(pause_s)
    head, _, body = answer.partition(b"\r\n\r\n")
    if b"transfer-encoding: chunked" in head.lower():
        assert body.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    elif head:
        assert json.loads(body), answer
    return int(head.split()[1])


EXPECTED = {
    "malformed": {400}, "oversized": {413}, "too long": {400}, "no http": {400}, "leaves early": {"left"},
    "leaves mid-stream": {"left"}, "unfinished body": {"left"},
}  # fmt: skip


async def wave(port, seed, num_requests, num_at_once):
    """So many clients, so many of them at a time; (temper, outcome) of each."""
    places = asyncio.Semaphore(num_at_once)

    async def one(number):
        dice = random.Random(seed * 1_000_003 + number)
        temper = TEMPERS[number % len(TEMPERS)]
        async with places:
            return temper, await asyncio.wait_for(send(port, temper, dice), 60)

    return await asyncio.gather(*(one(number) for number in range(num_requests)))


def run_storm(make_server, tmp_path, num_requests, num_at_once, traces_memory):
    pytest.importorskip("pyarrow", reason="the log of the run needs pyarrow")
    from kvledger.backends.serving.recording import LiveRecording
    from kvledger.backends.sinks import FlushPolicy
    from kvledger.sim.event_log_dir import open_event_log
    from kvledger.sim.log_verification import verify_log

    def recording(allocator, scheduler):
        flush = FlushPolicy(every_commits=50)
        return LiveRecording.create(tmp_path / "log", flush=flush, allocator=allocator, scheduler=scheduler)

    running = make_server(num_blocks=28, max_queued_requests=16, max_open_requests=48, recording=recording)
    num_objects, used_bytes = [], []
    if traces_memory:
        tracemalloc.start()
    try:
        for _ in range(4):
            outcomes = asyncio.run(wave(running.port, 0, num_requests // 4, num_at_once))
            for temper, outcome in outcomes:
                assert outcome in EXPECTED.get(temper, {200, 429}), temper
            running.wait_until_idle(30)
            gc.collect()
            num_objects.append(len(gc.get_objects()))
            used_bytes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    stats = running.engine.stats.scheduler
    assert stats.num_preemptions > 0 and stats.prefix_hits_tokens > 0 and stats.num_aborted > 0
    # The engine's thread may still hold the one that it ended last.
    assert len([each for each in gc.get_objects() if type(each) is LiveRequest]) <= 1
    # The first wave fills caches and imports; after it nothing may add up.
    assert num_objects[-1] - num_objects[1] < 500, num_objects
    assert used_bytes[-1] - used_bytes[1] < 100_000, used_bytes
    running.stop()
    assert running.engine.allocator.pool.num_held_blocks == 0
    found = verify_log(open_event_log(tmp_path / "log"), 50)
    assert found.is_sound, found
    return running, stats


def test_a_storm_of_requests_leaves_nothing_behind(make_server, tmp_path):
    run_storm(make_server, tmp_path, 208, 32, traces_memory=False)


@pytest.mark.slow
def test_a_long_storm_of_requests_leaves_nothing_behind(make_server, tmp_path):
    run_storm(make_server, tmp_path, 1040, 60, traces_memory=True)
