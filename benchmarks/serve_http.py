"""Tokens per second that reach clients over HTTP from an engine whose steps take a fixed time.

    python -m benchmarks.serve_http [--clients 64,256] [--step-ms 4] [--host-ms 0] [--seconds 4] [--wait] [--json]

A stand-in takes the device's place: a step begins there when it is launched and the one before has ended, and whoever
reads its tokens sleeps until its time is over, as a GPU's host thread does. All else is the server's own: scheduler,
messages between the processes, text, JSON, server-sent events and sockets. The bar is rows per step time, which the
device reaches if nothing delays it. Clients are one more process, on raw sockets.

`--host-ms` is time in which Python computes before a step is launched, beside the scheduler's own. `--wait` launches a
step only behind the tokens of the one before (EngineOptions.run_ahead). One event may hold several tokens
where a client or the server lags: tokens are counted by each stream's `usage`, and gaps between the moments in which a
client receives something.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks import stream_clients
from benchmarks.stream_clients import ROUTES
from meshwright.data.tokens.tokenizer import Tokenizer
from meshwright.model import build
from meshwright.observe.oracle.features import shrink
from meshwright.serving.engine import step_loop
from meshwright.serving.engine.cache.blocks import CachedSequence
from meshwright.serving.engine.engine_options import EngineOptions
from meshwright.serving.engine.sampler import SampledRow, SampledTokens
from meshwright.serving.engine.scheduler import StepPlan
from meshwright.serving.engine.serving_engine import ServingEngine
from meshwright.serving.http.engine_thread import HostedModel
from meshwright.serving.http.http_server import HttpServer
from meshwright.serving.http.server_options import ServerLimits, ServerOptions

LONGEST = 8192


class FixedStep:
    """Takes the runner's place: the device takes a fixed time for a step, one step after the other."""

    def __init__(self, runner: Any, step_s: float, host_s: float) -> None:
        """`host_s`: in which Python computes before a step is launched, as where its kernels are launched one by
        one."""
        self._runner, self._step_s, self._host_s = runner, step_s, host_s
        self._ended = 0.0
        self.steps = self.rows = 0
        self.late = 0
        """Steps that were launched when the device had nothing to do: the host took longer."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def run(
        self, step: StepPlan, *, behind: int = 0, drawn: torch.Tensor | None = None
    ) -> tuple[list[CachedSequence], torch.Tensor]:
        """Sequences that get a token, and in place of their logits when the device is done with them."""
        owners = [
            sequence for sequence, count in step.chunks.items() if sequence.computed + count == len(sequence.tokens)
        ]
        until = time.perf_counter() + self._host_s
        while time.perf_counter() < until:
            pass
        now = time.perf_counter()
        self.late += now > self._ended
        self._ended = max(now, self._ended) + self._step_s
        self.steps, self.rows = self.steps + 1, self.rows + len(owners)
        return owners, torch.full((len(owners), 1), self._ended, dtype=torch.float64)


@dataclass(frozen=True, slots=True)
class DueTokens:
    """Takes the place of tokens that the device draws: they can be read when their time has come."""

    tokens: torch.Tensor
    due: float
    drawn: list[int]

    def read(self) -> SampledTokens:
        """Sleep until then."""
        time.sleep(max(0.0, self.due - time.perf_counter()))
        count = len(self.drawn)
        return SampledTokens(self.drawn, [0.0] * count, [[]] * count, [False] * count)


class TokenSource:
    """Takes the sampler's place: tokens whose texts have one blank each."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        texts = ((token, tokenizer.spell(token)) for token in range(tokenizer.vocab))
        self._tokens = [token for token, text in texts if text.count(" ") == 1 and text.strip().isalpha()]
        self._drawn = 0

    def draw(self, logits: torch.Tensor, rows: Sequence[SampledRow]) -> DueTokens:
        """The next ones in turn."""
        count, tokens = len(rows), self._tokens
        begin = self._drawn % len(tokens)
        self._drawn += count
        drawn = (tokens * (1 + (begin + count) // len(tokens)))[begin : begin + count]
        return DueTokens(torch.tensor(drawn), float(logits[0, 0]), drawn)


@dataclass(frozen=True, slots=True, kw_only=True)
class NullModel(HostedModel):
    """A model whose engine computes nothing."""

    step_s: float
    host_s: float = 0.0

    def engine(self, options: EngineOptions) -> ServingEngine:
        """With the stand-in, after its first request was computed."""
        engine = HostedModel.engine(self, options)
        loop = engine._loop
        loop.runner = FixedStep(loop.runner, self.step_s, self.host_s)  # type: ignore[assignment]  # a stand-in
        return engine


def null_model(step_s: float, host_s: float) -> NullModel:
    """A small one, with the tokenizer that comes with the package."""
    tokenizer = Tokenizer.shipped()
    shape = replace(shrink("llama-3.1-8b"), vocab=tokenizer.vocab, max_positions=LONGEST)
    return NullModel(
        name="null", model=build(shape).eval(), tokenizer=tokenizer, end_ids=(), created=0, step_s=step_s,
        host_s=host_s,
    )  # fmt: skip


@contextmanager
def null_server(
    clients: int, step_s: float, host_s: float = 0.0, *, run_ahead: bool = True
) -> Iterator[HttpServer]:  # fmt: skip
    """Inside, it answers."""
    ready, hosted = threading.Event(), null_model(step_s, host_s)
    options = EngineOptions(
        cache_bytes=2**31, most_sequences=clients, most_tokens=max(8192, clients + 1), copies_bytes=0, packed=False,
        compiled=False, run_ahead=run_ahead,
    )  # fmt: skip
    limits = ServerLimits(max_queue=2 * clients, max_requests_per_key=2 * clients, drain_seconds=1)
    assert hosted.tokenizer is not None
    source = TokenSource(hosted.tokenizer)
    with Path(os.devnull).open("wb") as log:
        server = HttpServer(
            "null", lambda: hosted, ServerOptions(port=0, limits=limits), options, on_ready=lambda _: ready.set(),
            log=log,
        )  # fmt: skip
        thread = threading.Thread(target=server.run)
        with patch.object(step_loop, "draw", source.draw):
            thread.start()
            try:
                ready.wait()
                yield server
            finally:
                server.stop()
                server.stop()
                thread.join()


def measure(
    clients: int, step_s: float, host_s: float, seconds: float, route: str, *, run_ahead: bool
) -> dict[str, float]:
    """One load."""
    tokens = min(int(seconds / step_s), LONGEST - 200)
    with null_server(clients, step_s, host_s, run_ahead=run_ahead) as server:
        assert server.front is not None and server.channel is not None and server.engine is not None
        runner: Any = server.engine._loop.runner
        command = [sys.executable, stream_clients.__file__, server.address, "--route", route]
        words = ["--clients", clients, "--tokens", tokens, "--processes", os.getpid(), server.front.pid]
        command += map(str, words)
        sent, steps, rows, late = server.channel.sends, runner.steps, runner.rows, runner.late
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr[-2000:])
        received: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        steps, rows = runner.steps - steps, runner.rows - rows
        return {
            "clients": clients,
            "step_ms": 1e3 * step_s,
            "share_of_engine": received["tokens_per_second"] / (clients / step_s),
            "gap_p99_steps": received["gap_p99_ms"] / (1e3 * step_s),
            **received,
            "messages_per_step": (server.channel.sends - sent) / steps,
            "rows_per_step": rows / steps,
            "late_steps": (runner.late - late) / steps,
        }


def main(words: Sequence[str] | None = None) -> int:
    """Print a row for each number of clients."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", default="64,256", help="numbers of streams, with commas")
    parser.add_argument("--step-ms", type=float, default=4.0)
    parser.add_argument("--host-ms", type=float, default=0.0, help="in which Python computes before each step")
    parser.add_argument("--wait", action="store_true", help="launch a step behind the tokens of the one before")
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--route", choices=list(ROUTES), default="chat")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(words)
    step_s, host_s = asked.step_ms / 1e3, asked.host_ms / 1e3
    rows = [
        measure(int(count), step_s, host_s, asked.seconds, asked.route, run_ahead=not asked.wait)
        for count in asked.clients.split(",")
    ]
    if asked.json:
        print(json.dumps({f"clients_{row['clients']}": row for row in rows}))
        return 0
    for name in rows[0]:
        print(f"{name:20}" + "".join(f"{row[name]:12,.4g}" for row in rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
