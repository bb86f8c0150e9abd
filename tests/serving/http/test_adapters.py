"""Adapters as models of a server: what they are called, what they answer, and whose runs are taken."""

import io
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.interface.trained import serving
from meshwright.serving.engine.rows.request_adapters import ServedAdapter
from meshwright.serving.engine.serving_engine import ServingEngine
from meshwright.serving.http.engine_thread import HostedModel
from meshwright.spec.errors import ArgumentError
from meshwright.spec.model.shape import LoRAShape
from meshwright.spec.weights.inventory import parameters
from meshwright.verbs.main import main
from tests.serving.http.running import EXACT, KEYS, NAME, asked_once, running, small
from tests.verbs import toy
from tests.verbs.toy import refused

PROMPT = [7, 9, 11, 7, 9, 20, 31, 7, 9, 11, 7, 9, 20, 31, 7, 9, 11]


def adapted() -> HostedModel:
    served_adapters = {}
    for seed, called in enumerate(("poet", "group/lawyer")):
        lora = LoRAShape(rank=3 + seed, targets="attention")
        chance = torch.Generator().manual_seed(seed)
        low = [parameter for parameter in parameters(replace(small().model.shape, lora=lora)) if parameter.adapts]
        served_adapters[called] = ServedAdapter(
            lora, {parameter.name: torch.randn(parameter.shape, generator=chance) for parameter in low}
        )
    return replace(small(), adapters=served_adapters)


def test_each_is_a_model_of_its_own() -> None:
    hosted = adapted()
    engine = ServingEngine(hosted.model, EXACT, end_ids=hosted.end_ids, adapters=hosted.adapters)
    called = [NAME, "poet", "group/lawyer"]
    asked = [
        engine.add(PROMPT, mw.RequestOptions(max_new_tokens=12, adapter=None if adapter == NAME else adapter))
        for adapter in called
    ]
    engine.run(asked)
    right = {adapter: request.answers[0].ids for adapter, request in zip(called, asked, strict=True)}
    assert len({tuple(adapter) for adapter in right.values()}) == 3
    with running(hosted=hosted) as server:
        body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "return_token_ids": True}

        def ask(model: str) -> Any:
            status, _, document = server.ask("/v1/completions", {**body, "model": model})
            assert status == 200 and document["model"] == model
            return document

        with ThreadPoolExecutor(6) as clients:
            answers = list(clients.map(ask, called * 2))
        for name, document in zip(called * 2, answers, strict=True):
            assert document["choices"][0]["token_ids"] == right[name]
        assert ask("poet")["usage"]["prompt_tokens_details"]["cached_tokens"] == 16
        assert server.ask("/v1/completions", body)[2]["model"] == NAME
        status, _, document = server.ask("/v1/completions", {**body, "model": "painter"})
        assert status == 404 and document["error"]["message"].endswith("take small or poet or group/lawyer")
        metrics = server.ask("/metrics")[2].decode()
        assert 'request_success_total{finished_reason="length",model_name="poet"}' in metrics


def test_lists_chats_and_scores() -> None:
    hosted = adapted()
    with running(hosted=hosted) as server:
        listed = server.ask("/v1/models")[2]["data"]
        assert [(first_scores["id"], first_scores.get("parent")) for first_scores in listed] == [
            (NAME, None), ("poet", NAME), ("group/lawyer", NAME),
        ]  # fmt: skip
        assert server.ask("/v1/models/group/lawyer")[2]["parent"] == NAME
        assert server.ask("/tokenize", {"model": "poet", "prompt": "ab"})[2]["count"] == 2
        scored = {"prompt": PROMPT, "max_tokens": 0, "echo": True, "logprobs": 1}
        first_scores, second_scores = (
            server.ask("/v1/completions", {**scored, "model": name})[2]["choices"][0]["logprobs"]["token_logprobs"]
            for name in (NAME, "poet")
        )
        right = ServingEngine(hosted.model, adapters=hosted.adapters).score(PROMPT, 1, "poet").logprobs
        assert second_scores[1:] == pytest.approx(right, abs=1e-3) and first_scores[1:] != pytest.approx(
            second_scores[1:], abs=1e-2
        )
        client = server.client(KEYS[1])
        stream = client.completions.create(model="poet", prompt=PROMPT, max_tokens=6, temperature=0, stream=True)
        assert {event.model for event in stream} == {"poet"}


def test_an_adapter_has_not_the_name_of_the_model() -> None:
    with pytest.raises(ArgumentError, match="adapter='small' is the model's own name"):
        replace(small(), adapters={NAME: adapted().adapters["poet"]})


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """base: a folder; first and second: runs that trained adapters beside it; peft: the first one for PEFT."""
    folder = tmp_path_factory.mktemp("adapters")
    texts = toy.write_texts(folder / "texts")
    assert main(toy.train(texts, folder / "run")) == 0
    assert main(["export", str(folder / "run"), str(folder / "base")]) == 0
    for number, (name, more) in enumerate({"first": ("q,v", 4), "second": ("all", 9)}.items()):
        words = [f"model={folder / 'base'}", f"model.lora.rank={more[1]}", f"model.lora.targets={more[0]}"]
        words += ["recipe.learning_rate=0.05", f"recipe.seed={number}", f"data={texts}", f"run={folder / name}"]
        assert main(["train", "--no-dry-run", *toy.RECIPE, *words]) == 0
    assert main(["export", str(folder / "first"), str(folder / "peft"), "--adapter"]) == 0
    return folder


def test_adapters_of_runs_are_those_that_are_merged(runs: Path) -> None:
    base, prompts = mw.load(runs / "base"), ["def f1(", "class C", "    return"]
    adapters = {"first": runs / "first", "second": runs / "second", "peft": runs / "peft"}
    called = [*adapters, None]
    asked = [mw.RequestOptions(adapter=adapter, max_new_tokens=16) for adapter in called for _ in prompts]
    generated = base.generate_many(prompts * 4, asked, adapters=adapters)
    merged = {"first": "first", "second": "second", "peft": "first", None: "base"}
    for number, adapter in enumerate(called):
        right = mw.load(runs / merged[adapter]).generate_many(prompts, mw.RequestOptions(max_new_tokens=16))
        assert [each.ids for each in generated[3 * number : 3 * number + 3]] == [each.ids for each in right]
    assert len({generated[0].ids, generated[3].ids, generated[9].ids}) == 3


def test_one_adapter_of_generate_and_chat(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Adapters of a run and of PEFT give the answers of the fine-tuned model, and the base is unchanged after."""
    asked: dict[str, Any] = {"max_new_tokens": 12, "temperature": 0.0}
    base, right = mw.load(runs / "base"), mw.load(runs / "first").generate("def f1(", **asked)
    plain = base.generate("def f1(", **asked)
    for folder in ("first", "peft"):
        assert base.generate("def f1(", adapter=runs / folder, **asked).ids == right.ids
    assert base.generate("def f1(", **asked).ids == plain.ids != right.ids
    words = ["generate", str(runs / "base"), "--prompt", "def f1(", "--greedy", "--max-new-tokens", "12"]
    for more in ([], ["--samples", "2"]):
        capsys.readouterr()
        assert main([*words, *more, "--adapter", str(runs / "first")]) == 0
        printed = capsys.readouterr().out
        rows = (
            [json.loads(line)["text"] for line in printed.splitlines()]
            if more
            else [printed.removeprefix("def f1(")[:-1]]
        )
        assert rows == [right.text] * (1 + bool(more))
    answers = []
    for folder, more in (("first", []), ("base", ["--adapter", str(runs / "peft")]), ("base", [])):
        monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n"))
        assert main(["chat", str(runs / folder), "--greedy", "--max-new-tokens", "12", *more]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1] != answers[2]
    for verb in (words, ["chat", str(runs / "base")]):
        assert "--adapter nowhere does not exist" in refused(capsys, *verb, "--adapter", "nowhere")


def test_the_command_line(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    body = {"prompt": "def f1(", "max_tokens": 12, "temperature": 0, "return_token_ids": True}
    asked = [("/v1/completions", {**body, "model": name}) for name in ("base", "first", "other")]
    answers = list[Any]()
    monkeypatch.setattr(serving, "run", lambda server: answers.extend(asked_once(server, *asked)))
    options = ("--adapter", f"first={runs / 'first'}", "--adapter", f"other={runs / 'second'}", "--exact")
    assert main(["serve", str(runs / "base"), "--port", "0", *options, "--guess-tokens", "4"]) == 0
    assert "first, other" in capsys.readouterr().out
    for answer, path in zip(answers, ("base", "first", "second"), strict=True):
        right = mw.load(runs / path).generate("def f1(", max_new_tokens=12, temperature=0.0)
        assert answer["choices"][0]["token_ids"] == list(right.ids)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["poet"], "must be NAME=DIR"),
        (["poet=nowhere"], "poet=nowhere does not exist: give NAME=FOLDER"),
        (["base=first"], "the name base is taken"),
        (["a=first", "a=second"], "the name a is taken"),
        (["a=run"], "adapter a: run trained all weights and has no adapter"),
        (["a=texts"], "adapter a: texts has neither adapter_config.json nor plan.yaml"),
    ],
)
def test_what_is_no_adapter_is_refused(
    runs: Path, words: list[str], expected: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(runs)
    options = [word for value in words for word in ("--adapter", value)]
    assert expected in refused(capsys, "serve", "base", "--port", "0", *options).replace("--adapter", "adapter")


def test_an_adapter_of_other_weights(runs: Path) -> None:
    with pytest.raises(
        ArgumentError, match=r"adapter='a' does not fit: .* trained it on the weights of .*, and .*run has others"
    ):
        mw.load(runs / "run").engine(adapters={"a": runs / "first"})
