"""Requests that nobody should send: the server refuses them, stays up, and answers others right meanwhile."""

import contextlib
import json
import random
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshwright.serving.http.request.request_fields import NEUTRAL, ChatFields, CompletionFields
from meshwright.serving.http.server_options import ServerLimits
from tests.serving.http.running import KEYS, Running, answers, letters, running
from tests.serving.http.test_limits import free, until

LIMITS = ServerLimits(
    max_body_bytes=2**16,
    read_seconds=4.0,
    stall_seconds=1.0,
    max_request_seconds=30.0,
    drain_seconds=0.1,
    prompt_seconds=120.0,
    max_answer_tokens=512,
)
SCALARS = (
    st.none() | st.booleans() | st.integers() | st.integers(-(10**400), 10**400) | st.floats() | st.text(max_size=20)
)
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


def body(kind: type[CompletionFields] | type[ChatFields]) -> st.SearchStrategy[dict[str, Any]]:
    """Right fields with some wrong values among them."""
    right: dict[str, Any] = {"max_tokens": 3}
    right |= {"prompt": "x"} if kind is CompletionFields else {"messages": [{"role": "user", "content": "x"}]}
    names = st.sampled_from([*kind.model_fields, *NEUTRAL])
    return st.dictionaries(names, JSON, max_size=3).map(lambda wrong: {**right, **wrong})


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(limits=LIMITS) as served:
        yield served


@contextlib.contextmanager
def others_are_right(server: Running) -> Iterator[None]:
    """Inside, another client asks again and again, and each of its answers is the engine's own."""
    right, stop, faults = answers(letters().begin("other"), max_new_tokens=8)[0].text, threading.Event(), list[str]()
    asked = [0]

    def ask() -> None:
        while not stop.is_set() or not asked[0]:
            status, _, document = server.ask("/v1/completions", {"prompt": "other", "max_tokens": 8, "temperature": 0})
            asked[0] += 1
            if status != 200 or document["choices"][0]["text"] != right:
                faults.append(f"{status}: {document}")

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(300)
    assert not faults and asked[0]
    until(lambda: free(server))
    assert server.ask("/health")[0] == 200


QUIET = settings(
    max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None
)


@pytest.mark.parametrize("kind", [CompletionFields, ChatFields])
def test_wrong_values(server: Running, kind: Any) -> None:
    path = "/v1/completions" if kind is CompletionFields else "/v1/chat/completions"

    @QUIET
    @given(body(kind))
    def send(document: dict[str, Any]) -> None:
        status, _, answer = server.ask(path, document)
        assert status in (200, 400, 404), answer
        if status != 200:
            assert answer["error"]["message"] and answer["error"]["type"] == "invalid_request_error"

    with others_are_right(server):
        send()


def test_bytes_that_are_no_json(server: Running) -> None:
    @QUIET
    @given(st.binary(max_size=200) | st.text(max_size=50).map(lambda text: json.dumps(text).encode()))
    def send(data: bytes) -> None:
        for path in ("/v1/completions", "/tokenize", "/detokenize"):
            assert server.ask(path, data, method="POST")[0] == 400

    send()


@pytest.mark.parametrize(
    "data",
    [
        b'{"prompt": "x", "max_tokens": 3, "logit_bias": {' + b",".join(b'"%d": 1' % n for n in range(3000)) + b"}}",
        b'{"prompt": "x", "stop": ["' + b'","'.join([b"a"] * 5000) + b'"]}',
        b'{"prompt": ' + b"[" * 20000 + b"]" * 20000 + b"}",
        b'{"messages": ' + b'{"a":' * 9000 + b"1" + b"}" * 9000 + b"}",
        b'{"prompt": [' + b"1," * 20000 + b"1]}",
        b'{"prompt": [' + b'"x",' * 10000 + b'"x"]}',
        b'{"prompt": "x", "seed": ' + b"1" * 5000 + b"}",
        b'{"prompt": "x", "structured_outputs": {"regex": "' + b"(" * 3000 + b")" * 3000 + b'"}}',
        b'{"prompt": "x", "structured_outputs": {"regex": "(a{1,1000}){1,1000}"}}',
    ],
    ids=["biases", "stops", "depth", "objects", "tokens", "prompts", "digits", "brackets", "counts"],
)
def test_bodies_made_to_be_slow(server: Running, data: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        status, _, document = server.ask(path, data, method="POST")
        assert status == 400, document


def rubbish(server: Running, chance: random.Random) -> None:
    """Open a connection that misbehaves in one way."""
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEYS[0]}\r\n".encode()
    long = json.dumps({"prompt": "y", "max_tokens": 100, "n": 4, "stream": True, "ignore_eos": True}).encode()
    ways = [
        lambda: chance.randbytes(chance.randrange(2000)),
        lambda: head + b"x: " + b"y" * 70_000,
        lambda: head + b"".join(b"x%d: y\r\n" % number for number in range(500)) + b"\r\n",
        lambda: head + b"Content-Length: 50\r\n\r\n{",
        lambda: head + b"Content-Length: 3\r\n\r\n{}}" + chance.randbytes(50),
        lambda: head + b"Transfer-Encoding: chunked\r\n\r\n" + chance.randbytes(100),
        lambda: head + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n5\r\n{\"a\":\r\n0\r\n\r\n",
        lambda: head + b"Content-Length: %d\r\n\r\n" % len(long) + long,
        lambda: (head + b"Content-Length: %d\r\n\r\n" % len(long) + long) * 3,
        lambda: b"GET /%s HTTP/1.1\r\nHost: x\r\n\r\n" % chance.randbytes(20).hex().encode(),
        lambda: b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
        lambda: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ]  # fmt: skip
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection, contextlib.suppress(OSError):
        connection.sendall(chance.choice(ways)())
        if chance.random() < 0.5:
            connection.recv(chance.choice((1, 1 << 16)))


@pytest.mark.long
def test_connections_that_misbehave(server: Running) -> None:
    """Half-sent bodies, floods of headers, two lengths, readers that never read: all at once."""
    with others_are_right(server):
        threads = [
            threading.Thread(target=lambda seed=seed: [rubbish(server, random.Random(seed + k)) for k in range(12)])
            for seed in range(0, 100, 25)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
    until(lambda: server.open_requests == 0)
