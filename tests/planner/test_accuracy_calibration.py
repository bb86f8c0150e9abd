"""Calibration: finds what differs, stays home where rows say nothing, and never sees what is held out."""

from dataclasses import replace
from pathlib import Path

import pytest

from evaluation import holdout
from meshwright.planner.accuracy import calibration as fit
from meshwright.planner.accuracy.calibration import MOST_ROWS, Calibration, ClusterFit, load
from meshwright.planner.accuracy.published import PublishedRow, cluster_of, read
from meshwright.planner.accuracy.score import estimator_of, judge
from meshwright.planner.cost.exchanges import links_of
from meshwright.planner.cost.speeds import speeds_of
from meshwright.planner.machine.fitting import adjusted, solve
from tests.planner.published_tables import ROOT, run, table, write

LAYOUTS = ({"tp": 1}, {"tp": 2}, {"tp": 4}, {"pp": 2}, {"pp": 4}, {"tp": 2, "pp": 2}, {"tp": 8})
MODELS = ({"layers": 16, "hidden": 2048}, {"layers": 24, "hidden": 4096, "heads": 32, "ffn": 16384})


def rows_of(tmp_path: Path, **columns: object) -> list[PublishedRow]:
    made = [run(id=i, **{**model, **layout}, step_time_s=1, **columns)
            for i, (model, layout) in enumerate((m, x) for m in MODELS for x in LAYOUTS)]  # fmt: skip
    rows = [row for row in read(write(tmp_path / "rows.csv", made)) if isinstance(row, PublishedRow)]
    assert len(rows) == len(made)
    return rows


def other_machine(rows: list[PublishedRow], changes: dict[str, tuple[str, float]]) -> list[PublishedRow]:
    """The same rows, measured on a machine that differs from ours in some scalars."""
    truth = Calibration(
        clusters={cluster_of(rows[0]): ClusterFit(changes=changes, rows=(), error_before=0, error_after=0)}
    )
    return [replace(row, step_s=estimator_of(row, truth).predict(row.plan).step_s) for row in rows]


def test_what_differs_is_found(tmp_path: Path) -> None:
    rows = other_machine(
        rows_of(tmp_path), {"speeds.product_share": ("times", 0.7), "links.link_share": ("times", 0.6)}
    )
    fitted = fit.fit(rows[::2])
    assert fitted.error_before > 0.15
    assert fitted.error_after < 0.02
    calibration = Calibration(clusters={cluster_of(rows[0]): fitted})
    unseen = [abs(entry.step_error or 0) for entry in judge(rows[1::2], calibration)]  # type: ignore[union-attr]
    assert sum(unseen) / len(unseen) < 0.03


def test_nothing_changes_where_nothing_differs(tmp_path: Path) -> None:
    assert fit.fit(other_machine(rows_of(tmp_path)[:6], {})).changes == {}


def test_it_is_saved_and_loaded(tmp_path: Path) -> None:
    rows = rows_of(tmp_path)
    fitted = ClusterFit(
        changes={"speeds.product_share": ("times", 0.9), "stack.hides_tensor": ("plus", 0.125)},
        rows=((rows[0].source, rows[0].id),), error_before=0.5, error_after=0.25,
    )  # fmt: skip
    Calibration(clusters={cluster_of(rows[0]): fitted}, date="2026-11-21").save(tmp_path / "c.json")
    loaded = load(tmp_path / "c.json")
    assert (loaded.clusters, loaded.date) == ({cluster_of(rows[0]): fitted}, "2026-11-21")
    assert loaded.was_fitted_to(rows[0]) and not loaded.was_fitted_to(rows[1])
    other = replace(rows[0], source="somebody else's")
    parts = (other.stack, speeds_of(other.plan.cluster.device), links_of(other.plan.cluster))
    assert loaded.adjust(other, *parts) == parts
    assert loaded.adjust(rows[0], *parts)[1].product_share == pytest.approx(0.9 * parts[1].product_share)


def test_shares_stay_shares_and_seconds_stay_positive(tmp_path: Path) -> None:
    row = rows_of(tmp_path)[0]
    stack, _, _ = adjusted(
        row.stack, speeds_of(row.plan.cluster.device), links_of(row.plan.cluster),
        {"stack.hides_tensor": ("plus", 7.0), "stack.step_s": ("plus", -7.0)},
    )  # fmt: skip
    assert (stack.hides_tensor, stack.step_s) == (1.0, 0.0)


def test_twenty_rows_at_most(tmp_path: Path) -> None:
    rows = rows_of(tmp_path)
    with pytest.raises(ValueError, match="1 to 20"):
        fit.fit([rows[0]] * (MOST_ROWS + 1))


def test_the_split_holds_out_whole_models_and_counts() -> None:
    clusters: dict[str, list[PublishedRow]] = {}
    for row in read(table("training_throughput.csv")):
        if isinstance(row, PublishedRow) and row.step_s:
            clusters.setdefault(cluster_of(row), []).append(row)
    assert len(clusters) > 10
    for members in clusters.values():
        chosen, held = holdout.choose_rows(members).rows, holdout.held_out(members)
        assert len(chosen) <= MOST_ROWS
        assert not {id(row) for row in chosen} & {id(row) for row in held}
        models = sorted({holdout.model_key(row.plan.model) for row in members})
        assert not {holdout.model_key(row.plan.model) for row in chosen} & set(models[1::2])
        assert [row.id for row in chosen] == [row.id for row in holdout.choose_rows(members).rows]


def test_the_calibration_of_the_page_keeps_to_the_split() -> None:
    calibration = load(ROOT / "evaluation" / "calibration.json")
    clusters: dict[str, list[PublishedRow]] = {}
    for row in read(table("training_throughput.csv")):
        if isinstance(row, PublishedRow) and cluster_of(row) in calibration.clusters and row.step_s:
            clusters.setdefault(cluster_of(row), []).append(row)
    for name, members in clusters.items():
        rows = calibration.clusters[name].rows
        assert 1 <= len(set(rows)) == len(rows) <= MOST_ROWS
        assert not set(rows) & {(row.source, row.id) for row in holdout.held_out(members)}


def test_measured_times_play_no_part_in_the_choice(tmp_path: Path) -> None:
    rows = rows_of(tmp_path)
    slower = [replace(row, step_s=row.step_s * (i + 1)) for i, row in enumerate(rows)]
    assert [row.id for row in holdout.choose_rows(rows).rows] == [row.id for row in holdout.choose_rows(slower).rows]


def test_linear_systems_are_solved() -> None:
    assert solve([[4.0, 1.0], [1.0, 3.0]], [1.0, 2.0]) == pytest.approx([1 / 11, 7 / 11])
