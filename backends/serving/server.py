"""The OpenAI-compatible HTTP server on a live engine: completions, chat, models, health and metrics.

    server = OpenAIServer(engine, encoder, metrics, ServerSettings(model_names=("tiny",), limits=limits, ...))
    uvicorn.run(server.gate)

Every answer that is no success has OpenAI's error shape, and none shows a stack trace.
"""

import asyncio
import hashlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import attrs
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.types import Scope

from ...core.errors import InputError
from .choices import Choice, Wanted, cancel_all, collected, merged, submit_choices
from .event_stream import DONE, EventStream, event, unless_client_leaves
from .live_engine import LiveEngine
from .openai_errors import ApiError, internal_error, invalid_request
from .openai_requests import ChatCompletionRequest, CompletionRequest, GenerationRequest, TokenIds
from .openai_responses import (
    Answer,
    AnswerShape,
    ChatShape,
    CompletionShape,
    TokenText,
    model_card,
    model_list,
    usage,
)
from .prompt_encoder import PromptEncoder
from .request_limits import API_KEY, RequestGate, RequestLimits
from .sampling import SamplingSettings
from .serving_metrics import ServingMetrics

CLIENT_LEFT = 499
logger = logging.getLogger("uvicorn.error")
Result = TypeVar("Result")


@attrs.frozen(kw_only=True)
class ServerSettings:
    """What the server is besides its engine.

    Attributes:
        model_names: what clients may call the model; the first is what answers call it.
        limits: on what clients can make the server hold.
        max_queued_requests: as the engine was given it.
        isolates_api_keys: clients with different API keys share no cached prefixes, whatever their cache_salt.
    """

    model_names: tuple[str, ...] = attrs.field(converter=tuple)
    limits: RequestLimits
    max_queued_requests: int
    isolates_api_keys: bool = True

    def __attrs_post_init__(self) -> None:
        if not self.model_names or "" in self.model_names:
            raise InputError(f"model_names is {self.model_names}; give the model one name or more, none of them empty")


class OpenAIServer:
    """The endpoints.

    Attributes:
        gate: the application that a server of HTTP runs; tell it when the server drains.
        engine: that serves.
    """

    def __init__(
        self, engine: LiveEngine, encoder: PromptEncoder, metrics: ServingMetrics, settings: ServerSettings
    ) -> None:
        """Endpoints for an engine. Close the server after its last request."""
        self.engine = engine
        self._encoder = encoder
        self._metrics = metrics
        self._settings = settings
        self._created = int(time.time())
        # What fits at once, which a pool may bound below the model's length.
        self._longest_tokens = min(engine.max_model_len, engine.allocator.max_fitting_tokens())
        # One thread: tokenizers are not made for more, and long prompts must not hold up the streams of others.
        self._encoding = ThreadPoolExecutor(1, "kvledger-tokenizer")
        self._routes = self._make_routes()
        self.gate = RequestGate(self._routes, settings.limits, metrics.retry_after_s, metrics.answered)

    def close(self) -> None:
        """Let go of the tokenizer's thread."""
        self._encoding.shutdown(cancel_futures=True)

    # -- endpoints ---------------------------------------------------------------------------------------------------

    async def create_completion(self, body: CompletionRequest, request: Request) -> Response:
        """`POST /v1/completions`."""
        prompts = [await self._encoded(self._encoder.of_text, prompt) for prompt in body.prompts]
        return await self._answer(body, prompts, CompletionShape(self._token_text(body)), request)

    async def create_chat_completion(self, body: ChatCompletionRequest, request: Request) -> Response:
        """`POST /v1/chat/completions`."""
        prompt = await self._encoded(self._encoder.of_conversation, body)
        return await self._answer(body, [prompt], ChatShape(self._token_text(body)), request)

    async def list_models(self) -> Response:
        """`GET /v1/models`."""
        return JSONResponse(model_list(self._settings.model_names, self._created, self.engine.max_model_len))

    async def get_model(self, name: str) -> Response:
        """`GET /v1/models/{name}`."""
        self._check_model(name)
        return JSONResponse(model_card(name, self._created, self.engine.max_model_len))

    async def health(self) -> Response:
        """`GET /health`: 200 while requests are taken and served, else 503."""
        if self.engine.failure is not None:
            return JSONResponse({"status": "failed"}, 503)
        if self.gate.is_draining:
            return JSONResponse({"status": "shutting down"}, 503)
        return JSONResponse({"status": "ok"})

    async def metrics(self) -> Response:
        """`GET /metrics`."""
        return Response(self._metrics.text(), media_type=CONTENT_TYPE_LATEST)

    # -- one request -------------------------------------------------------------------------------------------------

    async def _answer(
        self, body: GenerationRequest, prompts: Sequence[TokenIds], shape: AnswerShape, request: Request
    ) -> Response:
        self._check_model(body.model)
        answer = Answer.new(shape.id_prefix, self._settings.model_names[0] if body.model is None else body.model)
        wanted = Wanted(
            name=answer.id,
            prompts=prompts,
            n=body.n or 1,
            settings=[self._sampling(body, len(prompt)) for prompt in prompts],
            priority=body.priority or 0,
            cache_salt=self._salt(body.cache_salt, request.scope),
        )
        choices = submit_choices(self.engine, wanted, self._settings.max_queued_requests, self._metrics.retry_after_s)
        headers = {"X-Request-Id": answer.id}
        if body.stream:
            events = self._events(choices, answer, shape, body.includes_usage)
            return EventStream(events, lambda was_sent: self._end(choices, was_sent), headers)
        was_sent = False
        try:
            pieces = await unless_client_leaves(request.receive, collected(choices, self._metrics.gap))
            was_sent = pieces is not None
        finally:
            self._end(choices, was_sent)
        if pieces is None:
            return Response(status_code=CLIENT_LEFT)
        document = answer.document(
            shape.whole, [shape.choice(choice.index, piece) for choice, piece in zip(choices, pieces, strict=True)]
        )
        return JSONResponse({**document, "usage": _usage(choices)}, headers=headers)

    async def _events(
        self, choices: Sequence[Choice], answer: Answer, shape: AnswerShape, includes_usage: bool
    ) -> AsyncGenerator[bytes, None]:
        # With its usage at the end, a stream says in every other chunk that it is not there yet.
        no_usage = {"usage": None} if includes_usage else {}
        try:
            for choice in choices:
                opening = shape.opening(choice.index)
                if opening is not None:
                    yield event({**answer.document(shape.chunk, [opening]), **no_usage})
            async for choice, piece in merged(choices, self._metrics.gap):
                delta = shape.delta(choice.index, piece)
                yield event({**answer.document(shape.chunk, [delta]), **no_usage})
            if includes_usage:
                yield event({**answer.document(shape.chunk, []), "usage": _usage(choices)})
        except ApiError as error:  # the status has been sent, so the stream says it
            self._metrics.answered(error.status)
            yield event(error.body())
        except Exception:
            logger.exception("a stream ended by an error")
            self._metrics.answered(500)
            yield event(internal_error().body())
        yield DONE

    def _end(self, choices: Sequence[Choice], was_sent: bool) -> None:
        cancel_all(choices)
        if not was_sent:
            self._metrics.client_left()

    def _check_model(self, name: str | None) -> None:
        if name is not None and name not in self._settings.model_names:
            raise ApiError(
                404,
                f"there is no model {name!r}; this server has {', '.join(self._settings.model_names)}",
                param="model",
                code="model_not_found",
            )

    def _sampling(self, body: GenerationRequest, num_prompt_tokens: int) -> SamplingSettings:
        rest = max(self._longest_tokens - num_prompt_tokens, 1)
        stop_token_ids = tuple(body.stop_token_ids or ())
        self._encoder.check_token_ids(stop_token_ids, "stop_token_ids")
        try:
            return SamplingSettings(
                max_tokens=body.max_output_tokens or min(body.default_max_tokens or rest, rest),
                temperature=1.0 if body.temperature is None else body.temperature,
                top_p=1.0 if body.top_p is None else body.top_p,
                top_k=max(body.top_k or 0, 0),
                seed=None if body.seed is None else body.seed % (1 << 64),
                stop=body.stop_strings,
                stop_token_ids=stop_token_ids,
                ignore_eos=bool(body.ignore_eos),
                logprobs=body.num_logprobs,
            )
        except InputError as error:
            raise invalid_request(str(error)) from None

    def _salt(self, given: str | None, scope: Scope) -> str | None:
        """The salt of a request: the client's own, and that of its API key before it, which nobody else can give."""
        key: str | None = scope.get(API_KEY)
        if key is None or not self._settings.isolates_api_keys:
            return given
        return f"key:{hashlib.sha256(key.encode()).hexdigest()}" + ("" if given is None else f":{given}")

    def _token_text(self, body: GenerationRequest) -> TokenText | None:
        return None if body.num_logprobs is None else self._encoder.token_text

    async def _encoded(self, encode: Callable[[Any], Result], prompt: Any) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._encoding, encode, prompt)

    # -- the application ---------------------------------------------------------------------------------------------

    def _make_routes(self) -> FastAPI:
        routes = FastAPI(title="kvledger", openapi_url=None, exception_handlers=self._exception_handlers())
        posts = {"/v1/completions": self.create_completion, "/v1/chat/completions": self.create_chat_completion}
        gets = {
            "/v1/models": self.list_models,
            "/v1/models/{name:path}": self.get_model,
            "/health": self.health,
            "/metrics": self.metrics,
        }
        for method, endpoints in (("POST", posts), ("GET", gets)):
            for path, endpoint in endpoints.items():
                routes.add_api_route(path, endpoint, methods=[method], response_model=None)
        return routes

    def _exception_handlers(self) -> dict[Any, Any]:
        async def told(_request: Request, error: ApiError) -> Response:
            return error.response()

        async def invalid(request: Request, error: RequestValidationError) -> Response:
            return _first_complaint(error, request).response()

        async def by_status(request: Request, error: HTTPException) -> Response:
            return _of_status(error, request).response()

        async def unexpected(_request: Request, _error: Exception) -> Response:
            return internal_error().response()  # the error itself is logged by the server of HTTP

        return {
            ApiError: told,
            RequestValidationError: invalid,
            HTTPException: by_status,
            Exception: unexpected,
        }


def _usage(choices: Sequence[Choice]) -> dict[str, Any]:
    by_prompt: dict[int, list[Any]] = {}
    for choice in choices:
        by_prompt.setdefault(choice.prompt, []).append(choice.live.stats)
    return usage(list(by_prompt.values()))


def _first_complaint(error: RequestValidationError, request: Request) -> ApiError:
    """The first thing that is wrong with a body, in a sentence that names the field."""
    first = error.errors()[0]
    place = [str(each) for each in first["loc"] if each != "body"]
    kind = first["type"]
    if kind == "json_invalid":
        return invalid_request(f"the body is no JSON: {first['ctx']['error']} at character {place[0]}")
    if not place and kind in ("model_attributes_type", "model_type", "dict_type", "missing"):
        if not _is_json(request.headers.get("content-type", "")):
            return ApiError(415, "the body must be JSON; send Content-Type: application/json")
        return invalid_request("the body must be a JSON object")
    param = ".".join(place) or None
    what = param or "the request"
    if kind == "missing":
        return invalid_request(f"{what} is missing", param, "missing_parameter")
    if kind == "extra_forbidden":
        return invalid_request(f"{what} is no parameter of this endpoint; leave it out", param, "unknown_parameter")
    message = first["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    separator = " must be " if first["msg"].startswith("Input should be ") else ": "
    return invalid_request(f"{what}{separator}{message}", param)


def _is_json(content_type: str) -> bool:
    kind = content_type.partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))


def _of_status(error: HTTPException, request: Request) -> ApiError:
    headers = dict(error.headers or {})
    match error.status_code:
        case 404:
            return ApiError(404, f"there is nothing at {request.url.path}", "not_found_error", code="not_found")
        case 405:
            return ApiError(
                405, f"{request.url.path} does not take {request.method}", code="method_not_allowed", headers=headers
            )
        case status if status < 500:
            return ApiError(status, str(error.detail), headers=headers)
        case status:
            return ApiError(status, str(error.detail), "server_error", headers=headers)
