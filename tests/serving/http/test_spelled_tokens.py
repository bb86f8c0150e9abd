"""Log-probabilities of a tokenizer in the manner of Llama-2: tokens keep their spaces, offsets are places in the text,
and bytes of characters are told apart."""

from functools import cache
from typing import Any

import pytest
import torch

from meshwright.data import Tokenizer
from meshwright.model import build
from meshwright.serving.http.engine_thread import HostedModel
from meshwright.serving.http.http_server import HttpServer
from meshwright.serving.http.server_options import ServerOptions
from meshwright.spec import ModelShape
from tests.data.tokenizers_for_tests import metaspace
from tests.serving.http.running import EXACT, NAME, asked_once

TOKENIZER = Tokenizer(metaspace(), bos="<s>", eos="</s>")
PROMPT = "the quick caf\u00e9 \u65e5"
ASKED: dict[str, Any] = {"model": NAME, "max_tokens": 40, "temperature": 1.5, "seed": 3, "return_token_ids": True}


def model() -> HostedModel:
    torch.manual_seed(0)
    shape = ModelShape(name="llama", vocab=TOKENIZER.vocab, layers=1, hidden=32, heads=2, ffn=48, max_positions=128)
    return HostedModel(name=NAME, model=build(shape).eval(), tokenizer=TOKENIZER, end_ids=(2,), created=1)


@cache
def answered() -> list[Any]:
    messages = [{"role": "user", "content": PROMPT}]
    server = HttpServer(NAME, model, ServerOptions(port=0), EXACT)
    return asked_once(
        server,
        ("/v1/completions", {**ASKED, "prompt": PROMPT, "echo": True, "logprobs": 20}),
        ("/v1/chat/completions", {**ASKED, "messages": messages, "logprobs": True, "top_logprobs": 20}),
    )


def utf8(token: int) -> bytes:
    """Return the vocabulary's bytes of a token."""
    name = next(name for name, id in TOKENIZER._library.get_vocab().items() if id == token)
    return bytes([token - 3]) if 3 <= token < 259 else name.replace("\u2581", " ").encode()


def test_tokens_stand_where_their_offsets_say() -> None:
    [choice] = answered()[0]["choices"]
    logprobs, text = choice["logprobs"], choice["text"]
    ids = [*choice["prompt_token_ids"], *choice["token_ids"]]
    assert choice["prompt_token_ids"] == TOKENIZER.begin(PROMPT) and text.startswith(PROMPT)
    borders = [*logprobs["text_offset"], len(text)]
    assert borders == sorted(borders) and borders[:3] == [0, 0, 0], "no bos is in the text, and no first space"
    spaces = 0
    for token, spelled, begin in zip(ids, logprobs["tokens"], logprobs["text_offset"], strict=True):
        if token < 259:
            assert spelled in ("<s>", "</s>", f"bytes:\\x{token - 3:02x}", chr(max(0, token - 3)))
        elif begin:
            assert spelled == utf8(token).decode() and text[begin:].startswith(spelled)
            spaces += spelled == " "
    assert spaces >= 3


def test_no_two_bytes_have_one_name() -> None:
    [choice] = answered()[0]["choices"]
    for position, likeliest in enumerate(choice["logprobs"]["top_logprobs"][1:], start=1):
        assert len(likeliest) >= 19, position  # a letter and its byte are one text


def test_bytes_of_chats_are_known() -> None:
    [choice] = answered()[1]["choices"]
    rows = choice["logprobs"]["content"]
    assert [bytes(row["bytes"]) for row in rows] == [utf8(token) for token in choice["token_ids"]]
    assert any(len(row["bytes"]) == 1 and row["bytes"][0] > 127 for row in rows)
    assert all(token["bytes"] for row in rows for token in row["top_logprobs"])


@pytest.mark.parametrize("ids", [[262, 259, 270], [3 + 0xE6, 3 + 0x97, 3 + 0xA5]])
def test_spelled_behind_others(ids: list[int]) -> None:
    assert b"".join(map(TOKENIZER.token_bytes, ids)).decode() == TOKENIZER.continuation_text([1, 260], ids)


def test_special_tokens_are_left_out_of_texts_unless_they_are_wanted() -> None:
    """vLLM's skip_special_tokens is true by default. `tokenizers` tells which tokens are special."""
    messages = [{"role": "user", "content": PROMPT}]
    drawn = {**ASKED, "logit_bias": {"1": 4}}  # <s> is drawn often
    bodies: dict[str, Any] = {
        "/v1/completions": {"prompt": PROMPT, "logprobs": 0},
        "/v1/chat/completions": {"messages": messages},
    }
    more: tuple[dict[str, Any], ...] = ({}, {"skip_special_tokens": False})
    asked = [(path, {**drawn, **body, **field}) for path, body in bodies.items() for field in more]
    answers = asked_once(HttpServer(NAME, model, ServerOptions(port=0), EXACT), *asked)
    for (_, body), answer in zip(asked, answers, strict=True):
        [choice] = answer["choices"]
        skipped = body.get("skip_special_tokens", True)
        assert choice["token_ids"].count(1) > 3
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        special = [token for token in range(3) if not TOKENIZER._library.decode([token], skip_special_tokens=True)]
        spelled = [token for token in choice["token_ids"] if not (skipped and token in special)]
        assert text == TOKENIZER.continuation_text(choice["prompt_token_ids"], spelled)
        assert ("<s>" in text) is not skipped and 1 in special
        if "text" in choice:
            offsets = choice["logprobs"]["text_offset"]
            assert offsets == sorted(offsets) and offsets[-1] <= len(text)


def test_a_stop_string_that_is_a_special_token_ends_the_answer() -> None:
    """Its text is left out by default, so the text alone would never show it."""
    body = {**ASKED, "prompt": PROMPT, "logit_bias": {"1": 4}, "stop": ["<s>"]}
    [answer] = asked_once(HttpServer(NAME, model, ServerOptions(port=0), EXACT), ("/v1/completions", body))
    [choice] = answer["choices"]
    assert choice["finish_reason"] == "stop" and choice["token_ids"].count(1) <= 1 and "<s>" not in choice["text"]
