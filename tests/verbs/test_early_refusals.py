"""Errors in a command come before torch is imported, for every verb and option."""

import inspect
import json
import socket
import subprocess
import sys
import typing
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer

from meshwright.interface.terminal.help import VERBS
from meshwright.spec.model.quantization_schemes import FOLDER_FORMATS
from meshwright.spec.recipe.recipe import PRECISIONS
from meshwright.verbs.commands import FOLDERS, FUNCTIONS
from meshwright.verbs.main import main
from tests.verbs.toy import train, write_texts

RUN = """
import contextlib, io, json, os, sys

class Torch(BaseException):
    pass

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise Torch
        return None

# Once for all cases, and without torch: most of a case's time is imports.
sys.meta_path.insert(0, Finder())
from meshwright.verbs.main import main
import meshwright.interface.planning.plan_request
import meshwright.verbs.plan.answer
import meshwright.verbs.quantize.options
import meshwright.interface.trained.serving
import meshwright.verbs.distill.answer
import meshwright.verbs.rent.answer
import meshwright.verbs.eval.request
import meshwright.data.preparation
for words in json.loads(sys.argv[1]):
    sys.stdout.flush()
    if child := os.fork():
        os.waitpid(child, 0)
        continue
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            end = main(words)
    except Torch:
        end = "torch"
    sys.__stdout__.write("CASE " + json.dumps([words, end, err.getvalue()]) + chr(10))
    sys.__stdout__.flush()
    os._exit(0)
"""
BASES: dict[str, list[str]] = {
    "quickstart": [], "init": [], "schema": [], "doctor": ["--quick"], "verify": [], "calibrate": [],
    "train": ["model=llama-tiny", "data=texts"], "tune": ["model=hf", "data=chat.jsonl"],
    "distill": ["--teacher", "hf", "--student", "teacher:layers=1", "data=texts"],
    "generate": ["hf", "--prompt", "a"], "chat": ["hf"], "serve": ["hf"], "plan": ["llama-tiny", "--cluster", "h100x8"],
    "rent": ["llama-tiny", "--tokens", "1B"], "explore": ["llama-tiny"], "dryrun": ["model=llama-tiny"],
    "profile": ["model=llama-tiny"], "compare": ["run"], "report": ["run"], "eval": ["hf"], "runs": ["run"],
    "export": ["run", "out"], "import": ["hf", "new"], "quantize": ["hf", "--scheme", "int8", "--out", "out"],
    "accuracy": ["runs.csv"], "data": [], "drill": [], "launch": ["model=llama-tiny", "--to", "slurm"],
}  # fmt: skip
"""Words that are right, but for one that the test puts in the place of another or behind them."""
WRONG = {int: "-7", float: "-7", str: "wrong-thing", Path: "nowhere/at/all"}
FREE: dict[str, str] = {
    "any text is one": "generate --prompt; chat --system; serve --name",
    "a folder that is made": "export OUT; import RUN; quantize --out; doctor --runs; explore --out; launch --out; "
    "drill --out",
    "any image may exist": "launch --image",
    "the matrices of the model are asked": "quantize --keep",
    "read by the code that draws the case": "verify --case",
}
"""Why -> options that take such a value, or are refused later."""
LATE = {option: why for why, options in FREE.items() for option in options.split("; ")}
UNWRITABLE = [
    ["export", "run", "/proc/x"], ["export", "run", "/proc/x.gguf"], ["import", "hf", "/proc/x"],
    ["quantize", "hf", "--scheme", "int8", "--out", "/proc/x"], ["train", "data=texts", "run=/proc/x"],
    ["report", "run", "--out", "/proc/x.html"], ["calibrate", "--out", "/proc/x.toml"],
    ["launch", "model=llama-tiny", "--to", "slurm", "--out", "/proc/x"],
    ["quickstart", "run=/proc/x"], ["profile", "model=llama-tiny", "run=/proc/x"],
    ["quantize", "hf", "--scheme", "int8", "--out", "q", "--html", "/proc/x.html"],
]  # fmt: skip
TAKEN = [
    ["export", "run", "hf"], ["import", "hf", "run"], ["quantize", "hf", "--scheme", "int8", "--out", "hf"],
    ["train", "data=texts", "run=run"], ["report", "hf"], ["compare", "hf"], ["eval", "texts"],
    ["generate", "texts", "--prompt", "a"], ["generate", "texts/a.py", "--prompt", "a"], ["serve", "texts"],
    ["chat", "texts"], ["train", "data=nowhere"], ["tune", "model=hf", "data=nowhere"], ["eval", "hf", "--data", "no"],
    ["distill", "--teacher", "hf", "--student", "llama-tiny", "data=nowhere"], ["data", "show", "data=nowhere"],
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with texts, a run and a Hugging Face directory."""
    here = tmp_path_factory.mktemp("refused")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(here)
        write_texts(Path("texts"))
        Path("chat.jsonl").write_text(json.dumps({"prompt": "a", "completion": "b"}) + "\n")
        Path("runs.csv").write_text("source\n")
        assert main(train(Path("texts"), Path("run"), "recipe.steps=1", "recipe.warmup_steps=0")) == 0
        assert main(["export", "run", "hf"]) == 0
    return here


def ends(cases: list[list[str]], folder: Path) -> list[tuple[list[str], Any, str]]:
    """Return words, exit code or "torch", and stderr of each command."""
    done = subprocess.run(
        [sys.executable, "-c", RUN, json.dumps(cases)], capture_output=True, text=True, check=False, cwd=folder,
        timeout=300,
    )  # fmt: skip
    lines = [line.removeprefix("CASE ") for line in done.stdout.splitlines() if line.startswith("CASE ")]
    assert len(lines) == len(cases), done.stderr
    return [tuple(json.loads(line)) for line in lines]


def check(cases: list[list[str]], folder: Path, marks: list[tuple[str, ...]] | None = None) -> None:
    """Check that each command is refused in one line, with one of `marks` in it."""
    wrong = []
    for number, (words, end, message) in enumerate(ends(cases, folder)):
        named = marks is None or any(mark in message for mark in marks[number])
        lines = [line for line in message.splitlines() if not line.startswith("meshwright: note:")]
        if (
            end != 2
            or not named
            or len(lines) != 1
            or not lines[0].startswith("meshwright: ")
            or "Traceback" in message
        ):
            wrong.append((" ".join(words), end, message))
    assert not wrong


def wrong_commands(verb: str) -> Iterator[list[str]]:
    """Yield a verb with one wrong value, for each of its parameters."""
    base = BASES[verb]
    function = getattr(import_module(f"meshwright.verbs.{FOLDERS.get(verb, verb)}.command"), FUNCTIONS.get(verb, verb))
    arguments = 0
    for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
        hint, info = typing.get_args(parameter.annotation)[:2]
        kinds = [kind for kind in WRONG if kind.__name__ in str(hint)]
        if not kinds:
            assert "bool" in str(hint), f"{verb} {name}: give a wrong value of {hint} in WRONG"
            continue
        value = WRONG[kinds[0]]
        if isinstance(info, typer.models.ArgumentInfo):
            shown = str(info.metavar).strip("[]")
            if name == "words":
                yield [verb, *base, "nowhere/at/all.yaml"] if verb != "quickstart" else [verb, *base, "recipe.none=1"]
                yield [verb, *base, "recipe.nonsense=1"]
            elif f"{verb} {shown}" not in LATE:
                yield [verb, *base[:arguments], value, *base[arguments + 1 :]]
            arguments += 1
            continue
        named = [word for word in info.param_decls or () if str(word).startswith("--")]
        option = str(named[0]).partition("/")[0] if named else f"--{name.replace('_', '-')}"
        if f"{verb} {option}" in LATE:
            continue
        if option in base:
            index = base.index(option)
            yield [verb, *base[: index + 1], value, *base[index + 2 :]]
        else:
            yield [verb, *base, option, value]


def test_every_verb_is_tried() -> None:
    assert set(BASES) == set(VERBS)
    tried = {verb: [*wrong_commands(verb)] for verb in VERBS if verb != "data"}
    assert sum(map(len, tried.values())) > 150


@pytest.mark.parametrize("verb", ["generate", *(verb for verb in BASES if verb not in ("generate", "data"))])
@pytest.mark.long(every=True)
def test_a_wrong_value_is_refused_before_torch_is_loaded(verb: str, folder: Path) -> None:
    """The line names the wrong value."""
    cases = [*wrong_commands(verb)]
    marks = []
    for words in cases:
        changed = [word for word in words[1:] if word not in BASES[verb]]
        marks.append((*changed, *(word.removeprefix("--") for word in changed), "nonsense", "none"))
    check(cases, folder, marks)


@pytest.mark.parametrize("cases", [UNWRITABLE, TAKEN], ids=["unwritable", "taken or no such"])
@pytest.mark.long(every=True)
def test_a_place_that_cannot_be_is_refused_before_torch_is_loaded(cases: list[list[str]], folder: Path) -> None:
    check(cases, folder)


def test_a_port_that_is_taken_is_refused_before_torch_is_loaded(folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        [(_, end, message)] = ends([["serve", "hf", "--port", port]], folder)
    assert end == 2 and f"--port {port} of 127.0.0.1 is taken" in message


def test_the_formats_that_are_refused_early_are_those_that_are_written() -> None:
    from meshwright.formats.quantized.table import FORMATS
    from meshwright.training.optimizer.precision import DTYPES

    assert tuple(FORMATS) == FOLDER_FORMATS and tuple(DTYPES) == PRECISIONS
