"""A server in a thread of the test's process, in front of a small model."""

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from http.client import HTTPConnection
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO, Any

import openai
import tokenizers
import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from meshwright.data.tokens.tokenizer import Tokenizer
from meshwright.data.tokens.word_encoder import byte_alphabet
from meshwright.model import build
from meshwright.observe.oracle.features import shrink
from meshwright.serving.engine.answers.request_options import RequestOptions
from meshwright.serving.engine.engine_options import EngineOptions
from meshwright.serving.engine.serving_engine import ServingEngine
from meshwright.serving.http.engine_thread import EngineThread, HostedModel
from meshwright.serving.http.http_server import HttpServer
from meshwright.serving.http.server_options import ServerLimits, ServerOptions

KEYS = ("first-key-of-the-tests", "second-key-of-the-tests")
NAME = "small"
EXACT = EngineOptions(exact=True, cache_bytes=2**22)
END = 95


def letters() -> Tokenizer:
    """A token for each printable letter of ASCII, and one that ends a text."""
    vocab = {letter: index for index, letter in enumerate(byte_alphabet()[32:127])}
    library = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False)])
    return Tokenizer(library.to_str(), bos="<|end|>", eos="<|end|>")


@cache
def small() -> HostedModel:
    """Three layers whose logits are far from a tie."""
    model = build(replace(shrink("llama-3.1-8b"), vocab=END + 1, max_positions=256))
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.4)
    return HostedModel(name=NAME, model=model.eval(), tokenizer=letters(), end_ids=(END,), created=1)


class Running:
    """A server that answers, and clients of it."""

    def __init__(self, server: HttpServer, log: IO[bytes] | None = None) -> None:
        self.server, self._log = server, log

    @property
    def lines(self) -> list[str]:
        """Lines of the log so far."""
        assert self._log is not None
        return Path(self._log.name).read_text().splitlines()

    @property
    def port(self) -> int:
        return int(self.server.address.rpartition(":")[2])

    @property
    def engine(self) -> ServingEngine:
        assert self.server.engine is not None
        return self.server.engine

    @property
    def engine_thread(self) -> EngineThread:
        assert self.server._thread is not None
        return self.server._thread

    @property
    def processes(self) -> list[int]:
        """The HTTP process, and those that it has started."""
        assert self.server.front is not None
        front = self.server.front.pid
        paths = Path(f"/proc/{front}/task").glob("*/children")
        return [front, *(int(process) for path in paths for process in path.read_text().split())]

    @property
    def open_requests(self) -> int:
        """HTTP requests that are being answered."""
        lines = self.ask("/metrics")[2].decode().splitlines()
        return int(float(next(line for line in lines if "num_requests_open{" in line).rpartition(" ")[2]))

    def client(self, key: str = KEYS[0], **more: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.server.address}/v1", api_key=key, max_retries=0, timeout=300, **more)

    def ask(
        self, path: str, body: Any = None, *, key: str | None = KEYS[0], method: str = "", headers: Any = ()
    ) -> tuple[int, dict[str, str], Any]:
        """Status, headers and JSON, or bytes where it is none."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=300)
        sent = {"Authorization": f"Bearer {key}"} if key else {}
        data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        connection.request(method or ("GET" if data is None else "POST"), path, data, sent | dict(headers))
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        plain = not content or "json" not in (answer.headers["content-type"] or "")
        return answer.status, dict(answer.headers.items()), content if plain else json.loads(content)


def lives(process: int) -> bool:
    """Return True if a process runs. A zombie does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@contextmanager
def running(
    *, hosted: HostedModel | None = None, engine: EngineOptions = EXACT, limits: ServerLimits | None = None,
    keys: tuple[str, ...] = KEYS, open_model: Any = None, adapter_folder: Path | None = None,
) -> Iterator[Running]:  # fmt: skip
    """Inside, a server answers."""
    ready, log = threading.Event(), NamedTemporaryFile()  # noqa: SIM115  # closed below
    options = ServerOptions(
        port=0, keys=keys, limits=limits or ServerLimits(drain_seconds=0.2), adapter_folder=adapter_folder
    )  # fmt: skip
    server = HttpServer(
        NAME, open_model or (lambda: hosted or small()), options, engine, on_ready=lambda _: ready.set(), log=log.file
    )  # fmt: skip
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        if open_model is None:
            assert ready.wait(300)
        yield Running(server, log)
    finally:
        server.stop()
        server.stop()
        thread.join(300)
        log.close()
        assert not thread.is_alive()


def asked_once(server: HttpServer, *questions: tuple[str, Any]) -> list[Any]:
    """Return the answers of a server that was not started to each (path, body), then stop it."""
    ready, announce = threading.Event(), server._on_ready

    def announced(started: HttpServer) -> None:
        if announce is not None:
            announce(started)
        ready.set()

    server._on_ready = announced
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        assert ready.wait(300)
        answers = [Running(server).ask(path, body, key=None) for path, body in questions]
    finally:
        server.stop()
        server.stop()
        thread.join(300)
    assert all(status == 200 for status, *_ in answers), answers
    return [content for *_, content in answers]


@cache
def _own_engine() -> ServingEngine:
    hosted = small()
    assert hosted.tokenizer is not None
    return ServingEngine(
        hosted.model, EXACT, decode=hosted.tokenizer.decode, end_ids=hosted.end_ids, tokenizer=hosted.tokenizer
    )


def answers(prompt: Sequence[int], **options: Any) -> list[Any]:
    """Return what a separate engine generates for a prompt."""
    asked = _own_engine().add(prompt, RequestOptions(**options))
    _own_engine().run([asked])
    return asked.answers
