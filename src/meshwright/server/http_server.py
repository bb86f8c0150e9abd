"""The server as a process sees it: a socket, signals, and the order in which things end."""

import asyncio
import errno
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress

import uvicorn

from meshwright.serve.engine_options import EngineOptions
from meshwright.server.answering import Admission
from meshwright.server.application import application
from meshwright.server.engine_thread import EngineThread
from meshwright.server.guarded_connection import guarded
from meshwright.server.hosted_model import OpenModel
from meshwright.server.prompt_reader import PromptReader
from meshwright.server.request_log import Write, to_stderr
from meshwright.server.routes import Service
from meshwright.server.server_metrics import ServerMetrics
from meshwright.server.server_options import ServerOptions
from meshwright.spec.errors import ArgumentError

SIGNALS = (signal.SIGTERM, signal.SIGINT)
LAST_SECONDS = 3.0
"""For error events to be sent, and for the engine to end its step."""


class _Uvicorn(uvicorn.Server):
    """uvicorn without its own way with signals, which ends the process by the signal itself."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Nothing: HttpServer has its own."""
        yield


class HttpServer:
    """One model behind one address. `run` it; `stop` may be called from any thread."""

    def __init__(
        self,
        name: str,
        open_model: OpenModel,
        options: ServerOptions,
        engine: EngineOptions,
        *,
        on_ready: Callable[["HttpServer"], None] | None = None,
        write: Write = to_stderr,
    ) -> None:
        """`name`: of the model, for metrics; `on_ready` is called when the first request may come; `write` takes lines
        of the log. ArgumentError where the address cannot be had."""
        self.options = options
        self.interrupted = False
        """It was ended by Ctrl-C."""
        self.name = name
        self._open, self._engine_options = open_model, engine
        self._on_ready, self._write = on_ready, write
        self._socket = _listening(options)
        self.service: Service | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._asked = 0
        self._stop = self._stop_now = asyncio.Event()

    @property
    def address(self) -> str:
        """As a browser takes it."""
        host, port = self._socket.getsockname()[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def run(self) -> None:
        """Answer until it is stopped. What opening the model, or its engine, raises; RunError."""
        asyncio.run(self._main())

    def stop(self) -> None:
        """Take no more requests and end with the last one; asked again, end at once."""
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed: it has ended
                self._loop.call_soon_threadsafe(self._stopped)

    async def _main(self) -> None:
        self._loop, limits = asyncio.get_running_loop(), self.options.limits
        self._stop, self._stop_now = asyncio.Event(), asyncio.Event()
        metrics = ServerMetrics(self.name)
        engine = EngineThread(self._open, self._engine_options, metrics)
        service = self.service = Service(engine, Admission(limits), metrics, self.options, self._write)
        server = _Uvicorn(self._config(service))
        with self._signals():
            serving = asyncio.create_task(server.serve(sockets=[self._socket]))
            engine.start()
            try:
                await self._serve(service, serving)
            finally:
                server.should_exit = True
                await serving
                if service.reader is not None:
                    service.reader.close()
                engine.stop(LAST_SECONDS)
        if engine.failure is not None and engine.engine is None:
            raise engine.failure

    async def _serve(self, service: Service, serving: "asyncio.Task[None]") -> None:
        """Until the model cannot be opened, or the server is stopped and has drained."""
        await _first(service.engine.settled.wait(), self._stop.wait(), serving)
        if service.engine.state == "ready" and service.engine.hosted is not None:
            tokenizer = service.engine.hosted.tokenizer
            if tokenizer is not None:
                service.reader = PromptReader(tokenizer, self.options.limits.prompt_seconds)
                await service.reader.start()
            if self._on_ready is not None:
                self._on_ready(self)
            await _first(self._stop.wait(), serving)
        if self._stop.is_set():
            await self._drain(service)

    async def _drain(self, service: Service) -> None:
        admission = service.admission
        admission.closed = True
        await _first(self._stop_now.wait(), _idle(admission), asyncio.sleep(self.options.limits.drain_seconds))
        admission.abort()
        await _first(_idle(admission), asyncio.sleep(LAST_SECONDS))

    def _stopped(self) -> None:
        (self._stop_now if self._stop.is_set() else self._stop).set()

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Inside, SIGTERM and Ctrl-C stop the server. Only in the main thread, where Python has signals."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        for one in SIGNALS:
            loop.add_signal_handler(one, self._signalled, one)
        try:
            yield
        finally:
            for one in SIGNALS:
                loop.remove_signal_handler(one)

    def _signalled(self, number: int) -> None:
        self.interrupted = self.interrupted or number == signal.SIGINT
        self._stopped()

    def _config(self, service: Service) -> uvicorn.Config:
        limits = self.options.limits
        return uvicorn.Config(
            application(service, self.options),
            http=guarded(limits.read_seconds, limits.stall_seconds),
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


def _listening(options: ServerOptions) -> socket.socket:
    """ArgumentError: the address is taken, or is not this machine's."""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((options.host, options.port))
        found.listen(1024)
        found.setblocking(False)
    except OSError as error:
        found.close()
        if error.errno == errno.EADDRINUSE:
            raise ArgumentError(
                f"port={options.port} of {options.host} is taken: stop who has it, or take another one"
            ) from None
        raise ArgumentError(f"host={options.host} port={options.port}: {error.strerror or error}") from None
    return found


async def _idle(admission: Admission) -> None:
    while not admission.idle:
        await asyncio.sleep(0.02)


async def _first(*waits: Awaitable[object]) -> None:
    """Until one of them is done; the others are given up, but tasks that were given go on."""
    own = [asyncio.ensure_future(one) for one in waits]
    try:
        await asyncio.wait(own, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for one, given in zip(own, waits, strict=True):
            if one is not given:
                one.cancel()
