"""Frames between the engine's process and the HTTP process over a socket pair: numbers and JSON, never objects."""

import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from enum import IntEnum, auto
from typing import NamedTuple, final

_HEAD = struct.Struct("<IBB")
RECEIVED = 2**18
"""Bytes read at once."""


class FrameKind(IntEnum):
    """Kinds of frames. Those up to STOP come from the engine's process, the others from the HTTP process."""

    SETUP = auto()
    """Settings of the server: `engine_messages.encode_setup`."""
    MODEL = auto()
    """Model is open: a ModelCard."""
    FAILED = auto()
    """Model cannot be opened, or the engine has failed."""
    BROKEN = auto()
    """Rank of the model is gone."""
    STEP = auto()
    """News of one step: StepNews."""
    SCORES = auto()
    """Scores of a prompt, after its task's number."""
    CHANGED = auto()
    """Result of loading or unloading an adapter: AdapterReply."""
    STOP = auto()
    """Take no more requests and end after the last one. A second one ends them at once."""
    READY = auto()
    """First request may come."""
    ADD = auto()
    """Prompt to answer: AddedPrompt."""
    CANCEL = auto()
    """Answers that are no longer needed: CancelledAnswers."""
    ADAPTER = auto()
    """Load or unload an adapter: AdapterCall."""
    ENDED = auto()
    """All requests have ended, and no other frame follows."""


class Frame(NamedTuple):
    """Kind and parts of one frame."""

    kind: FrameKind
    parts: list[bytes]


def encode_frame(kind: FrameKind, parts: Sequence[bytes]) -> bytes:
    """Encode a frame: number of bytes after the head, kind, number of parts, the length of each, the parts."""
    count = len(parts)
    lengths = struct.pack(f"<{count}I", *map(len, parts))
    return b"".join((_HEAD.pack(len(lengths) + sum(map(len, parts)), kind, count), lengths, *parts))


@final
class FrameReader:
    """Splitter of received bytes into frames."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, received: bytes) -> Iterator[Frame]:
        """Yield the frames that are now complete."""
        # A frame may arrive in pieces: the incomplete end waits for the next bytes.
        content = self._rest + received if self._rest else received
        begin, end = 0, len(content)
        while end - begin >= _HEAD.size:
            size, kind, count = _HEAD.unpack_from(content, begin)
            body = begin + _HEAD.size
            if end - body < size:
                break
            offset, parts = body + 4 * count, list[bytes]()
            for length in struct.unpack_from(f"<{count}I", content, body):
                parts.append(content[offset : offset + length])
                offset += length
            begin = body + size
            yield Frame(FrameKind(kind), parts)
        self._rest = content[begin:]


def receive_frame(end: socket.socket) -> Frame | None:
    """Return the next frame and read no byte beyond it. None = the other process is gone."""
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
    """End of the engine's process. Any thread may send; one receives."""

    def __init__(self, end: socket.socket) -> None:
        self._socket, self._lock = end, threading.Lock()
        self.sends = 0
        """Frames sent so far."""

    def send(self, kind: FrameKind, parts: Sequence[bytes] = (), *, wait_s: float = -1) -> bool:
        """Send a frame. Blocks while the other process is some hundred steps behind.

        If the other process is gone, nothing happens, and `frames` ends. Returns False when another thread has blocked
        this one for `wait_s` seconds. -1 = no limit.
        """
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
        """Yield the received frames until the other process is gone."""
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
        """Close it for both sides, even while another thread sends or receives."""
        with suppress(OSError):  # the other side closed it first
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
