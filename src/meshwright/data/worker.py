"""The encoding process: reads frames of text from stdin, answers with frames of token ids on stdout.

It imports neither numpy nor the caller's main module, so it starts in a tenth of a second and stays small. A frame is a
count, that many lengths, and the parts themselves.
"""

import os
import signal
import struct
import sys
from collections.abc import Sequence
from typing import IO

from meshwright.data import word_encoder


def write_frame(stream: IO[bytes], parts: Sequence[bytes]) -> None:
    """One frame, flushed."""
    stream.write(struct.pack(f"<I{len(parts)}Q", len(parts), *map(len, parts)))
    stream.writelines(parts)
    stream.flush()


def read_frame(stream: IO[bytes]) -> list[bytes] | None:
    """The next frame; None where the stream ends, also in the middle of one."""
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
    """Answer until the source ends.

    The first frame is (tokenizer.json, vocab). A request is (flags, text, text, ...); its answer is (error, ids,
    ids, ...), where an empty error means success. Ctrl-C is the parent's to handle.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    source, sink = source or sys.stdin.buffer, sink or sys.stdout.buffer
    setup = read_frame(source)
    if setup is None:
        return
    encode = word_encoder.encoder(word_encoder.library(setup[0].decode()), int(setup[1]))
    while (request := read_frame(source)) is not None:
        flags, *texts = request
        try:
            answer = [b"", *encode([text.decode() for text in texts], flags)]
        except Exception as error:
            answer = [f"{type(error).__name__}: {error}".encode()]
        try:
            write_frame(sink, answer)
        except BrokenPipeError:  # the parent is gone; an ordinary exit would complain about the unwritten rest
            os._exit(1)
