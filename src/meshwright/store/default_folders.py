"""Run folders that nobody named: `DIR/auto` is a new one, `DIR/DATE-MODEL`, and `DIR/latest` a link to the newest."""

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
from meshwright.spec.errors import MeshwrightError, RunError
from meshwright.store import checkpoint_folder

AUTO, LATEST = "auto", "latest"
_LENGTH = ("steps", "epochs", "tokens")
_LOOKS = ("noise_scale_every", "eval_every", "eval_sequences", "checkpoint_every", "keep_last", "log_every")
MAY_CHANGE = frozenset(_LENGTH + _LOOKS)
"""Keys of the recipe: how long a run is, and how often it looks at itself."""


def is_open(run: str) -> bool:
    """Whether the run folder is still to be chosen."""
    return Path(run).name == AUTO


def begun(plan: Plan, resume: str) -> str:
    """The run folder of a plan; of an open one with resume=auto that of the newest run of this plan, if there is one.
    A link is followed: `latest` may lead elsewhere tomorrow."""
    path = Path(plan.run)
    if is_open(plan.run):
        found = newest_of(path.parent, plan) if resume == "auto" else None
        return str(found or path)
    return str(path.parent / os.readlink(path)) if path.is_symlink() else plan.run


def settled(plan: Plan) -> str:
    """The run folder of a plan. Of an open one a new folder, `DIR/2026-11-22-llama-tiny` or the first of -2, -3 ...
    that is not there, made at once, so that no other process takes it. RunError where it cannot be made."""
    return str(_new(Path(plan.run).parent, plan.model.name)) if is_open(plan.run) else plan.run


def _new(root: Path, model: str) -> Path:
    words = re.sub(r"[^A-Za-z0-9._]+", "-", model.removesuffix(" (changed)")).strip("-.") or "model"
    name = f"{date.today().isoformat()}-{words}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        for number in count(1):
            path = root / (name if number == 1 else f"{name}-{number}")
            with suppress(FileExistsError):
                path.mkdir()
                return path
    except OSError as error:
        raise RunError(f"{error.filename or root}: {error.strerror or error}; choose another run=") from None
    raise AssertionError("there is always a next number")


def drop_unbegun(path: Path) -> None:
    """Remove the folder that `settled` made for a run that could not start: it holds no step, and `latest` leads
    elsewhere."""
    link = path.parent / LATEST
    leads_here = link.is_symlink() and os.readlink(link) == path.name
    if not (leads_here or (path / "metrics.jsonl").exists() or checkpoint_folder.listing(path / "checkpoints")):
        shutil.rmtree(path, ignore_errors=True)


def newest_of(root: Path, plan: Plan) -> Path | None:
    """The newest run under `root` that this plan can resume. Runs with an equal recipe come first, then those whose
    recipe differs only in its length and its intervals (evaluation, logging, checkpoints)."""
    runs = [(run, kept) for run, kept in _runs(root) if _goes_on(kept, plan) and not _changed(kept, plan)]
    equal = (run for run, kept in runs if kept.recipe == plan.recipe)
    return next(equal, runs[0][0] if runs else None)


def left_alone(plan: Plan, resume: str) -> str | None:
    """With resume=auto and no run to go on with: the newest run that is another only by its recipe, as a sentence."""
    if resume != "auto" or not is_open(plan.run):
        return None
    for run, kept in _runs(Path(plan.run).parent):
        if _goes_on(kept, plan) and (names := _changed(kept, plan)):
            here, there = (getattr(one.recipe, names[0]) for one in (plan, kept))
            others = len(names) - 1
            more = f" ({others} more {'key differs' if others == 1 else 'keys differ'})" if others else ""
            return (
                f"a new run: {run} has recipe.{names[0]}={there}, this plan {here}{more}; "
                f"run={run} resume=auto goes on with it"
            )
    return None


def point_latest(run: Path) -> None:
    """Have `latest` beside a run folder lead to it. Something else of that name stays; so does what cannot be changed:
    a run does not fail for a link."""
    link = run.parent / LATEST
    if run.name == LATEST or (link.exists() and not link.is_symlink()):
        return
    fresh = link.with_name(f".{LATEST}.{os.getpid()}")
    with suppress(OSError):
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(run.name, target_is_directory=True)
        fresh.replace(link)


def _runs(root: Path) -> Iterator[tuple[Path, Plan]]:
    """Run folders with a checkpoint or metrics, and their plans, the newest first; what cannot be read is left out."""
    found = [path for path in root.iterdir() if not path.is_symlink()] if root.is_dir() else []
    kept = [path for path in found if (path / "plan.yaml").is_file() and (path / "checkpoints").is_dir()]
    for path in sorted(kept, key=_age):
        with suppress(MeshwrightError):
            yield path, planfile.read(path / "plan.yaml")


def _age(run: Path) -> tuple[float, str]:
    """Sorts the newest first: by its last checkpoint, else by its plan."""
    saved = [path for path in checkpoint_folder.newest_first(run / "checkpoints") if path.is_dir()]
    return -max(path.stat().st_mtime for path in [run / "plan.yaml", *saved[:1]]), run.name


def _goes_on(kept: Plan, plan: Plan) -> bool:
    """Whether a checkpoint of the one can be loaded and its place in the data kept by the other."""
    one, other = (planfile.absolute(replace(which, run="-")) for which in (kept, plan))
    fixed = ("sequence", "seed", "precision")
    return (one.model, one.data, one.init) == (other.model, other.data, other.init) and all(
        getattr(one.recipe, name) == getattr(other.recipe, name) for name in fixed
    )


def _changed(kept: Plan, plan: Plan) -> list[str]:
    """Keys of the recipe that a run which nobody named may not change as it goes on."""
    one, other = (_fixed(which.recipe) for which in (kept, plan))
    return [name for name in one if one[name] != other[name]]


def _fixed(recipe: Recipe) -> dict[str, Any]:
    """Without what may change; -1 for a warm-up that follows from the number of steps."""
    found = {one.name: getattr(recipe, one.name) for one in fields(recipe) if one.name not in MAY_CHANGE}
    follows = recipe.warmup_steps == Recipe(steps=recipe.steps).warmup_steps
    return found | {"warmup_steps": -1} if follows else found
