"""Clients of every temper: patient, hasty, slow, and those that send what no server wants."""

import asyncio
import json
import random

TEMPERS = (
    "whole", "stream", "chat", "chat stream", "several", "leaves early", "leaves mid-stream", "slow", "malformed",
    "oversized", "too long", "unfinished body", "no http",
)  # fmt: skip
PREFIXES = ("Once upon a time there was", "The quick brown fox jumps", "It was a dark and stormy night")


def body_of(temper, dice, max_model_len):
    """Path and body of a request."""
    prompt = dice.choice(PREFIXES)[: dice.randrange(8, 27)] + " abcdefgh"[: dice.randrange(9)]
    settings = {
        "max_tokens": dice.randrange(1, max_model_len // 2 - 4),
        "temperature": dice.choice((0, 1.0)),
        "ignore_eos": True,
    }
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
        body["max_tokens"] = max_model_len // 2 - 2
    if temper == "too long":
        body["max_tokens"] = 500
    if temper == "oversized":
        body["prompt"] = "a" * 30_000
    return "/v1/completions", body


async def send(port, temper, dice, max_model_len):
    """One client; returns the status that it was given, or what it did."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        if temper == "no http":
            writer.write(b"\x16\x03\x01 is this the right port?\r\n\r\n")
            return await status_of(reader)
        path, body = body_of(temper, dice, max_model_len)
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


async def wave(port, seed, num_requests, num_at_once, max_model_len=64):
    """So many clients, so many of them at a time; (temper, outcome) of each."""
    places = asyncio.Semaphore(num_at_once)

    async def one(number):
        dice = random.Random(seed * 1_000_003 + number)
        temper = TEMPERS[number % len(TEMPERS)]
        async with places:
            return temper, await asyncio.wait_for(send(port, temper, dice, max_model_len), 60)

    return await asyncio.gather(*(one(number) for number in range(num_requests)))


def check_outcomes(outcomes):
    """Everybody was told what is right, or was turned away because the queue was full."""
    for temper, outcome in outcomes:
        assert outcome in EXPECTED.get(temper, {200, 429}), (temper, outcome)
