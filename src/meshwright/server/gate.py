"""What every request passes before any route: sizes, hosts, origins and keys; and headers of every answer."""

from collections.abc import Callable

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from meshwright.server.access import Keyring
from meshwright.server.api_error import ApiError
from meshwright.server.event_stream import header_of
from meshwright.server.server_options import LOOPBACK, ServerOptions

OPEN = frozenset({"/health", "/"})
"""Paths that need no key: whether the server is up, and the chat page, which holds nothing of the model."""
HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
]


class Gate:
    """The outermost part of the application. A path that nobody knows is refused without a key, too."""

    def __init__(self, app: ASGIApp, options: ServerOptions, keyring: Keyring, refused: Callable[[], None]) -> None:
        """`refused` is called for each request that goes no further."""
        self._app, self._options, self._keyring, self._refused = app, options, keyring, refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request; a scope of another kind goes through."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *HEADERS]}
            await send(message)

        try:
            self._check(scope)
        except ApiError as error:
            self._refused()
            answer = JSONResponse(error.document, error.status, error.headers)
            await answer(scope, receive, send_with_headers)
            return
        await self._app(scope, receive, send_with_headers)

    def _check(self, scope: Scope) -> None:
        limits = self._options.limits
        if len(scope["headers"]) > limits.max_headers:
            raise ApiError(431, f"more than {limits.max_headers} headers: send fewer", code="too_many_headers")
        self._check_host(scope)
        tenant = self._keyring.tenant(header_of(scope, b"authorization"))
        if tenant is None and scope["path"] not in OPEN:
            raise ApiError(401, "no valid API key: send it as Authorization: Bearer KEY", code="invalid_api_key")
        scope["state"]["tenant"] = tenant

    def _check_host(self, scope: Scope) -> None:
        """Pages of other sites may reach a server on this machine through its user's browser: their origin differs, or,
        where a name of theirs was made to lead here, the host."""
        host = (header_of(scope, b"host") or b"").decode("latin-1").lower()
        origin = header_of(scope, b"origin")
        if origin is not None and origin.decode("latin-1").lower().partition("://")[2] != host:
            raise ApiError(403, "requests from pages of other sites are refused", code="foreign_origin")
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
        inside = self._options.host in LOOPBACK and not self._keyring.asks
        if inside and name.strip("[]") not in LOOPBACK:
            raise ApiError(403, "without a key the host must be 127.0.0.1 or localhost", code="foreign_host")
