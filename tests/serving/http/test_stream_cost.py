"""Cost of a streamed token, counted: messages, bytes and calls of Python functions in both processes."""

import asyncio
import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from benchmarks.serve_http import TokenSource, null_model
from meshwright.data.tokens.tokenizer import Tokenizer
from meshwright.serving.engine import step_loop
from meshwright.serving.engine.answers.request_options import RequestOptions
from meshwright.serving.engine.engine_options import EngineOptions
from meshwright.serving.http.channel import (
    AddedPrompt,
    Channel,
    FrameKind,
    FrameReader,
    ModelCard,
    StepNews,
    encode_frame,
)
from meshwright.serving.http.engine_thread import EngineThread
from meshwright.serving.http.front.answer_documents import AnswerDocument, ChatShape, CompletionShape
from meshwright.serving.http.front.event_stream import StreamedConnection, stream_answers
from meshwright.serving.http.request.answering import Answering
from meshwright.serving.http.request.engine_link import EngineLink, ServerMetrics
from meshwright.serving.http.request.engine_task import EngineTask

STREAMS = 64
ENGINE_CALLS = 0.5
"""Calls of Python functions per token in the engine's process, without those of the engine's step."""
FRONT_CALLS = 8
"""Calls per token of a stream in the HTTP process, from the message to the socket."""
BYTES = 12
"""Bytes per token in the message of a step."""


def calls(function: Callable[[], Any]) -> int:
    """Count the calls of Python functions while it runs, including its own."""
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(before)
    return count


class Sent:
    """Takes the place of a channel, and of a transport."""

    def __init__(self) -> None:
        self.frames: list[tuple[FrameKind, list[bytes]]] = []

    def send(self, kind: FrameKind, parts: list[bytes] = []) -> None:  # noqa: B006  # as Channel.send
        self.frames.append((kind, list(parts)))

    def write(self, data: bytes) -> None:
        self.frames += FrameReader().feed(data)

    def is_closing(self) -> bool:
        return False


def test_the_engines_process() -> None:
    """The engine sends one message per step, whatever the number of requests."""
    hosted, sent = null_model(0.0, 0.0), Sent()
    assert hosted.tokenizer is not None
    options = EngineOptions(cache_bytes=2**24, most_sequences=STREAMS, most_tokens=4096, packed=False, compiled=False)
    engine, channel = hosted.engine(options), sent
    thread = EngineThread(lambda: hosted, options, channel)  # type: ignore[arg-type]
    with patch.object(step_loop, "draw", TokenSource(hosted.tokenizer).draw):
        news = StepNews()
        for number in range(STREAMS):
            added = AddedPrompt(task=number, first_answer=number, prompt=[5], options=RequestOptions(ignore_end=True))
            thread._add(engine, AddedPrompt.decode(added.encode()), news)
        for _ in range(3):
            thread._step(engine, news)
            thread._send(engine, news)
            news = StepNews()
        assert len(sent.frames) == 3
        grown = engine.step()
        assert len(grown) == STREAMS
    with patch.object(engine, "step", lambda: grown):
        made = calls(lambda: (thread._step(engine, news), thread._send(engine, news)))
    assert len(sent.frames) == 4 and made / STREAMS <= ENGINE_CALLS, made
    kind, parts = sent.frames[-1]
    assert len(encode_frame(kind, parts)) / STREAMS <= BYTES
    assert sorted(StepNews.decode(parts).answers) == list(range(STREAMS))


def test_numbers_of_answers_begin_anew() -> None:
    """Messages hold them in 32 bits. Answers that still grow keep theirs."""
    link: Any = EngineLink(ServerMetrics("small"), lambda: None)
    assert [link._free_numbers(count) for count in (1, 3, 2)] == [0, 1, 4]
    link._number, link._growing, link._tasks = 2**32 - 2, {0: None, 3: None}, {2: None}
    assert [link._free_numbers(count) for count in (2, 1, 2)] == [2**32 - 2, 1, 4]


@pytest.mark.parametrize("chat", [True, False])
def test_the_http_process(chat: bool) -> None:
    """Each stream is written once per step, and receives what the complete document has."""
    asyncio.run(_front(chat))


async def _front(chat: bool) -> None:
    tokenizer, sent = Tokenizer.shipped(), Sent()
    link = EngineLink(ServerMetrics("small"), lambda: None)
    link.connection_made(asyncio.Transport())
    link._transport = sent  # type: ignore[assignment]
    card = ModelCard(
        name="small", tokenizer=tokenizer, end_ids=(), created=0, longest=512, most_sequences=STREAMS, adapters=()
    )
    link.data_received(encode_frame(FrameKind.MODEL, [card.encode()]))
    drawn = TokenSource(tokenizer)._tokens
    with ExitStack() as streams:
        written_to = [_stream(streams, link, tokenizer, chat) for _ in range(STREAMS)]
        numbers = [AddedPrompt.decode(parts).first_answer for kind, parts in sent.frames if kind is FrameKind.ADD]
        assert len(numbers) == STREAMS

        def step(index: int) -> bytes:
            news = StepNews(at=index * 0.004 + 1, answers=numbers, tokens=drawn[index : index + STREAMS])
            return encode_frame(FrameKind.STEP, news.encode())

        for index in range(1, 4):
            link.data_received(step(index))
        before = [len(pieces) for pieces in written_to]
        frame = step(4)
        made = calls(lambda: link.data_received(frame))
        assert made / STREAMS <= FRONT_CALLS, made
        assert [len(pieces) for pieces in written_to] == [count + 1 for count in before], "one write for each client"
        link.data_received(step(5) + step(6))
        assert [len(pieces) for pieces in written_to] == [count + 2 for count in before], "what has come goes at once"
        for index, pieces in enumerate(written_to):
            tokens = [drawn[step_place + index] for step_place in range(1, 7)]
            assert _text(pieces, chat) == tokenizer.decode(tokens)


def _stream(streams: ExitStack, link: EngineLink, tokenizer: Tokenizer, chat: bool) -> list[bytes]:
    """Record what is written to one client from now on."""
    pieces = list[bytes]()
    transport = SimpleNamespace(write=pieces.append, is_closing=lambda: False)
    connection: Any = StreamedConnection.__new__(StreamedConnection)
    connection.transport, connection.scope = transport, {"http_version": "1.1"}
    task = EngineTask(
        prompt=[5], options=RequestOptions(ignore_end=True), tokenizer=tokenizer, end_ids=frozenset()
    )  # fmt: skip
    shape = ChatShape(tokenizer, None) if chat else CompletionShape(tokenizer, None, (), 1)
    document = AnswerDocument(shape, "small", best=1, include_usage=False, ids=False, logprobs=False)
    answering = Answering(link, [task], 60)
    streams.enter_context(answering.run_tasks())
    streams.enter_context(stream_answers(answering, document, connection))
    return pieces


def _text(pieces: list[bytes], chat: bool) -> str:
    text = ""
    for piece in pieces:
        length, _, rest = piece.partition(b"\r\n")
        assert len(rest) == int(length, 16) + 2 and rest.endswith(b"\n\n\r\n")
        for event in rest.decode().strip().split("\n\n"):
            (choice,) = json.loads(event.removeprefix("data: "))["choices"]
            text += choice["delta"].get("content", "") if chat else choice["text"]
    return text


def test_frames_are_cut_anywhere() -> None:
    """A socket gives what it has."""
    frames = [(FrameKind.STEP, [b"", b"abc" * 50, b"\0"]), (FrameKind.STOP, []), (FrameKind.SCORES, [b"x"])]
    content = b"".join(encode_frame(kind, parts) for kind, parts in frames)
    for size in (1, 2, 5, 7, 100, len(content)):
        reader = FrameReader()
        cut = [frame for begin in range(0, len(content), size) for frame in reader.feed(content[begin : begin + size])]
        assert [tuple(frame) for frame in cut] == frames


def test_a_channel_whose_other_end_is_gone_says_nothing() -> None:
    import socket

    here, there = socket.socketpair()
    channel = Channel(here)
    there.close()
    for _ in range(3):
        channel.send(FrameKind.STEP, [b"x" * 100])
    assert list(channel.frames()) == []
    channel.close()
    channel.close()


def test_messages_keep_what_they_are_told() -> None:
    options = RequestOptions(
        max_new_tokens=7, temperature=0.5, logit_bias={3: -1.5, 9: 2.0}, stop_ids=(4, 5), n=2, seed=2**62,
        json_schema={"type": "object"}, logprobs=3, priority=-2, adapter="sql", salt="a\0b\u00e9", early_stopping=True,
    )  # fmt: skip
    added = AddedPrompt(
        task=3, first_answer=2**32 - 1, prompt=list(range(100_000)), options=options, with_logprobs=True, scored=5
    )
    assert AddedPrompt.decode(added.encode()) == added
    bound = replace(added, options=RequestOptions(regex="a"))
    assert AddedPrompt.decode(bound.encode()) == bound
    news = StepNews(
        at=1.5, answers=[1, 1, 2], tokens=[7, 8, 9], scored=[0, 2], logprobs=[-0.5, float("-inf")],
        top=[[(1, -0.25), (2, -1.75)], []], started=[1], cached=[(1, 16)], ended=[(2, "stop")],
        refused=[(5, "request", "no")],
    )  # fmt: skip
    told = StepNews.decode(news.encode())
    assert json.dumps(told.rare) == json.dumps(news.rare)
    for name in ("at", "figures", "answers", "tokens", "scored", "logprobs", "top"):
        assert getattr(told, name) == getattr(news, name), name
