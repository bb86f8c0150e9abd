"""Health of the server while the model loads, when the engine fails, and when it hangs."""

import threading
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from meshwright.serving.http import http_server
from meshwright.serving.http.engine_thread import HostedModel
from meshwright.serving.http.http_server import HttpServer
from meshwright.serving.http.server_options import ServerLimits, ServerOptions
from meshwright.spec.errors import ArgumentError, RunError
from tests.serving.http.running import EXACT, NAME, Running, running, small
from tests.serving.http.test_limits import LONG, raw, until

ASKED = {"prompt": "x", "max_tokens": 4}


def test_while_the_model_loads() -> None:
    go = threading.Event()

    def slowly() -> HostedModel:
        go.wait(300)
        return small()

    with running(open_model=slowly) as server:
        until(lambda: _health(server) is not None)
        assert _health(server) == (503, "loading")
        status, headers, document = server.ask("/v1/completions", ASKED)
        assert (status, document["error"]["code"]) == (503, "not_ready") and headers["retry-after"]
        assert server.ask("/v1/models")[0] == 503 and server.ask("/metrics")[0] == 200
        go.set()
        until(lambda: _health(server) == (200, "ok"))
        assert server.ask("/v1/completions", ASKED)[0] == 200


def _health(server: Running) -> tuple[int, str] | None:
    try:
        status, _, document = server.ask("/health", key=None)
    except OSError:
        return None
    return status, document["status"]


def test_a_model_that_cannot_be_opened_ends_the_server() -> None:
    def broken() -> HostedModel:
        raise RunError("the weights are damaged")

    server = HttpServer(NAME, broken, ServerOptions(port=0), EXACT)
    with pytest.raises(RunError, match="damaged"):
        server.run()


def test_an_engine_that_fails(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Whoever waits is answered, and so is who comes later; the log has the traceback."""
    with running() as server:
        stream = raw(server, {**LONG, "stream": True})
        until(lambda: not server.engine.idle)

        def fails() -> Any:
            raise ZeroDivisionError("a defect of the engine")

        monkeypatch.setattr(server.engine, "step", fails)
        content = b""
        while part := stream.recv(65536):
            content += part
            if b"engine_failed" in content:
                break
        stream.close()
        assert b"engine_failed" in content
        assert _health(server) == (503, "failed")
        status, _, document = server.ask("/v1/completions", ASKED)
        assert (status, document["error"]["code"]) == (503, "not_ready")
        assert server.ask("/metrics")[0] == 200
    assert "a defect of the engine" in capfd.readouterr().err


def test_a_request_that_the_engine_cannot_take_ends_alone(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with running() as server:
        engine_add = server.engine.add

        def fails(prompt: Any, options: Any) -> Any:
            if options.priority == 7:
                raise ValueError("a defect of a library")
            return engine_add(prompt, options)

        monkeypatch.setattr(server.engine, "add", fails)
        status, _, document = server.ask("/v1/completions", {**ASKED, "priority": 7})
        assert (status, document["error"]["code"]) == (500, "internal_error")
        assert "library" not in document["error"]["message"]
        assert server.ask("/v1/completions", ASKED)[0] == 200 and _health(server) == (200, "ok")
    assert "a defect of a library" in capfd.readouterr().err


def test_an_engine_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(limits=ServerLimits(step_seconds=0.2, drain_seconds=0.1)) as server:
        engine_step, go = server.engine.step, threading.Event()
        monkeypatch.setattr(server.engine, "step", lambda: (go.wait(60), engine_step())[1])
        stream = raw(server, {**LONG, "stream": True})
        until(lambda: _health(server) == (503, "stuck"))
        go.set()
        until(lambda: _health(server) == (200, "ok"))
        stream.close()


def test_ranks_whose_step_outlasts_the_server_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A last message would arrive in the middle of their step, and be waited for without end."""
    monkeypatch.setattr(http_server, "LAST_SECONDS", 0.2)
    ranks, begun, go = SimpleNamespace(broken=False), threading.Event(), threading.Event()
    with running(limits=ServerLimits(drain_seconds=0.1)) as server:
        engine_step = server.engine.step
        server.engine_thread.hosted = replace(small(), ranks=cast(Any, ranks))
        monkeypatch.setattr(server.engine, "step", lambda: (begun.set(), go.wait(60), engine_step())[2])
        stream = raw(server, {**LONG, "stream": True})
        assert begun.wait(60)
        stream.close()
    assert ranks.broken
    go.set()


def test_idleness_is_no_hanging() -> None:
    with running(limits=ServerLimits(step_seconds=0.05, drain_seconds=0.1)) as server:
        time.sleep(0.3)
        assert _health(server) == (200, "ok")


def test_an_address_that_is_taken_is_said_before_anything_is_loaded() -> None:
    with running() as server:

        def never() -> HostedModel:
            raise AssertionError("it is not opened")

        with pytest.raises(ArgumentError, match=f"port={server.port} of 127.0.0.1 is taken"):
            HttpServer(NAME, never, ServerOptions(port=server.port), EXACT)
