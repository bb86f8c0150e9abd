"""Encoding process: reads frames of text from stdin and answers with frames of token ids on stdout.

It imports neither numpy nor the caller's main module, so it starts in a tenth of a second and stays small. A frame is a
count, that many lengths, and the parts themselves.
"""

import contextlib
import json
import os
import signal
import struct
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import IO

from meshwright.data.tokens import word_encoder
from meshwright.spec.errors import DataError

_MOST_BYTES = 2**32


def write_frame(stream: IO[bytes], parts: Sequence[bytes]) -> None:
    """Write one frame and flush it."""
    stream.write(struct.pack(f"<I{len(parts)}Q", len(parts), *map(len, parts)))
    stream.writelines(parts)
    stream.flush()


def read_frame(stream: IO[bytes]) -> list[bytes] | None:
    """Return the next frame. None = the stream ended, perhaps within a frame."""
    head = stream.read(4)
    if len(head) < 4:
        return None
    (count,) = struct.unpack("<I", head)
    lengths = stream.read(8 * count)
    if len(lengths) < 8 * count:
        return None
    parts = [stream.read(length) for length in struct.unpack(f"<{count}Q", lengths)]
    return None if sum(map(len, parts)) < sum(struct.unpack(f"<{count}Q", lengths)) else parts


def serve(source: IO[bytes] | None = None, sink: IO[bytes] | None = None) -> None:
    """Answer requests until the source ends.

    The first frame is (tokenizer.json, vocab, settings of samples or nothing). A request is (flags, text, text, ...).
    Its answer is (error, ids, ids, ...), where an empty error means success. The parent handles Ctrl-C.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    source, sink = source or sys.stdin.buffer, sink or sys.stdout.buffer
    setup = read_frame(source)
    if setup is None:
        return
    encode = _encoder(*(part.decode() for part in setup))
    answer_requests(source, sink, lambda request: encode([text.decode() for text in request[1:]], request[0]))


def answer_requests(source: IO[bytes], sink: IO[bytes], answer: Callable[[list[bytes]], Iterable[bytes]]) -> None:
    """Answer frames until the source ends, each with (error, parts of the answer). An empty error means success."""
    while (request := read_frame(source)) is not None:
        try:
            parts = [b"", *answer(request)]
        except Exception as error:
            reason = str(error) if isinstance(error, DataError) else f"{type(error).__name__}: {error}"
            parts = [reason.encode()]
        try:
            write_frame(sink, parts)
        except BrokenPipeError:  # the parent is gone; an ordinary exit would complain about the unwritten rest
            os._exit(1)


def _encoder(tokenizer: str, vocab: str, samples: str) -> word_encoder.Encode:
    """Return an encoder of texts, or of fine-tuning rows, whose templates run here under a memory limit."""
    library = word_encoder.library(tokenizer)
    if not samples:
        return word_encoder.encoder(library, int(vocab))
    from meshwright.data.chat import encoder as sample_encoder

    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, _MOST_BYTES))
    return sample_encoder.row_encoder(library, int(vocab), sample_encoder.SampleSettings(**json.loads(samples)))
