"""A model behind an HTTP address: what `meshwright serve` and `TrainedModel.serve` share."""

import asyncio
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.serve.engine_options import EngineOptions
from meshwright.server.access import check_key
from meshwright.server.server_options import ServerOptions
from meshwright.spec.extras import require

if TYPE_CHECKING:
    from meshwright.serve.speculation import Speculation
    from meshwright.server.hosted_model import OpenModel
    from meshwright.server.http_server import HttpServer

Ready = Callable[["HttpServer"], None]
"""Called when the first request may come."""


def server_of(
    name: str, opened: "OpenModel", options: ServerOptions, engine: EngineOptions, on_ready: Ready | None = None
) -> "HttpServer":
    """A server that has its address. ArgumentError; PlanError where its libraries are not installed."""
    require("serve", "serve")
    from meshwright.server.http_server import HttpServer

    for key in options.keys:
        check_key(key, "keys=")
    return HttpServer(name, opened, options, engine, on_ready=on_ready)


def run(server: "HttpServer") -> None:
    """Answer until SIGTERM, which is a good end, or Ctrl-C, which is raised again when requests have ended."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        server.run()
    else:
        _run_beside_a_loop(server)
    if server.interrupted:
        raise KeyboardInterrupt


def _run_beside_a_loop(server: "HttpServer") -> None:
    """In a notebook, whose thread has a loop already."""
    failures = list[BaseException]()

    def target() -> None:
        try:
            server.run()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=target, name="meshwright-serve")
    thread.start()
    try:
        thread.join()
    except KeyboardInterrupt:
        server.stop()
        thread.join()
        raise
    if failures:
        raise failures[0]


def served_name(path: Path) -> str:
    """Of a folder or file, as requests call it."""
    path = path.resolve()
    return path.stem if path.suffix == ".gguf" else path.name


def configuration(
    server: "HttpServer", engine: EngineOptions, draft: Path | None = None, adapters: Iterable[str] = ()
) -> dict[str, Any]:
    """What a server runs with: keys are counted, not shown. `draft`: where the model was read from that guesses;
    `adapters`: by name."""
    options = server.options
    shown = [name for name in EngineOptions.__slots__ if name not in ("speculation", "on_progress")]
    own = {name: getattr(engine, name) for name in shown}
    own |= {name: own[name] or "auto" for name in ("cache_bytes", "most_tokens", "most_sequences")}
    return {
        "keys": len(options.keys),
        "adapters": ",".join(adapters) or "none",
        "adapter_dir": options.adapter_folder or "none",
        **own,
        **_guesses(engine.speculation, draft),
        **{name: getattr(options.limits, name) for name in type(options.limits).__slots__},
    }


def _guesses(speculation: "Speculation | None", draft: Path | None) -> dict[str, Any]:
    if speculation is None:
        return {"guess_tokens": 0}
    how = {"draft": draft} if draft is not None else {"guess_ngram": speculation.ngram}
    return {"guess_tokens": speculation.tokens, **how}
