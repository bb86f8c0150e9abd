"""Many requests to a server, some of whose clients leave or read slowly: what is left behind, and how memory grows.

    python -m benchmarks.serve_soak --requests 10000 --json

A server runs before a small model. Clients ask for answers of mixed lengths, whole and as streams. Some
leave at a random moment, some read a few bytes now and then, and some send what is refused. Answers of the others are
compared with the engine's own. At the end every block of the cache must be free.
"""

import argparse
import asyncio
import json
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from meshwright.data.tokens.tokenizer import Tokenizer
from meshwright.model import build
from meshwright.observe.oracle.features import shrink
from meshwright.serving.engine.answers.request_options import RequestOptions
from meshwright.serving.engine.engine_options import EngineOptions
from meshwright.serving.engine.serving_engine import ServingEngine
from meshwright.serving.http.engine_thread import HostedModel
from meshwright.serving.http.http_server import HttpServer
from meshwright.serving.http.server_options import ServerLimits, ServerOptions

ENGINE = EngineOptions(exact=True, cache_bytes=2**21, most_sequences=16, most_tokens=128)
LIMITS = ServerLimits(max_queue=512, max_requests_per_key=512, stall_seconds=5.0, read_seconds=5.0)
CLIENTS = 24
PROMPTS = 40
WAYS = ("whole", "whole", "stream", "stream", "leaves", "leaves", "slow", "refused")
MIB = 2**20


@dataclass(slots=True)
class Found:
    """What the clients saw."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: int = 0
    every: int = 1
    """Requests between two looks at memory."""
    processes: tuple[int, ...] = ()
    """Whose memory is looked at: that of the engine and the clients, and that of HTTP."""
    memory: list[tuple[int, int]] = field(default_factory=list)
    """(requests answered, resident bytes)."""


def hosted() -> HostedModel:
    """Three layers over bytes."""
    model = build(replace(shrink("llama-3.1-8b"), vocab=257, max_positions=256))
    return HostedModel(name="soak", model=model.eval(), tokenizer=Tokenizer.bytes(), end_ids=(256,), created=0)


def prompts() -> list[tuple[list[int], int]]:
    """Token ids, and how many new ones."""
    chance = random.Random(0)
    return [
        ([chance.randrange(256) for _ in range(chance.randrange(1, 100))], chance.randrange(1, 40))
        for _ in range(PROMPTS)
    ]


def right_answers(model: HostedModel) -> list[list[int]]:
    """Of the engine alone."""
    engine = ServingEngine(model.model, ENGINE, end_ids=model.end_ids)
    asked = [engine.add(ids, RequestOptions(max_new_tokens=most)) for ids, most in prompts()]
    engine.run(asked)
    return [request.answers[0].ids for request in asked]


async def client(port: int, right: list[list[int]], work: "asyncio.Queue[int]", tally: Found) -> None:
    """Takes requests until there is none left."""
    load = prompts()
    while True:
        try:
            number = work.get_nowait()
        except asyncio.QueueEmpty:
            return
        chance = random.Random(number)
        way, prompt_number = chance.choice(WAYS), chance.randrange(PROMPTS)
        ids, most = load[prompt_number]
        asked: dict[str, Any] = {"prompt": ids, "max_tokens": most, "temperature": 0, "return_token_ids": True}
        asked |= {"stream": way in ("stream", "slow") or (way == "leaves" and chance.random() < 0.5)}
        asked |= {"temperature": -1} if way == "refused" else {}
        try:
            made = await one_request(port, asked, way, chance)
        except (OSError, asyncio.IncompleteReadError):
            made = None
        tally.counts[way] += 1
        if way in ("whole", "stream", "slow"):
            tally.wrong += made != right[prompt_number]
        if way == "refused":
            tally.wrong += made != []
        if number % tally.every == 0:
            tally.memory.append((sum(tally.counts.values()), resident_bytes(tally.processes)))


async def one_request(port: int, asked: dict[str, Any], way: str, chance: random.Random) -> list[int] | None:
    """The new tokens; empty for a refusal, None for a client that left."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        body = json.dumps(asked).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        writer.write(head.encode() + b"Connection: close\r\n\r\n" + body)
        await writer.drain()
        if way == "leaves":
            await asyncio.sleep(chance.random() * 0.1)
            if chance.random() < 0.5:
                await asyncio.wait_for(reader.read(100), 30)
            return None
        content = b""
        while part := await reader.read(chance.randrange(50, 500) if way == "slow" else 2**16):
            content += part
            if way == "slow":
                await asyncio.sleep(0.002)
        return tokens_of(content)
    finally:
        writer.close()


def tokens_of(content: bytes) -> list[int]:
    """Of a whole answer, or of all events of a stream; none of a refusal."""
    head, _, rest = content.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        return [] if head.startswith(b"HTTP/1.1 400") else [-1]
    if b"text/event-stream" not in head:
        return list(json.loads(rest)["choices"][0]["token_ids"])
    lines = [line[6:] for line in rest.replace(b"\r", b"").split(b"\n") if line.startswith(b"data: {")]
    return [token for line in lines for choice in json.loads(line)["choices"] for token in choice["token_ids"]]


def resident_bytes(processes: Iterable[int]) -> int:
    """Of all of them."""
    return sum(int(Path(f"/proc/{process}/statm").read_text().split()[1]) for process in processes) * 4096


def growth(memory: list[tuple[int, int]]) -> float:
    """Bytes per request, from the median of the second quarter of all points to that of the last."""
    memory = sorted(memory)
    quarter = max(1, len(memory) // 4)
    early, late = sorted(memory[quarter : 2 * quarter]), sorted(memory[-quarter:])
    (at, low), (then, high) = (_medians(part) for part in (early, late))
    return (high - low) / max(1, then - at)


def _medians(points: list[tuple[int, int]]) -> tuple[int, int]:
    """Of both numbers of the points, each for itself."""
    middle = len(points) // 2
    return sorted(first for first, _ in points)[middle], sorted(second for _, second in points)[middle]


def soak(requests: int) -> dict[str, Any]:
    """Ask so often."""
    model = hosted()
    right, tally, ready = right_answers(model), Found(every=max(1, requests // 100)), threading.Event()
    log = Path(os.devnull).open("wb")  # noqa: SIM115  # closed below
    server = HttpServer(
        "soak", lambda: model, ServerOptions(port=0, limits=LIMITS), ENGINE, on_ready=lambda _: ready.set(), log=log
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    ready.wait()
    assert server.front is not None
    tally.processes = os.getpid(), server.front.pid
    began = time.perf_counter()

    async def ask() -> None:
        work: asyncio.Queue[int] = asyncio.Queue()
        for number in range(requests):
            work.put_nowait(number)
        port = int(server.address.rpartition(":")[2])
        await asyncio.gather(*(client(port, right, work, tally) for _ in range(CLIENTS)))

    asyncio.run(ask())
    seconds = time.perf_counter() - began
    engine = server.engine
    assert engine is not None
    limit = time.monotonic() + 60
    while not engine.idle and time.monotonic() < limit:
        time.sleep(0.01)
    pool = engine.tables.pool
    lost = pool.size - pool.free + sum(map(bool, pool.holders))
    server.stop()
    thread.join()
    log.close()
    return {
        "requests": sum(tally.counts.values()), "ways": dict(tally.counts), "wrong": tally.wrong, "lost_blocks": lost,
        "bytes_per_request": round(growth(tally.memory), 1), "resident_mib": round(tally.memory[-1][1] / MIB, 1),
        "requests_per_second": round(requests / seconds, 1),
    }  # fmt: skip


def main() -> None:
    """Ask, and print."""
    words = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    words.add_argument("--requests", type=int, default=2000)
    words.add_argument("--json", action="store_true")
    options = words.parse_args()
    figures = soak(options.requests)
    print(json.dumps(figures) if options.json else "\n".join(f"{name}: {value}" for name, value in figures.items()))


if __name__ == "__main__":
    main()
