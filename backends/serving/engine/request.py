"""A request as the caller who submitted it sees it: its tokens, its figures, and its cancellation."""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator

import attrs

from ....core.types import Request
from ..sampling.settings import SamplingSettings

NANOSECONDS = 1e9


@attrs.frozen
class TokenDelta:
    """One output token, and the text that it completes.

    Attributes:
        token_id: the token.
        text: text that can be shown now; "" while a character or a possible stop text is incomplete, and for the token
            that stopped the output. None: the engine has no tokenizer.
        finish_reason: for the last token "stop" (a stop token or text) or "length" (`max_tokens`), else None.
        logprob: its log probability, if requested.
        top_logprobs: (token, log probability) of the likeliest tokens, if requested.
        time_ns: when it was computed, on the engine's clock.
    """

    token_id: int
    text: str | None
    finish_reason: str | None = None
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    time_ns: int = 0


def seconds_between(start_ns: int | None, end_ns: int | None) -> float | None:
    """Return the seconds between two times in nanoseconds; None if one of them has not happened yet."""
    return None if start_ns is None or end_ns is None else (end_ns - start_ns) / NANOSECONDS


@attrs.frozen(kw_only=True)
class RequestStats:
    """The figures of one request so far; None for what has not happened yet.

    Attributes:
        num_prompt_tokens: tokens of its prompt.
        num_output_tokens: tokens that it has produced.
        num_cached_tokens: prompt tokens that its first admission found in the cache; all of them for a forked sample.
        num_preemptions: how often it was preempted.
        queue_time_s: time from arrival to the start of its first step.
        ttft_s: time to first token (TTFT), from arrival.
        tpot_s: time per output token (TPOT), from the first token to the last; None with fewer than two tokens.
        e2e_s: time from arrival to the end.
        finish_reason: "stop", "length", "abort" (cancelled, or shut down) or "error"; None while it is running.
    """

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int | None
    num_preemptions: int
    queue_time_s: float | None
    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float | None
    finish_reason: str | None


@attrs.frozen(kw_only=True)
class Completion:
    """The complete output of a request.

    Attributes:
        token_ids: every output token, including a stop token.
        text: the output up to a stop text; None: the engine has no tokenizer.
        finish_reason: "stop", "length" or "abort".
        stop_reason: the token or text that stopped it, if one did.
        stats: its figures.
    """

    token_ids: tuple[int, ...]
    text: str | None
    finish_reason: str
    stop_reason: int | str | None
    stats: RequestStats


class LiveRequest:
    """A submitted request. One reader reads its tokens with `for` or `async for`, or waits for `result`.

        with engine.submit(prompt, SamplingSettings(max_tokens=100)) as request:  # cancelled if left early
            for delta in request:
                print(delta.text, end="")

    The tokens of a cancelled request end without an error; an engine failure is raised after the last token. A slow
    reader does not block the engine: at most `max_tokens` tokens gather.

    Attributes:
        request_id: its id in the log.
        settings: its sampling settings, as submitted.
        arrived_ns, started_ns, first_token_ns, last_token_ns, ended_ns: times on the engine's clock; None: not yet.
        finish_reason: see `RequestStats`.
        stop_reason: the token or text that stopped it, if one did.
        has_ended: whether it has ended.
    """

    def __init__(
        self, request: Request, settings: SamplingSettings, arrived_ns: int, cancel: Callable[[str], None]
    ) -> None:
        """Start a request; `LiveEngine.submit` makes it."""
        self.request_id = request.request_id
        self.settings = settings
        self.arrived_ns = arrived_ns
        self.started_ns: int | None = None
        self.first_token_ns: int | None = None
        self.last_token_ns: int | None = None
        self.ended_ns: int | None = None
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.has_ended = False
        self._request = request
        self._cancel = cancel
        self._error: Exception | None = None
        self._token_ids: list[int] = []
        self._texts: list[str] = []
        self._has_text = True
        self._changed = threading.Condition()
        self._unread: deque[TokenDelta] = deque()
        # The reader in an event loop that waits for a token.
        self._waiter: tuple[asyncio.AbstractEventLoop, asyncio.Future[None]] | None = None

    def __iter__(self) -> Iterator[TokenDelta]:
        """Yield its tokens as they arrive.

        Raises:
            EngineFailedError: the engine failed before it ended.
        """
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._unread or self.has_ended)
                delta = self._next()
            if delta is None:
                return
            yield delta

    async def __aiter__(self) -> AsyncIterator[TokenDelta]:
        """Yield its tokens in an event loop."""
        loop = asyncio.get_running_loop()
        while True:
            with self._changed:
                future: asyncio.Future[None] | None = None
                delta = None
                if self._unread or self.has_ended:
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

    def _next(self) -> TokenDelta | None:
        """Return the next token; None, or the request's error, at the end."""
        if self._unread:
            return self._unread.popleft()
        if self._error is not None:
            raise self._error
        return None

    def cancel(self) -> None:
        """End it after the step in flight, whatever its state; after its end this changes nothing."""
        self._cancel(self.request_id)

    def result(self, timeout_s: float | None = None) -> Completion:
        """Wait for its end and return the output; unread tokens can still be read.

        Raises:
            EngineFailedError: the engine failed before it ended.
            TimeoutError: it has not ended in time; it continues.
        """
        with self._changed:
            has_ended = self._changed.wait_for(lambda: self.has_ended, timeout_s)
        if not has_ended:
            raise TimeoutError(
                f"request {self.request_id!r} has {len(self._token_ids)} of at most {self.settings.max_tokens} output "
                f"tokens after {timeout_s} s; it continues unless you call cancel"
            )
        if self._error is not None:
            raise self._error
        return Completion(
            token_ids=tuple(self._token_ids),
            text="".join(self._texts) if self._has_text else None,
            finish_reason=self.finish_reason or "abort",
            stop_reason=self.stop_reason,
            stats=self.stats,
        )

    @property
    def stats(self) -> RequestStats:
        """Its figures so far."""
        num_outputs = len(self._token_ids)
        decoding_s = seconds_between(self.first_token_ns, self.last_token_ns)
        return RequestStats(
            num_prompt_tokens=self._request.num_prompt_tokens,
            num_output_tokens=num_outputs,
            num_cached_tokens=self._request.num_cached_tokens,
            num_preemptions=self._request.num_preemptions,
            queue_time_s=seconds_between(self.arrived_ns, self.started_ns),
            ttft_s=seconds_between(self.arrived_ns, self.first_token_ns),
            tpot_s=None if decoding_s is None or num_outputs < 2 else decoding_s / (num_outputs - 1),
            e2e_s=seconds_between(self.arrived_ns, self.ended_ns),
            finish_reason=self.finish_reason,
        )

    def __enter__(self) -> "LiveRequest":
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    # -- for the engine ----------------------------------------------------------------------------------------------

    def deliver(self, delta: TokenDelta) -> None:
        """Add one token."""
        if self.first_token_ns is None:
            self.first_token_ns = delta.time_ns
        self.last_token_ns = delta.time_ns
        self._token_ids.append(delta.token_id)
        if delta.text is None:
            self._has_text = False
        else:
            self._texts.append(delta.text)
        with self._changed:
            self._unread.append(delta)
            self._wake_reader()

    def end(self, finish_reason: str, ended_ns: int, error: Exception | None = None) -> None:
        """End the request."""
        self.finish_reason, self.ended_ns = finish_reason, ended_ns
        with self._changed:
            self.has_ended, self._error = True, error
            self._wake_reader()

    def _wake_reader(self) -> None:
        self._changed.notify_all()
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            loop, future = waiter
            try:
                loop.call_soon_threadsafe(_resolve, future)
            except RuntimeError:  # the reader's event loop is closed, so there is no reader any more
                return


def _resolve(future: "asyncio.Future[None]") -> None:
    if not future.done():  # its reader may have been cancelled meanwhile
        future.set_result(None)
