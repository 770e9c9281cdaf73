"""Errors in the shape that OpenAI's API gives them: a status, and a body that says what is wrong and what to change."""

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
    """What a client is answered instead of a completion.

    Attributes:
        status: the HTTP status.
        message: what was given, what was expected, what to do.
        type: the family of the error.
        param: the parameter of the request that it is about.
        code: a name that programs may test for.
        headers: sent along, such as Retry-After.
    """

    status: int
    message: str
    type: ErrorType = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = attrs.field(factory=dict)

    def __str__(self) -> str:
        return self.message

    def body(self) -> dict[str, Any]:
        """`{"error": {"message", "type", "param", "code"}}`."""
        # What a client gave may be quoted, and may be no text that UTF-8 can carry.
        message, param = (
            None if text is None else text.encode(errors="replace").decode() for text in (self.message, self.param)
        )
        return {"error": {"message": message, "type": self.type, "param": param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The whole answer."""
        return JSONResponse(self.body(), self.status, dict(self.headers))


def invalid_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the client has to change its request."""
    return ApiError(400, message, param=param, code=code)


def unsupported_parameter(param: str, message: str) -> ApiError:
    """400: a parameter that this server does not serve; it is never ignored."""
    return invalid_request(message, param, "unsupported_parameter")


def unknown_model(name: str, known: Sequence[str]) -> ApiError:
    """404: the model that the client named is not here."""
    return ApiError(
        404, f"there is no model {name!r}; this server has {', '.join(known)}", param="model", code="model_not_found"
    )


def queue_full(message: str, retry_after_s: int) -> ApiError:
    """429: the client may come again after so many whole seconds."""
    return ApiError(
        429, message, "rate_limit_error", code="queue_full", headers={"Retry-After": str(max(retry_after_s, 1))}
    )


def shutting_down() -> ApiError:
    """503: the server has been told to end."""
    return ApiError(
        503, "the server is shutting down; send the request to another one", "server_error", code="shutting_down"
    )


def engine_failed() -> ApiError:
    """500: the engine ended by an error, so no request can be served any more."""
    return ApiError(
        500, "the engine has failed, and the server ends; its log says why", "server_error", code="engine_failed"
    )


def internal_error() -> ApiError:
    """500: a fault of the server; what it was stands in its log, never in the answer."""
    return ApiError(500, "internal error; the server's log says more", "server_error", code="internal_error")
