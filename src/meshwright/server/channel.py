"""Frames between the engine's process and the HTTP process, over a pair of sockets: numbers and JSON, never objects."""

import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from enum import IntEnum, auto
from typing import NamedTuple, final

_HEAD = struct.Struct("<IBB")
RECEIVED = 2**18
"""Bytes that are read at once."""


class FrameKind(IntEnum):
    """Kinds of frames. The engine's process sends those up to STOP, the HTTP process the others."""

    SETUP = auto()
    """How the server runs: `engine_messages.encode_setup`."""
    MODEL = auto()
    """The model is open: a ModelCard."""
    FAILED = auto()
    """The model cannot be opened, or the engine has failed."""
    BROKEN = auto()
    """A rank of the model is gone."""
    STEP = auto()
    """News of one step: StepNews."""
    SCORES = auto()
    """A prompt is scored: a task's number, and its scores."""
    CHANGED = auto()
    """An adapter was loaded or unloaded, or not: AdapterReply."""
    STOP = auto()
    """Take no more requests, and end with the last one; a second one ends them at once."""
    READY = auto()
    """The first request may come."""
    ADD = auto()
    """A prompt to be answered: AddedPrompt."""
    CANCEL = auto()
    """Answers that nobody wants any more: CancelledAnswers."""
    ADAPTER = auto()
    """Load or unload an adapter: AdapterCall."""
    ENDED = auto()
    """All requests have ended, and no other word follows."""


class Frame(NamedTuple):
    """A kind, and the parts that it has."""

    kind: FrameKind
    parts: list[bytes]


def encode_frame(kind: FrameKind, parts: Sequence[bytes]) -> bytes:
    """A frame as bytes: their number behind this head, kind, number of parts, the length of each, the parts."""
    count = len(parts)
    lengths = struct.pack(f"<{count}I", *map(len, parts))
    return b"".join((_HEAD.pack(len(lengths) + sum(map(len, parts)), kind, count), lengths, *parts))


@final
class FrameReader:
    """Cuts received bytes into frames."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, received: bytes) -> Iterator[Frame]:
        """Frames that became whole."""
        content = self._rest + received if self._rest else received
        begin, end = 0, len(content)
        while end - begin >= _HEAD.size:
            size, kind, count = _HEAD.unpack_from(content, begin)
            body = begin + _HEAD.size
            if end - body < size:
                break
            place, parts = body + 4 * count, list[bytes]()
            for length in struct.unpack_from(f"<{count}I", content, body):
                parts.append(content[place : place + length])
                place += length
            begin = body + size
            yield Frame(FrameKind(kind), parts)
        self._rest = content[begin:]


def receive_frame(end: socket.socket) -> Frame | None:
    """The next frame and not a byte behind it; None where the other process is gone."""
    head = _received(end, _HEAD.size)
    size, _, _ = _HEAD.unpack(head) if len(head) == _HEAD.size else (0, 0, 0)
    return next(FrameReader().feed(head + _received(end, size)), None)


def _received(end: socket.socket, size: int) -> bytes:
    content = b""
    while len(content) < size and (part := end.recv(size - len(content))):
        content += part
    return content


@final
class Channel:
    """The end of the engine's process. Any thread may send; one receives."""

    def __init__(self, end: socket.socket) -> None:
        self._socket, self._lock = end, threading.Lock()
        self.sends = 0
        """Frames so far."""

    def send(self, kind: FrameKind, parts: Sequence[bytes] = (), *, wait_s: float = -1) -> bool:
        """Send a frame. It waits while the other process is some hundred steps behind; is the other gone, nothing
        happens, and `frames` ends. False: another thread has waited with its frame for all of `wait_s`; -1 = without
        limit."""
        frame = encode_frame(kind, parts)
        if not self._lock.acquire(timeout=wait_s):
            return False
        try:
            with suppress(OSError):
                self._socket.sendall(frame)
                self.sends += 1
        finally:
            self._lock.release()
        return True

    def frames(self) -> Iterator[Frame]:
        """What comes, until the other process is gone."""
        reader = FrameReader()
        while True:
            try:
                received = self._socket.recv(RECEIVED)
            except OSError:
                return
            if not received:
                return
            yield from reader.feed(received)

    def close(self) -> None:
        """End it for both sides, also while another thread sends or receives."""
        with suppress(OSError):  # the other side was first
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
