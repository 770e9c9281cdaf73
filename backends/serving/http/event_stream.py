"""Server-sent events to a client, and the end of its work when the client leaves."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

Outcome = TypeVar("Outcome")

DONE = b"data: [DONE]\n\n"


def event(document: Mapping[str, Any]) -> bytes:
    """One event that holds a JSON document."""
    return b"data: " + json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


async def unless_client_leaves(receive: Receive, work: Coroutine[Any, Any, Outcome]) -> Outcome | None:
    """What `work` returns; None if the client left first, and the work was cancelled.

    Args:
        receive: of a request whose body was read.
        work: what the client waits for.
    """
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_until_disconnected(receive))
    try:
        await asyncio.wait([working, watching], return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


class EventStream(Response):
    """A response whose events are made as they are sent.

    One event at a time: the next is not made before the connection's buffer (64 KiB) has room again, so what a slow
    reader has not taken yet stays with its request, where it is bounded by `max_tokens`.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        on_client_left: Callable[[], None],
        on_end: Callable[[], None],
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """A stream of events.

        Args:
            events: made one at a time.
            on_client_left: called if the client leaves before the last one.
            on_end: called once at the end, whatever happened.
            headers: sent along.
        """
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **(headers or {})})
        del self.headers["content-length"]
        self._events = events
        self._on_client_left = on_client_left
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything, or stop where the client leaves."""
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


async def _until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
