"""Clients of streams, in a process of their own that imports little: raw sockets, and a look at what came.

    python benchmarks/stream_clients.py http://127.0.0.1:8000 chat CLIENTS TOKENS [PID ...]

All ask at once. Figures are of the time in which all of them receive. With process ids it prints the share of a core
that each of these processes took meanwhile.
"""

import json
import os
import select
import socket
import sys
import time
from array import array
from pathlib import Path
from typing import Any

ROUTES = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
PROMPT = "Once upon a time"


def request_bytes(route: str, tokens: int) -> bytes:
    """A streamed request."""
    asked: dict[str, Any] = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    asked |= {"messages": [{"role": "user", "content": PROMPT}]} if route == "chat" else {"prompt": PROMPT}
    body = json.dumps(asked).encode()
    head = f"POST {ROUTES[route]} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def receive(address: str, route: str, clients: int, tokens: int, processes: list[int]) -> dict[str, Any]:
    """Stream to all clients. Each token's text must have one blank. RuntimeError: a stream is refused or cut off."""
    host, _, port = address.rpartition("//")[2].rpartition(":")
    request = request_bytes(route, tokens)
    streams = [socket.create_connection((host, int(port))) for _ in range(clients)]
    poll, receivers = select.epoll(), {}
    asked = time.perf_counter()
    for stream in streams:
        stream.sendall(request)
        stream.setblocking(False)
        poll.register(stream.fileno(), select.EPOLLIN)
        receivers[stream.fileno()] = stream.recv
    last = dict[int, float]()
    gaps, tokens_seen, events_seen, first_tokens = array("d"), 0, 0, list[float]()
    clock = time.perf_counter
    started = ended = 0.0
    before: list[float] = []
    while not ended:
        for descriptor, _ in poll.poll():
            data = receivers[descriptor](65536)
            now = clock()
            if not data or b"[DONE]" in data:
                if not data or not started:
                    raise RuntimeError("a stream ended before all had begun")
                ended = now
                break
            if descriptor not in last:
                if not data.startswith(b"HTTP/1.1 200"):
                    raise RuntimeError(data[:300].decode())
                last[descriptor] = now
                first_tokens.append(now - asked)
                if len(last) == clients:
                    started, before = now, [processor_seconds(process) for process in (os.getpid(), *processes)]
                    started = clock()
                continue
            if started:
                gaps.append(now - last[descriptor])
                events_seen += data.count(b"data: {")
                tokens_seen += data.count(b" ") - data.count(b"data: ")
            last[descriptor] = now
    after = [processor_seconds(process) for process in (os.getpid(), *processes)]
    for stream in streams:
        stream.close()
    wall, ordered = ended - started, sorted(gaps)
    shares = [(late - early) / wall for early, late in zip(before, after, strict=True)]
    return {
        "seconds": wall,
        "tokens_per_second": tokens_seen / wall,
        "tokens_per_event": tokens_seen / max(1, events_seen),
        "first_token_max_ms": 1e3 * max(first_tokens),
        "gap_p50_ms": 1e3 * ordered[len(ordered) // 2],
        "gap_p99_ms": 1e3 * ordered[int(0.99 * len(ordered))],
        "gap_max_ms": 1e3 * ordered[-1],
        **{f"{name}_core_share": share for name, share in zip(("client", "engine", "front"), shares, strict=False)},
    }


def processor_seconds(process: int) -> float:
    """That a process took so far."""
    words = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[3:]]
    print(json.dumps(receive(sys.argv[1], sys.argv[2], numbers[0], numbers[1], numbers[2:])))
