"""The benchmark of fine-tuning: its chat file, its turns, and what it says without TRL."""

import json
from pathlib import Path

import pytest

from benchmarks import tune_speed
from benchmarks.chat_file import ANSWER, PROMPT, TURNS, write_chat, write_model
from benchmarks.tune_ways import ROWS, SEQUENCE
from meshwright.data import Tokenizer


def test_conversations_have_the_lengths_that_are_stated(tmp_path: Path) -> None:
    write_chat(tmp_path / "chat.jsonl", 600)
    actual = [json.loads(line)["messages"] for line in (tmp_path / "chat.jsonl").read_text().splitlines()]
    tokenizer = Tokenizer.shipped()
    lengths: dict[str, list[int]] = {"user": [], "assistant": []}
    for messages in actual:
        assert [message["role"] for message in messages] == ["user", "assistant"] * (len(messages) // 2)
        for message in messages:
            lengths[message["role"]].append(len(tokenizer.encode(message["content"])))
    turns = len(lengths["user"])
    assert len(lengths["assistant"]) == turns == pytest.approx(TURNS * 600, rel=0.1)
    assert sum(lengths["user"]) / turns == pytest.approx(PROMPT, rel=0.15)
    assert sum(lengths["assistant"]) / turns == pytest.approx(ANSWER, rel=0.15)
    assert max(lengths["assistant"]) > 5 * ANSWER, "a long tail"


def test_a_seed_gives_the_same_file(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_chat(tmp_path / name, 20)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_without_trl_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(tune_speed.importlib.util, "find_spec", lambda name: None)
    tune_speed.main(["--json"])
    assert "pip install trl" in json.loads(capsys.readouterr().out)["skipped"]


@pytest.mark.slow
def test_ours_takes_turns(tmp_path: Path) -> None:
    write_chat(tmp_path / "chat.jsonl", 40)
    write_model(tmp_path / "model", "tiny")
    [actual] = tune_speed.race(["ours"], tmp_path, "fp32", 1, 1, "cpu")
    assert not actual.error and actual.peak_bytes > 0 and actual.seconds > 0
    assert 0.8 * ROWS * SEQUENCE < actual.tokens <= ROWS * SEQUENCE
    assert len(actual.losses) == tune_speed.WARM_UP + 1 and all(loss > 0 for loss in actual.losses)


@pytest.mark.long
def test_a_contestant_that_ends_is_reported(tmp_path: Path) -> None:
    [actual] = tune_speed.race(["ours"], tmp_path, "fp32", 1, 1, "cpu")
    assert actual.error and not actual.tokens
