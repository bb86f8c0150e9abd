"""The ASGI application: which path leads where."""

from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from meshwright.server import adapter_routes, routes
from meshwright.server.access import Keyring
from meshwright.server.api_error import ApiError
from meshwright.server.gate import Gate
from meshwright.server.page.chat_page import CONTENT_SECURITY_POLICY, chat_page
from meshwright.server.routes import Answer, Endpoint, Service
from meshwright.server.server_options import ServerOptions

ANSWERED: tuple[tuple[str, str, Answer], ...] = (
    ("GET", "/v1/models", routes.models),
    ("GET", "/v1/models/{name:path}", routes.models),
    ("POST", "/v1/completions", routes.completions),
    ("POST", "/v1/chat/completions", routes.chat_completions),
    ("POST", "/tokenize", routes.tokenize),
    ("POST", "/detokenize", routes.detokenize),
    ("POST", "/v1/load_lora_adapter", adapter_routes.load_adapter),
    ("POST", "/v1/unload_lora_adapter", adapter_routes.unload_adapter),
)
"""Routes that are logged and that count as a request of a key."""
ROUTES = (
    "GET /",
    "GET /health",
    "GET /metrics",
    *(f"{method} {path.partition('{')[0]}" for method, path, _ in ANSWERED),
)
"""As an answer to an unknown path lists them."""


def application(service: Service, options: ServerOptions) -> ASGIApp:
    """Everything behind the socket."""
    plain: list[tuple[str, Callable[[Request], Awaitable[Response]]]] = [
        ("/health", _health(service)), ("/metrics", _metrics(service)), ("/", _page),
    ]  # fmt: skip
    found = [Route(path, answer, methods=["GET"]) for path, answer in plain]
    found += [Route(path, Endpoint(service, answer), methods=[method]) for method, path, answer in ANSWERED]
    inner = Starlette(routes=found, exception_handlers={HTTPException: _refused_path})
    return Gate(inner, options, Keyring(options.keys), service.metrics.refusals.inc)


def _health(service: Service) -> Callable[[Request], Awaitable[Response]]:
    async def health(request: Request) -> Response:
        """200 while requests are answered, else 503."""
        found = service.health
        return JSONResponse({"status": found}, 200 if found == "ok" else 503)

    return health


def _metrics(service: Service) -> Callable[[Request], Awaitable[Response]]:
    async def metrics(request: Request) -> Response:
        """In Prometheus' format."""
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return metrics


async def _page(request: Request) -> Response:
    """The chat page."""
    return HTMLResponse(
        chat_page(), headers={"Content-Security-Policy": CONTENT_SECURITY_POLICY, "Cache-Control": "no-store"}
    )


async def _refused_path(request: Request, error: Exception) -> Response:
    """A path that leads nowhere, or with another method."""
    assert isinstance(error, HTTPException)
    code = {404: "unknown_path", 405: "method_not_allowed"}.get(error.status_code, "http_error")
    said = f"{error.detail.lower()}: {request.method} {request.url.path[:80]}; routes: {', '.join(ROUTES)}"
    if request.url.path.startswith("/v1/responses"):
        said = f"the Responses API is not served: take /v1/chat/completions; routes: {', '.join(ROUTES)}"
    found = ApiError(error.status_code, said, code=code)
    return JSONResponse(found.document, found.status, dict(error.headers or {}))
