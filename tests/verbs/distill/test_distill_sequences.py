"""Files of a teacher's answers: their rows, omissions, and `tune` on them."""

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.compress.distill_sequences import AnswerSearch, questions
from meshwright.data.chat.samples import Continuation, Conversation, sample
from meshwright.spec.errors import ArgumentError, DataError
from meshwright.verbs.distill.answer import write_answers
from meshwright.verbs.main import main
from tests.training.distilling import taught

CHAT = {"messages": [{"role": "user", "content": "1 times"}, {"role": "assistant", "content": "is 1"}]}


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a run whose letters end a text, so its answers end."""
    run = taught(tmp_path_factory.mktemp("taught"), steps=120)
    (run / "generation_config.json").write_text(json.dumps({"eos_token_id": [10, *range(97, 123)]}))
    return run


def test_prompts_of_every_form(tmp_path: Path) -> None:
    preference = {"prompt": "2 times", "chosen": " 3", "rejected": " 4"}
    rows = CHAT, {"prompt": "3 times"}, {"prompt": "4 times", "completion": " 5"}, preference
    prompts = list(questions(write(tmp_path / "a.jsonl", *rows)))
    assert prompts[0].messages == ({"role": "user", "content": "1 times"},)
    assert [prompt.text for prompt in prompts[1:]] == ["3 times", "4 times", "2 times"]
    with pytest.raises(DataError, match="line 1: has no prompt"):
        list(questions(write(tmp_path / "b.jsonl", {"text": "only text"})))
    with pytest.raises(DataError, match="holds no rows of prompts"):
        questions(tmp_path / "c.txt")


@pytest.mark.parametrize("how", [{}, {"temperature": 0.8, "samples": 2}, {"beams": 3}], ids=str)
def test_answers_are_rows_that_tune_reads(teacher: Path, tmp_path: Path, how: dict[str, Any]) -> None:
    asked = write(tmp_path / "asked.jsonl", CHAT, {"prompt": "3 times"})
    written = write_answers(teacher, asked, tmp_path / "out.jsonl", max_new_tokens=40, **how)
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert written.written == len(rows) and written.written + written.left_out == 2 * how.get("samples", 1)
    for number, row in enumerate(rows):
        sampled = sample((f"out:{number}", row))
        if isinstance(sampled, Conversation):
            assert sampled.messages[-1]["role"] == "assistant"


def test_what_does_not_end_is_left_out(teacher: Path, tmp_path: Path) -> None:
    asked = write(tmp_path / "asked.jsonl", {"prompt": "3 times"})
    with pytest.raises(DataError, match="none of 1 answers has text and ends within max_new_tokens=1"):
        write_answers(teacher, asked, tmp_path / "out.jsonl", max_new_tokens=1)
    assert not (tmp_path / "out.jsonl").exists() and not list(tmp_path.glob(".out*"))


def test_what_does_not_end_is_kept_and_marked_if_asked(
    teacher: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked, out = write(tmp_path / "asked.jsonl", CHAT, {"prompt": "3 times"}), tmp_path / "out.jsonl"
    words = ["distill", "--teacher", str(teacher), "--prompts", str(asked), "--sequences", str(out)]
    assert main([*words, "--max-new-tokens", "2", "--keep-cut"]) == 0
    assert "2 of them stop at 2 tokens, and teach no end" in capsys.readouterr().out
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    parsed = [sample((f"out:{number}", row)) for number, row in enumerate(rows)]
    assert all(isinstance(row, Conversation | Continuation) and row.is_cut for row in parsed)
    # The tokens that are there are those of a longer answer.
    whole = tmp_path / "whole.jsonl"
    write_answers(teacher, asked, whole, max_new_tokens=40, keep_cut=True)
    longer = [json.loads(line)["completion"] for line in whole.read_text().splitlines()[1:]]
    assert longer[0].startswith(rows[1]["completion"]) and len(longer[0]) > len(rows[1]["completion"])
    assert main(["distill", "--teacher", str(teacher), "--keep-cut"]) == 2
    assert "--keep-cut is for a teacher's answers" in capsys.readouterr().err


@pytest.mark.parametrize("how", [{"beams": 2, "temperature": 0.5}, {"samples": 2}, {"max_new_tokens": 0}], ids=str)
def test_ways_that_contradict_each_other(how: dict[str, Any]) -> None:
    with pytest.raises(DataError):
        AnswerSearch(**how)


def test_the_verb(teacher: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked, out = write(tmp_path / "asked.jsonl", {"prompt": "3 times"}), tmp_path / "out.jsonl"
    words = ["distill", "--teacher", str(teacher), "--prompts", str(asked), "--sequences", str(out)]
    assert main([*words, "--max-new-tokens", "60"]) == 0
    assert "1 answers of" in capsys.readouterr().out and out.is_file()
    with pytest.raises(ArgumentError, match="is there already"):
        write_answers(teacher, asked, out)
    assert main([*words[:3], "--sequences", str(out)]) == 2
    assert "give --teacher DIR --prompts FILE" in capsys.readouterr().err
