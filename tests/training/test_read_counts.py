"""What a resumed run with another batch reads, counted by the numbers that stand in the text of its batches."""

import json
import os
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from meshwright.observe.ranks import on_ranks
from meshwright.spec import Data, Plan
from meshwright.spec.errors import PlanError
from meshwright.spec.plan.plan import MixtureSource
from meshwright.training import loop, plot
from meshwright.training.objectives import teacher_targets
from meshwright.training.step.batches import Batch, Feed
from tests.training import running
from tests.training.distilling import student_plan, taught
from tests.training.running import Notes

ROWS = {"a": 57, "b": 23}
"""Windows of each text."""
SEQUENCE = 16
FIRST, THEN = {"epochs": 2, "global_batch": 8}, {"epochs": 3, "global_batch": 4}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "fsync", lambda number: None)
    monkeypatch.setattr(plot, "loss_plot", lambda *arguments, **named: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write(folder: Path, letter: str) -> Path:
    """A text whose every window of 16 bytes begins with its number, behind the token that begins the text."""
    path = folder / f"{letter}.txt"
    numbers = [f"<{letter}{number:04}>" + "." * 9 for number in range(ROWS[letter])]
    path.write_text("".join(numbers)[:-1] + "..")  # the last window has a token to predict
    return path


def asked(folder: Path, *, letters: str = "a", **recipe: Any) -> Plan:
    for letter in letters:
        write(folder, letter)
    options = {"sequence": SEQUENCE, "eval_every": 0, "checkpoint_every": 0, "steps": 500, **recipe}
    plan = running.plan(folder / "a.txt", folder / "run", micro_batch=1, **options)
    data = Data(path=str(folder / "a.txt"), tokenizer="bytes", validation=0.0)
    if len(letters) > 1:
        sources = tuple(MixtureSource(path=str(folder / f"{name}.txt"), weight=ROWS[name]) for name in letters)
        data = replace(data, path="", mixture=sources)
    return replace(plan, data=data, recipe=replace(plan.recipe, warmup_steps=0))


def read_by(plan: Plan, resume: str = "auto", watchers: tuple[Any, ...] = ()) -> list[str]:
    """Train; the numbers of the windows that this rank read."""
    os.fsync = lambda number: None  # type: ignore[assignment]
    plot.loss_plot = lambda *arguments, **named: None
    seen: list[str] = []
    take = Feed.take

    def spied(feed: Feed, cursor: int, count: int, following: int = 0) -> Batch:
        batch = take(feed, cursor, count, following)
        for row in batch.tokens.tolist():
            [number] = re.findall(r"<([a-z]\d+)>", bytes(token for token in row if token < 256).decode())
            seen.append(number)
        return batch

    Feed.take = spied  # type: ignore[method-assign]
    try:
        loop.run(plan, resume=resume, watchers=watchers)
    finally:
        Feed.take = take  # type: ignore[method-assign]
    return seen


def on_two(plan: Plan) -> list[str]:
    both = replace(plan, layout=replace(plan.layout, dp_replicate=2))
    return [number for seen in on_ranks(2, read_by, both) for number in seen]


def check(seen: list[str], letters: str, wanted: int, batch: int) -> None:
    """As many windows as were asked for, up to a whole step; none lost, each of a source as often as the others."""
    assert wanted <= len(seen) < wanted + batch
    whole = sum(ROWS[letter] for letter in letters)
    for letter in letters:
        times = Counter(number for number in seen if number.startswith(letter))
        assert len(times) == ROWS[letter], "none is lost"
        assert max(times.values()) - min(times.values()) <= 1, "none is read more often than others by more than once"
        assert abs(sum(times.values()) - Fraction(len(seen) * ROWS[letter], whole)) <= 1, "by its share"


Reader = Callable[[Plan], list[str]]


@pytest.mark.parametrize(("letters", "reader"), [("a", read_by), ("ab", read_by), ("a", on_two), ("ab", on_two)])
def test_windows_of_text_are_read_as_often_as_the_epochs_say(letters: str, reader: Reader, tmp_path: Path) -> None:
    """Of one text and of a mixture, on one process and on two."""
    seen = reader(asked(tmp_path, letters=letters, **FIRST))
    rows = sum(ROWS[letter] for letter in letters)
    check(seen, letters, 2 * rows, 8)
    seen += reader(asked(tmp_path, letters=letters, **THEN))
    check(seen, letters, 3 * rows, 4)


def test_a_token_budget_counts_what_two_processes_read(tmp_path: Path) -> None:
    """The same for a resumed run."""
    seen = on_two(asked(tmp_path, tokens=40 * SEQUENCE, global_batch=8))
    assert len(seen) == 40
    seen += read_by(asked(tmp_path, tokens=99 * SEQUENCE, global_batch=4))
    assert len(seen) == 100
    times = Counter(seen)
    assert len(times) == ROWS["a"] and set(times.values()) == {1, 2}


def test_malformed_rows_change_no_window_on_any_number_of_processes(tmp_path: Path) -> None:
    """A text behind and before broken rows is read as the text alone, in its order."""
    plain = asked(tmp_path, epochs=2, global_batch=8)
    expected = read_by(replace(plain, run=str(tmp_path / "plain")))
    row = json.dumps({"text": (tmp_path / "a.txt").read_text()})
    (tmp_path / "rows.jsonl").write_text("\n".join(['{"text": ', "[1]", row, '{"text": null}', "{"]))
    data = replace(plain.data, path=str(tmp_path / "rows.jsonl"), malformed="skip")
    broken = replace(plain, data=data)
    assert read_by(replace(broken, run=str(tmp_path / "one"))) == expected
    assert Counter(on_two(replace(broken, run=str(tmp_path / "two")))) == Counter(expected)


def test_a_teacher_is_asked_about_the_rows_that_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each once, however the batches of a resumed run lie; no row that was read lacks its answer."""
    teacher = taught(tmp_path)
    fill, filled = teacher_targets._fill, []

    def counted(tables: Any, missing: Any, *arguments: Any) -> int:
        filled.extend(missing.tolist())
        return fill(tables, missing, *arguments)

    monkeypatch.setattr(teacher_targets, "_fill", counted)

    def student(**recipe: Any) -> Plan:
        plan = asked(tmp_path)
        made = student_plan(teacher, tmp_path / "run", distillation_top_k=8, **recipe)
        options = {"sequence": SEQUENCE, "steps": 500, "warmup_steps": 0}
        return replace(made, data=plan.data, recipe=replace(made.recipe, **options), layout=plan.layout)

    seen = read_by(student(tokens=24 * SEQUENCE, global_batch=8))
    assert len(seen) == 24 and len(filled) == len(set(filled)) == 24
    seen += read_by(student(epochs=1, global_batch=4))
    check(seen, "a", ROWS["a"], 4)
    assert sorted(filled) == list(range(ROWS["a"])), "each row is asked about once"
    seen += read_by(student(**THEN))
    check(seen, "a", 3 * ROWS["a"], 4)
    assert len(filled) == ROWS["a"]


def test_a_jump_of_the_learning_rate_is_said(tmp_path: Path) -> None:
    """Beside the rates of the steps themselves."""
    before, after, same = Notes(), Notes(), Notes()
    read_by(asked(tmp_path, **FIRST), watchers=(before,))
    read_by(asked(tmp_path, **THEN), watchers=(after,))
    last, first = before.steps[-1], after.steps[0]
    assert after.info is not None and first.step == last.step + 1 == 16
    assert after.info.bytes_per_token > 0.99, "of what is trained on, where nothing is held out"
    sentences = [sentence for label, sentence in after.info.foreseen if "learning rate goes" in sentence]
    assert sentences == [
        f"the learning rate goes from {last.lr:.3g} at step 15 to {first.lr:.3g} at step 16: "
        "its schedule has 28 steps, and had 15"
    ]
    constant = {"learning_rate_schedule": "constant"}
    read_by(replace(asked(tmp_path, **FIRST, **constant), run=str(tmp_path / "flat")))
    read_by(replace(asked(tmp_path, **THEN, **constant), run=str(tmp_path / "flat")), watchers=(same,))
    assert same.info is not None and not [text for _, text in same.info.foreseen if "learning rate goes" in text]


def test_a_warm_up_is_measured_by_the_whole_run(tmp_path: Path) -> None:
    """29 steps of 4 rows and 4 of 16 are more than the 11 of 16 that all rows would be."""

    def warmed(**recipe: Any) -> Plan:
        plan = asked(tmp_path, **recipe)
        return replace(plan, recipe=replace(plan.recipe, warmup_steps=19))

    read_by(warmed(epochs=2, global_batch=4))
    seen = read_by(warmed(epochs=3, global_batch=16))
    assert len(seen) == 64, "171 - 116 rows in steps of 16"
    with pytest.raises(PlanError, match=r"warmup_steps=19 exceeds the 11 steps of recipe\.epochs=3"):
        read_by(replace(warmed(epochs=3, global_batch=16), run=str(tmp_path / "new")), resume="no")
