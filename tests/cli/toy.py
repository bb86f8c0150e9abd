"""A run that takes a second: arguments for the command line, and the command line called in this process."""

from pathlib import Path

import pytest

from meshwright.cli.main import main

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
    """A folder of two small Python-like files."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("a.py", "b.py"):
        (folder / name).write_text("".join(LINES.format(n=n) for n in range(lines)))
    return folder


def train(texts: Path, run: Path, *changes: str) -> list[str]:
    """Words of a training that takes a second."""
    return ["train", "--no-dry-run", *SHAPE, *RECIPE, f"data={texts}", f"run={run}", *changes]


def call(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of one command."""
    capsys.readouterr()
    code = main([str(word) for word in words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def refused(capsys: pytest.CaptureFixture[str], *words: str | Path, code: int = 2) -> str:
    """The one line on stderr with which a command is refused."""
    found, _, errors = call(capsys, *words)
    assert found == code, errors
    lines = errors.splitlines()
    assert len(lines) == 1 and lines[0].startswith("meshwright: "), errors
    assert "Traceback" not in errors
    return lines[0]
