"""Answers over a connection, as events while they grow or complete, and clients that leave or do nothing.

uvicorn waits without limit for headers, for the rest of a body that nobody reads, and for a peer that reads nothing of
the answer. Here a connection is cut if two checks in a row find no request, or blocked writing all the time between.

A stream is written past ASGI, without a task that wakes for each token: an application finds the connection in the
scope's state, under CONNECTION.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from meshwright.serving.http.channel import ApiError
from meshwright.serving.http.front.answer_documents import AnswerDocument, error_event
from meshwright.serving.http.request.answering import Answering, ClientGone

WRITE_BUFFER = 32_768
"""Bytes that wait in this process for a peer before its answer waits too."""
CONNECTION = "connection"


class StreamedConnection(H11Protocol):
    """Connection to which an application may write a response's body piece by piece."""

    on_writable: Callable[[], None] | None = None
    """Called when a slow peer reads again."""
    paused = False
    """True if the peer reads less than is written, or is gone."""

    def __init__(self, config: Any, server_state: Any, app_state: dict[str, Any], _loop: Any = None) -> None:
        super().__init__(config, server_state, {**app_state, CONNECTION: self}, _loop)

    def write_piece(self, piece: bytes) -> None:
        """Write a part of the body of a started response without a length (RFC 9112, section 7.1)."""
        if self.scope["http_version"] < "1.1":
            self.transport.write(piece)
        else:
            self.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))

    def connection_lost(self, exc: Exception | None) -> None:
        """Pause: the peer is gone."""
        self.paused = True
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Pause: the peer reads less than is written."""
        self.paused = True
        super().pause_writing()

    def resume_writing(self) -> None:
        """Resume: the peer has read most of it."""
        self.paused = False
        super().resume_writing()
        if self.on_writable is not None:
            self.on_writable()


def guarded_connection_class(idle_s: float, stall_s: float) -> type[H11Protocol]:
    """Return the class of connections. Limits are `idle_s` without a request and `stall_s` with blocked writing."""

    class GuardedConnection(StreamedConnection):
        """Connection with checks."""

        _idle_seen = _stall_seen = False
        _cycle_seen: RequestResponseCycle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as its base
            """Start the checks."""
            super().connection_made(transport)
            # A small buffer: text that waits here could still be merged into one longer event.
            transport.set_write_buffer_limits(high=WRITE_BUFFER)
            looks = (idle_s, self._look_idle), (stall_s, self._look_stalled)
            self._watches = [self.loop.call_later(seconds, look) for seconds, look in looks]

        def connection_lost(self, exc: Exception | None) -> None:
            """End the checks."""
            for watch in self._watches:
                watch.cancel()
            super().connection_lost(exc)

        def resume_writing(self) -> None:
            """Resume: the peer has read most of it."""
            self._stall_seen = False
            super().resume_writing()

        def _look_idle(self) -> None:
            # Idle now, idle at the last check, and no request in between.
            idle = self.cycle is None or self.cycle.response_complete
            if idle and self._idle_seen and self.cycle is self._cycle_seen:
                self.transport.abort()
                return
            self._idle_seen, self._cycle_seen = idle, self.cycle
            self._watches[0] = self.loop.call_later(idle_s, self._look_idle)

        def _look_stalled(self) -> None:
            # A closing connection also waits for its peer to read the rest.
            held = self.paused or (self.transport.is_closing() and self.transport.get_write_buffer_size() > 0)
            if held and self._stall_seen:
                self.transport.abort()
                return
            self._stall_seen = held
            self._watches[1] = self.loop.call_later(stall_s, self._look_stalled)

    return GuardedConnection


HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]


@contextmanager
def watch_client(answering: Answering, receive: Receive) -> Iterator[None]:
    """End the answers at once when the client leaves, whatever is being waited for inside."""
    watch = asyncio.ensure_future(_wait_for_disconnect(receive))
    # Cancelled = the answer was complete first.
    watch.add_done_callback(lambda done: None if done.cancelled() else answering.fail(ClientGone()))
    try:
        yield
    finally:
        watch.cancel()


async def wait_for_all(answering: Answering) -> None:
    """Wait until all answers have ended. Raises ApiError, ClientGone."""
    answering.on_growth = lambda: None  # complete answers are read when they have ended
    while True:  # an answer that ended before this call may have failed
        await answering.wait_for_news()
        if answering.ended:
            return


async def send_events(answering: Answering, document: AnswerDocument, scope: Scope, send: Send) -> ApiError | None:
    """Answer with a stream, and return the error that ended it early.

    Raises ApiError when the error comes before the first event, and ClientGone.

    Between the first event and the last ones, answers are written whenever they grow, without a task that wakes for it.
    A slow peer gets nothing until it has read what it has: then fewer and longer events.
    """
    # Errors before the first event can still have an HTTP status, so the response starts only with one.
    piece = b""
    while not piece:
        await answering.wait_for_news()
        if answering.ended:
            break
        piece = document.events(answering)
    await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
    failure: ApiError | None = None
    try:
        if piece:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        if not answering.ended:
            with stream_answers(answering, document, scope["state"][CONNECTION]):
                while not answering.ended:
                    await answering.wait_for_news()
        answering.check()
        last = [document.events(answering), *document.last_events(answering)]
    except ApiError as error:
        failure, last = error, [error_event(error)]
    await send({"type": "http.response.body", "body": b"".join(last), "more_body": False})
    return failure


@contextmanager
def stream_answers(answering: Answering, document: AnswerDocument, connection: StreamedConnection) -> Iterator[None]:
    """Write answers as they grow, inside."""

    def write() -> None:
        if not connection.paused:
            piece = document.events(answering)
            if piece:
                connection.write_piece(piece)

    answering.on_growth = connection.on_writable = write
    # What grew between the first event and now.
    write()
    try:
        yield
    finally:
        answering.on_growth = connection.on_writable = None


async def _wait_for_disconnect(receive: Receive) -> None:
    with suppress(OSError):
        while (await receive())["type"] != "http.disconnect":
            continue


def single_header(scope: Scope, name: bytes) -> bytes | None:
    """Return the one header of a name. None = there is none, or several that differ."""
    headers = {content for key, content in scope["headers"] if key == name}
    return headers.pop() if len(headers) == 1 else None
