"""One request as the one who submitted it sees it: its tokens, its figures, and the way to cancel it."""

from collections.abc import AsyncIterator, Callable, Iterator
from types import TracebackType

import attrs

from ....core.types import Request
from ..sampling.settings import SamplingSettings
from .token_stream import TokenDelta, TokenStream

NANOSECONDS = 1e9


@attrs.frozen(kw_only=True)
class RequestStats:
    """The figures of one request so far; None for what has not happened yet.

    Attributes:
        num_prompt_tokens: tokens of its prompt.
        num_output_tokens: tokens that it has produced.
        num_cached_tokens: prompt tokens that its first admission found in the cache; of a sample that forked, all.
        num_preemptions: how often it lost its blocks.
        queue_time_s: from its arrival to the start of its first step.
        ttft_s: from its arrival to its first token (TTFT).
        tpot_s: from its first token to its last, a token (TPOT); None with fewer than two.
        e2e_s: from its arrival to its end.
        finish_reason: "stop", "length", "abort" (cancelled, or shut down) or "error"; None while it goes on.
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
    """What came out of a request.

    Attributes:
        token_ids: every output token, a stop token included.
        text: the output up to a stop text; None: the engine has no tokenizer.
        finish_reason: "stop", "length" or "abort".
        stop_reason: the token or the text that stopped it, where one did.
        stats: its figures.
    """

    token_ids: tuple[int, ...]
    text: str | None
    finish_reason: str
    stop_reason: int | str | None
    stats: RequestStats


class LiveRequest:
    """A submitted request. Read its tokens with `for` or `async for`, by one reader, or wait for `result`.

        with engine.submit(prompt, SamplingSettings(max_tokens=100)) as request:  # cancelled if left early
            for delta in request:
                print(delta.text, end="")

    A cancelled request's tokens end without an error; an engine's failure is raised behind the last token.

    Attributes:
        request_id: its name in the log.
        settings: as submitted.
        arrived_ns, started_ns, first_token_ns, last_token_ns, ended_ns: when, on the engine's clock; None: not yet.
        finish_reason: see `RequestStats`.
        stop_reason: the token or the text that stopped it, where one did.
    """

    def __init__(
        self, request: Request, settings: SamplingSettings, arrived_ns: int, cancel: Callable[[str], None]
    ) -> None:
        """Made by `LiveEngine.submit`."""
        self.request_id = request.request_id
        self.settings = settings
        self.arrived_ns = arrived_ns
        self.started_ns: int | None = None
        self.first_token_ns: int | None = None
        self.last_token_ns: int | None = None
        self.ended_ns: int | None = None
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self._request = request
        self._cancel = cancel
        self._stream = TokenStream()
        self._token_ids: list[int] = []
        self._texts: list[str] = []
        self._has_text = True

    # -- for its reader ----------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[TokenDelta]:
        """Its tokens as they come; waits for each.

        Raises:
            EngineFailedError: the engine failed before it ended.
        """
        return iter(self._stream)

    def __aiter__(self) -> AsyncIterator[TokenDelta]:
        """The same in an event loop."""
        return aiter(self._stream)

    def cancel(self) -> None:
        """End it after the step in flight, in whatever state it is; after its end this changes nothing."""
        self._cancel(self.request_id)

    @property
    def has_ended(self) -> bool:
        """Whether no token follows."""
        return self._stream.is_closed

    def result(self, timeout_s: float | None = None) -> Completion:
        """Wait for its end; tokens that no reader has taken stay to be read.

        Raises:
            EngineFailedError: the engine failed before it ended.
            TimeoutError: it has not ended in time; it goes on.
        """
        if not self._stream.wait_until_closed(timeout_s):
            raise TimeoutError(
                f"request {self.request_id!r} has {len(self._token_ids)} of at most {self.settings.max_tokens} output "
                f"tokens after {timeout_s} s; it goes on, or call cancel"
            )
        self._stream.raise_error()
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
        decoding_s = self._seconds(self.first_token_ns, self.last_token_ns)
        return RequestStats(
            num_prompt_tokens=self._request.num_prompt_tokens,
            num_output_tokens=num_outputs,
            num_cached_tokens=self._request.num_cached_tokens,
            num_preemptions=self._request.num_preemptions,
            queue_time_s=self._seconds(self.arrived_ns, self.started_ns),
            ttft_s=self._seconds(self.arrived_ns, self.first_token_ns),
            tpot_s=None if decoding_s is None or num_outputs < 2 else decoding_s / (num_outputs - 1),
            e2e_s=self._seconds(self.arrived_ns, self.ended_ns),
            finish_reason=self.finish_reason,
        )

    def __enter__(self) -> "LiveRequest":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    @staticmethod
    def _seconds(start_ns: int | None, end_ns: int | None) -> float | None:
        return None if start_ns is None or end_ns is None else (end_ns - start_ns) / NANOSECONDS

    # -- for the engine ----------------------------------------------------------------------------------------------

    def deliver(self, delta: TokenDelta) -> None:
        """The engine: hand over one token."""
        if self.first_token_ns is None:
            self.first_token_ns = delta.time_ns
        self.last_token_ns = delta.time_ns
        self._token_ids.append(delta.token_id)
        if delta.text is None:
            self._has_text = False
        else:
            self._texts.append(delta.text)
        self._stream.put(delta)

    def end(self, finish_reason: str, ended_ns: int, error: Exception | None = None) -> None:
        """The engine: no token follows."""
        self.finish_reason, self.ended_ns = finish_reason, ended_ns
        self._stream.close(error)
