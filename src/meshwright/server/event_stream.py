"""Answers over a connection: as events while they grow, or whole; and what happens when the client leaves."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from starlette.types import Receive, Scope, Send

from meshwright.server.answer_document import AnswerDocument, error_event
from meshwright.server.answering import Answering, ClientGone
from meshwright.server.api_error import ApiError
from meshwright.server.guarded_connection import CONNECTION, StreamedConnection

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]


@contextmanager
def watched(answering: Answering, receive: Receive) -> Iterator[None]:
    """Inside, a client that leaves ends its answers at once, whatever is being waited for."""
    watch = asyncio.ensure_future(_disconnected(receive))
    watch.add_done_callback(lambda done: None if done.cancelled() else answering.fail(ClientGone()))
    try:
        yield
    finally:
        watch.cancel()


async def whole(answering: Answering) -> None:
    """Until all answers have ended. ApiError, ClientGone."""
    answering.on_growth = _nothing
    while True:  # what has ended before it was asked for may have failed
        await answering.grown()
        if answering.ended:
            return


def _nothing() -> None:
    """Answers that are given whole are read when they have ended."""


async def send_events(answering: Answering, document: AnswerDocument, scope: Scope, send: Send) -> ApiError | None:
    """Answer with a stream, and give what ended it early. ApiError where that comes before its first event; ClientGone.

    Between the first event and the last ones the connection is written to whenever answers grow, without a task that
    wakes for it. A peer that takes less than comes gets nothing until it has taken what it has: then fewer and longer
    events."""
    piece = b""
    while not piece:
        await answering.grown()
        if answering.ended:
            break
        piece = document.events(answering)
    await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
    failure: ApiError | None = None
    try:
        if piece:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        if not answering.ended:
            with written(answering, document, scope["state"][CONNECTION]):
                while not answering.ended:
                    await answering.grown()
        answering.check()
        last = [document.events(answering), *document.last_events(answering)]
    except ApiError as error:
        failure, last = error, [error_event(error)]
    await send({"type": "http.response.body", "body": b"".join(last), "more_body": False})
    return failure


@contextmanager
def written(answering: Answering, document: AnswerDocument, connection: StreamedConnection) -> Iterator[None]:
    """Inside, answers are written as they grow."""

    def write() -> None:
        if not connection.paused:
            piece = document.events(answering)
            if piece:
                connection.write_piece(piece)

    answering.on_growth = connection.on_writable = write
    write()
    try:
        yield
    finally:
        answering.on_growth = connection.on_writable = None


async def _disconnected(receive: Receive) -> None:
    with suppress(OSError):
        while (await receive())["type"] != "http.disconnect":
            continue


def header_of(scope: Scope, name: bytes) -> bytes | None:
    """The one header of a name; None = there is none, or several that differ."""
    found = {value for key, value in scope["headers"] if key == name}
    return found.pop() if len(found) == 1 else None
