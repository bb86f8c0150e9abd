"""A run that takes a second: its arguments, and the command line called in this process."""

from pathlib import Path

import pytest

from meshwright.verbs.main import main

SHAPE = [
    "model.layers=2",
    "model.hidden=32",
    "model.heads=2",
    "model.kv_heads=1",
    "model.ffn=64",
    "model.max_positions=128",
]
RECIPE = [
    "recipe.steps=12",
    "recipe.warmup_steps=2",
    "recipe.sequence=32",
    "recipe.global_batch=4",
    "recipe.eval_every=5",
    "recipe.checkpoint_every=5",
]
LINES = "def f{n}(x):\n    return x + {n}\n\n\nclass C{n}:\n    value = {n}\n\n"


def write_texts(folder: Path, lines: int = 400) -> Path:
    """Write a folder of two small Python-like files."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("a.py", "b.py"):
        (folder / name).write_text("".join(LINES.format(n=n) for n in range(lines)))
    return folder


def train(texts: Path, run: Path, *changes: str) -> list[str]:
    """Return the words of a training that takes a second."""
    return ["train", "--no-dry-run", *SHAPE, *RECIPE, f"data={texts}", f"run={run}", *changes]


def call(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str, str]:
    """Return exit code, stdout and stderr of one command."""
    capsys.readouterr()
    code = main([str(word) for word in words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def refused(capsys: pytest.CaptureFixture[str], *words: str | Path, code: int = 2) -> str:
    """Return the only line on stderr of a refused command."""
    status, _, errors = call(capsys, *words)
    assert status == code, errors
    lines = errors.splitlines()
    assert len(lines) == 1 and lines[0].startswith("meshwright: "), errors
    assert "Traceback" not in errors
    return lines[0]
