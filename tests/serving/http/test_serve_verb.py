"""`meshwright serve` as a process: what it prints, whom it refuses, and how it ends."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.formats.hub.adapter import save_adapter
from meshwright.spec.model.shape import LoRAShape
from meshwright.spec.weights.inventory import parameters
from meshwright.verbs.main import main
from tests.verbs import toy
from tests.verbs.toy import refused


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("serve")
    assert main(toy.train(toy.write_texts(folder), folder / "run")) == 0
    return folder / "run"


class Started:
    """A process that serves."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process, self.lines = process, list[str]()
        while not (self.lines and self.lines[-1].startswith("  more ")):  # the last of what serve prints when ready
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, process.wait()
            self.lines.append(line)
        self.port = int(re.findall(r"at http://127\.0\.0\.1:(\d+)", "".join(self.lines))[0])

    def ask(self, path: str, body: Any = None, key: str = "") -> tuple[int, Any]:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=120)
        connection.request(
            "GET" if body is None else "POST", path, body and json.dumps(body),
            {"Authorization": f"Bearer {key}"} if key else {},
        )  # fmt: skip
        answer = connection.getresponse()
        content = answer.read().decode()
        connection.close()
        return answer.status, content if content.startswith("data") else json.loads(content)


@contextmanager
def started(*words: str | Path, **environment: str) -> Iterator[Started]:
    command = [sys.executable, "-m", "meshwright", "serve", *map(str, words), "--port", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment}
    ) as process:
        try:
            yield Started(process)
        finally:
            process.kill()


LONG = {"prompt": "def ", "max_tokens": 90, "ignore_eos": True, "stream": True, "temperature": 0}


def streamed(server: Started, body: dict[str, Any], lines: list[str], begun: threading.Event) -> None:
    connection = HTTPConnection("127.0.0.1", server.port, timeout=120)
    connection.request("POST", "/v1/completions", json.dumps(body))
    answer = connection.getresponse()
    lines.append(str(answer.status))
    for line in answer:
        if line.strip():
            lines.append(line.decode().strip())
            begun.set()
    connection.close()


@pytest.mark.slow
@pytest.mark.parametrize("ends", ["drained", "deadline", "twice"])
def test_sigterm(run: Path, ends: str) -> None:
    """Health says no, what grows is finished, or ended with an error event; the exit code is 0."""
    seconds = "60" if ends == "drained" else "1" if ends == "deadline" else "100"
    with started(run, "--drain-seconds", seconds, "--max-answer-tokens", "200000") as server:
        body = {**LONG, "max_tokens": 60, "n": 2} if ends == "drained" else {**LONG, "prompt": ["def "] * 64, "n": 16}
        lines, begun = list[str](), threading.Event()
        thread = threading.Thread(target=streamed, args=(server, body, lines, begun))
        assert server.ask("/health") == (200, {"status": "ok"})
        thread.start()
        assert begun.wait(120)
        server.process.send_signal(signal.SIGTERM)
        if ends == "drained":
            while (answer := _try(server))[0] == 200:
                pass
            assert answer in ((503, {"status": "draining"}), (0, None))
        if ends == "twice":
            time.sleep(0.3)
            server.process.send_signal(signal.SIGTERM)
        thread.join(120)
        assert server.process.wait(60) == 0
    assert lines[0] == "200"
    if ends == "drained":
        assert lines[-1] == "data: [DONE]"
    else:
        assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "shutting_down"


def _try(server: Started) -> tuple[int, Any]:
    try:
        return server.ask("/health")
    except OSError:
        return 0, None


@pytest.mark.slow
def test_ctrl_c_is_130_and_a_run_is_served_as_it_is(run: Path) -> None:
    """The answer is that of `generate`; its key comes from the environment and is on no command line."""
    right = mw.load(run).generate("def ", max_new_tokens=12, temperature=0.0)
    with started(run, "--exact", "--name", "toy", MESHWRIGHT_API_KEY="sesame") as server:
        assert any("access" in line and "1 key" in line for line in server.lines)
        assert "sesame" not in "".join(server.lines)
        assert "sesame" not in Path(f"/proc/{server.process.pid}/cmdline").read_text()
        assert server.ask("/v1/models")[0] == 401
        body = {"model": "toy", "prompt": "def ", "max_tokens": 12, "temperature": 0, "return_token_ids": True}
        status, document = server.ask("/v1/completions", body, "sesame")
        assert status == 200 and document["choices"][0]["token_ids"] == list(right.ids)
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(60) == 130
        assert server.process.stderr is not None
        assert f"{run} has no chat template" in server.process.stderr.readline()


@pytest.mark.slow
def test_two_ranks_behind_one_address(run: Path) -> None:
    """Ctrl-C is for the first; what needs a whole model on it is refused with a sentence."""
    right = mw.load(run).generate("def ", max_new_tokens=12, temperature=0.0)
    with started(run, "--tp", "2") as server:
        assert any("tp=2" in line for line in server.lines)
        body = {"prompt": "def ", "max_tokens": 12, "temperature": 0, "return_token_ids": True}
        status, document = server.ask("/v1/completions", body)
        assert status == 200 and document["choices"][0]["token_ids"] == list(right.ids)
        status, document = server.ask("/v1/completions", {**body, "echo": True, "logprobs": 1})
        assert status == 400 and "leave out echo" in document["error"]["message"]
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(60) == 130


@pytest.mark.long
def test_adapters_of_two_ranks_come_and_go(run: Path, tmp_path: Path) -> None:
    base = mw.load(run)
    for seed, name in enumerate(("one", "two")):
        shape = replace(base.model.shape, lora=LoRAShape(rank=3 + seed, targets="all"))
        chance = torch.Generator().manual_seed(seed)
        low = {item.name: torch.randn(item.shape, generator=chance) * 0.1 for item in parameters(shape) if item.adapts}
        (tmp_path / name).mkdir()
        save_adapter(tmp_path / name, low, shape, base=str(run), dtype=torch.float32)
    folders = {name: tmp_path / name for name in ("one", "two")}
    asked = [mw.RequestOptions(adapter=name, max_new_tokens=12) for name in (*folders, None)]
    right = [list(item.ids) for item in base.generate_many(["def "] * 3, asked, adapters=folders)]
    assert right[0] != right[1] != right[2]
    body = {"prompt": "def ", "max_tokens": 12, "temperature": 0, "return_token_ids": True}
    options = ("--adapter", f"mine={tmp_path / 'one'}", "--adapter-dir", str(tmp_path), "--exact")
    with started(run, "--tp", "2", *options) as server:

        def answered(name: str) -> list[int]:
            status, document = server.ask("/v1/completions", {**body, "model": name})
            assert status == 200, document
            return list(document["choices"][0]["token_ids"])

        assert answered("mine") == right[0]
        assert server.ask("/v1/load_lora_adapter", {"lora_name": "other", "lora_path": "two"})[0] == 200
        assert (answered("other"), answered("mine"), answered(run.name)) == (right[1], right[0], right[2])
        assert server.ask("/v1/unload_lora_adapter", {"lora_name": "mine"})[0] == 200
        assert server.ask("/v1/load_lora_adapter", {"lora_name": "mine", "lora_path": "two"})[0] == 200
        assert answered("mine") == right[1]


@pytest.mark.slow
def test_health_tells_that_a_rank_is_gone_before_anybody_asks(run: Path) -> None:
    with started(run, "--tp", "2") as server:
        assert server.ask("/health") == (200, {"status": "ok"})
        (rank,) = _forked(server.process.pid)
        os.kill(rank, signal.SIGKILL)
        end = time.monotonic() + 60
        while server.ask("/health")[0] == 200:
            assert time.monotonic() < end
            time.sleep(0.05)
        assert server.ask("/v1/completions", {"prompt": "def ", "max_tokens": 4})[0] >= 500
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) is not None


def _forked(process: int) -> list[int]:
    """Grandchildren: those that the server of forks has made."""
    servers = (child for child in _children(process) if b"forkserver" in Path(f"/proc/{child}/cmdline").read_bytes())
    return [pid for child in servers for pid in _children(child)]


def _children(process: int) -> list[int]:
    return [int(pid) for path in Path(f"/proc/{process}/task").glob("*/children") for pid in path.read_text().split()]


def test_an_address_that_is_taken(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        assert f"--port {port} of 127.0.0.1 is taken" in refused(capsys, "serve", run, "--port", port)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["nowhere"], "nowhere does not exist"),
        (["RUN", "--host", "0.0.0.0"], "there is no API key"),
        (["RUN", "--host", "999.1.1.1", "--without-key"], "--host 999.1.1.1"),
        (["RUN", "--api-key-file", "none"], "--api-key-file none cannot be read"),
        (["RUN", "--max-queue", "0"], "--max-queue 0 must be above 0"),
        (["RUN", "--port", "70000"], "--port 70000"),
        (["RUN", "--port", "0", "--tp", "3"], "does not divide"),
        (["RUN", "--port", "0", "--tp", "2", "--adapter", "sql=."], "--adapter sql: . has neither adapter_config.json"),
        (["RUN", "--api-key", "x"], "Did you mean --api-key-file, --without-key? See meshwright serve --help"),
    ],
)
def test_bad_usage(
    run: Path, words: list[str], expected: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.parent)
    assert expected in refused(capsys, "serve", *(str(run) if word == "RUN" else word for word in words))


def test_a_model_that_cannot_be_opened(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "neither plan.yaml nor config.json" in refused(capsys, "serve", tmp_path, "--port", "0")
    (tmp_path / "config.json").write_text("{}")
    assert refused(capsys, "serve", tmp_path, "--port", "0")
