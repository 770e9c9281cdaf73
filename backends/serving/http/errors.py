"""Errors in the shape of OpenAI's API: a status, and a body that says what is wrong and what to change."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import attrs
from starlette.responses import JSONResponse

from ....core.errors import KVLedgerError

ErrorType = Literal[
    "invalid_request_error", "authentication_error", "not_found_error", "rate_limit_error", "server_error"
]


@attrs.frozen
class ApiError(KVLedgerError):
    """An error answer to a client."""

    status: int
    message: str  # what was given, what was expected, what to do
    type: ErrorType = "invalid_request_error"  # OpenAI's type of the error
    param: str | None = None  # the parameter of the request that is wrong
    code: str | None = None  # a name that programs may test for
    headers: Mapping[str, str] = attrs.field(factory=dict)  # further headers, such as Retry-After

    def __str__(self) -> str:
        return self.message

    def body(self) -> dict[str, Any]:
        """Return `{"error": {"message", "type", "param", "code"}}`."""
        # The message may quote the client's text, which may not be valid in UTF-8.
        message, param = (
            None if text is None else text.encode(errors="replace").decode() for text in (self.message, self.param)
        )
        return {"error": {"message": message, "type": self.type, "param": param, "code": self.code}}

    def response(self) -> JSONResponse:
        """Return the complete response."""
        return JSONResponse(self.body(), self.status, dict(self.headers))


def invalid_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Return 400: the client must change its request."""
    return ApiError(400, message, param=param, code=code)


def unsupported_parameter(param: str, message: str) -> ApiError:
    """Return 400: the server does not support a parameter. It never ignores one."""
    return invalid_request(message, param, "unsupported_parameter")


def unknown_model(name: str, known: Sequence[str]) -> ApiError:
    """Return 404: the server does not have the named model."""
    return ApiError(
        404, f"there is no model {name!r}; this server has {', '.join(known)}", param="model", code="model_not_found"
    )


def queue_full(message: str, retry_after_s: int) -> ApiError:
    """Return 429: the client may retry after `retry_after_s` seconds."""
    return ApiError(
        429, message, "rate_limit_error", code="queue_full", headers={"Retry-After": str(max(retry_after_s, 1))}
    )


def shutting_down() -> ApiError:
    """Return 503: the server is shutting down."""
    return ApiError(
        503, "the server is shutting down; send the request to another one", "server_error", code="shutting_down"
    )


def engine_failed() -> ApiError:
    """Return 500: the engine failed, so no request can be served any more."""
    return ApiError(
        500, "the engine has failed, and the server ends; its log says why", "server_error", code="engine_failed"
    )


def internal_error() -> ApiError:
    """Return 500: the server has a fault. Its log tells which; the answer never does."""
    return ApiError(500, "internal error; the server's log says more", "server_error", code="internal_error")
