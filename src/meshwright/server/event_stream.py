"""Answers over a connection: as events while they grow, or whole; and what happens when the client leaves."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress

from starlette.types import Receive, Scope, Send

from meshwright.server.answer_document import AnswerDocument, error_event
from meshwright.server.answering import Answering, ClientGone
from meshwright.server.api_error import ApiError

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
    async for _ in answering.grown():
        pass


async def send_events(answering: Answering, document: AnswerDocument, send: Send) -> ApiError | None:
    """Answer with a stream, and give what ended it early. ApiError where that comes before its first event; ClientGone.

    The connection takes a piece when it has sent enough of those before: a slow reader gets fewer and longer ones."""
    started, failure = False, None
    try:
        async for piece in _pieces(answering, document):
            if not started:
                await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
                started = True
            await send({"type": "http.response.body", "body": piece, "more_body": True})
    except ApiError as error:
        if not started:
            raise
        failure = error
        await send({"type": "http.response.body", "body": error_event(error), "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})
    return failure


async def _pieces(answering: Answering, document: AnswerDocument) -> AsyncIterator[bytes]:
    async for _ in answering.grown():
        piece = b"".join(document.events(answering))
        if piece:
            yield piece
    yield b"".join(document.last_events(answering))


async def _disconnected(receive: Receive) -> None:
    with suppress(OSError):
        while (await receive())["type"] != "http.disconnect":
            continue


def header_of(scope: Scope, name: bytes) -> bytes | None:
    """The one header of a name; None = there is none, or several that differ."""
    found = {value for key, value in scope["headers"] if key == name}
    return found.pop() if len(found) == 1 else None
