"""Advice on a tokenizer that does not suit its text, and on how often a text is read."""

from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.data import prepare
from meshwright.data.report import advice
from meshwright.planfile import read
from meshwright.spec import BatchStage, Data, Plan
from tests.data.chats_for_tests import tokenizer_json


def plan(tmp_path: Path, text: str, tokenizer: str = "auto", vocab: int = 2048) -> Plan:
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    loaded = read(None, [f"model.vocab={vocab}"])
    return replace(loaded, data=Data(path=str(tmp_path / "text.txt"), tokenizer=tokenizer))


def advice_for(asked: Plan) -> str:
    return "\n".join(advice(asked, prepare(asked.data)))


def test_another_script_is_told_to_train_a_tokenizer_that_then_suits(tmp_path: Path) -> None:
    hindi = "".join(f"यह वाक्य संख्या {number} है और इसमें कुछ शब्द हैं।\n" for number in range(3000))
    poor = plan(tmp_path, hindi)
    assert "1.0" in advice_for(poor) and "bytes per token; data.tokenizer=bpe:2048 trains one on it" in advice_for(poor)
    advised = replace(poor, data=replace(poor.data, tokenizer="bpe:512"))
    assert advice_for(replace(advised, model=replace(advised.model, vocab=512))) == ""
    spelled = replace(poor, data=replace(poor.data, tokenizer="bytes"), model=replace(poor.model, vocab=257))
    assert advice_for(spelled) == "", "bytes were asked for"


def test_python_and_short_texts_are_left_in_peace(tmp_path: Path) -> None:
    python = "".join(f"def function_{n}(self, value):\n    return self.value + value\n\n" for n in range(3000))
    assert advice_for(plan(tmp_path, python)) == ""
    assert advice_for(plan(tmp_path, "यह\n" * 100)) == ""


def test_rows_that_no_token_uses_are_named(tmp_path: Path) -> None:
    sentences = advice_for(plan(tmp_path, "x\n" * 100, vocab=32000))
    assert sentences.startswith("model.vocab=32000 has 29,952 rows that the 2,048 tokens of the tokenizer never use")


def test_the_tokens_of_a_ramp_are_those_of_its_steps(tmp_path: Path) -> None:
    loaded = read(None, ["recipe.steps=37", "recipe.sequence=7", "recipe.global_batch=3"])
    for ramp in ((), ((50, 5), (60, 1)), ((1, 2), (100, 9), (10**9, 4))):
        stages = tuple(BatchStage(tokens=tokens, global_batch=batch) for tokens, batch in ramp)
        ramped = replace(loaded, recipe=replace(loaded.recipe, batch_ramp=stages))
        seen = 0
        for _ in range(37):
            seen += ramped.recipe.global_batch_at(seen) * 7
        assert ramped.recipe.tokens_of_run() == seen


def test_special_tokens_that_a_text_spells_are_named(tmp_path: Path) -> None:
    """Text is encoded as letters, which is right for pages about models and wrong for rendered conversations."""
    (tmp_path / "model").mkdir()
    file = tmp_path / "model" / "tokenizer.json"
    file.write_text(tokenizer_json("qwen2"), encoding="utf-8")
    chat = plan(tmp_path, "<|im_start|>user\nq<|im_end|>\n" * 20, str(file), vocab=400)
    library = pytest.importorskip("transformers").PreTrainedTokenizerFast(tokenizer_file=str(file))
    corpus, name = prepare(chat.data), "<|im_start|>"
    theirs = library(name)["input_ids"]
    assert len(theirs) == 1 and theirs[0] not in corpus.train.parts[0].read(0, corpus.train.size)
    assert "the text spells <|im_start|> and <|im_end|> of the tokenizer" in advice_for(chat)
    assert advice_for(plan(tmp_path, "a <s>struck</s> word\n" * 20, str(file), vocab=400)) == ""
