"""HTTP process: sockets, requests, text and JSON. It loads neither torch nor the model (engine_link.py).

`http_server` starts it with one end of a channel and the listening socket. It ends when it is told to and all requests
have ended, or when the engine's process is gone.
"""

import asyncio
import gc
import socket
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager

import uvicorn

from meshwright.serving.http.channel.channel import receive_frame
from meshwright.serving.http.channel.engine_messages import decode_setup
from meshwright.serving.http.front.application import application
from meshwright.serving.http.front.guarded_connection import guarded_connection_class
from meshwright.serving.http.front.routes import Service, to_stderr
from meshwright.serving.http.request.answering import Admission
from meshwright.serving.http.request.engine_link import EngineLink
from meshwright.serving.http.request.prompt_reader import PromptReader
from meshwright.serving.http.request.server_metrics import ServerMetrics
from meshwright.serving.http.server_options import ServerOptions

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

    async def _serve(self, service: Service, engine: EngineLink, serving: "asyncio.Task[None]") -> None:
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
        admission.closed = True
        waits = self._stop_now.wait(), engine.gone.wait(), _wait_until_idle(admission)
        await _wait_for_any(*waits, asyncio.sleep(self._options.limits.drain_seconds))
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
