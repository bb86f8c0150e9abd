"""A load of the serving engine, and the same over HTTP from the real server, in one run.

The engine answers a load by itself first. Then a server with the same model, in this process and its HTTP process,
answers streaming clients in a process of their own. Both run the load twice, of which the second counts. Prompts are
random token ids, weights are random, and only tokens of the tokenizer that comes with the package are drawn: rows of
the head beyond it are zero, whose product takes as long.
"""

import gc
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks import stream_clients
from benchmarks.gpu.serve_loads import answered
from benchmarks.gpu.timing import Timer
from meshwright.data.tokens.tokenizer import Tokenizer
from meshwright.model import Transformer, build
from meshwright.serving.engine.engine_options import EngineOptions
from meshwright.serving.engine.serving_engine import ServingEngine
from meshwright.serving.http.engine_thread import HostedModel
from meshwright.serving.http.http_server import HttpServer
from meshwright.serving.http.server_options import ServerLimits, ServerOptions
from meshwright.spec import presets

PATIENCE_S = 400.0
"""For the server to begin, and for a load."""
NEEDED = ("pydantic", "starlette", "uvicorn", "prometheus_client")
"""Packages of the server alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpEntry:
    """A model, and a load of so many clients at once."""

    model: str
    clients: int
    prompt: int
    """Tokens of each prompt."""
    answer: int
    rank: int
    expected_s: float

    @property
    def name(self) -> str:
        """For people."""
        return f"serving {self.model} over HTTP, {self.title}"

    @property
    def title(self) -> str:
        """As of other loads."""
        return f"{self.clients} x {self.prompt:,} + {self.answer:,}"


HTTP = [
    HttpEntry(model="llama-3.1-8b", clients=64, prompt=128, answer=256, rank=1, expected_s=130),
    HttpEntry(model="llama-3.2-1b", clients=64, prompt=128, answer=256, rank=2, expected_s=80),
    HttpEntry(model="llama-3.2-1b", clients=256, prompt=128, answer=256, rank=3, expected_s=80),
]
TINY_HTTP = [HttpEntry(model="llama-tiny", clients=4, prompt=8, answer=24, rank=1, expected_s=30)]


@torch.no_grad()
def model_of(entry: HttpEntry, tokenizer: Tokenizer, device: torch.device) -> Transformer:
    """The model with random weights, which draws tokens of the tokenizer alone."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = build(presets.model(entry.model), dtype=dtype, device=device).eval()
    model.head_weight[tokenizer.vocab :].zero_()
    return model


@contextmanager
def served(hosted: HostedModel, options: EngineOptions, clients: int) -> Iterator[HttpServer]:
    """Inside, a server answers. RuntimeError: it does not begin."""
    ready, limits = threading.Event(), ServerLimits(max_queue=2 * clients, max_requests_per_key=2 * clients)
    with Path(os.devnull).open("wb") as log:
        server = HttpServer(
            hosted.name, lambda: hosted, ServerOptions(port=0, limits=limits), options,
            on_ready=lambda _: ready.set(), log=log,
        )  # fmt: skip
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            begun = time.monotonic()
            while not ready.wait(0.5):
                if not thread.is_alive() or time.monotonic() - begun > PATIENCE_S:
                    raise RuntimeError("the server has not begun to answer: see what it printed")
            yield server
        finally:
            server.stop()
            server.stop()
            thread.join()


def asked(server: HttpServer, entry: HttpEntry, vocab: int, seed: int) -> dict[str, Any]:
    """Figures of streaming clients. RuntimeError: one of them failed."""
    assert server.front is not None
    words = ["--clients", entry.clients, "--tokens", entry.answer, "--prompt-tokens", entry.prompt]
    words += ["--vocabulary", vocab, "--seed", seed, "--processes", os.getpid(), server.front.pid]
    command = [sys.executable, stream_clients.__file__, server.address, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    if done.returncode:
        raise RuntimeError(done.stderr[-1000:])
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def row(entry: HttpEntry, device: torch.device, timer: Timer, late: Callable[[], bool]) -> dict[str, Any]:
    """The load by the engine alone and over HTTP, and how much of the engine's rate reaches clients."""
    missing = [package for package in NEEDED if find_spec(package) is None]
    if missing:
        raise RuntimeError(f"not installed: {', '.join(missing)}")
    tokenizer = Tokenizer.shipped()
    model = model_of(entry, tokenizer, device)
    options = EngineOptions(cache_bytes=0 if device.type == "cuda" else 2**26, most_sequences=max(64, entry.clients))
    engine, lengths = ServingEngine(model, options), [(entry.prompt, entry.answer)] * entry.clients
    answered(engine, lengths, timer, "warm", tokenizer.vocab)
    alone = answered(engine, lengths, timer, "counted", tokenizer.vocab)
    ahead = engine.steps_ahead
    del engine
    gc.collect()
    timer.release()
    measured = {"model": entry.model, "load": entry.title, "engine": alone, "steps_ahead": ahead}
    if late():
        return {**measured, "left_out": "no time left for HTTP"}
    hosted = HostedModel(name=entry.model, model=model, tokenizer=tokenizer, end_ids=(), created=0)
    with served(hosted, options, entry.clients) as server:
        asked(server, entry, tokenizer.vocab, 1)
        over_http = asked(server, entry, tokenizer.vocab, 2)
    share = over_http["whole_tokens_per_second"] / alone["tokens_per_s"]
    return {**measured, "http": over_http, "share_of_engine": share}
