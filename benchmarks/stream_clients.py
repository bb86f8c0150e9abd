"""Clients of streams, in a process of their own that imports little: raw sockets, and a look at what came.

    python benchmarks/stream_clients.py http://127.0.0.1:8000 --clients 64 --tokens 128 [--prompt-tokens 128]
        [--vocabulary 2048] [--route completions] [--processes PID ...]

All ask at once, and each reads its stream to the end. Tokens are those that the stream's own `usage` states. With
process ids it prints the share of a core that each of these processes took while all streams grew.
"""

import argparse
import json
import os
import random
import re
import select
import socket
import sys
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROUTES = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
PROMPT = "Once upon a time"
USAGE = re.compile(rb'"completion_tokens": ?(\d+)')
TAIL = 1024
"""Bytes that the end of a stream is looked for in, with its usage."""


def request_bytes(route: str, tokens: int, prompt: str | Sequence[int] = PROMPT) -> bytes:
    """A streamed request. Prompts of token ids are for completions."""
    asked: dict[str, Any] = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    asked["stream_options"] = {"include_usage": True}
    asked |= {"messages": [{"role": "user", "content": prompt}]} if route == "chat" else {"prompt": prompt}
    body = json.dumps(asked).encode()
    head = f"POST {ROUTES[route]} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


@dataclass(slots=True)
class Stream:
    """What came of one request."""

    connection: socket.socket
    first: float = 0.0
    """When its first bytes came."""
    last: float = 0.0
    early: int = 0
    """Tokens that came with the first bytes: an event has one, but where a client lags."""
    tail: bytes = b""
    """The last bytes."""
    tokens: int = 0
    """As its usage says, at its end."""


def receive(address: str, requests: Sequence[bytes], processes: Sequence[int]) -> dict[str, Any]:
    """Stream to a client for each request. RuntimeError: a stream is refused, cut off, or says no usage."""
    host, _, port = address.rpartition("//")[2].rpartition(":")
    poll, streams = select.epoll(), dict[int, Stream]()
    for _ in requests:
        stream = Stream(socket.create_connection((host, int(port))))
        streams[stream.connection.fileno()] = stream
        poll.register(stream.connection.fileno(), select.EPOLLIN)
    asked, clock = time.perf_counter(), time.perf_counter
    for stream, request in zip(streams.values(), requests, strict=True):
        stream.connection.sendall(request)
        stream.connection.setblocking(False)
    gaps, events, growing, unbegun = array("d"), 0, len(streams), len(streams)
    started, ended = asked, 0.0
    """Between these all streams grow; from the begin to the end, where they never do so together."""
    before = [processor_seconds(process) for process in (os.getpid(), *processes)]
    after: list[float] = []
    while growing:
        for descriptor, _ in poll.poll():
            stream = streams[descriptor]
            data = stream.connection.recv(65536)
            now = clock()
            if not data:
                raise RuntimeError(f"a stream was cut off behind {stream.tail[-200:]!r}")
            stream.tail = stream.tail[-TAIL:] + data
            if not stream.first:
                if not data.startswith(b"HTTP/1.1 200"):
                    raise RuntimeError(data[:300].decode())
                stream.first, stream.early = now, max(1, data.count(b"data: {"))
                unbegun -= 1
                if not unbegun and growing == len(streams):
                    before, started = [processor_seconds(process) for process in (os.getpid(), *processes)], clock()
                    gaps, events = array("d"), 0
            elif not ended:
                gaps.append(now - stream.last)
                events += data.count(b"data: {")
            stream.last = now
            if b"[DONE]" in stream.tail:
                stream.tokens = int(USAGE.findall(stream.tail)[-1])
                poll.unregister(descriptor)
                growing -= 1
                if not ended and (not unbegun or not growing):
                    ended, after = now, [processor_seconds(process) for process in (os.getpid(), *processes)]
    for stream in streams.values():
        stream.connection.close()
    rates = [(stream.tokens - stream.early) / (stream.last - stream.first) for stream in streams.values()]
    firsts = sorted(stream.first - asked for stream in streams.values())
    tokens, ordered, wall = sum(stream.tokens for stream in streams.values()), sorted(gaps), ended - started
    shares = [(late - early) / wall for early, late in zip(before, after, strict=True)]
    return {
        "seconds": max(stream.last for stream in streams.values()) - asked,
        "tokens": tokens,
        "tokens_per_second": sum(rates),
        "whole_tokens_per_second": tokens / (max(stream.last for stream in streams.values()) - asked),
        "tokens_per_event": sum(rates) * wall / max(1, events),
        "first_token_p50_ms": 1e3 * firsts[len(firsts) // 2],
        "first_token_max_ms": 1e3 * firsts[-1],
        "gap_p50_ms": 1e3 * ordered[len(ordered) // 2],
        "gap_p99_ms": 1e3 * ordered[int(0.99 * len(ordered))],
        "gap_max_ms": 1e3 * ordered[-1],
        **{f"{name}_core_share": share for name, share in zip(("client", "engine", "front"), shares, strict=False)},
    }


def processor_seconds(process: int) -> float:
    """That a process took so far."""
    words = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def main(words: Sequence[str] | None = None) -> int:
    """Print figures of all streams as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("address")
    parser.add_argument("--route", choices=list(ROUTES), default="completions")
    parser.add_argument("--clients", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True, help="of each answer")
    parser.add_argument("--prompt-tokens", type=int, default=0, help="random ones; 0: all ask the same few words")
    parser.add_argument("--vocabulary", type=int, default=2048, help="ids of random prompts lie below")
    parser.add_argument("--seed", type=int, default=0, help="of random prompts: another one finds no cached prefix")
    parser.add_argument("--processes", type=int, nargs="*", default=[])
    asked = parser.parse_args(words)
    chance = random.Random(asked.seed)
    requests = [
        request_bytes(
            asked.route, asked.tokens,
            [chance.randrange(asked.vocabulary) for _ in range(asked.prompt_tokens)] if asked.prompt_tokens else PROMPT,
        )
        for _ in range(asked.clients)
    ]  # fmt: skip
    print(json.dumps(receive(asked.address, requests, asked.processes)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
