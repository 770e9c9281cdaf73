"""The HTTP connection of the server, with an end for clients that stop moving."""

import asyncio
import json
import socket
import struct
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from .errors import invalid_request


class BoundedHttpProtocol(H11Protocol):
    """uvicorn's connection, aborted when nothing moves on it for `stall_timeout_s`.

    Two things would otherwise be held for as long as a client likes: the answer to a reader that does not read (64 KiB
    in the transport, and what its request has produced), and the connection of a sender whose request never comes.
    A reader that is merely slow is not touched, as long as it takes something within the time.
    """

    stall_timeout_s: float = 60.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._stall_timer: asyncio.TimerHandle | None = None
        self._buffered_bytes = 0

    @classmethod
    def with_stall_timeout(cls, seconds: float) -> "type[BoundedHttpProtocol]":
        """The class with another timeout, since uvicorn makes the connections itself."""
        return type(cls.__name__, (cls,), {"stall_timeout_s": seconds})

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Wait for the first request."""
        super().connection_made(transport)
        self._start_stall_timer()

    def data_received(self, data: bytes) -> None:
        """From its first byte to the end of its headers a request has the time; its body is timed by who reads it."""
        super().data_received(data)
        if self.flow.write_paused:
            return
        if self.conn.their_state is not h11.IDLE:
            self._stop_stall_timer()
        elif self._stall_timer is None:
            self._start_stall_timer()

    def pause_writing(self) -> None:
        """The reader is behind by more than the transport's buffer."""
        super().pause_writing()
        self._start_stall_timer()

    def resume_writing(self) -> None:
        """The reader has caught up."""
        super().resume_writing()
        self._stop_stall_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Whatever was waited for does not come."""
        self._stop_stall_timer()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP in the shape of every other error."""
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
        self._stall_timer = self.loop.call_later(self.stall_timeout_s, self._end_of_patience)

    def _stop_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _end_of_patience(self) -> None:
        self._stall_timer = None
        if self.flow.write_paused and self.transport.get_write_buffer_size() < self._buffered_bytes:
            self._start_stall_timer()
        else:
            self._reset()

    def _reset(self) -> None:
        """End the connection at once: closing would wait for the reader, here and in the system's buffers."""
        connection = self.transport.get_extra_info("socket")
        if connection is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()
