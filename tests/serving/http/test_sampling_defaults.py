"""Requests that say nothing have the sampling values of generation_config.json, as with vLLM."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import meshwright as mw
from meshwright.data import Tokenizer
from meshwright.serving.http.http_server import HttpServer
from meshwright.serving.http.request.request_fields import sampling_defaults
from meshwright.serving.http.server_options import ServerOptions
from tests.serving.http.running import EXACT, NAME, asked_once, small
from tests.training.test_weights import SHAPES, directory

SAID = {"temperature": 0.4, "top_k": 5, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.3}
GENERATION = {**SAID, "max_new_tokens": 7, "do_sample": True, "eos_token_id": 95, "transformers_version": "5.0.0"}
ASKED: dict[str, Any] = {"model": NAME, "prompt": "def f", "max_tokens": 24, "seed": 3, "ignore_eos": True}
CHAT: dict[str, Any] = {"model": NAME, "messages": [{"role": "user", "content": "Hi"}], "seed": 3, "ignore_eos": True}
PLAIN = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
QUESTIONS = {
    "nothing": ("completions", ASKED),
    "null": ("completions", {**ASKED, "temperature": None}),
    "all of them": ("completions", {**ASKED, **SAID}),
    "others": ("completions", {**ASKED, **PLAIN}),
    "beams": ("completions", {**ASKED, "use_beam_search": True, "best_of": 2}),
    "a chat": ("chat/completions", CHAT),
    "a long chat": ("chat/completions", {**CHAT, "max_tokens": 9}),
}  # fmt: skip


@cache
def answered(served: bool) -> dict[str, Any]:
    """Return the answers to QUESTIONS. `served`: by a server whose model has such a file."""
    hosted = replace(small(), sampling=sampling_defaults(GENERATION) if served else {})
    server = HttpServer(NAME, lambda: hosted, ServerOptions(port=0), EXACT)
    asked = [(f"/v1/{route}", body) for route, body in QUESTIONS.values()]
    return dict(zip(QUESTIONS, asked_once(server, *asked), strict=True))


def text(served: bool, name: str) -> str:
    return str(answered(served)[name]["choices"][0]["text"])


def test_what_a_request_does_not_say_is_the_model_s() -> None:
    assert text(True, "nothing") == text(True, "null") == text(True, "all of them") == text(False, "all of them")
    assert text(True, "others") == text(False, "others") == text(False, "nothing") != text(True, "nothing")
    assert text(True, "beams"), "beams draw no token"


def test_the_length_of_a_chat_that_says_none() -> None:
    assert [answered(True)[name]["usage"]["completion_tokens"] for name in ("a chat", "a long chat")] == [7, 9]
    assert answered(False)["a chat"]["usage"]["completion_tokens"] > 7


def test_values_are_those_that_transformers_reads() -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.GenerationConfig(**GENERATION).to_dict()
    defaults = sampling_defaults(GENERATION)
    assert defaults == {name: theirs[name] for name in (*SAID, "max_new_tokens")}
    assert sampling_defaults({"temperature": "hot", "top_p": 3.0, "top_k": True, "max_new_tokens": None}) == {}


def test_folders_are_opened_with_theirs(tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    directory(folder, replace(SHAPES["llama"], vocab=2048), Tokenizer.shipped())
    (folder / "generation_config.json").write_text('{"temperature": 0.6, "top_p": 0.95, "eos_token_id": 0}')
    opened = mw.load(folder)
    assert opened.hosted("it").sampling == {"temperature": 0.6, "top_p": 0.95}
    assert opened.hosted("it", generation_config=False).sampling == {}
