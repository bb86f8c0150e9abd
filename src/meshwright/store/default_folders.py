"""Automatic run folders: `DIR/auto` creates `DIR/DATE-MODEL`, and `DIR/latest` links to the newest.

Commands choose folders before they load torch, so nothing here does.
"""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields, replace
from datetime import date
from itertools import count
from pathlib import Path
from typing import Any

from meshwright import planfile
from meshwright.spec import Plan, Recipe
from meshwright.spec.errors import MeshwrightError, RunError, argument
from meshwright.store import checkpoint_folder

AUTO, LATEST = "auto", "latest"
_LENGTH = ("steps", "epochs", "tokens")
_INTERVALS = ("noise_scale_every", "eval_every", "eval_sequences", "checkpoint_every", "keep_last", "log_every")
MAY_CHANGE = frozenset(_LENGTH + _INTERVALS)
"""Recipe keys that a resumed run may change: its length, and how often it evaluates, saves and logs."""


def is_open(run: str) -> bool:
    """Return whether the run folder is still to be chosen."""
    return Path(run).name == AUTO


def find_begun_run(plan: Plan, resume: str) -> str:
    """Return the run folder to resume from: for `DIR/auto` with resume=auto, the newest run that this plan continues.

    A link is resolved, since `latest` may point elsewhere tomorrow.
    """
    path = Path(plan.run)
    if is_open(plan.run):
        return str((resume == "auto" and _find_resumable(path.parent, plan)) or path)
    return str(path.parent / os.readlink(path)) if path.is_symlink() else plan.run


def settle_run(plan: Plan) -> str:
    """Return the run folder of a plan, creating a new one for `DIR/auto`.

    The name is `DIR/2026-11-22-llama-tiny`, with -2, -3 ... if taken. The folder is made at once, so that no other
    process takes it. Raises RunError when it cannot be made.
    """
    if not is_open(plan.run):
        return plan.run
    root = Path(plan.run).parent
    words = re.sub(r"[^A-Za-z0-9._]+", "-", plan.model.name.removesuffix(" (changed)")).strip("-.") or "model"
    name = f"{date.today().isoformat()}-{words}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        # mkdir itself decides who gets a name when two runs start at once.
        for number in count(1):
            path = root / (name if number == 1 else f"{name}-{number}")
            with suppress(FileExistsError):
                path.mkdir()
                return str(path)
    except OSError as error:
        raise RunError(
            f"{error.filename or root}: {error.strerror or error}; choose another {argument('run')}"
        ) from None
    raise AssertionError("there is always a next number")


def drop_unbegun(path: Path) -> None:
    """Remove the folder that `settle_run` made for a run that never started: one without steps and not `latest`."""
    link = path.parent / LATEST
    is_latest = link.is_symlink() and os.readlink(link) == path.name
    if not (is_latest or (path / "metrics.jsonl").exists() or checkpoint_folder.list_checkpoints(path / "checkpoints")):
        shutil.rmtree(path, ignore_errors=True)


def point_latest(run: Path) -> None:
    """Point the link `latest` beside a run folder at it.

    A file or folder of that name remains. Errors are ignored: a run must not fail for a link.
    """
    link = run.parent / LATEST
    if run.name == LATEST or (link.exists() and not link.is_symlink()):
        return
    # A rename replaces the link, so that a reader finds the old one or the new.
    fresh = link.with_name(f".{LATEST}.{os.getpid()}")
    with suppress(OSError):
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(run.name, target_is_directory=True)
        fresh.replace(link)


def explain_new_run(plan: Plan, resume: str) -> str | None:
    """Explain why resume=auto starts a new run: name the newest run that differs in its recipe alone.

    None when no run is that close, or when the folder was not chosen automatically.
    """
    if resume != "auto" or not is_open(plan.run):
        return None
    for run, old in _runs(Path(plan.run).parent):
        if _is_compatible(old, plan) and (names := _changed_keys(old, plan)):
            new_setting, old_setting = getattr(plan.recipe, names[0]), getattr(old.recipe, names[0])
            others = len(names) - 1
            more = f" ({others} more {'key differs' if others == 1 else 'keys differ'})" if others else ""
            return (
                f"a new run: {run} has recipe.{names[0]}={old_setting}, this plan {new_setting}{more}; "
                f"run={run} resume=auto goes on with it"
            )
    return None


def _find_resumable(root: Path, plan: Plan) -> Path | None:
    """Return the newest run under `root` that this plan can resume.

    Runs with an equal recipe come first, then those whose recipe differs only in length and intervals (evaluation,
    logging, checkpoints).
    """
    runs = [(run, old) for run, old in _runs(root) if _is_compatible(old, plan) and not _changed_keys(old, plan)]
    equal = (run for run, old in runs if old.recipe == plan.recipe)
    return next(equal, runs[0][0] if runs else None)


def _runs(root: Path) -> Iterator[tuple[Path, Plan]]:
    """Yield (run folder, plan), newest first by last checkpoint or plan. Unreadable plans are skipped."""
    folders = [path for path in root.iterdir() if not path.is_symlink()] if root.is_dir() else []
    runs = [path for path in folders if (path / "plan.yaml").is_file() and (path / "checkpoints").is_dir()]

    def last_change(run: Path) -> tuple[float, str]:
        saved = [path for path in checkpoint_folder.list_newest_first(run / "checkpoints") if path.is_dir()]
        return -max(path.stat().st_mtime for path in [run / "plan.yaml", *saved[:1]]), run.name

    for path in sorted(runs, key=last_change):
        with suppress(MeshwrightError):
            yield path, planfile.read(path / "plan.yaml")


def _is_compatible(old: Plan, new: Plan) -> bool:
    """Return whether `new` can load a checkpoint of `old` and continue at its position in the data."""
    old, new = (planfile.absolute(replace(plan, run="-")) for plan in (old, new))
    fixed = ("sequence", "seed", "precision")
    return (old.model, old.data, old.init) == (new.model, new.data, new.init) and all(
        getattr(old.recipe, name) == getattr(new.recipe, name) for name in fixed
    )


def _changed_keys(old: Plan, new: Plan) -> list[str]:
    """List the recipe keys that differ although an automatically chosen run may not change them."""
    before, after = _fixed_keys(old.recipe), _fixed_keys(new.recipe)
    return [name for name in before if before[name] != after[name]]


def _fixed_keys(recipe: Recipe) -> dict[str, Any]:
    """Return the recipe without MAY_CHANGE."""
    return {field.name: getattr(recipe, field.name) for field in fields(recipe) if field.name not in MAY_CHANGE}
