"""A server in a thread of the test's process, in front of a small model."""

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import openai
import tokenizers
import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from meshwright.data.tokenizer import Tokenizer
from meshwright.data.word_encoder import byte_alphabet
from meshwright.model import build
from meshwright.observe.tiny_models import shrink
from meshwright.serve.engine_options import EngineOptions
from meshwright.serve.request_options import RequestOptions
from meshwright.serve.serving_engine import ServingEngine
from meshwright.server.hosted_model import HostedModel
from meshwright.server.http_server import HttpServer
from meshwright.server.server_options import ServerLimits, ServerOptions

KEYS = ("first-key-of-the-tests", "second-key-of-the-tests")
NAME = "small"
EXACT = EngineOptions(exact=True, cache_bytes=2**22)
END = 95


def letters() -> Tokenizer:
    """A token for each printable letter of ASCII, and one that ends a text."""
    vocab = {letter: place for place, letter in enumerate(byte_alphabet()[32:127])}
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

    def __init__(self, server: HttpServer) -> None:
        self.server = server
        self.lines: list[str] = []

    @property
    def port(self) -> int:
        return int(self.server.address.rpartition(":")[2])

    @property
    def engine(self) -> ServingEngine:
        assert self.server.service is not None and self.server.service.engine.engine is not None
        return self.server.service.engine.engine

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


@contextmanager
def running(
    *, hosted: HostedModel | None = None, engine: EngineOptions = EXACT, limits: ServerLimits | None = None,
    keys: tuple[str, ...] = KEYS, open_model: Any = None, adapter_folder: Path | None = None,
) -> Iterator[Running]:  # fmt: skip
    """Inside, a server answers."""
    ready, lines = threading.Event(), list[str]()
    options = ServerOptions(
        port=0, keys=keys, limits=limits or ServerLimits(drain_seconds=0.2), adapter_folder=adapter_folder
    )  # fmt: skip
    server = HttpServer(
        NAME, open_model or (lambda: hosted or small()), options, engine, on_ready=lambda _: ready.set(),
        write=lines.append,
    )  # fmt: skip
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        if open_model is None:
            assert ready.wait(300)
        found = Running(server)
        found.lines = lines
        yield found
    finally:
        server.stop()
        server.stop()
        thread.join(300)
        assert not thread.is_alive()


def asked_once(server: HttpServer, *questions: tuple[str, Any]) -> list[Any]:
    """What a server that was not started answers to (path, body), one after the other; then it is stopped."""
    ready = threading.Event()
    server._on_ready = lambda _: ready.set()
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        assert ready.wait(300)
        found = [Running(server).ask(path, body, key=None) for path, body in questions]
    finally:
        server.stop()
        server.stop()
        thread.join(300)
    assert all(status == 200 for status, *_ in found), found
    return [content for *_, content in found]


@cache
def _own_engine() -> ServingEngine:
    hosted = small()
    assert hosted.tokenizer is not None
    return ServingEngine(
        hosted.model, EXACT, decode=hosted.tokenizer.decode, end_ids=hosted.end_ids, tokenizer=hosted.tokenizer
    )


def answers(prompt: Sequence[int], **options: Any) -> list[Any]:
    """What an engine of its own makes of a prompt."""
    asked = _own_engine().add(prompt, RequestOptions(**options))
    _own_engine().run([asked])
    return asked.answers
