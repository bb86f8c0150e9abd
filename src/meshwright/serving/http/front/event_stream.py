"""Answers over a connection, as events while they grow or complete, and the handling of clients that leave."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from starlette.types import Receive, Scope, Send

from meshwright.serving.http.api_error import ApiError
from meshwright.serving.http.front.answer_documents import AnswerDocument, error_event
from meshwright.serving.http.front.guarded_connection import CONNECTION, StreamedConnection
from meshwright.serving.http.request.answering import Answering, ClientGone

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]


@contextmanager
def watch_client(answering: Answering, receive: Receive) -> Iterator[None]:
    """End the answers at once when the client leaves, whatever is being waited for inside."""
    watch = asyncio.ensure_future(_disconnected(receive))
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
    write()
    try:
        yield
    finally:
        answering.on_growth = connection.on_writable = None


async def _disconnected(receive: Receive) -> None:
    with suppress(OSError):
        while (await receive())["type"] != "http.disconnect":
            continue


def single_header(scope: Scope, name: bytes) -> bytes | None:
    """Return the one header of a name. None = there is none, or several that differ."""
    headers = {content for key, content in scope["headers"] if key == name}
    return headers.pop() if len(headers) == 1 else None
