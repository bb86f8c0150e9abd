"""ASGI application: a gate that checks sizes, hosts, origins and keys, the routes behind it, and the chat page at `/`.

The page is one file, which loads nothing from elsewhere. Its policy allows exactly its style and script, by their
hashes, and connections to this server alone.
"""

from base64 import b64encode
from collections.abc import Awaitable, Callable
from functools import cache
from hashlib import sha256
from importlib.resources import files

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from meshwright.serving.http.api_error import ApiError
from meshwright.serving.http.front import routes
from meshwright.serving.http.front.event_stream import single_header
from meshwright.serving.http.front.routes import Answer, Endpoint, Service
from meshwright.serving.http.request.access import Keyring
from meshwright.serving.http.server_options import LOOPBACK, ServerOptions


def _resource(name: str) -> str:
    return (files("meshwright.serving.http") / "page" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


@cache
def chat_page() -> str:
    """Return the HTML."""
    page = _resource("chat.html")
    return page.replace("/*STYLE*/", _resource("chat.css")).replace("/*SCRIPT*/", _resource("chat.js"))


CONTENT_SECURITY_POLICY = (
    f"default-src 'none'; style-src {_hash(_resource('chat.css'))}; script-src {_hash(_resource('chat.js'))}; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


ANSWERED: tuple[tuple[str, str, Answer], ...] = (
    ("GET", "/v1/models", routes.models),
    ("GET", "/v1/models/{name:path}", routes.models),
    ("POST", "/v1/completions", routes.completions),
    ("POST", "/v1/chat/completions", routes.chat_completions),
    ("POST", "/tokenize", routes.tokenize),
    ("POST", "/detokenize", routes.detokenize),
    ("POST", "/v1/load_lora_adapter", routes.load_adapter),
    ("POST", "/v1/unload_lora_adapter", routes.unload_adapter),
)
"""Routes that are logged and count as a request of a key."""
ROUTES = (
    "GET /",
    "GET /health",
    "GET /metrics",
    *(f"{method} {path.partition('{')[0]}" for method, path, _ in ANSWERED),
)
"""Routes as an answer to an unknown path lists them."""
OPEN = frozenset({"/health", "/"})
"""Paths that need no key: the health of the server, and the chat page, which shows nothing of the model."""
HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
]


def application(service: Service, options: ServerOptions) -> ASGIApp:
    """Build the ASGI application behind the socket."""

    async def health(request: Request) -> Response:
        state = service.health
        return JSONResponse({"status": state}, 200 if state == "ok" else 503)

    async def metrics(request: Request) -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    plain: list[tuple[str, Callable[[Request], Awaitable[Response]]]] = [
        ("/health", health),
        ("/metrics", metrics),
        ("/", _page),
    ]
    routes_with_endpoints = [Route(path, answer, methods=["GET"]) for path, answer in plain]
    routes_with_endpoints += [
        Route(path, Endpoint(service, answer), methods=[method]) for method, path, answer in ANSWERED
    ]
    inner = Starlette(routes=routes_with_endpoints, exception_handlers={HTTPException: _unknown_path})
    return Gate(inner, options, Keyring(options.keys), service.metrics.refusals.inc)


async def _page(request: Request) -> Response:
    return HTMLResponse(
        chat_page(), headers={"Content-Security-Policy": CONTENT_SECURITY_POLICY, "Cache-Control": "no-store"}
    )


async def _unknown_path(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = {404: "unknown_path", 405: "method_not_allowed"}.get(error.status_code, "http_error")
    message = f"{error.detail.lower()}: {request.method} {request.url.path[:80]}; routes: {', '.join(ROUTES)}"
    if request.url.path.startswith("/v1/responses"):
        message = f"the Responses API is not served: take /v1/chat/completions; routes: {', '.join(ROUTES)}"
    api_error = ApiError(error.status_code, message, code=code)
    return JSONResponse(api_error.document, api_error.status, dict(error.headers or {}))


class Gate:
    """Outermost part of the application. An unknown path without a key is refused like any other."""

    def __init__(self, app: ASGIApp, options: ServerOptions, keyring: Keyring, on_refusal: Callable[[], None]) -> None:
        """Wrap the application. `on_refusal` is called for each request that is refused here."""
        self._app, self._options, self._keyring, self._on_refusal = app, options, keyring, on_refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check and handle one request. Scopes of other kinds pass through."""
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
            self._on_refusal()
            answer = JSONResponse(error.document, error.status, error.headers)
            await answer(scope, receive, send_with_headers)
            return
        await self._app(scope, receive, send_with_headers)

    def _check(self, scope: Scope) -> None:
        limits = self._options.limits
        if len(scope["headers"]) > limits.max_headers:
            raise ApiError(431, f"more than {limits.max_headers} headers: send fewer", code="too_many_headers")
        self._check_host(scope)
        tenant = self._keyring.tenant(single_header(scope, b"authorization"))
        if tenant is None and scope["path"] not in OPEN:
            raise ApiError(401, "no valid API key: send it as Authorization: Bearer KEY", code="invalid_api_key")
        scope["state"]["tenant"] = tenant

    def _check_host(self, scope: Scope) -> None:
        """Refuse requests of other sites' pages through a local browser, by origin, or by host if a name leads here."""
        host = (single_header(scope, b"host") or b"").decode("latin-1").lower()
        origin = single_header(scope, b"origin")
        if origin is not None and origin.decode("latin-1").lower().partition("://")[2] != host:
            raise ApiError(403, "requests from pages of other sites are refused", code="foreign_origin")
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
        is_local = self._options.host in LOOPBACK and not self._keyring.needs_key
        if is_local and name.strip("[]") not in LOOPBACK:
            raise ApiError(403, "without a key the host must be 127.0.0.1 or localhost", code="foreign_host")
