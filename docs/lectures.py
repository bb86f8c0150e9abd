"""Runs the commands of docs/lectures.md, and writes into each row whether its command works.

    python -m docs.lectures              # as they stand on the page: a training takes minutes
    python -m docs.lectures --short      # two small steps; without benchmarks, pictures and make targets
    python -m docs.lectures --only BC    # rows of sections B and C

The first word of a row's state is "works" or "partly". A row whose command fails becomes "partly: its command fails",
and works again once the command does. "partly: ..." with another reason stays. The exit code is 1 if a command failed.
"""

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "lectures.md"
ROW = re.compile(r"^\| (?P<topic>.+?) \| (?P<state>.+?) \| `(?P<command>[^`]+)` \| (?P<files>.+) \|$", re.MULTILINE)
WORKS, FAILS = "works", "partly: its command fails"
SHORT = {"steps": 2, "global_batch": 8, "sequence": 64, "eval_sequences": 8}
"""Keys of the recipe of a short training. A command's own keys are kept."""
MINUTES = ("make ", "python -m benchmarks.", "python -m docs.")
"""Beginnings of commands that take minutes, or are part of the test suite."""
TRAINING = ("train", "tune", "profile", "distill")
LIMIT_S = 1800
"""A command that takes longer has failed."""
CHAT = '{"messages": [{"role": "user", "content": "Name a colour."}, {"role": "assistant", "content": "Blue."}]}\n'
PROMPT = '{"prompt": "def main"}\n'


@dataclass(frozen=True)
class Row:
    """A topic of the lectures."""

    section: str
    state: str
    command: str


@dataclass(frozen=True)
class Outcome:
    """Exit code, seconds and output of a command."""

    code: int
    seconds: float
    text: str


def rows(page: str) -> list[Row]:
    """Return every row of the page, in its order."""
    sections = re.split(r"^## ([A-E])\. ", page, flags=re.MULTILINE)
    return [
        Row(letter, match["state"], match["command"])
        for letter, text in zip(sections[1::2], sections[2::2], strict=True)
        for match in ROW.finditer(text)
    ]


def commands(page: str, sections: str = "ABCDE", *, short: bool) -> list[str]:
    """Return the commands of these sections, each once. `short`: without those that take minutes."""
    chosen = dict.fromkeys(row.command for row in rows(page) if row.section in sections)
    return [command for command in chosen if not (short and command.startswith(MINUTES))]


class Workspace:
    """A folder with the files that commands of the page read. `short`: trainings take two small steps."""

    def __init__(self, folder: Path, *, short: bool) -> None:
        self.folder, self.short = folder, short
        for name in ("examples", "benchmarks", "tests", "src", "pyproject.toml", "Makefile"):
            (folder / name).symlink_to(ROOT / name)
        (folder / "docs").mkdir()  # a benchmark writes its picture here
        (folder / "plan.yaml").write_text(self._prepare("meshwright init"))
        self._prepare("meshwright train plan.yaml recipe.steps=2 run=runs/short")
        self._prepare("meshwright export runs/short hf_folder")
        (folder / "runs" / "teacher").symlink_to("short")
        (folder / "chat.jsonl").write_text("".join(CHAT.replace("colour", f"colour, try {n}") for n in range(64)))
        (folder / "asked.jsonl").write_text(PROMPT * 2)

    def _prepare(self, command: str) -> str:
        outcome = self.run(command)
        if outcome.code:
            raise RuntimeError(f"{command}\n{outcome.text}")
        return outcome.text

    def _words(self, command: str) -> list[str]:
        """Split a command, with files in place of the page's names."""
        words = ["runs/short" if word == "RUN" else word for word in shlex.split(command)]
        words = [f"{tempfile.mkdtemp(dir=self.folder)}/out" if word == "OUT" else word for word in words]
        if words[0] in ("meshwright", "torchrun"):
            verb = words[words.index("meshwright") + 1]
            if self.short and verb in TRAINING and "--sequences" not in words:
                words += [f"recipe.{key}={number}" for key, number in SHORT.items() if f"recipe.{key}" not in command]
            module = ["meshwright"] if words[0] == "meshwright" else ["torch.distributed.run"]
            words = ["python", "-m", *module, *words[1:]]
        return [sys.executable, *words[1:]] if words[0] == "python" else words

    def run(self, command: str) -> Outcome:
        """Run a command to its end; one that takes more than half an hour fails."""
        # Launchers choose free ports, so that two of them can run side by side. `make` installs nothing anew.
        settings = {"PET_STANDALONE": "1", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "VENV": sys.prefix}
        environment = {**os.environ, **settings}
        began = time.monotonic()
        try:
            ended = subprocess.run(
                self._words(command), cwd=self.folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S
            )
            code, text = ended.returncode, ended.stdout + ended.stderr
        except subprocess.TimeoutExpired as error:
            code, text = 1, str(error)
        return Outcome(code, time.monotonic() - began, text)


def stated(page: str, codes: Mapping[str, int]) -> str:
    """Return the page with the first words of each state as its command ended."""

    def row(match: re.Match[str]) -> str:
        state, code = match["state"], codes.get(match["command"])
        if code is None or (state.startswith("partly") and not state.startswith(FAILS)):
            return match[0]
        start, end = (index - match.start() for index in match.span("state"))
        reason = state.removeprefix(FAILS).removeprefix(WORKS)
        return f"{match[0][:start]}{FAILS if code else WORKS}{reason}{match[0][end:]}"

    return ROW.sub(row, page)


def main(words: Sequence[str] | None = None) -> int:
    """Run the commands and write the states. Return 1 if a command failed, else 0."""
    reader = argparse.ArgumentParser(prog="python -m docs.lectures", description="Run the commands of the lectures.")
    reader.add_argument("--short", action="store_true", help="train two small steps; leave out what takes minutes")
    reader.add_argument("--only", default="ABCDE", metavar="SECTIONS", help="letters of sections, such as AD")
    options = reader.parse_args(words)
    page = PAGE.read_text(encoding="utf-8")
    codes = {}
    with tempfile.TemporaryDirectory() as folder:
        workspace = Workspace(Path(folder), short=options.short)
        for command in commands(page, options.only, short=options.short):
            outcome = workspace.run(command)
            codes[command] = outcome.code
            print(f"{'FAILS' if outcome.code else 'works'} {outcome.seconds:6.1f} s  {command}", flush=True)
            if outcome.code:
                print(*outcome.text.splitlines()[-8:], sep="\n", flush=True)
    PAGE.write_text(stated(page, codes), encoding="utf-8")
    return int(any(codes.values()))


if __name__ == "__main__":
    sys.exit(main())
