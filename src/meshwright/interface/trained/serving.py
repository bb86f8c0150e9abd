"""A model behind an HTTP address, shared by `meshwright serve` and `TrainedModel.serve`."""

import asyncio
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.serving.engine.engine_options import EngineOptions
from meshwright.serving.http.server_options import ServerOptions, check_key
from meshwright.spec.errors import argument
from meshwright.spec.extras import require

if TYPE_CHECKING:
    from meshwright.serving.engine.speculation import Speculation
    from meshwright.serving.http.engine_thread import OpenModel
    from meshwright.serving.http.http_server import HttpServer

Ready = Callable[["HttpServer"], None]
"""Called when the server accepts requests."""


def server_of(
    name: str, opened: "OpenModel", options: ServerOptions, engine: EngineOptions, on_ready: Ready | None = None
) -> "HttpServer":
    """Return a server that has its address. Raises ArgumentError, and PlanError without its libraries."""
    require("serve", "serve")
    from meshwright.serving.http.http_server import HttpServer

    for key in options.keys:
        check_key(key, argument("keys"))
    return HttpServer(name, opened, options, engine, on_ready=on_ready)


def run(server: "HttpServer") -> None:
    """Answer until SIGTERM, a good end, or Ctrl-C, which is raised again once requests have ended."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        server.run()
    else:
        _run_in_thread(server)
    if server.interrupted:
        raise KeyboardInterrupt


def _run_in_thread(server: "HttpServer") -> None:
    """Run in a thread of its own: a notebook's thread has a loop already."""
    failures = list[BaseException]()

    def serve() -> None:
        try:
            server.run()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=serve, name="meshwright-serve")
    thread.start()
    try:
        thread.join()
    # Ctrl-C reaches the main thread only. The server then ends the requests in progress.
    except KeyboardInterrupt:
        server.stop()
        thread.join()
        raise
    if failures:
        raise failures[0]


def served_name(path: Path) -> str:
    """Return the default name of a model in requests: that of its folder or file."""
    path = path.resolve()
    return path.stem if path.suffix == ".gguf" else path.name


def configuration(
    server: "HttpServer", engine: EngineOptions, draft: Path | None = None, adapters: Iterable[str] = ()
) -> dict[str, Any]:
    """Return the settings of a server. Keys are counted, not shown.

    `draft`: path of the model that guesses. `adapters`: their names.
    """
    options = server.options
    shown = [name for name in EngineOptions.__slots__ if name not in ("speculation", "on_progress")]
    settings = {name: getattr(engine, name) for name in shown}
    settings |= {name: settings[name] or "auto" for name in ("cache_bytes", "most_tokens", "most_sequences")}
    return {
        "keys": len(options.keys),
        "adapters": ",".join(adapters) or "none",
        "adapter_dir": options.adapter_folder or "none",
        **settings,
        "record": engine.record or "none",
        **_guess_settings(engine.speculation, draft),
        **{name: getattr(options.limits, name) for name in type(options.limits).__slots__},
    }


def _guess_settings(speculation: "Speculation | None", draft: Path | None) -> dict[str, Any]:
    if speculation is None:
        return {"guess_tokens": 0}
    how = {"draft": draft} if draft is not None else {"guess_ngram": speculation.ngram}
    return {"guess_tokens": speculation.tokens, **how}
