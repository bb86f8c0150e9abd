"""Server as its user sees it: an address, signals, and the order in which things end.

This process runs the engine in a thread; another one runs HTTP (front.py). If one of the two ends, so does the other.
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

from meshwright.serving.engine.engine_options import EngineOptions
from meshwright.serving.engine.serving_engine import ServingEngine
from meshwright.serving.http.channel import AdapterCall, AddedPrompt, CancelledAnswers, Channel, FrameKind, encode_setup
from meshwright.serving.http.engine_thread import EngineThread, OpenModel, answer_adapter_call
from meshwright.serving.http.server_options import ServerOptions
from meshwright.spec.errors import RunError

SIGNALS = (signal.SIGTERM, signal.SIGINT)
LAST_SECONDS = 3.0
"""Time for the engine to end its step, and for the HTTP process to end after its last frame."""
LOOK_SECONDS = 0.25
"""Time between checks for a lost rank of the model."""
BUFFER_BYTES = 2**22
"""Buffer of the channel, where the system allows it: steps that the HTTP process has not read yet."""
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from meshwright.serving.http.front.front import main; main(int(sys.argv[2]), int(sys.argv[3]))"
)
Event = Literal["ready", "stop", "ended", "lost"]


@final
class HttpServer:
    """Model behind one address. `run` it; any thread may call `stop`."""

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
        """Open the address. Raises ArgumentError when it is not available.

        Args:
            name: Name of the model in metrics.
            on_ready: Called when the first request may come.
            log: Receives a line per request. None = stderr.
        """
        self.options = options
        self.interrupted = False
        """True if Ctrl-C ended it."""
        self.name = name
        self.front: subprocess.Popen[bytes] | None = None
        """HTTP process."""
        self.channel: Channel | None = None
        self._open, self._engine_options = open_model, engine
        self._on_ready, self._log = on_ready, log
        self._listener = options.listener()
        host, port = self._listener.getsockname()[:2]
        self.address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        """Address for a browser."""
        self._thread: EngineThread | None = None
        self._events: SimpleQueue[Event] = SimpleQueue()

    @property
    def engine(self) -> ServingEngine | None:
        """Engine, once it exists, for inspection. Only its own thread may call it."""
        return None if self._thread is None else self._thread.engine

    def run(self) -> None:
        """Answer until stopped. Raises as opening does, and RunError when the HTTP process has ended."""
        with self._signals():
            front, channel = self._start_front()
            thread = self._thread = EngineThread(self._open, self._engine_options, channel)
            threading.Thread(
                target=self._receive_frames, args=(channel, thread), name="meshwright-http", daemon=True
            ).start()
            thread.start()
            try:
                lost = self._wait_for_end(channel, thread)
            finally:
                self._shut_down(front, channel, thread)
        if thread.failure is not None and thread.engine is None:
            raise thread.failure
        if lost:
            raise RunError(
                f"the HTTP process has ended with {_describe_status(front.returncode)}: start the server again"
            )

    def stop(self) -> None:
        """Stop: take no more requests and end after the last one. A second call ends at once."""
        self._events.put("stop")

    def _start_front(self) -> tuple[subprocess.Popen[bytes], Channel]:
        """Start the HTTP process with signals blocked, since a signal reaches a whole group of processes."""
        own_end, front_end = socket.socketpair()
        # Steps must not wait for a busy HTTP process, so several hundred may be under way.
        for end in (own_end, front_end):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        descriptors = front_end.fileno(), self._listener.fileno()
        command = [sys.executable, "-P", "-c", _START, json.dumps([*map(str, sys.path)]), *map(str, descriptors)]
        # The mask is inherited, so the child cannot be hit before it handles signals itself.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            front = subprocess.Popen(command, pass_fds=descriptors, stdin=subprocess.DEVNULL, stderr=self._log)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        # Only the HTTP process holds these now, so this process sees when it ends.
        front_end.close()
        self._listener.close()
        channel = self.channel = Channel(own_end)
        self.front = front
        channel.send(FrameKind.SETUP, encode_setup(self.name, self.options))
        return front, channel

    def _wait_for_end(self, channel: Channel, thread: EngineThread) -> bool:
        """Wait until the HTTP process has ended. Returns True if nobody asked it to."""
        has_reported_broken = False
        until = float("inf")
        while monotonic() < until:
            ranks = None if thread.hosted is None else thread.hosted.ranks
            if ranks is not None and ranks.broken and not has_reported_broken:
                has_reported_broken = True
                channel.send(FrameKind.BROKEN)
            try:
                # An idle server without ranks sleeps until an event comes.
                polls = thread.engine is None or ranks or until < float("inf")
                event = self._events.get(timeout=LOOK_SECONDS if polls else None)
            except Empty:
                continue
            if event == "stop":
                if not channel.send(FrameKind.STOP, wait_s=LAST_SECONDS):
                    return True  # it no longer reads, so it is killed
                # A hanging process is killed when its time is over, or at the second request to stop.
                is_draining = until < float("inf")
                until = monotonic() + (0 if is_draining else self.options.limits.drain_seconds) + 2 * LAST_SECONDS
            elif event == "ready" and self._on_ready is not None:
                self._on_ready(self)
            elif event in ("ended", "lost"):
                return event == "lost"
        return True

    def _receive_frames(self, channel: Channel, thread: EngineThread) -> None:
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

    def _shut_down(self, front: subprocess.Popen[bytes], channel: Channel, thread: EngineThread) -> None:
        # The HTTP process ends when its channel closes. The engine ends last, since it may be in a step.
        channel.close()
        try:
            front.wait(LAST_SECONDS)
        except subprocess.TimeoutExpired:
            front.kill()
            front.wait()
        thread.stop(LAST_SECONDS)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Let SIGTERM and Ctrl-C stop the server inside. Only in the main thread, which handles signals in Python."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self.interrupted = self.interrupted or number == signal.SIGINT
        self.stop()


def _describe_status(status: int) -> str:
    if status >= 0:
        return f"status {status}"
    with suppress(ValueError):
        return signal.Signals(-status).name
    return f"signal {-status}"
