"""HTTP process: sockets, requests, text and JSON. It loads neither torch nor the model (engine_link.py).

`http_server` starts it with one end of a channel and the listening socket. It ends when it is told to and all requests
have ended, or when the engine's process is gone.

The application is a gate that checks sizes, hosts, origins and keys, the routes behind it, and the chat page at `/`.
The page is one file, which loads nothing from elsewhere. Its policy allows exactly its style and script, by their
hashes, and connections to this server alone.
"""

import asyncio
import gc
import socket
from base64 import b64encode
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import cache
from hashlib import sha256
from importlib.resources import files

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from meshwright.serving.http.channel import ApiError, decode_setup, receive_frame
from meshwright.serving.http.front import routes
from meshwright.serving.http.front.event_stream import guarded_connection_class, single_header
from meshwright.serving.http.front.routes import Answer, Endpoint, Service, to_stderr
from meshwright.serving.http.request.answering import Admission
from meshwright.serving.http.request.engine_link import EngineLink, ServerMetrics
from meshwright.serving.http.request.prompt_reader import PromptReader
from meshwright.serving.http.server_options import LOOPBACK, Keyring, ServerOptions


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
        # Before the key is looked at: a page in a local browser would send the user's own requests.
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


LAST_SECONDS = 3.0
"""Time to send the last error events."""


class _Uvicorn(uvicorn.Server):
    """uvicorn without its signal handling, which belongs to the other process."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def main(channel_descriptor: int, listener_descriptor: int) -> None:
    """Answer requests until the end."""
    channel = socket.socket(fileno=channel_descriptor)
    listener = socket.socket(fileno=listener_descriptor)
    # No setup comes if the other process ended while this one started.
    setup = receive_frame(channel)
    if setup is not None:
        name, options = decode_setup(setup.parts)
        asyncio.run(HttpFront(name, options).run(channel, listener))


class HttpFront:
    """Address with the engine behind it."""

    def __init__(self, name: str, options: ServerOptions) -> None:
        self._options, self._metrics = options, ServerMetrics(name)

    async def run(self, channel: socket.socket, listener: socket.socket) -> None:
        """Serve until told to end."""
        self._stop, self._stop_now = asyncio.Event(), asyncio.Event()
        engine = EngineLink(self._metrics, self._on_stop)
        await asyncio.get_running_loop().create_connection(lambda: engine, sock=channel)
        service = Service(engine, Admission(self._options.limits), self._metrics, self._options, to_stderr)
        server = _Uvicorn(self._config(service))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            await self._serve(service, engine, serving)
        finally:
            server.should_exit = True
            await serving
            if service.reader is not None:
                service.reader.close()
            engine.report_ended()
        if engine.defect is not None:
            raise engine.defect

    async def _serve(self, service: Service, engine: EngineLink, serving: asyncio.Task[None]) -> None:
        """Serve until the model cannot be opened, the engine's process is gone, or the server has drained."""
        await _wait_for_any(engine.opening_done.wait(), self._stop.wait(), engine.gone.wait(), serving)
        if engine.card is not None:
            if engine.card.tokenizer is not None:
                service.reader = PromptReader(engine.card.tokenizer, self._options.limits.prompt_seconds)
                await service.reader.start()
            gc.freeze()  # objects that live as long as the process need no more collection
            engine.report_ready()
            await _wait_for_any(self._stop.wait(), engine.gone.wait(), serving)
        if self._stop.is_set() or engine.gone.is_set():
            await self._drain(service, engine)

    async def _drain(self, service: Service, engine: EngineLink) -> None:
        admission = service.admission
        # First no more requests, then time for those under way, then errors for the rest.
        admission.closed = True
        waits = self._stop_now.wait(), engine.gone.wait(), _wait_until_idle(admission)
        await _wait_for_any(*waits, asyncio.sleep(self._options.limits.drain_seconds))
        # Each client still gets an error, so that it need not wait for its own time limit.
        admission.abort()
        await _wait_for_any(_wait_until_idle(admission), asyncio.sleep(LAST_SECONDS))

    def _on_stop(self) -> None:
        (self._stop_now if self._stop.is_set() else self._stop).set()

    def _config(self, service: Service) -> uvicorn.Config:
        limits = self._options.limits
        return uvicorn.Config(
            application(service, self._options),
            http=guarded_connection_class(limits.read_seconds, limits.stall_seconds),
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            # uvicorn answers 503 by itself beyond it.
            limit_concurrency=limits.max_connections,
            h11_max_incomplete_event_size=int(limits.max_header_bytes),
            timeout_keep_alive=max(1, int(limits.read_seconds)),
            timeout_graceful_shutdown=int(LAST_SECONDS),
        )


async def _wait_until_idle(admission: Admission) -> None:
    while not admission.idle:
        await asyncio.sleep(0.02)


async def _wait_for_any(*waits: Awaitable[object]) -> None:
    """Wait until one of them is done and cancel the others, except tasks of the caller."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task, wait in zip(tasks, waits, strict=True):
            if task is not wait:
                task.cancel()
