"""Checks a request before it is parsed: its API key, its size, its time to arrive, and the number of open requests."""

import asyncio
import hmac
from collections.abc import Awaitable, Callable
from typing import Any

import attrs
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ....core.errors import InputError
from .errors import ApiError, queue_full, shutting_down

# A client that sends too much reads no answer before it has sent everything; this much more is read and discarded.
MAX_DISCARDED_BYTES = 16 << 20
DISCARD_TIMEOUT_S = 2.0
GUARDED_PREFIX = "/v1"
API_KEY = "kvledger_api_key"


@attrs.frozen
class RequestLimits:
    """Limits on what clients can make the server hold."""

    max_request_bytes: int  # size of the largest body
    body_timeout_s: float  # how long a client may take to send its body
    max_open_requests: int  # most requests under `/v1` whose answer is not sent yet
    # A client must send one of them as `Authorization: Bearer KEY`; empty: none is needed.
    api_keys: tuple[str, ...] = attrs.field(default=(), converter=tuple, repr=False)

    def __attrs_post_init__(self) -> None:
        for name in ("max_request_bytes", "body_timeout_s", "max_open_requests"):
            if not getattr(self, name) > 0:
                raise InputError(f"{name} is {getattr(self, name)}; it must be above 0")
        if any(not key.strip() for key in self.api_keys):
            raise InputError("an API key is empty; give one with something in it, or none")


class RequestGate:
    """ASGI middleware that enforces `RequestLimits`. It reads bodies completely before it calls the application.

    Attributes:
        num_open: requests under `/v1` that are being served now.
        is_draining: whether new ones are answered with 503.
    """

    def __init__(
        self, app: ASGIApp, limits: RequestLimits, retry_after_s: Callable[[], int], on_status: Callable[[int], None]
    ) -> None:
        """Guard an application.

        `retry_after_s` returns the whole seconds after which a refused client may retry; `on_status` is called with the
        status of every answer under `/v1`.
        """
        self._app = app
        self._limits = limits
        self._retry_after_s = retry_after_s
        self._on_status = on_status
        self.num_open = 0
        self.is_draining = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http" or not scope["path"].startswith(GUARDED_PREFIX):
            await self._app(scope, receive, send)
            return

        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._on_status(message["status"])
            await send(message)

        await self._guard(scope, receive, counting)

    async def _guard(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._check_key(scope)
            if self.is_draining:
                raise shutting_down()
            if self.num_open >= self._limits.max_open_requests:
                raise queue_full(
                    f"{self.num_open} requests are open, which is all that this server takes; try again later",
                    self._retry_after_s(),
                )
        except ApiError as error:
            await _discard(scope, receive)
            await _refuse(error, scope, receive, send)
            return
        self.num_open += 1
        try:
            try:
                body = await self._read_body(scope, receive)
            except ApiError as error:
                await _refuse(error, scope, receive, send)
                return
            if body is not None:
                await self._app(scope, _replayed(body, receive), send)
        finally:
            self.num_open -= 1

    def _check_key(self, scope: Scope) -> None:
        if not self._limits.api_keys:
            return
        given = Headers(scope=scope).get("authorization", "")  # bytes as latin-1
        scheme, _, key = given.partition(" ")
        key = key.strip()
        # Compared in a time that does not tell how much of the key was right.
        matches = [each for each in self._limits.api_keys if hmac.compare_digest(each.encode(), key.encode("latin-1"))]
        if not matches or scheme.lower() != "bearer":
            raise ApiError(
                401,
                "no valid API key was given; send it as Authorization: Bearer KEY",
                "authentication_error",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        scope[API_KEY] = matches[0]

    async def _read_body(self, scope: Scope, receive: Receive) -> bytes | None:
        """Return the whole body; None if the client left before its end."""
        limit = self._limits.max_request_bytes
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isdecimal() and int(declared) > limit:
            await _discard(scope, receive)
            raise _too_large(f"a body of {int(declared):,} bytes", limit)
        chunks: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._limits.body_timeout_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    chunks.append(message.get("body", b""))
                    size += len(chunks[-1])
                    has_more = message.get("more_body", False)
                    if size > limit:
                        break
                    if not has_more:
                        return b"".join(chunks)
        except TimeoutError:
            raise ApiError(
                408,
                f"the body did not arrive within {self._limits.body_timeout_s:g} s; {size:,} bytes of it did",
                code="request_timeout",
            ) from None
        if has_more:
            await _discard(scope, receive)
        raise _too_large("the body", limit)


def _too_large(what: str, limit: int) -> ApiError:
    return ApiError(413, f"{what} is larger than the {limit:,} bytes that this server takes", code="request_too_large")


async def _refuse(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer and close the connection, since the rest of the body is no next request."""
    response = error.response()
    response.headers["Connection"] = "close"
    await response(scope, receive, send)


async def _discard(scope: Scope, receive: Receive) -> None:
    """Read and drop what a client sends before it reads its answer; one that asks first (`Expect`) sends nothing."""
    if "expect" in Headers(scope=scope):
        return
    size = 0
    try:
        async with asyncio.timeout(DISCARD_TIMEOUT_S):
            while size < MAX_DISCARDED_BYTES:
                message = await receive()
                size += len(message.get("body", b""))
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return
    except TimeoutError:
        return


def _replayed(body: bytes, receive: Receive) -> Callable[[], Awaitable[Message]]:
    """Return a `receive` that first returns the body, then the connection's messages: that the client left."""
    first: list[dict[str, Any]] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return first.pop() if first else await receive()

    return replay
