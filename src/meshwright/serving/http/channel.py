"""Frames between the engine's process and the HTTP process over a socket pair, and the messages in them.

They hold numbers and JSON, never objects: arrays of tokens, JSON otherwise. Errors have the form of OpenAI's interface:
a status, and an object with message, type, param and code.
"""

import json
import socket
import struct
import threading
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass, field, fields
from enum import IntEnum, auto
from pathlib import Path
from typing import Any, NamedTuple, Self, final

from meshwright.data.tokens.tokenizer import Tokenizer
from meshwright.serving.engine.answers.request_options import RequestOptions
from meshwright.serving.http.server_options import ServerLimits, ServerOptions

_HEAD = struct.Struct("<IBB")
READ_BYTES = 2**18
"""Bytes read at once."""
Top = list[tuple[int, float]]
"""Likeliest tokens at one position, and their log-probabilities."""
TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
    504: "timeout_error",
}
"""Error type by status. All others are errors in the request."""


class ApiError(Exception):
    """Error that a client receives instead of an answer."""

    def __init__(
        self, status: int, message: str, *, code: str, param: str | None = None, retry_seconds: int | None = None
    ) -> None:
        """Build the error. `param` is the field at fault, `retry_seconds` the time after which a retry is useful."""
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.retry_seconds = retry_seconds

    @property
    def document(self) -> dict[str, Any]:
        """Body of the answer."""
        kind = TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the answer. Connections close where a body stayed unread: it would be the next request."""
        headers = {"Retry-After": str(self.retry_seconds)} if self.retry_seconds is not None else {}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return headers | ({"Connection": "close"} if self.status in (408, 413, 431) else {})


def bad_request(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """Return the error for an invalid request."""
    return ApiError(400, message, code=code, param=param)


def shutdown_error() -> ApiError:
    """Return the error of a server that takes no more requests or cannot end this one."""
    return ApiError(503, "the server is shutting down: ask another one", code="shutting_down", retry_seconds=5)


def internal_error() -> ApiError:
    """Return the error for a defect of the server. Its traceback is in the log."""
    return ApiError(500, "internal server error: see the log of the server", code="internal_error")


class FrameKind(IntEnum):
    """Kinds of frames. Those up to STOP come from the engine's process, the others from the HTTP process."""

    SETUP = auto()
    """Settings of the server: `encode_setup`."""
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
    head = _receive_bytes(end, _HEAD.size)
    # A closed socket gives a short head, and then no frame.
    size, _, _ = _HEAD.unpack(head) if len(head) == _HEAD.size else (0, 0, 0)
    return next(FrameReader().feed(head + _receive_bytes(end, size)), None)


def _receive_bytes(end: socket.socket, size: int) -> bytes:
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
        # Several threads send: the engine's, the server's, and those that answer adapter calls.
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
                received = self._socket.recv(READ_BYTES)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """Model as requests see it: its name, tokenizer and limits. No weights."""

    name: str
    """Name in requests and `/v1/models`."""
    tokenizer: Tokenizer | None
    """Tokenizer. None = prompts and answers are token ids."""
    end_ids: tuple[int, ...]
    """Tokens that end a text."""
    created: int
    """Seconds since 1970."""
    longest: int
    """Most tokens of prompt and answer without the last."""
    most_sequences: int
    """Answers that are generated at once."""
    sampling: Mapping[str, float] = field(default_factory=dict)
    """Defaults of requests: `sampling_defaults`."""
    adapters: tuple[str, ...]
    """Adapters at the start of the server, by the names that requests give in the model's place."""

    def adapter_of(self, name: str | None) -> str | None:
        """Return the adapter that a request's name means. None = the model alone."""
        return None if name == self.name else name

    def encode(self) -> bytes:
        """Encode it as JSON."""
        fields: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__}
        return json.dumps(fields | {"tokenizer": self.tokenizer and self.tokenizer.parts}).encode()

    @classmethod
    def decode(cls, text: bytes) -> "ModelCard":
        """Decode what `encode` wrote."""
        fields = json.loads(text)
        parts = fields.pop("tokenizer")
        ends, adapters = tuple(fields.pop("end_ids")), tuple(fields.pop("adapters"))
        return cls(tokenizer=parts and Tokenizer(**parts), end_ids=ends, adapters=adapters, **fields)


class EngineFigures(NamedTuple):
    """Figures of the engine for metrics."""

    running: int = 0
    """Sequences that grow."""
    waiting: int = 0
    """Prompts that wait."""
    blocks: int = 1
    free_blocks: int = 1
    adapters: int = 0
    """Adapters in memory."""
    adapter_bytes: int = 0
    preemptions: int = 0
    """Total over all steps, as all fields below."""
    queries: int = 0
    hits: int = 0
    host_hits: int = 0
    host_saved: int = 0
    guessed: int = 0
    accepted: int = 0


_FIGURES = struct.Struct(f"<d{len(EngineFigures._fields)}q")


@dataclass(slots=True)
class StepNews:
    """News of one step. The HTTP process numbers the answers."""

    at: float = 0.0
    """End of the step by the clock of the machine (`monotonic`)."""
    figures: EngineFigures = field(default_factory=EngineFigures)
    answers: list[int] = field(default_factory=list)
    """Answer of each new token. An answer with several new tokens is repeated."""
    tokens: list[int] = field(default_factory=list)
    scored: list[int] = field(default_factory=list)
    """Indices of `tokens` with log-probabilities, in order."""
    logprobs: list[float] = field(default_factory=list)
    top: list[Top] = field(default_factory=list)
    started: list[int] = field(default_factory=list)
    """Tasks that no longer wait."""
    cached: list[tuple[int, int]] = field(default_factory=list)
    """Tasks with their first token, and how many of the prompt's tokens were cached."""
    ended: list[tuple[int, str]] = field(default_factory=list)
    """Answers, and why they ended."""
    refused: list[tuple[int, str, str]] = field(default_factory=list)
    """Tasks that the engine refused: the reason in a word (`request`, `engine`, `defect`) and in a sentence."""

    @property
    def rare(self) -> dict[str, Any]:
        """Fields that are empty in most steps, if they are not."""
        names = ("started", "cached", "ended", "refused")
        return {name: entries for name in names if (entries := getattr(self, name))}

    def encode(self) -> list[bytes]:
        """Encode it as parts of a frame."""
        rare = self.rare
        parts = [
            _FIGURES.pack(self.at, *self.figures),
            array("I", self.answers).tobytes(),
            array("I", self.tokens).tobytes(),
            json.dumps(rare).encode() if rare else b"",
        ]
        if self.scored:
            parts += [array("I", self.scored).tobytes(), *encode_scores(self.logprobs, self.top)]
        return parts

    @classmethod
    def decode(cls, parts: Sequence[bytes]) -> "StepNews":
        """Decode the parts that `encode` wrote."""
        head, answers, tokens, rare, *scores = parts
        at, *figures = _FIGURES.unpack(head)
        news = cls(at, EngineFigures(*figures), _numbers("I", answers), _numbers("I", tokens))
        for name, entries in json.loads(rare).items() if rare else ():
            setattr(news, name, entries)
        if scores:
            news.scored = _numbers("I", scores[0])
            news.logprobs, news.top = decode_scores(scores[1:])
        return news


def encode_scores(logprobs: Sequence[float], top: Sequence[Top]) -> list[bytes]:
    """Encode log-probabilities of tokens and the likeliest at each position, as four arrays."""
    pairs = [pair for row in top for pair in row]
    return [
        array("d", logprobs).tobytes(),
        array("I", map(len, top)).tobytes(),
        array("I", [token for token, _ in pairs]).tobytes(),
        array("d", [logprob for _, logprob in pairs]).tobytes(),
    ]


def decode_scores(parts: Sequence[bytes]) -> tuple[list[float], list[Top]]:
    """Decode the parts that `encode_scores` wrote."""
    pairs = zip(_numbers("I", parts[2]), _numbers("d", parts[3]), strict=True)
    top = [[next(pairs) for _ in range(count)] for count in _numbers("I", parts[1])]
    return _numbers("d", parts[0]), top


def _numbers(kind: str, content: bytes) -> list[Any]:
    numbers = array(kind)
    numbers.frombytes(content)
    return numbers.tolist()


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedPrompt:
    """Prompt for the engine."""

    task: int
    first_answer: int
    """Number of its first answer. The others follow."""
    prompt: Sequence[int]
    options: RequestOptions
    """Options without stop strings, which the HTTP process searches for in the text."""
    with_logprobs: bool = False
    """True if each token's log-probability is needed."""
    scored: int | None = None
    """Likeliest tokens per position of the prompt. None = the prompt is not scored."""

    def encode(self) -> list[bytes]:
        """Encode it as parts of a frame."""
        # Options at their defaults are left out, so the message stays short.
        changed = {
            option.name: getattr(self.options, option.name)
            for option in fields(RequestOptions)
            if option.name != "stop" and getattr(self.options, option.name) != getattr(_DEFAULTS, option.name)
        }
        if "logit_bias" in changed:
            # JSON keys are strings, and tokens are integers: pairs keep them.
            changed["logit_bias"] = list(changed["logit_bias"].items())
        rest = [self.task, self.first_answer, self.with_logprobs, self.scored, changed]
        return [json.dumps(rest).encode(), array("I", self.prompt).tobytes()]

    @classmethod
    def decode(cls, parts: Sequence[bytes]) -> "AddedPrompt":
        """Decode the parts that `encode` wrote."""
        task, first, with_logprobs, scored, changed = json.loads(parts[0])
        if "logit_bias" in changed:
            changed["logit_bias"] = dict(changed["logit_bias"])
        if "stop_ids" in changed:
            changed["stop_ids"] = tuple(changed["stop_ids"])
        return cls(
            task=task, first_answer=first, prompt=_numbers("I", parts[1]), options=RequestOptions(**changed),
            with_logprobs=with_logprobs, scored=scored,
        )  # fmt: skip


_DEFAULTS = RequestOptions()


def encode_setup(name: str, options: ServerOptions) -> list[bytes]:
    """Encode the settings of the server and the name of the model in metrics. Keys are never on a command line."""
    document = asdict(options) | {"adapter_folder": options.adapter_folder and str(options.adapter_folder)}
    return [json.dumps([name, document]).encode()]


def decode_setup(parts: Sequence[bytes]) -> tuple[str, ServerOptions]:
    """Decode the parts that `encode_setup` wrote."""
    name, document = json.loads(parts[0])
    limits, folder, keys = document.pop("limits"), document.pop("adapter_folder"), document.pop("keys")
    options = ServerOptions(
        limits=ServerLimits(**limits), adapter_folder=folder and Path(folder), keys=tuple(keys), **document
    )
    return name, options


@dataclass(frozen=True, slots=True)
class _JSONMessage:
    """Message whose fields JSON can hold."""

    def encode(self) -> list[bytes]:
        """Encode it as parts of a frame."""
        return [json.dumps(astuple(self)).encode()]

    @classmethod
    def decode(cls, parts: Sequence[bytes]) -> Self:
        """Decode the parts that `encode` wrote."""
        return cls(*json.loads(parts[0]))


@dataclass(frozen=True, slots=True)
class CancelledAnswers(_JSONMessage):
    """Answers of one task that are no longer needed."""

    task: int
    answers: Sequence[int] | None = None
    """Numbers of the answers. None = all that grow."""


@dataclass(frozen=True, slots=True)
class AdapterCall(_JSONMessage):
    """Call to load an adapter from a folder, or to unload it."""

    call: int
    name: str
    path: str | None
    """Folder. None = unload."""


@dataclass(frozen=True, slots=True)
class AdapterReply:
    """Result of an AdapterCall."""

    call: int
    names: Sequence[str]
    """Names of the adapters that are loaded now."""
    error: ApiError | None = None

    def encode(self) -> list[bytes]:
        """Encode it as parts of a frame."""
        error = self.error
        words = error and [error.status, error.message, error.code, error.param, error.retry_seconds]
        return [json.dumps([self.call, list(self.names), words]).encode()]

    @classmethod
    def decode(cls, parts: Sequence[bytes]) -> "AdapterReply":
        """Decode the parts that `encode` wrote."""
        call, names, words = json.loads(parts[0])
        error = None
        if words:
            status, message, code, param, retry = words
            error = ApiError(status, message, code=code, param=param, retry_seconds=retry)
        return cls(call, names, error)
