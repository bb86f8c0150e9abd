"""Refusals in the form of OpenAI's interface: a status, and an object with message, type, param and code."""

from typing import Any

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
    504: "timeout_error",
}
"""Of a status; others are mistakes of the request."""


class ApiError(Exception):
    """What a client is answered in place of what it asked for."""

    def __init__(
        self, status: int, message: str, *, code: str, param: str | None = None, retry_seconds: int | None = None
    ) -> None:
        """`param`: the field at fault; `retry_seconds`: when it is worth asking again."""
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.retry_seconds = retry_seconds

    @property
    def document(self) -> dict[str, Any]:
        """The body of the answer."""
        kind = TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """Beside the body. A body that was not read would be taken for the next request: such connections close."""
        found = {"Retry-After": str(self.retry_seconds)} if self.retry_seconds is not None else {}
        if self.status == 401:
            found["WWW-Authenticate"] = "Bearer"
        return found | ({"Connection": "close"} if self.status in (408, 413, 431) else {})


def refused(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """A request that makes no sense."""
    return ApiError(400, message, code=code, param=param)


def shutting_down() -> ApiError:
    """The server takes no more requests, or cannot end this one."""
    return ApiError(503, "the server is shutting down: ask another one", code="shutting_down", retry_seconds=5)


def mistake() -> ApiError:
    """A defect of the server, whose traceback is in its log."""
    return ApiError(500, "the server made a mistake, which its log describes", code="internal_error")
