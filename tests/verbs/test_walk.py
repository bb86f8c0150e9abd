"""The walks of the pages. docs/tuning.md: a small model is trained on the default text, tuned on a chat file, and
answers in its form; alone, as the page says it, and under ZeRO-3 on two ranks that are killed in the middle.
docs/distill.md: half of that model's layers are taught by it, quantized to 4 bits, and answer."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.verbs.faults import In
from tests.verbs.launched import launch

ROOT = Path(__file__).resolve().parents[2]
QUESTIONS = {"cat": "animal", "lemon": "fruit", "blue": "colour", "seven": "number", "melon": "fruit", "dog": "animal"}
JSON = "eval", "quantize"
FORM = re.compile(r"[a-z]+: (animal|fruit|colour|number)\.")


def commands(page: str = "tuning.md") -> list[list[str]]:
    """Return the commands of the page's walk, line by line."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    block = text[text.index("## A walk of ") :].split("\n\n    ", 1)[1].split("\n\n", 1)[0]
    return [shlex.split(line.split("  #")[0]) for line in block.splitlines() if line.strip()]


def run(words: list[str], folder: Path) -> str:
    """Run a command as a user does, from a folder."""
    program = {"meshwright": [sys.executable, "-m", "meshwright"], "python": [sys.executable]}
    options = [str(ROOT / word) if word.startswith("examples/") else word for word in words[1:]]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "XDG_CACHE_HOME": str(folder / "cache")}
    done = subprocess.run(
        [*program[words[0]], *options], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def answers(run_folder: str, folder: Path) -> list[str]:
    texts = []
    for thing in QUESTIONS:
        words = ["generate", run_folder, "--chat", "--prompt", f"What is {thing}?", "--greedy", "--json"]
        texts.append(json.loads(run(["meshwright", *words, "--max-new-tokens", "12"], folder))["text"])
    return texts


@pytest.fixture(scope="module")
def walked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("walk")
    for words in commands():
        if "generate" not in words:
            run(words, folder)
    return folder


@pytest.mark.slow
def test_a_tuned_model_answers_in_the_form(walked: Path) -> None:
    tuned_answers = answers("runs/chat", walked)
    assert sum(bool(FORM.match(text)) for text in tuned_answers) >= len(tuned_answers) - 1, tuned_answers
    right = [f"{thing}: {kind}." for thing, kind in QUESTIONS.items()]
    assert sum(text.startswith(each) for text, each in zip(tuned_answers, right, strict=True)) >= 4, tuned_answers
    before = answers("base", walked)
    assert not any(FORM.match(text) for text in before), before


@pytest.mark.slow
def test_two_ranks_that_are_killed_answer_too(walked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(walked)
    monkeypatch.setenv("XDG_CACHE_HOME", str(walked / "cache"))
    tune = next(words for words in commands() if words[1] == "tune")
    words = [word for word in tune[1:] if not word.startswith("run=")]
    words += ["run=runs/two", "layout.dp_shard=2", "layout.zero=3", "recipe.checkpoint_every=20"]

    ended = launch(2, words, walked / "first", fault=In(30, "die"))
    assert -signal.SIGKILL in ended.codes
    again = launch(2, [*words, "resume=auto"], walked / "second")
    assert again.codes == [0, 0], again.errors
    tuned_answers = answers("runs/two", walked)
    assert sum(bool(FORM.match(text)) for text in tuned_answers) >= len(tuned_answers) - 1, tuned_answers


@pytest.mark.slow
def test_a_student_of_half_the_layers_answers_in_4_bits(walked: Path) -> None:
    train, *others = commands("distill.md")
    assert [word.replace("teacher", "base") for word in train] == commands()[0], "one training for both walks"
    shutil.copytree(walked / "runs" / "base", walked / "runs" / "teacher")
    outputs = {words[1]: run([*words, "--json"] if words[1] in JSON else words, walked) for words in others}
    assert "divergence" in outputs["distill"]
    behind, quantized = (json.loads(outputs[verb].splitlines()[-1]) for verb in ("eval", "quantize"))
    [held_out] = behind["figures"]
    assert held_out["value"]["value"] < 7.0, "nats per token, of log 2048 = 7.6 where nothing was learned"
    assert 0 < held_out["difference"]["value"] < 0.4, "behind its teacher, which has twice the layers"
    assert quantized["passed"] and quantized["top1"] > 0.8 and quantized["bytes"] == quantized["predicted_bytes"]
    assert len(outputs["generate"]) > len("import")
