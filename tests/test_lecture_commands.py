"""Every row of docs/lectures.md says whether its command works, and it is run here.

Short tests check that a command's plan is legal, or that its program, test or target is there. The long ones run it.
"""

import re
import shlex
from pathlib import Path

import pytest

from docs import lectures
from meshwright.interface.planning.plan_reading import read_plan
from meshwright.planfile.writing import commented
from meshwright.spec.plan.plan import world_violation

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "lectures.md").read_text(encoding="utf-8")
COMMANDS = sorted({row.command for row in lectures.rows(PAGE)})
LAUNCHED = re.compile(r"(?:torchrun --nproc_per_node (\d+) -m )?meshwright (?:train|profile) (.*)")
MADE = {"hf_folder", "chat.jsonl", "asked.jsonl", "answers.jsonl", "plan.yaml", "runs/teacher", "RUN", "OUT"}
"""Files and folders that commands read or write; the page says how to make them."""
VERBS = ("plan", "explore", "quantize", "distill", "tune", "dryrun")
"""Others than `train` and `profile`; tests/test_docs.py parses their words and runs the plans."""


@pytest.mark.parametrize("command", [line for line in COMMANDS if LAUNCHED.fullmatch(line)])
def test_a_training_command_has_a_plan_for_as_many_processes(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("plan.yaml").write_text(commented())
    match = LAUNCHED.fullmatch(command)
    assert match is not None
    # `profile` starts as many processes as its plan has.
    starts_two = "meshwright profile" in command and re.search(r"layout\.(dp_replicate|dp_shard|tp|cp|pp)=2 ", command)
    processes = 2 if starts_two else int(match[1] or 1)
    plan, _ = read_plan(shlex.split(match[2]), {}, processes=processes)
    plan.check()
    assert not world_violation(plan, processes, 1)


@pytest.mark.parametrize("command", [line for line in COMMANDS if not LAUNCHED.fullmatch(line)])
def test_another_command_names_what_is_there(command: str) -> None:
    words = shlex.split(command)
    match words:
        case ["make", target]:
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
            return
        case ["python", "-m", "pytest", path, *options]:
            text = (ROOT / path).read_text(encoding="utf-8")
            assert options[:1] in ([], ["-k"]) and all(re.search(rf"def test_\w*{word}", text) for word in options[1:])
            return
        case ["python", "-m", module, *options]:
            source = ROOT / f"{module.replace('.', '/')}.py"
        case ["python", path, *options]:
            source = ROOT / path
        case ["meshwright", verb, *options]:
            assert verb in VERBS
            files = {word.partition("=")[2] or word for word in options if not word.startswith("--")}
            assert all(word in PAGE.partition("## A.")[0] for word in files & MADE), "say how to make it"
            return
        case _:
            pytest.fail(f"{command}: no rule here says whether it runs")
    text = source.read_text(encoding="utf-8")
    assert all(f'"{word}"' in text for word in options if word.startswith("--") and word != "--")


def test_the_page_says_what_its_commands_need() -> None:
    needs = PAGE.partition("## A.")[0]
    assert all(word in needs for word in ("make quickstart", "make test", *MADE))
    if any("leaderboard" in line for line in COMMANDS):
        assert "MESHWRIGHT_PUBLISHED" in needs


def test_every_row_has_a_state_and_a_command() -> None:
    headings = PAGE.count("\n| topic | state | command | files, tests |")
    assert len(lectures.rows(PAGE)) == sum(line.startswith("| ") for line in PAGE.splitlines()) - headings
    assert all(row.state.startswith((lectures.WORKS, "partly: ")) for row in lectures.rows(PAGE))


def test_a_row_says_partly_when_its_command_fails_and_works_again_afterwards() -> None:
    page = "## A. Topics\n\n| a | works: all | `one` | f |\n| b | partly: half | `two` | f |\n"
    failed = lectures.stated(page, {"one": 1, "two": 0})
    assert [row.state for row in lectures.rows(failed)] == ["partly: its command fails: all", "partly: half"]
    assert lectures.stated(failed, {"one": 0}) == page == lectures.stated(page, {})


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> lectures.Workspace:
    return lectures.Workspace(tmp_path_factory.mktemp("lectures"), short=True)


@pytest.mark.long(every=True)
@pytest.mark.parametrize("command", lectures.commands(PAGE, short=True))
def test_a_row_says_how_its_command_ends(command: str, workspace: lectures.Workspace) -> None:
    states = [row.state for row in lectures.rows(PAGE) if row.command == command]
    outcome = workspace.run(command)
    if outcome.code:
        assert all(state.startswith("partly") for state in states), outcome.text[-2000:]
    else:
        assert not any(state.startswith(lectures.FAILS) for state in states)
