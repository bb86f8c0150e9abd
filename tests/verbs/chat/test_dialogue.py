"""Conversations: turns continue, earlier turns are cached, and the verb reads lines without a terminal."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from meshwright.data import Tokenizer
from meshwright.formats.hub import export_folder
from meshwright.interface.trained.trained_model import TrainedModel
from meshwright.model import build
from meshwright.serving.engine.answers.request_options import RequestOptions
from meshwright.spec.errors import ArgumentError, DataError, PlanError
from meshwright.verbs.chat.answer import Dialogue
from meshwright.verbs.chat.command import talk
from meshwright.verbs.generate.answer import answer_prompts, questions_of, read_prompts
from meshwright.verbs.main import main
from tests.model.shrunk import shrink

TOKENIZER = Tokenizer.shipped()
SHAPE = replace(shrink("llama-3.1-8b"), vocab=TOKENIZER.vocab, max_positions=400)
assert TOKENIZER.eos is not None
MODEL = TrainedModel(
    model=build(SHAPE, seed=2).eval(), tokenizer=TOKENIZER, tokenizer_file="auto", plan=None, stop_ids=(TOKENIZER.eos,)
)


def written(folder: Path) -> Path:
    """Write the model as a Hugging Face directory."""
    tensors = MODEL.model.state_dict().items()
    export_folder(folder, model_tensors=tensors, shape=SHAPE, tokenizer=TOKENIZER, dtype=torch.float32)
    return folder


GREEDY = RequestOptions(max_new_tokens=12)


def test_turns_go_on_and_what_was_said_is_cached() -> None:
    talked = Dialogue(MODEL, GREEDY, system="Be brief.")
    first = "".join(talked.say("Hello there, what is a tree?"))
    assert first and talked.last is not None and talked.last.cached == 0 and talked.last.tokens == 12
    assert [message["role"] for message in talked.messages] == ["system", "user", "assistant"]
    assert talked.messages[-1]["content"] == first
    asked = [*talked.messages, {"role": "user", "content": "And a list?"}]
    alone = MODEL.generate_many([MODEL.encode_messages(asked)], GREEDY)[0]
    second = "".join(talked.say("And a list?"))
    assert second == alone.text, "the whole conversation is read"
    assert talked.last.prompt - 32 <= talked.last.cached < talked.last.prompt and talked.last.first_seconds > 0
    talked.reset()
    assert [message["role"] for message in talked.messages] == ["system"]
    assert "".join(talked.say("Hello there, what is a tree?")) == first


def test_an_answer_that_is_left_stays_as_far_as_it_was_said() -> None:
    talked = Dialogue(MODEL, GREEDY)
    pieces = talked.say("Hello")
    piece = next(pieces)
    pieces.close()  # type: ignore[attr-defined]  # a generator
    assert talked.last is not None and talked.last.ending == "cancelled"
    assert talked.messages[-1]["content"].startswith(piece)
    assert "".join(talked.say("Go on")), "the engine is free again"


def test_a_turn_that_cannot_be_answered_is_forgotten() -> None:
    talked = Dialogue(MODEL, GREEDY)
    with pytest.raises(PlanError, match="positions: shorten it"):
        list(talked.say("word " * 500))
    assert talked.messages == [] and "".join(talked.say("Hello"))
    with pytest.raises(ArgumentError, match="n=2"):
        Dialogue(MODEL, RequestOptions(n=2, temperature=1.0))


def test_the_verb_reads_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(written(tmp_path / "hf"))
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n\n/reset\nHello\n/other\n/quit\nnever\n"))
    assert main(["chat", folder, "--greedy", "--max-new-tokens", "6", "--system", "Be brief."]) == 0
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if line.startswith("[first token ")]
    assert len(lines) == 2 and all("6 new, stopped at --max-new-tokens" in line for line in lines)
    assert "0 of" in lines[0] and "/other is not known" in err and "never" not in out
    half = len(out) // 2
    assert out[:half] == out[half:], "begun anew, the same words have the same answer"
    monkeypatch.setattr("sys.stdin", io.StringIO("one line without an end"))
    assert main(["chat", folder, "--greedy", "--max-new-tokens", "2"]) == 0
    assert main(["chat", folder, "--max-new-tokens", "0"]) == 2
    monkeypatch.setattr("sys.stdin", io.StringIO("word " * 500))
    assert main(["chat", folder, "--greedy"]) == 0
    err = capsys.readouterr().err
    assert "; /reset begins anew" in err and "max_new_tokens=" not in err


def test_a_model_without_a_chat_template_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = written(tmp_path / "hf")
    for template in ("", "{{ messages[-1].content }}"):
        if template:
            (folder / "chat_template.jinja").write_text(template)
        monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n"))
        assert main(["chat", str(folder), "--greedy", "--max-new-tokens", "2"]) == 0
        assert (f"{folder} has no chat template" in capsys.readouterr().err) is (not template)


def test_ctrl_c_stops_an_answer_and_not_the_program(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    talked = Dialogue(MODEL, GREEDY)
    steps, step = [], talked._engine.step

    def interrupted() -> list[object]:
        steps.append(1)
        if len(steps) == 4:
            raise KeyboardInterrupt
        return step()  # type: ignore[return-value]

    monkeypatch.setattr(talked._engine, "step", interrupted)
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\nAgain\n"))
    talk(talked)
    _, err = capsys.readouterr()
    figures = [line for line in err.splitlines() if line.startswith("[first token ")]
    assert "3 new, stopped]" in figures[0] and "12 new" in figures[1]
    assert len(talked.messages) == 4 and talked._engine.idle


def test_a_file_of_prompts_is_answered_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines, rows = tmp_path / "p.txt", tmp_path / "p.jsonl"
    lines.write_text("def f\n\nclass Tree\n")
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    rows.write_text("\n".join(map(json.dumps, [{"prompt": "def f"}, {"messages": messages}])))
    assert [prompt.text for prompt in read_prompts(lines)] == ["def f", "class Tree"]
    assert [bool(prompt.messages) for prompt in read_prompts(lines, chat=True)] == [True, True]
    rows_answered = list(answer_prompts(MODEL, [*read_prompts(lines), *read_prompts(rows)], GREEDY))
    assert [row["text"] for row in rows_answered[:2]] == [
        MODEL.generate(text, max_new_tokens=12, temperature=0.0).text for text in ("def f", "class Tree")
    ]
    assert rows_answered[2]["ids"] == rows_answered[0]["ids"]
    assert tuple(rows_answered[3]["ids"]) == MODEL.generate_many([MODEL.encode_chat("Hi")], GREEDY)[0].ids
    words = ["generate", str(written(tmp_path / "hf")), "--max-new-tokens", "12"]
    assert main([*words, "--prompts", str(lines), "--greedy"]) == 0
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert printed == rows_answered[:2]
    assert main([*words, "--prompt", "def f", "--samples", "3", "--seed", "4"]) == 0
    sampled = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(sampled) == 3 and len({tuple(answer["ids"]) for answer in sampled}) == 3
    want = RequestOptions(max_new_tokens=12, temperature=0.8, seed=4, n=3)
    assert sampled == list(answer_prompts(MODEL, questions_of(["def f"]), want))
    for wrong in (
        ["--prompts", str(lines), "--prompt", "x"],
        ["--prompts", str(tmp_path / "none.txt")],
        ["--prompt-ids", "1", "--samples", "2"],
        ["--prompt", "x", "--samples", "0"],
    ):
        assert main([*words, *wrong]) == 2
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(DataError, match="has no prompts"):
        read_prompts(tmp_path / "empty.txt")
