"""Errors in the form of OpenAI's interface: a status, and an object with message, type, param and code."""

from typing import Any

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
    504: "timeout_error",
}
"""Error type by status. All others are errors in the request."""


class ApiError(Exception):
    """Error that a client receives instead of an answer."""

    def __init__(
        self, status: int, message: str, *, code: str, param: str | None = None, retry_seconds: int | None = None
    ) -> None:
        """Build the error. `param` is the field at fault, `retry_seconds` the time after which a retry is useful."""
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.retry_seconds = retry_seconds

    @property
    def document(self) -> dict[str, Any]:
        """Body of the answer."""
        kind = TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the answer. Connections close where a body stayed unread: it would be the next request."""
        headers = {"Retry-After": str(self.retry_seconds)} if self.retry_seconds is not None else {}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return headers | ({"Connection": "close"} if self.status in (408, 413, 431) else {})


def bad_request(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """Return the error for an invalid request."""
    return ApiError(400, message, code=code, param=param)


def shutdown_error() -> ApiError:
    """Return the error of a server that takes no more requests or cannot end this one."""
    return ApiError(503, "the server is shutting down: ask another one", code="shutting_down", retry_seconds=5)


def internal_error() -> ApiError:
    """Return the error for a defect of the server. Its traceback is in the log."""
    return ApiError(500, "internal server error: see the log of the server", code="internal_error")
