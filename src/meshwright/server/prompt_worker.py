"""The process that makes prompts: reads frames of text or conversations, answers with token ids.

A chat template is a program that came with a model, and a tokenizer's pattern may take long on text made for it. Both
run here, with bounded memory, and the parent ends this process when it takes too long. It needs no torch.
"""

import contextlib
import json
import os
import signal
import sys
from array import array
from typing import IO

from meshwright.data.chat_prompt import chat_prompt, template_of
from meshwright.data.tokenizer import Tokenizer
from meshwright.data.worker import read_frame, write_frame
from meshwright.spec.errors import DataError

MOST_BYTES = 2**32
"""Of memory."""


READY = b"ready"


def serve(source: IO[bytes] | None = None, sink: IO[bytes] | None = None) -> None:
    """Answer until the source ends.

    The first frame is a tokenizer's parts as JSON, and READY answers it. A request is JSON: a text, or {messages,
    tools, begun, settings}; its answer is (error, ids as unsigned ints), where an empty error means success."""
    for ignored in (signal.SIGINT, signal.SIGTERM):  # are the parent's to handle
        signal.signal(ignored, signal.SIG_IGN)
    source, sink = source or sys.stdin.buffer, sink or sys.stdout.buffer
    setup = read_frame(source)
    if setup is None:
        return
    _bound_memory()
    tokenizer = Tokenizer(**json.loads(setup[0]))
    prompt_ids(tokenizer, b'"a"')
    write_frame(sink, [READY])
    while (request := read_frame(source)) is not None:
        try:
            answer = [b"", array("I", prompt_ids(tokenizer, request[0])).tobytes()]
        except Exception as error:
            answer = [
                str(error).encode() if isinstance(error, DataError) else f"{type(error).__name__}: {error}".encode()
            ]
        try:
            write_frame(sink, answer)
        except BrokenPipeError:  # the parent is gone; an ordinary exit would complain about the unwritten rest
            os._exit(1)


def prompt_ids(tokenizer: Tokenizer, request: bytes) -> list[int]:
    """Of a request as JSON. DataError where the chat template fails."""
    asked = json.loads(request)
    if isinstance(asked, str):
        return tokenizer.begin(asked)
    template, names = template_of(tokenizer), ("messages", "tools", "begun", "settings")
    return chat_prompt(tokenizer, template, *(asked[name] for name in names))


def _bound_memory() -> None:
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
