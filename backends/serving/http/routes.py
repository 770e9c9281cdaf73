"""Routes requests to the endpoints, and turns invalid ones into API errors.

The endpoints are plain functions that find their server in the application. FastAPI caches data about each function for
ever, so bound methods would keep the engine of every server alive.
"""

import json
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from .errors import ApiError, internal_error, invalid_request, unknown_model
from .requests import ChatCompletionRequest, CompletionRequest
from .responses import model_card, model_list

if TYPE_CHECKING:
    from .server import OpenAIServer

MAX_SHOWN_CHARACTERS = 100


def build_routes(server: "OpenAIServer") -> FastAPI:
    """Return the application of one server."""
    routes = FastAPI(title="kvledger", openapi_url=None, exception_handlers=_EXCEPTION_HANDLERS)
    routes.router.route_class = _StrictRoute
    routes.state.server = server
    for method, endpoints in _ENDPOINTS.items():
        for path, endpoint in endpoints.items():
            routes.add_api_route(path, endpoint, methods=[method], response_model=None)
    return routes


class _StrictRequest(Request):
    """A request that refuses a field given twice; JSON's readers silently keep the last one."""

    async def json(self) -> Any:
        return json.loads(await self.body(), object_pairs_hook=_unique_fields)


class _StrictRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_strictly(request: Request) -> Response:
            return await handle(_StrictRequest(request.scope, request.receive))

        return handle_strictly


def _unique_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, value in pairs:
        if name in fields:
            raise invalid_request(f"{json.dumps(name)} is given twice; give it once", name)
        fields[name] = value
    return fields


async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """Answer `POST /v1/completions`."""
    return await _server_of(request).complete(body, request)


async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
    """Answer `POST /v1/chat/completions`."""
    return await _server_of(request).chat(body, request)


async def list_models(request: Request) -> Response:
    """Answer `GET /v1/models`."""
    server = _server_of(request)
    return JSONResponse(model_list(server.settings.model_names, server.created, server.engine.max_model_len))


async def get_model(name: str, request: Request) -> Response:
    """Answer `GET /v1/models/{name}`."""
    server = _server_of(request)
    if name not in server.settings.model_names:
        raise unknown_model(name, server.settings.model_names)
    return JSONResponse(model_card(name, server.created, server.engine.max_model_len))


async def health(request: Request) -> Response:
    """Answer `GET /health`: 200 while requests are taken and served, else 503."""
    server = _server_of(request)
    if server.engine.failure is not None:
        return JSONResponse({"status": "failed"}, 503)
    if server.gate.is_draining:
        return JSONResponse({"status": "shutting down"}, 503)
    return JSONResponse({"status": "ok"})


async def metrics(request: Request) -> Response:
    """Answer `GET /metrics`."""
    return Response(_server_of(request).metrics.text(), media_type=CONTENT_TYPE_LATEST)


_ENDPOINTS = {
    "POST": {"/v1/completions": create_completion, "/v1/chat/completions": create_chat_completion},
    "GET": {"/v1/models": list_models, "/v1/models/{name:path}": get_model, "/health": health, "/metrics": metrics},
}


def _server_of(request: Request) -> "OpenAIServer":
    return request.app.state.server


async def _error_response(request: Request, error: Exception) -> Response:
    match error:
        case ApiError():
            return error.response()
        case RequestValidationError():
            return _first_complaint(error, request).response()
        case HTTPException():
            return _of_status(error, request).response()
        case _:
            return internal_error().response()  # uvicorn logs the error itself


_EXCEPTION_HANDLERS: dict[Any, Any] = dict.fromkeys(
    (ApiError, RequestValidationError, HTTPException, Exception), _error_response
)


def _first_complaint(error: RequestValidationError, request: Request) -> ApiError:
    """Describe the first mistake in a body, in a sentence that names the field."""
    first = error.errors()[0]
    place = [str(each) for each in first["loc"] if each != "body"]
    kind = first["type"]
    if kind == "json_invalid":
        return invalid_request(f"the body is no JSON: {first['ctx']['error']} at character {place[0]}")
    if not place:
        return _not_an_object(kind, request)
    param = ".".join(place)
    what = param or '""'
    if kind == "missing":
        return invalid_request(f"{what} is missing", param, "missing_parameter")
    if kind == "extra_forbidden":
        return invalid_request(f"{what} is no parameter of this endpoint; leave it out", param, "unknown_parameter")
    given = _shown(first["input"])
    message = _complaint(first)
    return invalid_request(f"{what}: {message}" if given is None else f"{what} is {given}; {message}", param)


def _not_an_object(kind: str, request: Request) -> ApiError:
    """Describe what is wrong with a body as a whole."""
    if kind == "string_unicode":
        return invalid_request("the name of a parameter holds a lone surrogate, which no UTF-8 text has; leave it out")
    if not _is_json(request.headers.get("content-type", "")):
        return ApiError(415, "the body must be JSON; send Content-Type: application/json")
    return invalid_request("the body must be a JSON object")


def _complaint(error: Mapping[str, Any]) -> str:
    """Put pydantic's complaint about a value into JSON's words."""
    kind, context = error["type"], error.get("ctx", {})
    match kind:
        case "literal_error":
            return f"it must be {context['expected']}".replace("False", "false")
        case "greater_than_equal":
            return f"it must be {context['ge']} or more"
        case "value_error":
            return str(context["error"])
        case _:
            return f"it must be {_EXPECTED[kind]}" if kind in _EXPECTED else str(error["msg"])


_EXPECTED = {
    "bool_type": "true or false",
    "dict_type": "an object",
    "finite_number": "a finite number",
    "float_type": "a number",
    "int_from_float": "a whole number",
    "int_type": "a whole number",
    "list_type": "a list",
    "model_attributes_type": "an object",
    "model_type": "an object",
    "string_too_short": "text with something in it",
    "string_type": "text",
    "string_unicode": "text that UTF-8 can carry",
    "too_short": "a list with something in it",
}


def _shown(given: Any) -> str | None:
    """Return a value as the client wrote it, or None if it is long."""
    if isinstance(given, dict | list) and given:
        return None
    text = json.dumps(given)
    return text if len(text) <= MAX_SHOWN_CHARACTERS else None


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
        case 400 if isinstance(error.__cause__, ApiError):
            return error.__cause__
        case 400:
            return invalid_request(_unreadable(error.__cause__) or str(error.detail))
        case status if status < 500:
            return ApiError(status, str(error.detail), headers=headers)
        case status:
            return ApiError(status, str(error.detail), "server_error", headers=headers)


def _unreadable(cause: BaseException | None) -> str | None:
    """Return why a body could not be read, if its JSON grammar is not the reason."""
    match cause:
        case UnicodeDecodeError():
            return f"the body is no UTF-8 text: byte {cause.start} fits nowhere in one"
        case RecursionError():
            return "the body nests lists and objects too deeply to be read; no parameter needs that"
        case ValueError():
            return "the body holds a whole number with too many digits to be read; no parameter needs that"
        case _:
            return None
