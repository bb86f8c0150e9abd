"""Text and conversations to token ids, by processes that are ended when they take too long."""

import asyncio
import contextlib
import json
import subprocess
import sys
import threading
from array import array
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from meshwright.data.tokenizer import Tokenizer
from meshwright.data.worker import read_frame, write_frame
from meshwright.server.api_error import ApiError, refused

_START = (
    "import json, sys; sys.path[:] = json.loads(sys.stdin.buffer.readline()); "
    "from meshwright.server.prompt_worker import serve; serve()"
)
PROCESSES = 2
"""One conversation that takes long leaves the other process to the rest."""


class PromptReader:
    """Processes for one tokenizer, each with a thread that asks it. `close` ends them."""

    def __init__(self, tokenizer: Tokenizer, limit_s: float) -> None:
        """`limit_s`: for one prompt."""
        self._setup, self._limit_s = json.dumps(tokenizer.parts).encode(), limit_s
        self._threads = ThreadPoolExecutor(PROCESSES, thread_name_prefix="meshwright-prompt")
        self._mine = threading.local()
        self._children = set[subprocess.Popen[bytes]]()

    async def start(self) -> None:
        """Start the first process, so that no prompt waits for it; another follows when two come at once. ApiError."""
        await asyncio.get_running_loop().run_in_executor(self._threads, self._own_child)

    async def text(self, text: str) -> list[int]:
        """Ids of a text that is to be gone on with. ApiError."""
        return await self._ask(text)

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        begun: str = "",
        settings: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Ids of a conversation, up to where the model answers. `begun`: what the answer begins with; `settings`: as
        `chat_prompt`. ApiError where the template fails."""
        return await self._ask(
            {"messages": list(messages), "tools": tools and list(tools), "begun": begun, "settings": settings or {}}
        )

    def close(self) -> None:
        """End the processes."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for child in list(self._children):
            self._end(child)

    async def _ask(self, asked: Any) -> list[int]:
        request = json.dumps(asked).encode()
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._answer, request)

    def _answer(self, request: bytes) -> list[int]:
        """Runs in a thread that owns one child."""
        child = self._own_child()
        assert child.stdin is not None and child.stdout is not None
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
            raise refused(
                f"the prompt took more than {self._limit_s:g} s or too much memory to become tokens: shorten it",
                code="prompt_too_slow",
            )
        error, *ids = answer
        if error:
            raise refused(error.decode("utf-8", "replace")[:500], code="prompt_refused")
        return array("I", ids[0]).tolist()

    def _own_child(self) -> "subprocess.Popen[bytes]":
        """Of this thread; started where there is none that lives."""
        child: subprocess.Popen[bytes] | None = getattr(self._mine, "child", None)
        if child is not None and child.poll() is not None:
            self._end(child)
            child = None
        return child or self._start()

    def _start(self) -> "subprocess.Popen[bytes]":
        try:
            child = subprocess.Popen(
                [sys.executable, "-P", "-c", _START], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
        except OSError as error:
            raise ApiError(503, f"no process for prompts: {error.strerror}", code="busy", retry_seconds=1) from None
        self._children.add(child)
        self._mine.child = child
        assert child.stdin is not None
        child.stdin.write(json.dumps(sys.path).encode() + b"\n")
        write_frame(child.stdin, [self._setup])
        assert child.stdout is not None
        if read_frame(child.stdout) is None:
            self._end(child)
            raise ApiError(503, "the process for prompts did not start", code="busy", retry_seconds=1)
        return child

    def _end(self, child: "subprocess.Popen[bytes]") -> None:
        self._children.discard(child)
        child.kill()
        for pipe in (child.stdin, child.stdout):
            with contextlib.suppress(OSError):
                pipe and pipe.close()
        child.wait()
