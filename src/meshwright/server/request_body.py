"""The body of a request: so many bytes, in so much time, as JSON of so much depth."""

import asyncio
from collections.abc import Mapping
from typing import Any

from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request

from meshwright.server.api_error import ApiError, refused
from meshwright.server.server_options import ServerLimits


async def read_body(request: Request, limits: ServerLimits) -> Mapping[str, Any]:
    """The JSON object. ApiError; ClientDisconnect where it never comes whole."""
    encoding = request.headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise ApiError(415, "content-encoding is not supported: send the body as it is", code="unsupported_encoding")
    _check_size(request.headers.get("content-length", "0"), limits)
    try:
        async with asyncio.timeout(limits.read_seconds):
            data = await _received(request, limits)
    except TimeoutError:
        raise ApiError(408, f"the body did not come within {limits.read_seconds:g} s", code="request_timeout") from None
    try:
        found = from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise refused(f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(found, dict):
        raise refused("the body must be a JSON object", code="invalid_json")
    return found


async def _received(request: Request, limits: ServerLimits) -> bytes:
    parts, size = list[bytes](), 0
    async for part in request.stream():
        size += len(part)
        _check_size(size, limits)
        parts.append(part)
    return b"".join(parts)


def _check_size(size: int | str, limits: ServerLimits) -> None:
    if isinstance(size, str):
        size = int(size) if size.isdecimal() and len(size) < 19 else limits.max_body_bytes + 1
    if size > limits.max_body_bytes:
        raise ApiError(413, f"the body has more than {limits.max_body_bytes:,} bytes: send less", code="body_too_large")


__all__ = ["ClientDisconnect", "read_body"]
