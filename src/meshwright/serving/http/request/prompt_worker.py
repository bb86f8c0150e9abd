"""Process that builds prompts: reads frames of text or conversations, answers with token ids.

A chat template is a program that came with a model, and a tokenizer's pattern may be slow on hostile text. Both run
here, with bounded memory, and the parent kills this process when it takes too long. It needs no torch.
"""

import contextlib
import json
import os
import signal
import sys
from array import array
from typing import IO

from meshwright.data.chat.prompt import chat_prompt, template_of
from meshwright.data.corpus.worker import read_frame, write_frame
from meshwright.data.tokens.tokenizer import Tokenizer
from meshwright.spec.errors import DataError

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

        resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    tokenizer = Tokenizer(**json.loads(setup[0]))
    # One text on trial, so that the first prompt finds everything loaded.
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
    """Return the ids of a request in JSON. Raises DataError when the chat template fails."""
    prompt = json.loads(request)
    if isinstance(prompt, str):
        return tokenizer.begin(prompt)
    template, names = template_of(tokenizer), ("messages", "tools", "answer_start", "settings")
    return chat_prompt(tokenizer, template, *(prompt[name] for name in names))
