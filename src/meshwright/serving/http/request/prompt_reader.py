"""Conversion of text and conversations to token ids, in processes that are killed when they take too long.

A chat template is a program that came with a model, and a tokenizer's pattern may be slow on hostile text. Both run in
a child with bounded memory: it reads frames of text or conversations, and answers with token ids. It needs no torch.
"""

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import threading
from array import array
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any

from meshwright.data.chat.rendering import chat_prompt, template_of
from meshwright.data.corpus.worker import answer_requests, read_frame, write_frame
from meshwright.data.tokens.tokenizer import Tokenizer
from meshwright.serving.http.channel import ApiError, bad_request

_START = (
    "import json, sys; sys.path[:] = json.loads(sys.stdin.buffer.readline()); "
    "from meshwright.serving.http.request.prompt_reader import serve; serve()"
)
PROCESSES = 2
"""Number of processes. A slow conversation leaves the other one free."""


class PromptReader:
    """Processes for one tokenizer, each with a thread that talks to it. `close` ends them."""

    def __init__(self, tokenizer: Tokenizer, limit_s: float) -> None:
        """Prepare the processes. `limit_s` is the time limit of one prompt."""
        self._setup, self._limit_s = json.dumps(tokenizer.parts).encode(), limit_s
        self._threads = ThreadPoolExecutor(PROCESSES, thread_name_prefix="meshwright-prompt")
        self._local = threading.local()
        self._children = set[subprocess.Popen[bytes]]()

    async def start(self) -> None:
        """Start the first process, so no prompt waits for it. Others start on demand. Raises ApiError."""
        await asyncio.get_running_loop().run_in_executor(self._threads, self._thread_child)

    async def text(self, text: str) -> list[int]:
        """Return the ids of a text to continue. Raises ApiError."""
        return await self._ask(text)

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        answer_start: str = "",
        settings: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the ids of a conversation and the start of its answer. Raises ApiError when the template fails."""
        return await self._ask(
            {
                "messages": list(messages),
                "tools": tools and list(tools),
                "answer_start": answer_start,
                "settings": settings or {},
            }
        )

    def close(self) -> None:
        """End the processes."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for child in list(self._children):
            self._end(child)

    async def _ask(self, request: Any) -> list[int]:
        encoded = json.dumps(request).encode()
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._answer, encoded)

    def _answer(self, request: bytes) -> list[int]:
        child = self._thread_child()
        assert child.stdin is not None and child.stdout is not None
        # Killing the child closes its pipe, which ends the read below.
        timer = threading.Timer(self._limit_s, child.kill)
        answer = None
        timer.start()
        try:
            with contextlib.suppress(BrokenPipeError, ValueError):
                write_frame(child.stdin, [request])
                answer = read_frame(child.stdout)
        finally:
            timer.cancel()
        if answer is None:
            self._end(child)
            raise bad_request(
                f"the prompt took more than {self._limit_s:g} s or too much memory to become tokens: shorten it",
                code="prompt_too_slow",
            )
        error, *ids = answer
        if error:
            raise bad_request(error.decode("utf-8", "replace")[:500], code="prompt_refused")
        return array("I", ids[0]).tolist()

    def _thread_child(self) -> subprocess.Popen[bytes]:
        """Return the child of this thread, started if none is alive."""
        # Each thread has a child of its own, so frames of two prompts cannot mix.
        child: subprocess.Popen[bytes] | None = getattr(self._local, "child", None)
        if child is not None and child.poll() is not None:
            self._end(child)
            child = None
        return child or self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        try:
            child = subprocess.Popen(
                [sys.executable, "-P", "-c", _START], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
        except OSError as error:
            raise ApiError(503, f"no process for prompts: {error.strerror}", code="busy", retry_seconds=1) from None
        self._children.add(child)
        self._local.child = child
        assert child.stdin is not None
        child.stdin.write(json.dumps(sys.path).encode() + b"\n")
        write_frame(child.stdin, [self._setup])
        assert child.stdout is not None
        if read_frame(child.stdout) is None:
            self._end(child)
            raise ApiError(503, "the process for prompts did not start", code="busy", retry_seconds=1)
        return child

    def _end(self, child: subprocess.Popen[bytes]) -> None:
        self._children.discard(child)
        child.kill()
        # Leaving it closes its pipes and waits.
        with contextlib.suppress(OSError), child:
            pass


MOST_BYTES = 2**32
"""Limit on memory."""
READY = b"ready"


def serve(source: IO[bytes] | None = None, sink: IO[bytes] | None = None) -> None:
    """Answer until the source ends.

    The first frame is a tokenizer's parts as JSON, and READY answers it. A request is JSON: a text, or {messages,
    tools, answer_start, settings}. Its answer is (error, ids as unsigned ints), where an empty error means success.
    """
    for ignored in (signal.SIGINT, signal.SIGTERM):  # the parent handles them
        signal.signal(ignored, signal.SIG_IGN)
    source, sink = source or sys.stdin.buffer, sink or sys.stdout.buffer
    setup = read_frame(source)
    if setup is None:
        return
    with contextlib.suppress(ImportError, OSError, ValueError):  # where the system knows no such limit
        import resource

        # Address space, not resident memory: it is the limit that Linux enforces.
        resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    tokenizer = Tokenizer(**json.loads(setup[0]))
    # One text on trial, so that the first prompt finds everything loaded.
    prompt_ids(tokenizer, b'"a"')
    write_frame(sink, [READY])
    answer_requests(source, sink, lambda request: [array("I", prompt_ids(tokenizer, request[0])).tobytes()])


def prompt_ids(tokenizer: Tokenizer, request: bytes) -> list[int]:
    """Return the ids of a request in JSON. Raises DataError when the chat template fails."""
    prompt = json.loads(request)
    if isinstance(prompt, str):
        return tokenizer.begin(prompt)
    template, names = template_of(tokenizer), ("messages", "tools", "answer_start", "settings")
    return chat_prompt(tokenizer, template, *(prompt[name] for name in names))
