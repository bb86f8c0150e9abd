"""The engine's process and that of HTTP: what either's end does to the other, and what crosses between them."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.serve_http import null_server
from benchmarks.stream_clients import request_bytes
from meshwright.data.tokens.tokenizer import Tokenizer
from meshwright.model import build
from meshwright.serving.http.http_server import HttpServer
from meshwright.serving.http.server_options import ServerLimits, ServerOptions
from meshwright.spec.errors import RunError
from tests.serving.http.running import EXACT, NAME, Running, answers, lives, running, small
from tests.serving.http.test_limits import LONG, free, raw, until

SCRIPT = """
import sys, threading
from tests.serving.http.running import Running, running
with running(keys=()) as server:
    print(server.port, *server.processes, flush=True)
    threading.Event().wait()
"""


def refuses(port: int) -> bool:
    """Return True if nobody listens on the port."""
    with socket.socket() as attempt:
        return attempt.connect_ex(("127.0.0.1", port)) != 0


def received(connection: socket.socket) -> bytes:
    """Everything up to the end of the connection."""
    content = b""
    while part := connection.recv(65536):
        content += part
    return content


def test_an_engine_process_that_is_killed_takes_the_other_with_it() -> None:
    """Whoever is being answered gets an error; no process is left, and the port is free."""
    with subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout is not None
        port, *processes = map(int, engine.stdout.readline().split())
        assert len(processes) == 2 and all(map(lives, processes))
        connection = socket.create_connection(("127.0.0.1", port), timeout=60)
        body = json.dumps({**LONG, "stream": True, "prompt": ["x"] * 8, "n": 16}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        content = connection.recv(65536)
        engine.kill()
        content += received(connection)
        connection.close()
        until(lambda: not any(map(lives, processes)), 30)
    assert content.startswith(b"HTTP/1.1 200") and b'"code":"engine_failed"' in content
    assert refuses(port)


def test_an_http_process_that_is_killed_ends_the_server() -> None:
    """The error says so; prompts' processes end, too."""
    ready, failures = threading.Event(), list[BaseException]()
    server = HttpServer(NAME, small, ServerOptions(port=0), EXACT, on_ready=lambda _: ready.set())

    def run() -> None:
        try:
            server.run()
        except RunError as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert ready.wait(120)
    port, processes = Running(server).port, Running(server).processes
    os.kill(processes[0], signal.SIGKILL)
    thread.join(60)
    assert not thread.is_alive() and "the HTTP process has ended with SIGKILL" in str(failures[0])
    until(lambda: not any(map(lives, processes)), 30)
    assert refuses(port) and server.engine is not None and server.engine.idle


def test_signals_to_a_group_of_processes_are_the_engines_to_handle() -> None:
    """Ctrl-C in a terminal reaches both processes. The HTTP process continues until told to end."""
    with running() as server:
        for process in server.processes:
            for number in (signal.SIGINT, signal.SIGTERM):
                os.kill(process, number)
        time.sleep(0.3)
        assert all(map(lives, server.processes))
        assert server.ask("/v1/completions", {"prompt": "x", "max_tokens": 4})[0] == 200


def test_an_http_process_that_stands_still_stops_the_engine_and_costs_no_memory() -> None:
    """The channel holds what it can; then the engine waits. Afterwards everything comes."""
    with running(limits=ServerLimits(drain_seconds=0.1)) as server:
        body = {**LONG, "stream": True, "return_token_ids": True}
        connection = raw(server, {**body, "max_tokens": 100})
        until(lambda: not server.engine.idle)
        front = server.processes[0]
        os.kill(front, signal.SIGSTOP)
        until(lambda: server.engine.idle)
        os.kill(front, signal.SIGCONT)
        content = b""
        while not content.endswith(b"0\r\n\r\n"):
            content += connection.recv(65536)
        connection.close()
        lines = [line for line in content.splitlines() if line.startswith(b"data: {")]
        ids = [token for line in lines for token in json.loads(line[6:])["choices"][0]["token_ids"]]
        prompt = small().tokenizer.begin("x")  # type: ignore[union-attr]
        assert ids == answers(prompt, max_new_tokens=100, ignore_end=True)[0].ids
        assert len(lines) < 100, "what had come was written at once"


WORDS = "na\u00efve caf\u00e9 \U0001f600 \u65e5\u672c\u8a9e, STOP and more"


@pytest.mark.parametrize("stream", [False, True])
def test_characters_and_stop_strings_across_tokens(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are single bytes. What the engine makes behind a stop string is dropped, and its blocks are free."""
    hosted = _speaker()
    with running(hosted=hosted) as server:
        _let_say(server, WORDS, monkeypatch)
        body = {**LONG, "max_tokens": 90, "stream": stream, "stop": ["STOP"], "n": 2}
        status, _, answer = server.ask("/v1/completions", body)
        assert status == 200
        texts, reasons, made = ["", ""], ["", ""], 0
        if stream:
            events = [json.loads(event[6:]) for event in answer.decode().strip().split("\n\n")[:-1]]
        else:
            events, made = [answer], answer["usage"]["completion_tokens"]
        for choice in (choice for event in events for choice in event["choices"]):
            assert "\ufffd" not in choice["text"] and "S" not in choice["text"]
            texts[choice["index"]] += choice["text"]
            reasons[choice["index"]] += choice["finish_reason"] or ""
        assert texts == [WORDS.partition("STOP")[0]] * 2 and reasons == ["stop"] * 2
        assert stream or made == 2 * len((WORDS.partition("STOP")[0] + "STOP").encode())
        until(lambda: free(server))


def test_one_answer_of_several_is_stopped_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    hosted = _speaker()
    with running(hosted=hosted) as server:
        words = {0: "one two END three", 1: "four five six seven"}
        _let_say(server, words, monkeypatch)
        body = {**LONG, "max_tokens": 19, "stop": "END", "n": 2}
        choices = server.ask("/v1/completions", body)[2]["choices"]
        assert [(choice["text"], choice["finish_reason"]) for choice in choices] == [
            ("one two ", "stop"), ("four five six seven", "length"),
        ]  # fmt: skip
        until(lambda: free(server))


def _speaker() -> Any:
    shape = replace(small().model.shape, vocab=257)
    return replace(small(), model=build(shape).eval(), tokenizer=Tokenizer.bytes(), end_ids=())


def _let_say(server: Running, words: str | dict[int, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each answer be these words, byte by byte; of several by the number of the answer."""
    engine_step, made = server.engine.step, dict[int, int]()
    tokenizer = Tokenizer.bytes()
    ids = {
        number: tokenizer.encode(text).tolist()
        for number, text in (words if isinstance(words, dict) else {0: words}).items()
    }

    def step() -> list[Any]:
        grown = engine_step()
        for answer in grown:
            index = made[id(answer)] = made.get(id(answer), -1) + 1
            number = answer.row.seed - answer.options.seed
            spoken = ids.get(number, ids[0])
            answer.ids[-1] = spoken[index % len(spoken)]
        return list(grown)

    monkeypatch.setattr(server.engine, "step", step)


def test_a_long_prompt_crosses_whole() -> None:
    """More bytes than the channel holds, while another answer grows."""
    with null_server(4, 0.001) as started:
        server = Running(started)
        ids = [100 + index % 500 for index in range(8000)]
        body = {"prompt": [ids] * 16, "max_tokens": 2, "ignore_eos": True}
        status, _, answer = server.ask("/v1/completions", body, key=None)
        assert status == 200 and answer["usage"]["prompt_tokens"] == 16 * 8000
        assert answer["usage"]["completion_tokens"] == 32


def test_many_connect_at_once() -> None:
    """Each of 256 streams gets all of its tokens, and the engine sends one message a step."""
    with null_server(256, 0.004) as started:
        server = Running(started)
        body = request_bytes("completions", 8)
        runner: Any = server.engine._loop.runner
        assert started.channel is not None
        sent, steps = started.channel.sends, runner.steps
        connections = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(256)]
        for connection in connections:
            connection.sendall(body)
        for connection in connections:
            content = b""
            while b"[DONE]" not in content:
                part = connection.recv(65536)
                assert part, content
                content += part
            events = [line for line in content.splitlines() if line.startswith(b"data: {")]
            documents = [json.loads(event[6:]) for event in events]
            text = "".join(choice["text"] for document in documents for choice in document["choices"])
            assert text.count(" ") == documents[-1]["usage"]["completion_tokens"] == 8
            connection.close()
        until(lambda: free(server))
        idle_messages = 256  # of prompts that came, at most one for each time that the engine looked
        assert started.channel.sends - sent <= runner.steps - steps + idle_messages
