"""The pictures of the Learn pages show what the planner, the schedules and a dry run say today."""

import copy

import pytest

from docs.pictures import draw, figures

DRY = "steps"
"""The picture of a dry run, which takes a process of its own."""


@pytest.mark.parametrize("name", [name for name in draw.PICTURES if name != DRY])
def test_a_picture_shows_what_the_code_says(name: str) -> None:
    assert not draw.stale(name, figures.recorded(), figures.figures(name)), "run `make pages`"


@pytest.mark.long
def test_the_first_steps_are_those_of_a_dry_run() -> None:
    assert not draw.stale(DRY, figures.recorded(), figures.figures(DRY)), "run `make pages`"


def test_torchs_optimizer_makes_its_states_at_the_end_of_the_first_step() -> None:
    """Parameters of Llama-3.2-1B by hand, in fp32: 4 bytes of weights, 4 of gradients, 8 of states each."""
    layer = 2048 * (2048 + 512 + 512 + 2048) + 3 * 2048 * 8192 + 2 * 2048
    gib = 4 * (128_256 * 2048 + 16 * layer + 2048) / 2**30
    steps = figures.recorded()["steps"]["torch"]
    columns: dict[str, list[dict[str, float]]] = {}
    for name, column in zip(steps["names"], steps["sizes"], strict=True):
        columns.setdefault(name, []).append(column)
    before, after, updates = (columns[name] for name in ("backward 1", "backward 2", "update 2"))
    assert {column["parameters"] for column in steps["sizes"]} == {round(gib, 2)}
    assert {column["optimizer states"] for column in before} == {0}
    assert all(column["optimizer states"] == pytest.approx(2 * gib, abs=0.01) for column in after)
    assert {column["gradients"] for column in updates} == {round(gib, 2)}
    peaks = [max(sum(column.values()) for column in part) for part in (before, after)]
    assert peaks[1] - peaks[0] == pytest.approx(2 * gib, abs=0.02)


def test_every_picture_is_drawn_here_and_every_number_is_of_one() -> None:
    assert {file.stem for file in draw.HERE.glob("*.png")} == set(draw.PICTURES) == set(figures.recorded())
    assert set(figures.FIGURES) <= set(draw.PICTURES)


def test_a_stale_picture_is_found() -> None:
    """Both where the code says something new, and where the numbers were written anew without the picture."""
    before = figures.recorded()
    changed = copy.deepcopy(before)
    changed["data"]["bars"]["3, ZeRO-3"]["activations"] += 0.1
    assert not draw.stale("data", before, before["data"])
    assert draw.stale("data", before, changed["data"])
    assert draw.stale("data", changed, changed["data"])
    assert draw.stale("mesh", {}, before["mesh"])


def test_what_no_reader_sees_is_alike() -> None:
    assert figures.alike({"a": [1.0, "b"]}, {"a": [1.0005, "b"]})
    assert not figures.alike({"a": [1.0, "b"]}, {"a": [1.05, "b"]})
    assert not figures.alike({"a": [1.0, "b"]}, {"a": [1.0, "c"]}) and not figures.alike([1.0], [1.0, 1.0])
    assert not figures.alike({"a": 1}, {"b": 1}) and not figures.alike({"a": 1}, {"a": 2})
