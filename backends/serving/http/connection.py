"""The server's HTTP connections: server-sent events, and an end for clients that leave or stall."""

import asyncio
import json
import socket
import struct
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

import h11
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from .errors import invalid_request

Outcome = TypeVar("Outcome")

DONE = b"data: [DONE]\n\n"
# A comment: clients skip it, and proxies see that the connection lives.
KEEP_ALIVE = b": keep-alive\n\n"


def event(document: Mapping[str, Any]) -> bytes:
    """Return one event that holds a JSON document."""
    return b"data: " + json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


async def unless_client_leaves(receive: Receive, work: Coroutine[Any, Any, Outcome]) -> Outcome | None:
    """Return the result of `work`; cancel it and return None if the client leaves first.

    `receive` is that of a request whose body was read.
    """

    async def wait_for_disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working = asyncio.create_task(work)
    watching = asyncio.create_task(wait_for_disconnect())
    try:
        await asyncio.wait([working, watching], return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


class EventStream(Response):
    """A response that makes each event when it sends it.

    The next event is not made before the connection's buffer (64 KiB) has room again. The tokens that a slow reader has
    not taken stay with its request, where `max_tokens` bounds them.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        on_client_left: Callable[[], None],
        on_end: Callable[[], None],
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Send `events`; call `on_client_left` if the client leaves before the last, and `on_end` once, in any case."""
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **(headers or {})})
        del self.headers["content-length"]
        self._events = events
        self._on_client_left = on_client_left
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all events, or stop when the client leaves."""
        try:
            if await unless_client_leaves(receive, self._send_all(send)) is None:
                self._on_client_left()
        finally:
            self._on_end()

    async def _send_all(self, send: Send) -> bool:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._events):
            async for each in self._events:
                await send({"type": "http.response.body", "body": each, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return True


class BoundedHttpProtocol(H11Protocol):
    """uvicorn's connection, which aborts if nothing moves on it for `stall_timeout_s`.

    Otherwise a client could hold two things for as long as it likes: the answer that it does not read (64 KiB in the
    transport, and the output of its request), and a connection on which it never sends its request. A slow reader is
    not aborted as long as it takes some bytes within the time.
    """

    stall_timeout_s: float = 60.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._stall_timer: asyncio.TimerHandle | None = None
        self._buffered_bytes = 0

    @classmethod
    def with_stall_timeout(cls, seconds: float) -> "type[BoundedHttpProtocol]":
        """Return a subclass with another timeout, since uvicorn makes the connections itself."""
        return type(cls.__name__, (cls,), {"stall_timeout_s": seconds})

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Start the timer for the first request."""
        super().connection_made(transport)
        self._start_stall_timer()

    def data_received(self, data: bytes) -> None:
        """Time a request from its first byte to the end of its headers; `RequestGate` times its body."""
        super().data_received(data)
        if self.flow.write_paused:
            return
        if self.conn.their_state is not h11.IDLE:
            self._stop_stall_timer()
        elif self._stall_timer is None:
            self._start_stall_timer()

    def pause_writing(self) -> None:
        """Start the timer: the reader lags by more than the transport's buffer."""
        super().pause_writing()
        self._start_stall_timer()

    def resume_writing(self) -> None:
        """Stop the timer: the reader has caught up."""
        super().resume_writing()
        self._stop_stall_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer: the connection is closed."""
        self._stop_stall_timer()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are no HTTP with OpenAI's error shape, like every other error."""
        body = json.dumps(invalid_request(msg).body()).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        response = h11.Response(status_code=400, headers=headers, reason=b"Bad Request")
        for event in (response, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _start_stall_timer(self) -> None:
        self._stop_stall_timer()
        self._buffered_bytes = self.transport.get_write_buffer_size()
        self._stall_timer = self.loop.call_later(self.stall_timeout_s, self._on_stall)

    def _stop_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _on_stall(self) -> None:
        self._stall_timer = None
        if self.flow.write_paused and self.transport.get_write_buffer_size() < self._buffered_bytes:
            self._start_stall_timer()
            return
        # Reset the connection: closing would wait for the reader, here and in the system's buffers.
        connection = self.transport.get_extra_info("socket")
        if connection is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()
