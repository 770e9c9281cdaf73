"""The OpenAI-compatible HTTP server on a live engine: completions, chat, models, health and metrics.

    server = OpenAIServer(engine, encoder, metrics, ServerSettings(model_names=("tiny",), limits=limits, ...))
    uvicorn.run(server.gate)

Every error answer has OpenAI's error shape, and none shows a stack trace.
"""

import asyncio
import hashlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import attrs
from fastapi import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Scope

from ....core.errors import InputError
from ..engine.live_engine import LiveEngine
from ..errors import SettingError
from ..sampling.settings import NUM_SEEDS, SamplingSettings
from .choices import Choice, cancel_all, check_lengths, collected, merged, name_of_prompt, submit_choices, usage
from .connection import DONE, EventStream, event, unless_client_leaves
from .errors import ApiError, internal_error, invalid_request, unknown_model
from .limits import API_KEY, RequestGate, RequestLimits
from .metrics import ServingMetrics
from .prompt_encoder import PromptEncoder
from .requests import ChatCompletionRequest, CompletionRequest, GenerationRequest, TokenIds
from .responses import Answer, AnswerShape, ChatShape, CompletionShape, Speller
from .routes import build_routes

CLIENT_LEFT = 499
logger = logging.getLogger("uvicorn.error")
Result = TypeVar("Result")


@attrs.frozen(kw_only=True)
class ServerSettings:
    """The settings of the server."""

    # Names of the model for clients; answers use the first one.
    model_names: tuple[str, ...] = attrs.field(converter=tuple)
    limits: RequestLimits  # limits on what clients can make the server hold
    max_queued_requests: int  # the engine's limit on queued requests
    # Whether clients with different API keys never share cached prefixes, for any cache_salt.
    isolates_api_keys: bool = True

    def __attrs_post_init__(self) -> None:
        if not self.model_names or "" in self.model_names:
            raise InputError(f"model_names is {self.model_names}; give the model one name or more, none of them empty")


class OpenAIServer:
    """Answers requests from one engine.

    Attributes:
        gate: the ASGI application; set its `is_draining` when the server drains.
        engine: the engine.
        metrics: the server's metrics.
        settings: the server's settings.
        created: when the server was made, in seconds since 1970.
    """

    def __init__(
        self, engine: LiveEngine, encoder: PromptEncoder, metrics: ServingMetrics, settings: ServerSettings
    ) -> None:
        """Make the server. Call `close` after its last request."""
        self.engine = engine
        self._encoder = encoder
        self.metrics = metrics
        self.settings = settings
        self.created = int(time.time())
        # One thread, since tokenizers are not thread-safe; not the event loop's, which long prompts would block.
        self._encoding = ThreadPoolExecutor(1, "kvledger-tokenizer")
        self.gate = RequestGate(build_routes(self), settings.limits, metrics.retry_after_s, metrics.answered)

    def close(self) -> None:
        """Stop the tokenizer's thread."""
        self._encoding.shutdown(cancel_futures=True)

    async def complete(self, body: CompletionRequest, request: Request) -> Response:
        """Answer `POST /v1/completions`."""
        self._check(body, len(body.prompts))
        prompts = [
            await self._in_tokenizer_thread(
                self._encoder.of_text, prompt, name_of_prompt(body.prompt_param, place, len(body.prompts))
            )
            for place, prompt in enumerate(body.prompts)
        ]
        return await self._answer(body, prompts, CompletionShape(self._speller(body)), request)

    async def chat(self, body: ChatCompletionRequest, request: Request) -> Response:
        """Answer `POST /v1/chat/completions`."""
        self._check(body, 1)
        prompt = await self._in_tokenizer_thread(self._encoder.of_conversation, body)
        return await self._answer(body, [prompt], ChatShape(self._speller(body)), request)

    async def _answer(
        self, body: GenerationRequest, prompts: Sequence[TokenIds], shape: AnswerShape, request: Request
    ) -> Response:
        max_tokens = [self._max_tokens(body, len(prompt)) for prompt in prompts]
        check_lengths(self.engine.lengths, body, prompts, max_tokens)
        # Few prompts differ in it, so the settings' token lists are checked only once for each value.
        sampling = {each: self._sampling(body, each) for each in dict.fromkeys(max_tokens)}
        answer = Answer.new(shape.id_prefix, self.settings.model_names[0] if body.model is None else body.model)
        choices = submit_choices(
            self.engine,
            body,
            answer.id,
            prompts,
            [sampling[each] for each in max_tokens],
            self._salt(body.cache_salt, request.scope),
            self.metrics.retry_after_s,
        )
        headers = {"X-Request-Id": answer.id}
        if body.stream:
            events = self._events(choices, answer, shape, body.includes_usage)
            return EventStream(events, self.metrics.client_left, lambda: cancel_all(choices), headers)
        try:
            pieces = await unless_client_leaves(request.receive, collected(choices, self.metrics.gap))
        finally:
            cancel_all(choices)
        if pieces is None:
            self.metrics.client_left()
            return Response(status_code=CLIENT_LEFT)
        document = answer.document(
            shape.whole, [shape.choice(choice.index, piece) for choice, piece in zip(choices, pieces, strict=True)]
        )
        return JSONResponse({**document, "usage": usage(choices)}, headers=headers)

    async def _events(
        self, choices: Sequence[Choice], answer: Answer, shape: AnswerShape, includes_usage: bool
    ) -> AsyncGenerator[bytes, None]:
        # If the last chunk has the usage, every other chunk states that it has none.
        no_usage = {"usage": None} if includes_usage else {}
        try:
            for choice in choices:
                opening = shape.opening(choice.index)
                if opening is not None:
                    yield event({**answer.document(shape.chunk, [opening]), **no_usage})
            async for choice, piece in merged(choices, self.metrics.gap):
                delta = shape.delta(choice.index, piece)
                yield event({**answer.document(shape.chunk, [delta]), **no_usage})
            if includes_usage:
                yield event({**answer.document(shape.chunk, []), "usage": usage(choices)})
        except ApiError as error:  # the status has been sent, so the stream carries the error
            self.metrics.answered(error.status)
            yield event(error.body())
        except Exception:
            logger.exception("a stream ended by an error")
            self.metrics.answered(500)
            yield event(internal_error().body())
        yield DONE

    def _check(self, body: GenerationRequest, num_prompts: int) -> None:
        """Refuse what can be refused without knowing the tokens."""
        if body.model is not None and body.model not in self.settings.model_names:
            raise unknown_model(body.model, self.settings.model_names)
        n, most = body.n or 1, self.settings.max_queued_requests
        if num_prompts * n > most:
            prompts = f"{num_prompts} prompts" if num_prompts > 1 else "1 prompt"
            raise invalid_request(
                f"{prompts} with n {n} are {num_prompts * n} choices, more than the {most} that may wait at once; send "
                "them in several requests",
                "prompt" if num_prompts > most else "n",
            )

    def _max_tokens(self, body: GenerationRequest, num_prompt_tokens: int) -> int:
        """Return `max_tokens` as given, else the endpoint's default, at most what fits after the prompt."""
        rest = max(self.engine.lengths.num_tokens - num_prompt_tokens, 1)
        return body.max_output_tokens or min(body.default_max_tokens or rest, rest)

    def _sampling(self, body: GenerationRequest, max_tokens: int) -> SamplingSettings:
        try:
            return SamplingSettings(
                max_tokens=max_tokens,
                min_tokens=body.min_tokens or 0,
                temperature=1.0 if body.temperature is None else body.temperature,
                top_p=1.0 if body.top_p is None else body.top_p,
                top_k=min(max(body.top_k or 0, 0), self._encoder.vocab_size),
                min_p=body.min_p or 0.0,
                presence_penalty=body.presence_penalty or 0.0,
                frequency_penalty=body.frequency_penalty or 0.0,
                repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
                logit_bias=body.biases,
                seed=None if body.seed is None else body.seed % NUM_SEEDS,
                stop=body.stop_strings,
                stop_token_ids=body.stop_token_ids or (),
                ignore_eos=bool(body.ignore_eos),
                logprobs=body.num_logprobs,
            )
        except SettingError as error:
            raise invalid_request(str(error), error.setting) from None

    def _salt(self, given: str | None, scope: Scope) -> str | None:
        """Return a request's cache salt: a hash of its API key, which no other client can send, then its own salt."""
        key: str | None = scope.get(API_KEY)
        if key is None or not self.settings.isolates_api_keys:
            return given
        return f"key:{hashlib.sha256(key.encode()).hexdigest()}" + ("" if given is None else f":{given}")

    def _speller(self, body: GenerationRequest) -> Speller | None:
        return None if body.num_logprobs is None else self._encoder.spell

    async def _in_tokenizer_thread(self, encode: Callable[..., Result], *prompt: Any) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._encoding, encode, *prompt)
