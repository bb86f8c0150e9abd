"""Text that grows token by token: with looked-up texts of tokens it is what decoding all of them gives."""

import random
from collections.abc import Sequence

import pytest
import tokenizers
from tokenizers import decoders, models

from meshwright.data.tokens.text_stream import TextStream, TokenTexts
from meshwright.data.tokens.tokenizer import Tokenizer
from tests.data.tokenizers_for_tests import NAMES, TEXT, made, metaspace, with_added

BYTE_LEVEL = {name: Tokenizer(made(name)) for name in NAMES} | {"bytes": Tokenizer.bytes()}
ALL = BYTE_LEVEL | {
    "shipped": Tokenizer.shipped(),
    "llama2": Tokenizer(metaspace()),
    "added": Tokenizer(with_added(made("gpt2"), "caf\u00e9 \U0001f600", special=False)),
}
SPOKEN = TEXT + " \U0001f468\u200d\U0001f469\u200d\U0001f467 na\u00efve \u65e5\u672c caf\u00e9 \U0001f600!"


def pieces(tokenizer: Tokenizer, ids: list[int], prompt: list[int], texts: TokenTexts | None) -> list[str]:
    stream = TextStream(tokenizer.decode, prompt, texts)
    return [*(stream.push(token) for token in ids), stream.rest()]


@pytest.mark.parametrize("name", ALL)
def test_text_in_many_alphabets(name: str) -> None:
    """Tokens may end within a character. Half a character is never shown."""
    tokenizer = ALL[name]
    ids = tokenizer.begin(SPOKEN)
    for cut in (1, 2, 7, len(ids) // 2):
        prompt, rest = ids[:cut], ids[cut:]
        grown = pieces(tokenizer, rest, prompt, tokenizer.texts)
        assert "".join(grown) == tokenizer.decode(ids)[len(tokenizer.decode(prompt)) :]
        assert name == "llama2" or grown == pieces(tokenizer, rest, prompt, None)
        assert "\ufffd" not in "".join(grown)


@pytest.mark.parametrize("name", [name for name in ALL if name != "llama2"])
def test_tokens_in_any_order(name: str) -> None:
    """Bytes that are no characters among them, also at the end of the prompt."""
    tokenizer, chance = ALL[name], random.Random(7)
    for _ in range(60):
        ids = [chance.randrange(tokenizer.vocab) for _ in range(chance.randrange(1, 40))]
        prompt = [chance.randrange(tokenizer.vocab) for _ in range(chance.randrange(1, 12))]
        grown = "".join(pieces(tokenizer, ids, prompt, tokenizer.texts))
        assert grown == tokenizer.decode([*prompt, *ids])[len(tokenizer.decode(prompt)) :]


def test_runs_of_bytes_behind_a_prompt_of_bytes() -> None:
    """Characters that the vocabulary lacks are bytes; a run of them is decoded as a whole, or not at all."""
    tokenizer = ALL["llama2"]
    ids = tokenizer.encode("\u65e5\u672c" * 60).tolist()
    for cut in (len(ids) - 3, 178, 34):
        grown = pieces(tokenizer, ids[cut:], ids[:cut], tokenizer.texts)
        assert "".join(grown) == tokenizer.decode(ids)[len(tokenizer.decode(ids[:cut])) :]
        assert {len(piece) for piece in grown} == {0, 1}


@pytest.mark.parametrize("unit", [b"\x80", b"\xe6", b"\xe6\x97", b"\xf0\x9f\x98", b"\xff\xe6\x97\x80\x80"])
@pytest.mark.parametrize("looked_up", [True, False])
def test_a_run_that_is_no_text_costs_the_same_for_each_token(unit: bytes, looked_up: bool) -> None:
    """It comes while it grows, and what is text behind it is whole."""
    tokenizer, decoded = BYTE_LEVEL["bytes"], 0
    text = unit * (1500 // len(unit)) + "\u65e5\u672c!".encode()

    def decode(ids: Sequence[int]) -> str:
        nonlocal decoded
        decoded += len(ids)
        return tokenizer.decode(ids)

    stream = TextStream(decode, (), tokenizer.texts if looked_up else None)
    grown = [stream.push(token) for token in text]
    assert "".join([*grown, stream.rest()]) == tokenizer.decode(list(text))
    assert any(grown[:200]) and decoded < 150 * len(text)


def test_most_tokens_are_looked_up() -> None:
    for name, share in (("shipped", 0.9), ("llama3", 0.5), ("llama2", 0.09)):
        tokenizer = ALL[name]
        known = sum(tokenizer.texts[token] is not None for token in range(tokenizer.vocab))
        assert known >= share * tokenizer.vocab, name


def test_a_decoder_that_is_not_known_is_asked() -> None:
    """WordPiece joins a token to the one before it, or does not."""
    vocab = {"[UNK]": 0, "a": 1, "##b": 2, "c": 3, ".": 4}
    library = tokenizers.Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    library.decoder = decoders.WordPiece()
    tokenizer = Tokenizer(library.to_str())
    assert all(tokenizer.texts[token] is None for token in vocab.values())
    assert "".join(pieces(tokenizer, [2, 3, 4], [1], tokenizer.texts)) == "b c."
