"""Adapters that are loaded and unloaded over HTTP: whom it is allowed, from where, how many, and what requests get."""

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.formats.hub.adapter import save_adapter
from meshwright.interface.trained.trained_model import peft_adapter
from meshwright.serving.engine.answers.request_options import RequestOptions
from meshwright.serving.engine.serving_engine import ServingEngine
from meshwright.serving.http.server_options import ServerLimits
from meshwright.spec.model.shape import LoRAShape
from meshwright.spec.weights.inventory import parameters
from tests.serving.http.running import EXACT, KEYS, NAME, Running, running, small
from tests.serving.http.test_limits import until

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
PROMPT = [7, 9, 11, 7, 9, 20, 31, 7, 9, 11, 7, 9, 20, 31, 7, 9, 11]
LIMITS = ServerLimits(max_adapters=2, max_adapter_rank=8, max_adapter_bytes=2**16, drain_seconds=0.2)


def write(folder: Path, seed: int, rank: int = 3, **changed: Any) -> Path:
    """An adapter of the small model in PEFT's format."""
    folder.mkdir(parents=True)
    shape = replace(small().model.shape, lora=LoRAShape(rank=rank, targets="attention"))
    chance = torch.Generator().manual_seed(seed)
    low = {
        parameter.name: torch.randn(parameter.shape, generator=chance)
        for parameter in parameters(shape)
        if parameter.adapts
    }
    save_adapter(folder, low, shape, base="small", dtype=torch.float32)
    if changed:
        config = folder / "adapter_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | changed))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make folders: in `in` the adapters a, b, c and others; beside it one that nobody may load."""
    root = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("a", "b", "group/c")):
        write(root / "in" / name, seed)
    write(root / "in" / "wide", 3, rank=9)
    write(root / "in" / "false", 4, r=2)
    write(root / "in" / "dora", 5, use_dora=True)
    write(root / "beside", 6)
    (root / "in" / "leads_out").symlink_to(root / "beside")
    linked = root / "in" / "linked"
    linked.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (linked / name).symlink_to(root / "beside" / name)
    damaged = write(root / "in" / "damaged", 7) / "adapter_model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:90])
    large = write(root / "in" / "large", 8) / "adapter_model.safetensors"
    large.write_bytes(large.read_bytes() + bytes(2**17))
    (root / "in" / "empty").mkdir()
    return root


@pytest.fixture
def server(folder: Path) -> Iterator[Running]:
    hosted = replace(small(), open_adapter=partial(peft_adapter, small().model))
    with running(hosted=hosted, limits=LIMITS, adapter_folder=folder / "in") as served:
        yield served


def right(adapter_folder: Path | None, tokens: int = 12) -> list[int]:
    adapters = {} if adapter_folder is None else {"own": peft_adapter(small().model, adapter_folder)}
    engine = ServingEngine(small().model, EXACT, end_ids=small().end_ids, adapters=adapters)
    options = RequestOptions(max_new_tokens=tokens, adapter=next(iter(adapters), None))
    asked = engine.add(PROMPT, options)
    engine.run([asked])
    return asked.answers[0].ids


def answer(server: Running, name: str, tokens: int = 12) -> tuple[list[int], int]:
    """Token ids, and how many of the prompt were cached."""
    body = {"model": name, "prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "return_token_ids": True}
    status, _, document = server.ask("/v1/completions", body)
    assert status == 200, document
    return document["choices"][0]["token_ids"], document["usage"]["prompt_tokens_details"]["cached_tokens"]


def code(server: Running, path: str, **body: Any) -> tuple[int, str]:
    status, _, document = server.ask(path, body)
    return status, document["error"]["code"] if status != 200 else ""


def models(server: Running) -> list[str]:
    return [entry["id"] for entry in server.ask("/v1/models")[2]["data"]]


def test_a_name_means_what_was_loaded_last(server: Running, folder: Path) -> None:
    inside = folder / "in"
    assert models(server) == [NAME]
    assert code(server, LOAD, lora_name="mine", lora_path="a") == (200, "")
    assert models(server) == [NAME, "mine"]
    assert server.ask("/v1/models/mine")[2]["parent"] == NAME
    assert answer(server, "mine") == (right(inside / "a"), 0)
    assert answer(server, "mine")[1] == 16
    assert answer(server, NAME)[0] == right(None) != right(inside / "a") != right(inside / "b")
    assert code(server, LOAD, lora_name="mine", lora_path="b") == (400, "adapter_exists")
    assert code(server, UNLOAD, lora_name="mine") == (200, "")
    assert models(server) == [NAME]
    assert code(server, "/v1/completions", model="mine", prompt=PROMPT) == (404, "model_not_found")
    assert code(server, LOAD, lora_name="mine", lora_path=str(inside / "b")) == (200, "")
    assert answer(server, "mine") == (right(inside / "b"), 0), "nothing of the one before is found in the cache"
    assert code(server, UNLOAD, lora_name="mine")[0] == 200
    assert code(server, LOAD, lora_name="a.b/c-d_1", lora_path="./group/../group/c")[0] == 200
    assert answer(server, "a.b/c-d_1")[0] == right(inside / "group" / "c")
    assert "load_lora_adapter 200" in "\n".join(server.lines) and "group" not in "\n".join(server.lines)


def test_metrics_tell_of_adapters_that_are_here(server: Running) -> None:
    def told() -> str:
        return server.ask("/metrics")[2].decode()

    assert code(server, LOAD, lora_name="mine", lora_path="a")[0] == 200
    answer(server, "mine")
    of_mine = 'request_success_total{finished_reason="length",model_name="mine"} 1.0'
    until(lambda: of_mine in told())
    assert f'num_adapters{{model_name="{NAME}"}} 1.0' in told()
    assert code(server, UNLOAD, lora_name="mine")[0] == 200
    until(lambda: 'model_name="mine"' not in told())
    assert (
        f'num_adapters{{model_name="{NAME}"}} 0.0' in told() and f'adapter_bytes{{model_name="{NAME}"}} 0.0' in told()
    )
    assert code(server, LOAD, lora_name="mine", lora_path="a")[0] == 200
    answer(server, "mine")
    until(lambda: of_mine in told())


def test_an_answer_in_flight_keeps_its_adapter(server: Running, folder: Path) -> None:
    before, after = right(folder / "in" / "a", 150), right(folder / "in" / "b")  # the server has the same model
    code(server, LOAD, lora_name="mine", lora_path="a")
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(answer(server, "mine", 150)[0]))
    thread.start()
    until(lambda: not server.engine.idle)
    assert code(server, UNLOAD, lora_name="mine") == (200, "")
    held = server.engine.adapters.count
    code(server, LOAD, lora_name="mine", lora_path="b")
    assert answer(server, "mine")[0] == after
    thread.join(300)
    assert answers == [before]
    assert held == 1 and server.engine.adapters.count == 1


@pytest.mark.parametrize(
    ("path", "status", "expected_code"),
    [
        ("../beside", 403, "outside_adapter_dir"),
        ("/etc", 403, "outside_adapter_dir"),
        ("leads_out", 403, "outside_adapter_dir"),
        ("linked", 403, "outside_adapter_dir"),
        ("a/../../in/../beside", 403, "outside_adapter_dir"),
        ("a\0", 400, "no_adapter"),
        ("x" * 4000, 400, "no_adapter"),
        ("nowhere", 400, "no_adapter"),
        ("empty", 400, "no_adapter"),
        (".", 400, "no_adapter"),
        ("a/adapter_config.json", 400, "no_adapter"),
        ("damaged", 400, "no_adapter"),
        ("large", 400, "adapter_too_large"),
        ("wide", 400, "no_adapter"),
        ("false", 400, "no_adapter"),
        ("dora", 400, "no_adapter"),
    ],
)
def test_what_is_no_adapter_here_is_refused(
    shared: Running, folder: Path, path: str, status: int, expected_code: str
) -> None:  # fmt: skip
    refused = shared.ask(LOAD, {"lora_name": "mine", "lora_path": path})
    assert (refused[0], refused[2]["error"]["code"]) == (status, expected_code), refused
    assert str(folder) not in refused[2]["error"]["message"] or path.startswith("/")
    assert models(shared) == [NAME] and shared.engine.adapters.count == 0


def test_a_file_that_cannot_be_read_is_the_requests_fault_and_names_no_place(folder: Path) -> None:
    def gone(folder_path: Path, _: int) -> Any:
        return (folder_path / "not.safetensors").read_bytes()

    with running(hosted=replace(small(), open_adapter=gone), limits=LIMITS, adapter_folder=folder / "in") as server:
        status, _, document = server.ask(LOAD, {"lora_name": "mine", "lora_path": "a"})
        assert status == 400 and document["error"]["message"] == "lora_path cannot be read"


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[Running]:
    hosted = replace(small(), open_adapter=partial(peft_adapter, small().model))
    with running(hosted=hosted, limits=LIMITS, adapter_folder=folder / "in") as served:
        yield served


@pytest.mark.parametrize("name", [NAME, "", "a b", "../x", "x" * 129, "a\n", 3, None])
def test_names_that_are_none(shared: Running, name: Any) -> None:
    assert shared.ask(LOAD, {"lora_name": name, "lora_path": "a"})[0] == 400
    assert shared.ask(UNLOAD, {"lora_name": name})[0] == 400
    assert code(shared, UNLOAD, lora_name="unknown") == (404, "model_not_found")
    assert code(shared, LOAD, lora_name="a", lora_path="a", load_inplace=True) == (400, "unknown_parameter")


def test_so_many_take_memory_and_no_more(server: Running) -> None:
    for name in ("one", "two"):
        assert code(server, LOAD, lora_name=name, lora_path="a")[0] == 200
    assert code(server, LOAD, lora_name="three", lora_path="b") == (409, "too_many_adapters")
    assert code(server, UNLOAD, lora_name="one")[0] == 200
    assert code(server, LOAD, lora_name="three", lora_path="b")[0] == 200
    statuses = list[int]()
    code(server, UNLOAD, lora_name="three")
    threads = [
        threading.Thread(target=lambda: statuses.append(code(server, LOAD, lora_name="same", lora_path="b")[0]))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert sorted(statuses) == [200, 400, 400, 400] and models(server) == [NAME, "two", "same"]


def test_it_is_off_unless_a_folder_is_named_and_needs_a_key(shared: Running) -> None:
    with running() as server:
        assert code(server, LOAD, lora_name="mine", lora_path="a") == (403, "adapters_are_fixed")
        assert code(server, UNLOAD, lora_name="mine") == (403, "adapters_are_fixed")
    for path in (LOAD, UNLOAD):
        assert shared.ask(path, {"lora_name": "mine", "lora_path": "a"}, key=None)[0] == 401
        assert shared.ask(path, {"lora_name": "mine", "lora_path": "a"}, key=KEYS[0] + "x")[0] == 401
    assert models(shared) == [NAME]
