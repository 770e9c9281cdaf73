"""What the engine's thread produces and one reader takes: with `for` in a thread, with `async for` in an event loop."""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterator

import attrs


@attrs.frozen
class TokenDelta:
    """One output token, and the text that it makes certain.

    Attributes:
        token_id: which.
        text: what can be shown now; "" while a character or a possible stop text is incomplete, and for the token
            that stopped the output. None: the engine has no tokenizer.
        finish_reason: of the last token: "stop" (a stop token or text) or "length" (`max_tokens`); else None.
        logprob: its log probability, where asked for.
        top_logprobs: (token, log probability) of the likeliest ones, where asked for.
        time_ns: when it was there, on the engine's clock.
    """

    token_id: int
    text: str | None
    finish_reason: str | None = None
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    time_ns: int = 0


class TokenStream:
    """A queue from one writer to one reader. A slow reader holds nobody up: at most `max_tokens` tokens gather.

    Iteration ends behind the last token; it raises the error that the request ended with, if any.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._deltas: deque[TokenDelta] = deque()
        self._is_closed = False
        self._error: Exception | None = None
        self._waiter: tuple[asyncio.AbstractEventLoop, asyncio.Future[None]] | None = None

    # -- the writer --------------------------------------------------------------------------------------------------

    def put(self, delta: TokenDelta) -> None:
        """Add a token."""
        with self._changed:
            self._deltas.append(delta)
            self._wake()

    def close(self, error: Exception | None = None) -> None:
        """No token follows. A second call changes nothing."""
        with self._changed:
            if not self._is_closed:
                self._is_closed, self._error = True, error
                self._wake()

    def _wake(self) -> None:
        self._changed.notify_all()
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            loop, future = waiter
            try:
                loop.call_soon_threadsafe(_resolve, future)
            except RuntimeError:  # the reader's event loop is closed: nobody reads any more
                return

    # -- the reader --------------------------------------------------------------------------------------------------

    @property
    def is_closed(self) -> bool:
        """Whether no token follows those that are there."""
        return self._is_closed

    def wait_until_closed(self, timeout_s: float | None = None) -> bool:
        """Wait for the end without taking anything; False if it has not come in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._is_closed, timeout_s)

    def raise_error(self) -> None:
        """Raise the error that the request ended with, if any."""
        if self._error is not None:
            raise self._error

    def __iter__(self) -> Iterator[TokenDelta]:
        while True:
            with self._changed:
                self._changed.wait_for(self._is_ready)
                delta = self._next()
            if delta is None:
                return
            yield delta

    def __aiter__(self) -> AsyncIterator[TokenDelta]:
        return self._read_async()

    async def _read_async(self) -> AsyncIterator[TokenDelta]:
        loop = asyncio.get_running_loop()
        while True:
            with self._changed:
                future: asyncio.Future[None] | None = None
                delta = None
                if self._is_ready():
                    delta = self._next()
                    if delta is None:
                        return
                else:
                    future = loop.create_future()
                    self._waiter = loop, future
            if delta is not None:
                yield delta
            elif future is not None:
                await future

    def _is_ready(self) -> bool:
        return self._is_closed or bool(self._deltas)

    def _next(self) -> TokenDelta | None:
        """The next token; None at the end."""
        if self._deltas:
            return self._deltas.popleft()
        self.raise_error()
        return None


def _resolve(future: "asyncio.Future[None]") -> None:
    if not future.done():  # its reader may have been cancelled meanwhile
        future.set_result(None)
