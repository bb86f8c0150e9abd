"""Documents that `--json` of every verb prints, recorded under tests/verbs/documents.

`python -m tests.verbs.json_documents` writes them anew: where a document changes on purpose, and its difference
is read.
What only the planner counts is recorded whole. What torch or a clock measures is recorded by its structure: names, and
kinds of values. The commands run in one temporary folder, each on what those before it wrote.
"""

import contextlib
import io
import json
import math
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.verbs.main import main
from tests.planner import published_tables
from tests.verbs import toy

RECORDED = Path(__file__).parent / "documents"
DIGITS = 9
"""Significant digits of a recorded number: further ones differ between machines' libraries of mathematics."""


@dataclass(frozen=True, slots=True)
class Command:
    """Words of a command, without `--json`."""

    words: tuple[str, ...]
    is_whole: bool = False
    """Its document is the same on every machine: values are recorded too."""


def _words(text: str) -> Command:
    return Command(tuple(text.split()))


def _whole(text: str) -> Command:
    return Command(tuple(text.split()), is_whole=True)


COMMANDS: dict[str, Command] = {
    "train": Command(tuple(toy.train(Path("texts"), Path("run")))),
    "compare": _words("compare run"),
    "dryrun": _words("dryrun run/plan.yaml"),
    "profile": _words("profile run/plan.yaml --steps 2"),
    "eval": _words("eval run --data texts"),
    "generate": Command(("generate", "run", "--prompt", "def f", "--max-new-tokens", "4", "--greedy")),
    "data-show": _words("data show run/plan.yaml"),
    "data-prepare": _words("data prepare data=texts data.tokenizer=bytes -o store"),
    "runs": _words("runs run --verify"),
    "launch": _whole("launch model=llama-tiny --to kubernetes -o launched"),
    "export": _whole("export run exported"),
    "import": _whole("import exported imported"),
    "quantize": _words("quantize exported --scheme int4-rtn -o quantized"),
    "quantize-gguf": _words("quantize exported --scheme q8_0 -o quantized.gguf"),
    "tune": _words("tune model=exported data=chat.jsonl run=tuned recipe.epochs=1 --no-dry-run"),
    "distill": _words("distill --teacher run --student exported data=texts run=student recipe.steps=2 --no-dry-run"),
    "plan": _whole("plan gpt2-124m --cluster h100x8"),
    "plan-no-fit": _whole("plan llama-3.1-70b --cluster a100x1"),
    "plan-layout": _whole("plan llama-3.1-8b --cluster h100x8 --layout dp=2,tp=4"),
    "plan-tune": _whole("plan llama-3.1-8b --cluster a100-40gbx1 --tune lora"),
    "plan-formula": _whole("plan gpt2-124m --formula --recipe sequence=1024"),
    "plan-serve": _whole("plan llama-3.1-8b --cluster h100x1 --serve"),
    "plan-for": _whole("plan llama-3.1-8b --cluster h100x8 --for torchtitan -o titan"),
    "plan-from": _whole("plan --from titan/torchtitan.toml --cluster h100x8"),
    "rent": _whole("rent gpt2-124m --tokens 1e9"),
    "explore": _whole("explore gpt2-124m --cluster h100x8 -o explorer.html"),
    "doctor": _words("doctor"),
    "accuracy": _whole("accuracy rows.csv"),
    "verify": _words("verify --processes 2 --only tp"),
    "calibrate": _words("calibrate --quick"),
    "drill": _words("drill --only error"),
}
"""A name for each document, and the command that prints it, in the order in which they run."""

MACHINE = "figures"
"""Name of a part that holds what a machine has: recorded as there, without what is in it."""


@contextlib.contextmanager
def workspace(folder: Path) -> Iterator[None]:
    """Enter a folder that holds the texts and conversations which the commands name."""
    toy.write_texts(folder / "texts")
    turns = (
        {"messages": [{"role": "user", "content": f"What is {n}?"}, {"role": "assistant", "content": f"It is {n}."}]}
        for n in range(24)
    )
    (folder / "chat.jsonl").write_text("".join(json.dumps(turn) + "\n" for turn in turns))
    layouts = ({"tp": 1}, {"tp": 2}, {"tp": 4}, {"tp": 8}, {"pp": 2}, {"pp": 4}, {"tp": 2, "pp": 2})
    published_tables.write(folder / "rows.csv", (published_tables.run(**layout, step_time_s=1) for layout in layouts))
    with contextlib.chdir(folder):
        yield


def document(command: Command) -> tuple[int, Any]:
    """Run a command with `--json` here, and return its exit code and its document as recorded."""
    printed, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
        code = main([*command.words, "--json"])
    if not printed.getvalue():
        raise AssertionError(f"{' '.join(command.words)} printed no document: {errors.getvalue()}")
    whole = json.loads(printed.getvalue())
    return code, rounded(whole) if command.is_whole else structure(whole)


def rounded(whole: Any) -> Any:
    """Return a document with numbers of DIGITS significant digits, and `.` for the folder that it was made in."""
    match whole:
        case dict():
            return {name: rounded(part) for name, part in whole.items()}
        case list():
            return [rounded(part) for part in whole]
        case float() if math.isfinite(whole):
            return float(f"{whole:.{DIGITS}g}")
        case str():
            return whole.replace(os.getcwd(), ".")
        case _:
            return whole


def structure(whole: Any) -> Any:
    """Return names and kinds of values: of a list, those of all its entries together; of a number, `number`.

    Names that are counted, such as ranks, stand as `0`: how many there are depends on the machine.
    """
    match whole:
        case dict():
            parts: dict[str, Any] = {}
            for name, part in whole.items():
                name = "0" if name.isdigit() else name
                kinds = "of the machine" if name == MACHINE else structure(part)
                parts[name] = _union(parts[name], kinds) if name in parts else kinds
            return parts
        case list():
            entries: Any = None
            for index, part in enumerate(whole):
                entries = structure(part) if index == 0 else _union(entries, structure(part))
            return [] if not whole else [entries]
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "text"
        case _:
            return "null"


def _union(left: Any, right: Any) -> Any:
    """Return the structure that covers two: names of both, kinds of both joined by `or`."""
    match left, right:
        case dict(), dict():
            return {
                name: _union(left[name], right[name])
                if name in left and name in right
                else left.get(name, right.get(name))
                for name in (*left, *(name for name in right if name not in left))
            }
        case list(), list():
            if not left or not right:
                return left or right
            return [_union(left[0], right[0])]
        case str(), str():
            return " or ".join(sorted({*left.split(" or "), *right.split(" or ")}))
        case _:
            return left if left == right else sorted([json.dumps(left), json.dumps(right)])


def text(code: int, recorded: Any) -> str:
    """Write a document as the file that records it."""
    return json.dumps({"exit_code": code, "document": recorded}, indent=1, ensure_ascii=False) + "\n"


def write(names: list[str]) -> None:
    """Record the documents of these names, or all."""
    if unknown := [name for name in names if name not in COMMANDS]:
        sys.exit(f"no document is named {', '.join(unknown)}: there are {', '.join(COMMANDS)}")
    RECORDED.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, workspace(Path(folder)):
        for name, command in COMMANDS.items():
            code, recorded = document(command)
            if not names or name in names:
                (RECORDED / f"{name}.json").write_text(text(code, recorded), encoding="utf-8")


if __name__ == "__main__":
    write(sys.argv[1:])
