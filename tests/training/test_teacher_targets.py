"""What is kept of a teacher: the numbers, their place on disk, runs that read them, and what goes wrong."""

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from meshwright.data import prepare
from meshwright.data.sequences.numbered_rows import numbered_rows
from meshwright.data.stored.encoding import prepare_store
from meshwright.interface.trained.opening import load
from meshwright.observe.ranks import on_ranks
from meshwright.parallel import Mesh
from meshwright.spec import Layout, Plan
from meshwright.spec.errors import RunError
from meshwright.spec.user_cache import default_root
from meshwright.training import loop
from meshwright.training.objectives import teacher_targets
from meshwright.training.objectives.teacher_targets import DONE, TableSizes, TeacherTables, cached_path
from tests.training.distilling import student_plan, taught, trained
from tests.training.running import SHAPE, Notes

TOP = 8


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return taught(tmp_path_factory.mktemp("taught"))


def tables_of(asked: Plan) -> TeacherTables:
    """The tables that a run of this plan reads, found as it finds them."""
    tables: list[TeacherTables] = []
    keep = teacher_targets.read_in_order
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            teacher_targets,
            "read_in_order",
            lambda read_tables, rows: tables.append(read_tables) or keep(read_tables, rows),
        )
        loop.run(replace(asked, run=f"{asked.run}-again"))
    return tables[0]


def asked_about(caplog: pytest.LogCaptureFixture) -> str:
    """What was said before the teacher was asked."""
    return "".join(record.getMessage() for record in caplog.records if record.name.startswith("meshwright"))


def test_all_tokens_kept_teach_what_the_teacher_does(teacher: Path, tmp_path: Path) -> None:
    """But for what 16 bits round."""
    asked = student_plan(teacher, tmp_path / "online", distillation_temperature=2.0, distillation_hard=0.25)
    right = trained(asked)
    every = replace(asked.recipe, distillation_top_k=SHAPE.vocab)
    for curve, other in zip(trained(replace(asked, run=str(tmp_path / "kept"), recipe=every)), right, strict=True):
        assert curve == pytest.approx(other, rel=2e-3)


def test_targets_of_a_token_store_teach_what_the_teacher_does(teacher: Path, tmp_path: Path) -> None:
    online = student_plan(teacher, tmp_path / "online", sequence=16)
    store = str(tmp_path / "store")
    prepare_store(online.data, store, processes=1, shard_tokens=500)
    online = replace(online, data=replace(online.data, path=store))
    every = replace(online.recipe, distillation_top_k=SHAPE.vocab)
    stored = trained(replace(online, run=str(tmp_path / "stored"), recipe=every))
    for curve, other in zip(stored, trained(online), strict=True):
        assert curve == pytest.approx(other, rel=2e-3)


def test_what_is_kept_are_the_teachers_likeliest_tokens(
    teacher: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asked = student_plan(teacher, tmp_path / "run", distillation_top_k=TOP)
    trained(asked)
    size_text = "34 bytes per token"  # eight tokens of two bytes, nine numbers of two
    assert size_text in asked_about(caplog)
    caplog.clear()
    tables = tables_of(asked)
    assert not asked_about(caplog), "it is not asked again"
    corpus = prepare(asked.data)
    rows = numbered_rows(asked.data, asked.recipe, corpus, corpus.train, shuffle=True)
    read = asked.recipe.tokens_of_run() // asked.recipe.sequence
    done = np.fromfile(tables.folder / DONE, dtype=np.uint8)
    assert 0 < done.sum() <= min(read, len(rows)) and done.sum() < len(done), "rows that no step reads are not asked"
    number = int(np.flatnonzero(done)[0])
    sequences = rows.rows_of(np.array([number]))  # type: ignore[attr-defined]  # windows of one text
    model = load(teacher).model
    mask_inputs = {"positions": torch.as_tensor(sequences.positions), "documents": torch.as_tensor(sequences.documents)}
    with torch.no_grad():
        logs = model(torch.as_tensor(sequences.tokens), **mask_inputs)[0].log_softmax(-1)
    right, _ = logs.topk(TOP)
    ids, kept_logs = tables.tables()
    picked = logs.gather(1, torch.tensor(ids[number].astype(np.int64)))
    torch.testing.assert_close(picked, right, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(torch.tensor(kept_logs[number, :, :TOP]).float(), right, rtol=2e-3, atol=2e-3)
    rest = 1 - right.exp().sum(1)
    torch.testing.assert_close(torch.tensor(kept_logs[number, :, TOP]).float().exp(), rest, rtol=1e-2, atol=1e-3)


LAYOUTS: list[dict[str, Any]] = [
    {"tp": 2}, {"dp_shard": 2, "zero": 3}, {"pp": 2, "micro_batch": 1}, {"cp": 2, "zero": 0}
]  # fmt: skip


def _under(layouts: list[dict[str, Any]], asked: Plan, caches: Path) -> list[list[tuple[float, ...]]]:
    """Each with a cache of its own, so that each asks."""
    curves = []
    for number, each in enumerate(layouts):
        layout, run = Layout(compile="off", **each), f"{asked.run}-{number}"
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_CACHE_HOME", str(caches / str(number)))
            curves.append(trained(replace(asked, run=run, layout=layout)))
    return curves


@pytest.mark.slow
def test_layouts_ask_and_read_the_same(teacher: Path, tmp_path: Path) -> None:
    """And a pipeline, which no teacher stands beside."""
    asked = student_plan(teacher, tmp_path / "run", distillation_top_k=TOP)
    right = trained(asked)
    [first, _] = on_ranks(2, _under, LAYOUTS, asked, tmp_path / "caches")
    for each, curve in zip(LAYOUTS, first, strict=True):
        assert [entry[0] for entry in curve] == pytest.approx([entry[0] for entry in right], rel=2e-5), each
    written = [entry.read_bytes() for entry in (tmp_path / "caches").glob("*/meshwright/teachers/*/done.bin")]
    assert len(written) == len(LAYOUTS) and len(set(written)) == 1


def test_rows_that_a_longer_run_needs_are_added(
    teacher: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    asked = student_plan(teacher, tmp_path / "run", distillation_top_k=TOP, steps=2)
    trained(asked)
    longer = student_plan(teacher, tmp_path / "longer", distillation_top_k=TOP, steps=4)
    caplog.clear()
    trained(longer)
    assert "the teacher is asked about 8 rows" in asked_about(caplog)


def _stopped_while_asking(asked: Plan, rank: int) -> tuple[str, int, int]:
    """(how it ended, steps, rows that are there) of a run of which one rank is told to stop after its first batch."""
    watcher, keep = Notes(), teacher_targets._gather_progress

    def told(mesh: Mesh, mine: NDArray[np.int64], stops: bool) -> tuple[NDArray[np.int64], bool]:
        if mesh.rank == rank and not stops:
            os.kill(os.getpid(), signal.SIGINT)
        return keep(mesh, mine, stops)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(teacher_targets, "_gather_progress", told)
        summary = loop.run(asked, watchers=[watcher])
    [done] = (default_root() / "teachers").glob("*/done.bin")
    return summary.stopped, len(watcher.steps), int(np.fromfile(done, dtype=np.uint8).sum())


def _on_two(asked: Plan, cache: Path) -> tuple[str, int, int]:
    os.environ["XDG_CACHE_HOME"] = str(cache)
    return _stopped_while_asking(asked, 1)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_signal_ends_the_asking_after_a_batch_and_a_rerun_goes_on(
    ranks: int, teacher: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(teacher_targets, "REPORT_S", 0.0)
    asked = student_plan(teacher, tmp_path / "run", distillation_top_k=TOP, steps=4)
    rows = asked.recipe.tokens_of_run() // asked.recipe.sequence
    if ranks == 1:
        lines = _stopped_while_asking(asked, 0)
    else:
        layout = Layout(compile="off", dp_shard=2, zero=3)
        asked = replace(asked, layout=layout)
        [lines, other] = on_ranks(2, _on_two, asked, tmp_path / "cache")
        assert lines[0] == other[0] == "interrupted", "the other rank ends too"
    stopped, steps, done = lines
    assert (stopped, steps) == ("interrupted", 0) and 0 < done < rows
    caplog.clear()
    if ranks == 1:
        watcher = Notes()
        assert loop.run(asked, resume="auto", watchers=[watcher]).stopped == "done"
        assert len(watcher.steps) == 4
        assert f"asked about {rows - done} rows" in asked_about(caplog)
        assert f"of {rows - done} rows, " in asked_about(caplog) and " left" in asked_about(caplog)


def test_tables_of_other_sizes_are_refused(tmp_path: Path) -> None:
    sizes = TableSizes(rows=3, sequence=4, top=2, vocab=300)
    tables = TeacherTables(tmp_path / "kept", sizes)
    tables.create()
    assert tables.missing(np.arange(3)).tolist() == [0, 1, 2]
    tables.mark(np.array([1]))
    TeacherTables(tmp_path / "kept", sizes).create()
    assert tables.missing(np.arange(3)).tolist() == [0, 2]
    (tables.folder / "ids.bin").write_bytes(b"1")
    with pytest.raises(RunError, match="was changed: remove it"):
        tables.create()


@pytest.mark.parametrize(
    ("table", "value", "complaint"),
    [(0, SHAPE.vocab, "names token 257 of 257"), (1, np.nan, "do not sum to 1"), (1, 0.0, "do not sum to 1")],
)
def test_tables_that_were_changed_between_runs_are_refused(
    table: int, value: float, complaint: str, teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    asked = student_plan(teacher, tmp_path / "run", distillation_top_k=TOP, steps=2)
    trained(asked)
    tables_of(asked).tables("r+")[table][...] = value
    with pytest.raises(RunError, match=rf"was changed: .*{complaint}: remove it"):
        trained(replace(asked, run=f"{asked.run}-changed"))


def test_bytes_and_a_disk_without_room(tmp_path: Path) -> None:
    assert TableSizes(rows=1, sequence=1, top=32, vocab=65_536).token_bytes == 130
    wide = TableSizes(rows=2**40, sequence=2**12, top=32, vocab=128_256)
    assert wide.token_bytes == 194
    with pytest.raises(RunError, match=r"Lower recipe\.distillation_top_k"):
        TeacherTables(tmp_path / "kept", wide).check_room(wide.rows)


def test_other_content_has_another_place() -> None:
    assert cached_path("a", 1) != cached_path("a", 2) and cached_path("a", 1) == cached_path("a", 1)
