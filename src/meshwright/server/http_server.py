"""The server as its user sees it: an address, signals, and the order in which things end.

This process has the engine, in a thread; another one has HTTP (front.py). If one of the two ends, so does the other.
"""

import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from time import monotonic
from types import FrameType
from typing import IO, Literal, final

from meshwright.serve.engine_options import EngineOptions
from meshwright.serve.serving_engine import ServingEngine
from meshwright.server.adapter_folder import answer_adapter_call
from meshwright.server.channel import Channel, FrameKind
from meshwright.server.engine_messages import AdapterCall, AddedPrompt, CancelledAnswers, encode_setup
from meshwright.server.engine_thread import EngineThread
from meshwright.server.hosted_model import OpenModel
from meshwright.server.server_options import ServerOptions
from meshwright.spec.errors import RunError

SIGNALS = (signal.SIGTERM, signal.SIGINT)
LAST_SECONDS = 3.0
"""For the engine to end its step, and for the HTTP process to end behind its last word."""
LOOK_SECONDS = 0.25
"""Between looks whether a rank of the model is gone."""
BUFFER_BYTES = 2**22
"""Of the channel, as far as the system allows: messages of steps that the HTTP process has not read."""
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from meshwright.server.front import main; main(int(sys.argv[2]), int(sys.argv[3]))"
)
Event = Literal["ready", "stop", "ended", "lost"]


@final
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
        log: IO[bytes] | None = None,
    ) -> None:
        """`name`: of the model, for metrics; `on_ready` is called when the first request may come; `log` takes a line
        for each request in place of stderr. ArgumentError where the address cannot be had."""
        self.options = options
        self.interrupted = False
        """It was ended by Ctrl-C."""
        self.name = name
        self.front: subprocess.Popen[bytes] | None = None
        """The process that has HTTP."""
        self.channel: Channel | None = None
        self._open, self._engine_options = open_model, engine
        self._on_ready, self._log = on_ready, log
        self._listener = options.listener()
        host, port = self._listener.getsockname()[:2]
        self.address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        """As a browser takes it."""
        self._thread: EngineThread | None = None
        self._events: SimpleQueue[Event] = SimpleQueue()

    @property
    def engine(self) -> ServingEngine | None:
        """To be looked at, when it is there; only its own thread may call it."""
        return None if self._thread is None else self._thread.engine

    def run(self) -> None:
        """Answer until it is stopped. What opening the model, or its engine, raises; RunError: the HTTP process has
        ended."""
        with self._signals():
            front, channel = self._start()
            thread = self._thread = EngineThread(self._open, self._engine_options, channel)
            threading.Thread(target=self._hear, args=(channel, thread), name="meshwright-http", daemon=True).start()
            thread.start()
            try:
                lost = self._wait(channel, thread)
            finally:
                self._end(front, channel, thread)
        if thread.failure is not None and thread.engine is None:
            raise thread.failure
        if lost:
            raise RunError(f"the HTTP process has ended with {_ending(front.returncode)}: start the server again")

    def stop(self) -> None:
        """Take no more requests and end with the last one; asked again, end at once."""
        self._events.put("stop")

    def _start(self) -> tuple["subprocess.Popen[bytes]", Channel]:
        """Start the HTTP process. It is deaf to signals, which come to a whole group of processes: it ends when this
        process says so, or is gone."""
        here, there = socket.socketpair()
        for end in (here, there):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        descriptors = there.fileno(), self._listener.fileno()
        command = [sys.executable, "-P", "-c", _START, json.dumps([*map(str, sys.path)]), *map(str, descriptors)]
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            front = subprocess.Popen(command, pass_fds=descriptors, stdin=subprocess.DEVNULL, stderr=self._log)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        there.close()
        self._listener.close()
        channel = self.channel = Channel(here)
        self.front = front
        channel.send(FrameKind.SETUP, encode_setup(self.name, self.options))
        return front, channel

    def _wait(self, channel: Channel, thread: EngineThread) -> bool:
        """Until the HTTP process has ended; whether nobody asked it to."""
        broken_told = False
        until = float("inf")
        while monotonic() < until:
            ranks = None if thread.hosted is None else thread.hosted.ranks
            if ranks is not None and ranks.broken and not broken_told:
                broken_told = True
                channel.send(FrameKind.BROKEN)
            try:
                looks = thread.engine is None or ranks or until < float("inf")
                event = self._events.get(timeout=LOOK_SECONDS if looks else None)
            except Empty:
                continue
            if event == "stop":
                if not channel.send(FrameKind.STOP, wait_s=LAST_SECONDS):
                    return True  # it reads nothing any more, and is ended by force
                # A process that stands still keeps no promise: after its time, or asked again, it is ended by force.
                again = until < float("inf")
                until = monotonic() + (0 if again else self.options.limits.drain_seconds) + 2 * LAST_SECONDS
            elif event == "ready" and self._on_ready is not None:
                self._on_ready(self)
            elif event in ("ended", "lost"):
                return event == "lost"
        return True

    def _hear(self, channel: Channel, thread: EngineThread) -> None:
        """Take what the HTTP process says, until it is gone."""
        last: Event = "lost"
        try:
            for kind, parts in channel.frames():
                if kind is FrameKind.ADD:
                    thread.put(AddedPrompt.decode(parts))
                elif kind is FrameKind.CANCEL:
                    thread.put(CancelledAnswers.decode(parts))
                elif kind is FrameKind.ADAPTER:
                    answer_adapter_call(AdapterCall.decode(parts), thread, self.options, channel)
                elif kind is FrameKind.READY:
                    self._events.put("ready")
                elif kind is FrameKind.ENDED:
                    last = "ended"
        finally:
            self._events.put(last)

    def _end(self, front: "subprocess.Popen[bytes]", channel: Channel, thread: EngineThread) -> None:
        channel.close()
        try:
            front.wait(LAST_SECONDS)
        except subprocess.TimeoutExpired:
            front.kill()
            front.wait()
        thread.stop(LAST_SECONDS)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Inside, SIGTERM and Ctrl-C stop the server. Only in the main thread, where Python has signals."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._signalled) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _signalled(self, number: int, _: FrameType | None) -> None:
        self.interrupted = self.interrupted or number == signal.SIGINT
        self.stop()


def _ending(status: int) -> str:
    if status >= 0:
        return f"status {status}"
    with suppress(ValueError):
        return signal.Signals(-status).name
    return f"signal {-status}"
