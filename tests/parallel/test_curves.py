"""Runs under many layouts beside one device, and runs that go on under others: the same losses, the same sequences."""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import layout_curves
from benchmarks.layout_curves import JOURNEYS, LAYOUTS, Setting
from benchmarks.layout_picture import draw
from meshwright.observe.ranks import on_ranks
from meshwright.spec import Data, Layout, Plan
from meshwright.training import plot, trainer
from meshwright.training.step.batches import Batch, Feed, Share
from tests.training import running

STEPS = 8
TOLERANCE = 1e-5
"""Relative, of a loss in fp32 and of all weights; the benchmark's bar over 40 steps is 1e-4."""
OFTEN: dict[str, Any] = {"eval_every": 2, "checkpoint_every": 2, "eval_sequences": 4}

Taken = list[tuple[int, int, Share, Any]]


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    folder = tmp_path_factory.mktemp("curves")
    data = Data(path=str(running.write_texts(folder / "texts")), tokenizer="bytes", validation=0.1)
    recipe = replace(layout_curves.RECIPE, steps=STEPS, sequence=32, warmup_steps=1, **OFTEN)
    return Setting(data=data, recipe=recipe, folder=folder)


@pytest.fixture(scope="module", autouse=True)
def quick() -> Any:
    """For what the benchmark starts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout_curves, "train", quickly)
        yield


def quickly(plan: Plan, until: int) -> str:
    """On one rank: as the benchmark's runs, without a picture and without waiting for the disk."""
    os.fsync = lambda number: None  # type: ignore[assignment]
    plot.loss_plot = lambda *arguments, **named: None
    return ON_RANK(plan, until)


ON_RANK = layout_curves.train


def noting(plan: Plan, until: int) -> Taken:
    """The same; gives the sequences that each step was given here."""
    taken: Taken = []

    class Noting(Feed):
        def take(self, cursor: int, count: int, following: int = 0) -> Batch:
            batch = super().take(cursor, count, following)
            taken.append((cursor, count, self.share, batch.tokens.numpy().copy()))
            return batch

    trainer.Feed = Noting  # type: ignore[misc]
    quickly(plan, until)
    return taken


def read_by(setting: Setting, name: str, layout: Mapping[str, Any], until: int = STEPS) -> list[Any]:
    """Train, on as many ranks as the layout has; the global batch of each step, put together from what ranks read."""
    plan = replace(setting.plan("dense", name), layout=Layout(compile="off", **layout))
    steps = []
    for at in zip(*on_ranks(plan.layout.world, noting, plan, until), strict=True):
        count = at[0][1]
        assert {(cursor, number) for cursor, number, _, _ in at} == {(at[0][0], count)}
        read = np.full((count, setting.recipe.sequence), -1)
        for _, _, share, tokens in at:
            rows = slice(share.index * count // share.parts, (share.index + 1) * count // share.parts)
            read[rows, slice(None) if share.columns is None else list(share.columns)] = tokens
        assert (read >= 0).all()
        steps.append(read)
    return steps


@pytest.fixture(scope="module")
def sequences(setting: Setting) -> list[Any]:
    """What one device reads."""
    return read_by(setting, "one dense", {})


@pytest.fixture(scope="module")
def right(setting: Setting, sequences: list[Any]) -> list[float]:
    """The dense model's curve on one device."""
    return layout_curves.losses(setting.run("one dense"))


@pytest.mark.long
def test_a_run_goes_on_under_other_layouts(setting: Setting, right: list[float], sequences: list[Any]) -> None:
    """Four processes, four again, one, four: losses, weights, and the very sequences of every step."""
    read: list[Any] = []
    legs = JOURNEYS["dense"]
    for number, (_, layout) in enumerate(legs, start=1):
        read += read_by(setting, "resumed dense", layout, STEPS * number // len(legs))
    assert len(read) == STEPS and all(np.array_equal(a, b) for a, b in zip(read, sequences, strict=True))
    assert not np.array_equal(sequences[0], sequences[1])
    report = layout_curves.report(setting, {"dense": right}, "dense", "resumed dense")
    assert report["largest_relative_difference"] <= TOLERANCE
    assert report["largest_weight_difference"] <= TOLERANCE
    assert right[-1] < 0.9 * right[0], "it learns: equal curves mean something"


@pytest.mark.long
def test_experts_go_on_under_other_layouts(setting: Setting) -> None:
    journey = layout_curves.journey(setting, layout_curves.one_device(setting, ["experts"]), "experts")
    assert [leg["until"] for leg in journey["legs"]] == [2, 5, 8]
    assert journey["largest_relative_difference"] <= TOLERANCE
    assert journey["largest_weight_difference"] <= TOLERANCE


def test_evaluated_and_saved_in_shards_it_is_the_same_model(
    setting: Setting, right: list[float], tmp_path: Path
) -> None:
    """An evaluation gathers parameters; the save after it must not take those for this rank's. And the picture."""
    rows = layout_curves.laid_out(setting, {"dense": right}, ["ZeRO-2 x 2"])
    row = rows["ZeRO-2 x 2"]
    assert row["largest_relative_difference"] <= TOLERANCE
    assert row["largest_weight_difference"] <= TOLERANCE
    resumed = {kind: {**row, "legs": [{"layout": "one", "until": 4}, {"layout": "b", "until": 8}]} for kind in JOURNEYS}
    draw({"steps": 8, "one_device": {"dense": right}, "layouts": rows, "resumed": resumed}, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_every_axis_is_among_the_layouts() -> None:
    layouts = [Layout(**options) for _, options in LAYOUTS.values()]
    assert len(layouts) >= 12 and max(layout.world for layout in layouts) == 8
    for axis in ("dp_replicate", "dp_shard", "tp", "cp", "pp", "ep", "vp"):
        assert any(getattr(layout, axis) > 1 for layout in layouts), axis
    assert {layout.zero for layout in layouts} == {0, 1, 2, 3}
