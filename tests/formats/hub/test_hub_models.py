"""Models by their names on the hub: the cache as huggingface_hub lays it out, and downloads from a server of it."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from meshwright import planfile
from meshwright.formats.hub import download
from meshwright.interface.planning.plan_reading import read_folder
from meshwright.interface.trained.opening import load
from meshwright.spec.errors import PlanError
from meshwright.spec.hub_cache import cache_root, find_snapshot
from meshwright.spec.hub_names import download_command
from meshwright.verbs.main import main
from tests.verbs.test_hub_verbs import directory

hub = pytest.importorskip("huggingface_hub")
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    directory(folder)
    return folder


@pytest.fixture
def cache(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with one model: files are links to blobs, as huggingface_hub makes them."""
    folder = tmp_path / "hub" / "models--acme--tiny-9b"
    snapshot = folder / "snapshots" / COMMIT
    (folder / "blobs").mkdir(parents=True)
    (folder / "refs").mkdir()
    snapshot.mkdir(parents=True)
    (folder / "refs" / "main").write_text(COMMIT)
    for number, path in enumerate(sorted(model.iterdir())):
        (folder / "blobs" / str(number)).write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(Path("../../blobs") / str(number))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(download, "hub_answers", lambda: False)
    monkeypatch.chdir(tmp_path)
    return snapshot


@pytest.mark.parametrize(
    "variables", [{"HF_HUB_CACHE": "/a/b"}, {"HF_HOME": "/a"}, {"XDG_CACHE_HOME": "/a"}, {}], ids=str
)
def test_the_cache_is_where_huggingface_hub_has_it(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    for name, folder in variables.items():
        monkeypatch.setenv(name, folder)
    call = [sys.executable, "-c", "from huggingface_hub import constants; print(constants.HF_HUB_CACHE)"]
    assert str(cache_root()) == subprocess.run(call, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize("name", ["acme/tiny-9b", "acme/tiny-9b@main", f"acme/tiny-9b@{COMMIT}"])
def test_a_name_is_the_folder_in_the_cache(name: str, cache: Path) -> None:
    theirs = hub.snapshot_download("acme/tiny-9b", cache_dir=cache.parents[2], local_files_only=True)
    assert find_snapshot(name) == Path(theirs) == cache
    plan = planfile.read(None, [f"model={name}"], read_folder=read_folder, notes=[])
    assert plan.init == str(cache) and plan.model.layers == 2
    assert load(name).model.state_dict().keys() == load(cache).model.state_dict().keys()


def test_presets_and_folders_come_first(cache: Path, model: Path, tmp_path: Path) -> None:
    (tmp_path / "acme").mkdir()
    (tmp_path / "acme" / "tiny-9b").symlink_to(model)
    assert download.local_folder("acme/tiny-9b") == Path("acme/tiny-9b")
    assert planfile.read(None, ["model=acme/tiny-9b"], read_folder=read_folder, notes=[]).init == "acme/tiny-9b"
    other = cache.parents[1].with_name("models--Qwen--Qwen3-8B")
    cache.parents[1].rename(other)
    notes: list[str] = []
    assert planfile.read(None, ["model=Qwen/Qwen3-8B"], notes=notes).init == "random"
    assert "model=Qwen/Qwen3-8B@main" in notes[0]
    plan = planfile.read(None, ["model=Qwen/Qwen3-8B@main"], read_folder=read_folder, notes=[])
    assert plan.init == str(other / "snapshots" / COMMIT)


def test_a_copy_that_lacks_weights_is_no_copy(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (cache / "model.safetensors").resolve().unlink()
    assert find_snapshot("acme/tiny-9b") is None
    assert find_snapshot("acme/tiny-9b", "config.json") == cache
    with pytest.raises(PlanError, match="run `hf download acme/tiny-9b --local-dir tiny-9b` and give"):
        planfile.read(None, ["model=acme/tiny-9b"], read_folder=read_folder, notes=[])
    assert main(["generate", "acme/tiny-9b", "--prompt", "a"]) == 2
    assert "run `hf download acme/tiny-9b --local-dir tiny-9b` and give" in capsys.readouterr().err
    (cache / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "1.safetensors"}}))
    assert find_snapshot("acme/tiny-9b") is None
    (cache / "1.safetensors").write_bytes(b"")
    assert find_snapshot("acme/tiny-9b") == cache


def test_the_command_names_the_revision() -> None:
    assert download_command("a/b@v1", "config.json") == "hf download a/b config.json --revision v1 --local-dir b"


@pytest.fixture
def server(model: Path) -> Iterator[tuple[str, list[str]]]:
    """Serve acme/tiny-9b, and pickled weights that nobody needs: (address, files that were sent)."""
    files = {path.name: path.read_bytes() for path in model.iterdir()}
    files |= {"pytorch_model.bin": b"pickle", "original/consolidated.safetensors": b"again"}
    sent: list[str] = []

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = self.path.partition("?")[0].strip("/")
            name = path.partition(f"resolve/{COMMIT}/")[2]
            if path == "" or path.startswith("api/models/acme/tiny-9b"):
                entries = [
                    {"type": "file", "path": file, "size": len(body), "oid": file} for file, body in files.items()
                ]
                siblings = [{"rfilename": file} for file in files]
                about = {"id": "acme/tiny-9b", "sha": COMMIT, "siblings": siblings}
                self.answer(200, json.dumps(entries if "/tree/" in path else about).encode())
            elif name in files:
                sent.extend([name] if self.command == "GET" else [])
                self.answer(200, files[name])
            else:
                self.answer(404, b"", **{"X-Error-Code": "RepoNotFound"})

        def answer(self, status: int, body: bytes, **more: str) -> None:
            self.send_response(status)
            headers = {"Content-Length": str(len(body)), "ETag": f'"{hash(body)}"', "X-Repo-Commit": COMMIT, **more}
            for key, text in headers.items():
                self.send_header(key, text)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    running = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{running.server_port}", sent
    running.shutdown()
    running.server_close()


def test_a_model_is_downloaded_once_and_only_its_files(server: tuple[str, list[str]], tmp_path: Path) -> None:
    address, sent = server
    names = {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_ENDPOINT": address, "HF_HUB_OFFLINE": "0"}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        call = [sys.executable, "-m", "meshwright", *words]
        return subprocess.run(call, cwd=tmp_path, env={**os.environ, **names}, capture_output=True, text=True)

    words = ["generate", "acme/tiny-9b", "--prompt", "a", "--max-new-tokens", "2"]
    first = run(*words)
    assert first.returncode == 0, first.stderr
    assert sorted(sent) == sorted(set(sent))
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= set(sent)
    assert not {"pytorch_model.bin", "original/consolidated.safetensors"} & set(sent)
    number = len(sent)
    assert run(*words).stdout == first.stdout and len(sent) == number
    missing = run("train", "model=acme/other")
    assert missing.returncode == 2 and "model=acme/other is not on the Hugging Face Hub" in missing.stderr
    assert missing.stderr.count("\n") == 1
