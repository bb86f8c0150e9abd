"""Bodies, queues, deadlines, clients that leave and clients that do not read."""

import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from meshwright.serving.engine.engine_options import EngineOptions
from meshwright.serving.http.request.prompt_reader import PromptReader
from meshwright.serving.http.server_options import ServerLimits
from tests.serving.http.running import KEYS, NAME, Running, answers, letters, lives, running, small

LONG = {"prompt": "x", "max_tokens": 200, "ignore_eos": True, "temperature": 0}
SLOW = EngineOptions(exact=True, cache_bytes=2**22, most_sequences=2, most_tokens=64)


def until(holds: Callable[[], bool], seconds: float = 120.0) -> None:
    limit = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < limit, "it never came"
        time.sleep(0.005)


def raw(server: Running, body: dict[str, Any], *, buffer: int = 0) -> socket.socket:
    """A connection that has sent a request, and has read nothing."""
    connection = socket.socket()
    if buffer:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    connection.connect(("127.0.0.1", server.port))
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEYS[0]}\r\nContent-Length: {len(data)}"
    connection.sendall(head.encode() + b"\r\n\r\n" + data)
    return connection


def free(server: Running) -> bool:
    pool = server.engine.tables.pool
    return pool.free == pool.size and server.engine.idle


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_blocks_within_a_step(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with running() as server:
        steps, engine_step = [0], server.engine.step

        def counted() -> Any:
            steps[0] += 1
            time.sleep(0.02)
            return engine_step()

        monkeypatch.setattr(server.engine, "step", counted)
        connection = raw(server, {**LONG, "n": 4, "stream": stream})
        until(lambda: steps[0] > 5)
        assert not free(server)
        cancelled_at: list[int] = []
        engine_cancel = server.engine.cancel
        monkeypatch.setattr(
            server.engine, "cancel", lambda *asked: (cancelled_at.append(steps[0]), engine_cancel(*asked))[1]
        )
        commands = server.engine_thread.put
        asked_at: list[int] = []
        monkeypatch.setattr(
            server.engine_thread, "put", lambda command: (asked_at.append(steps[0]), commands(command))[1]
        )
        connection.close()
        until(lambda: free(server))
        assert cancelled_at[0] - asked_at[0] <= 1, "the step that ran is the last one"
        until(lambda: any("499" in line for line in server.lines))
        until(lambda: 'finished_reason="abort"' in server.ask("/metrics")[2].decode())


def test_a_client_that_leaves_while_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(engine=EngineOptions(cache_bytes=2**22, most_sequences=1, most_tokens=64)) as server:
        engine_step = server.engine.step
        monkeypatch.setattr(server.engine, "step", lambda: (time.sleep(0.02), engine_step())[1])
        first = raw(server, {**LONG, "stream": True})
        until(lambda: bool(server.engine.scheduler.running))
        second = raw(server, LONG)
        until(lambda: server.engine.scheduler.waiting == 1)
        second.close()
        until(lambda: server.engine.scheduler.waiting == 0 and len(server.engine.scheduler.running) == 1)
        first.close()
        until(lambda: free(server))


def test_a_full_queue_is_429_with_a_time_to_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(engine=SLOW, limits=ServerLimits(max_queue=2, drain_seconds=0.1)) as server:
        engine_step = server.engine.step
        monkeypatch.setattr(
            server.engine, "step", lambda: (time.sleep(0.1), engine_step())[1]
        )  # none ends before the others
        open_ones = [raw(server, LONG) for _ in range(2)]
        until(lambda: len(server.engine.scheduler.running) == 2)
        open_ones += [raw(server, LONG) for _ in range(2)]
        until(lambda: server.engine.scheduler.waiting == 2)
        status, headers, document = server.ask("/v1/completions", LONG)
        assert (status, document["error"]["code"], document["error"]["type"]) == (429, "queue_full", "rate_limit_error")
        assert int(headers["retry-after"]) >= 1
        for name in ("running", "waiting"):  # as the step says in which these two came
            until(lambda: f'num_requests_{name}{{model_name="small"}} 2.0' in server.ask("/metrics")[2].decode())  # noqa: B023
        for connection in open_ones:
            connection.close()
        until(lambda: free(server))
        assert server.ask("/v1/completions", {**LONG, "max_tokens": 2})[0] == 200


def test_requests_of_a_key_at_once() -> None:
    with running(limits=ServerLimits(max_requests_per_key=1, drain_seconds=0.1)) as server:
        first = raw(server, {**LONG, "stream": True})
        until(lambda: not server.engine.idle)
        status, headers, document = server.ask("/v1/completions", LONG)
        assert (status, document["error"]["code"]) == (429, "too_many_requests") and headers["retry-after"]
        assert server.ask("/v1/completions", {**LONG, "max_tokens": 2}, key=KEYS[1])[0] == 200, (
            "another key has its own"
        )
        first.close()
        until(lambda: free(server))


def test_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(limits=ServerLimits(max_request_seconds=0.4, drain_seconds=0.1)) as server:
        engine_step = server.engine.step
        monkeypatch.setattr(server.engine, "step", lambda: (time.sleep(0.02), engine_step())[1])
        status, _, document = server.ask("/v1/completions", LONG)
        assert (status, document["error"]["code"]) == (504, "deadline_exceeded")
        content = server.ask("/v1/completions", {**LONG, "stream": True})[2].decode()
        events = [json.loads(event.removeprefix("data: ")) for event in content.strip().split("\n\n")]
        assert events[0]["choices"][0]["text"] and events[-1]["error"]["code"] == "deadline_exceeded"
        until(lambda: free(server))


def test_a_deadline_counts_from_the_arrival() -> None:
    """The process that makes tokens of the prompt stands still for longer than the request may take."""
    with running(limits=ServerLimits(max_request_seconds=0.5)) as server:
        _, reader = server.processes
        os.kill(reader, signal.SIGSTOP)
        waker = threading.Timer(5.0, os.kill, (reader, signal.SIGCONT))  # a busy machine asks seconds late
        waker.start()
        status, _, document = server.ask("/v1/completions", {"prompt": "x", "max_tokens": 1})
        waker.join()
        assert (status, document["error"]["code"]) == (504, "deadline_exceeded")
        until(lambda: free(server))


@pytest.mark.parametrize(
    ("body", "headers", "status", "code"),
    [
        (b"x" * 3000, {}, 413, "body_too_large"),
        (b"{}", {"Content-Length": "99999999999999999999999"}, 400, None),
        (b"{}", {"Content-Encoding": "gzip"}, 415, "unsupported_encoding"),
        (b"", {}, 400, "invalid_json"),
        (b"[]", {}, 400, "invalid_json"),
        (b"\xff\xfe", {}, 400, "invalid_json"),
        (b'{"prompt": NaN}', {}, 400, "invalid_json"),
        (b'{"prompt": "\\ud800"}', {}, 400, "invalid_json"),
        (b"[" * 1500, {}, 400, "invalid_json"),
        (b'{"prompt":' + b"[" * 900 + b"]" * 900 + b"}", {}, 400, "invalid_json"),
        (b'{"prompt": "a", "max_tokens": 1e999}', {}, 400, None),
        (b'{"prompt": "a", "max_tokens": ' + b"9" * 1500 + b"}", {}, 400, None),
    ],
)
def test_bodies(limited: Running, body: bytes, headers: dict[str, str], status: int, code: str | None) -> None:
    actual, _, document = limited.ask("/v1/completions", body, headers=headers, method="POST")
    assert actual == status
    assert code is None or document["error"]["code"] == code


@pytest.fixture(scope="module")
def limited() -> Any:
    limits = ServerLimits(
        max_body_bytes=2048, max_prompt_tokens=20, max_answer_tokens=64, max_n=4, max_prompts=3, read_seconds=0.4,
        drain_seconds=0.1, stall_seconds=0.4,
    )  # fmt: skip
    with running(limits=limits) as server:
        yield server


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": "x" * 21}, None),
        ({"max_tokens": 65}, "max_tokens"),
        ({"max_tokens": 33, "n": 2}, "max_tokens"),
        ({"max_tokens": 17, "n": 2, "prompt": ["a", "b"]}, "max_tokens"),
        ({"n": 5}, "n"),
        ({"prompt": ["a", "b", "c", "d"]}, "prompt"),
    ],
)
def test_limits_of_a_request(limited: Running, change: dict[str, Any], param: str | None) -> None:
    status, _, document = limited.ask("/v1/completions", {"prompt": "x", "max_tokens": 8, **change})
    assert (status, document["error"]["param"]) == (400, param)


def test_a_chunked_body_is_counted(limited: Running) -> None:
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEYS[0]}\r\n"
    with socket.create_connection(("127.0.0.1", limited.port), timeout=10) as connection:
        connection.sendall(
            (head + "Transfer-Encoding: chunked\r\n\r\n").encode() + (b"3e8\r\n" + b"x" * 1000 + b"\r\n") * 5
        )  # at once: the server may close early
        assert b" 413 " in connection.recv(4096)


def test_a_body_that_never_comes(limited: Running) -> None:
    with socket.create_connection(("127.0.0.1", limited.port), timeout=10) as connection:
        connection.sendall(
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEYS[0]}\r\n"
            "Content-Length: 100\r\n\r\n{".encode()
        )
        assert b" 408 " in connection.recv(4096)
        while connection.recv(4096):
            pass  # the server closes it


@pytest.mark.parametrize("sent", [b"", b"GET /health HT", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"])
def test_headers_that_never_come(limited: Running, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", limited.port), timeout=10) as connection:
        connection.sendall(sent)
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(4096) == b""


def test_a_flood_of_headers(limited: Running) -> None:
    with socket.create_connection(("127.0.0.1", limited.port), timeout=10) as connection:
        try:
            for _ in range(100):
                connection.sendall(b"GET /health HTTP/1.1\r\n" if _ == 0 else b"x-y: " + b"z" * 1000 + b"\r\n")
            assert b" 400 " in connection.recv(4096)
        except (BrokenPipeError, ConnectionResetError):
            pass
    assert limited.ask("/health")[0] == 200


def test_a_reader_that_stops_is_cut_off_and_costs_no_memory() -> None:
    """Its answer goes on, is bounded, and is given up with the connection."""
    limits = ServerLimits(stall_seconds=0.5, drain_seconds=0.1)
    with running(limits=limits) as server:
        many = {**LONG, "n": 16, "logprobs": 20, "stream": True, "return_token_ids": True, "prompt": "x" * 50}
        stuck = [raw(server, many, buffer=2048) for _ in range(2)]
        right = answers(letters().begin("hello"), max_new_tokens=8)[0].text
        for _ in range(5):
            document = server.ask("/v1/completions", {"prompt": "hello", "max_tokens": 8, "temperature": 0})[2]
            assert document["choices"][0]["text"] == right
        until(lambda: server.open_requests == 0, 60)
        until(lambda: free(server))
        for connection in stuck:
            connection.close()


def test_a_slow_reader_gets_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(limits=ServerLimits(stall_seconds=20, drain_seconds=0.1)) as server:
        body = {
            **LONG,
            "n": 4,
            "logprobs": 5,
            "stream": True,
            "temperature": 1.0,
            "seed": 1,
            "skip_special_tokens": False,
        }
        connection, data = raw(server, body, buffer=4096), b""
        while not data.endswith(b"0\r\n\r\n"):
            data += connection.recv(1 << 14)
            time.sleep(0.001)
        connection.close()
        made = [""] * 4
        for line in data.decode().splitlines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    made[choice["index"]] += choice["text"]
        right = answers(
            letters().begin("x"), max_new_tokens=200, ignore_end=True, n=4, temperature=1.0, seed=1
        )  # fmt: skip
        assert made == [answer.text for answer in right]


def test_a_prompt_that_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hostile template ends its process, and nobody else's request."""
    from dataclasses import replace

    template = "{% for a in range(99999) %}{{ ('x' * 9999999) | upper | length }}{% endfor %}"
    tokenizer = letters().with_template(template)
    with running(hosted=replace(small(), tokenizer=tokenizer), limits=ServerLimits(prompt_seconds=1.0)) as server:
        status, _, document = server.ask("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]})
        assert (status, document["error"]["code"]) == (400, "prompt_too_slow")
        assert server.ask("/v1/completions", {"prompt": "x", "max_tokens": 2})[0] == 200


def test_a_template_that_fails_is_named() -> None:
    from dataclasses import replace

    tokenizer = letters().with_template("{{ raise_exception('no system turns here') }}")
    with running(hosted=replace(small(), tokenizer=tokenizer)) as server:
        status, _, document = server.ask("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]})
        assert status == 400 and "no system turns here" in document["error"]["message"]


def test_a_model_without_a_tokenizer() -> None:
    from dataclasses import replace

    with running(hosted=replace(small(), tokenizer=None)) as server:
        asked = {"prompt": [70, 71, 72], "max_tokens": 8, "temperature": 0, "return_token_ids": True}
        choice = server.ask("/v1/completions", asked)[2]["choices"][0]
        assert choice["token_ids"] == answers([70, 71, 72], max_new_tokens=8)[0].ids and choice["text"] == ""
        for path, body in (
            ("/v1/completions", {"prompt": "text"}), ("/v1/completions", {**asked, "stop": "a"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
            ("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]}),
        ):  # fmt: skip
            assert server.ask(path, body)[0] == 400


def test_tokens_of_a_prompt() -> None:
    with running() as server:
        tokens = server.ask("/tokenize", {"prompt": "hello"})[2]
        assert tokens == {"count": 5, "max_model_len": 256, "tokens": letters().begin("hello")}
        assert server.ask("/detokenize", {"tokens": tokens["tokens"]})[2] == {"prompt": "hello"}
        chat = server.ask("/tokenize", {"messages": [{"role": "user", "content": "hello"}]})[2]
        assert "### user\nhello".replace("\n", "") in server.ask("/detokenize", {"tokens": chat["tokens"]})[2]["prompt"]
        for body in ({}, {"prompt": "a", "messages": []}, {"prompt": 1}):
            assert server.ask("/tokenize", body)[0] == 400
        assert server.ask("/detokenize", {"tokens": [96]})[0] == 400


def test_a_log_names_the_path_that_was_asked_for() -> None:
    with running(keys=()) as server:
        assert server.ask(f"/v1/models/{NAME}", key=None)[0] == 200
        assert server.ask("/v1/models/" + "x" * 500, key=None)[0] == 404
        until(lambda: len(server.lines) == 2)
        first, second = server.lines
    assert f" GET /v1/models/{NAME}" in first and " GET /v1/models/xxx" in second and len(second) < 300


def test_a_log_holds_no_words_of_anybody() -> None:
    with running() as server:
        server.ask("/v1/completions", {"prompt": "SECRET", "max_tokens": 4, "ignore_eos": True, "user": "ann\n[31m"})
        server.ask("/v1/completions", {"prompt": "SECRET", "max_tokens": -4})
        until(lambda: len(server.lines) == 2)
        joined = "\n".join(server.lines)
        assert "SECRET" not in joined and KEYS[0] not in joined and len(joined.splitlines()) == 2
        assert "key1" in joined and "prompt=6 cached=0 new=4" in joined and "400" in joined


def _figures(server: Running) -> dict[str, float]:
    from prometheus_client.parser import text_string_to_metric_families

    return {
        sample.name.removeprefix("meshwright:"): sample.value
        for family in text_string_to_metric_families(server.ask("/metrics")[2].decode())
        for sample in family.samples
        if not sample.name.endswith("_bucket")
    }


def test_figures_of_prometheus() -> None:
    with running() as server:
        for _ in range(2):
            assert server.ask("/v1/completions", {"prompt": "m" * 40, "max_tokens": 4, "ignore_eos": True})[0] == 200
        server.ask("/v1/completions", {"prompt": "m", "n": 0})
        until(lambda: _figures(server)["num_requests_running"] == 0)
        until(lambda: _figures(server)["requests_refused_total"] == 1)
        until(lambda: _figures(server)["e2e_request_latency_seconds_count"] == 2)
        figures = _figures(server)
        assert figures["prompt_tokens_total"] == 80 and figures["generation_tokens_total"] == 8
        assert figures["prefix_cache_hits_total"] == 32 and figures["prefix_cache_queries_total"] >= 80
        assert figures["time_to_first_token_seconds_count"] == figures["e2e_request_latency_seconds_count"] == 2
        assert figures["inter_token_latency_seconds_count"] == 6 and figures["request_queue_time_seconds_count"] == 2
        assert figures["num_requests_running"] == figures["num_requests_waiting"] == figures["kv_cache_usage_perc"] == 0
        assert figures["request_success_total"] == 2 and figures["requests_refused_total"] == 1
        assert figures["num_preemptions_total"] == 0


def test_threads_and_processes_end_with_the_server() -> None:
    before = threading.active_count()
    with running() as server:
        front, *children = server.processes
        assert len(children) == 1
    until(lambda: threading.active_count() <= before and not any(map(lives, (front, *children))))


def test_a_process_for_prompts_that_died_is_replaced() -> None:
    reader = PromptReader(letters(), limit_s=30)
    right = reader._answer(b'"ab"')
    (child,) = reader._children
    child.kill()
    child.wait()
    assert reader._answer(b'"ab"') == right
    assert len(reader._children) == 1 and child not in reader._children
    assert child.stdin is not None and child.stdin.closed
    reader.close()
