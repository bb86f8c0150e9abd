"""A small teacher, and plans of students that learn from it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwright.spec import ModelShape, MoEShape, Plan, Recipe
from meshwright.training import loop
from tests.training.running import SHAPE, Notes, write_texts
from tests.training.running import plan as plain_plan

TEACHER = replace(SHAPE, name="teacher", layers=3, hidden=24, heads=4, kv_heads=2, ffn=40)
STUDENT = replace(SHAPE, name="student", kv_heads=2)
ROUTED = replace(TEACHER, name="routed", family="mixtral", moe=MoEShape(experts=4, top_k=2, ffn=20))


def taught(folder: Path, shape: ModelShape = TEACHER, steps: int = 8) -> Path:
    """The run of a teacher that was trained for some steps on texts beside it."""
    texts = write_texts(folder / "texts")
    loop.run(plain_plan(texts, folder / "teacher", shape=shape, steps=steps, checkpoint_every=0, eval_every=0))
    return folder / "teacher"


def student_plan(teacher: Path, run: Path, *, shape: ModelShape = STUDENT, **recipe: Any) -> Plan:
    """A plan of a student whose teacher is a run."""
    from meshwright.store.run_folder import RunFolder

    steps = recipe.pop("steps", 4)
    base = plain_plan(teacher.parent / "texts", run, shape=shape, steps=steps)
    asked = replace(base.recipe, objective="distill", checkpoint_every=0, eval_every=0, **recipe)
    theirs = RunFolder.open(teacher).plan.model
    return replace(base, recipe=Recipe(**_fields(asked)), teacher=theirs, teacher_init=str(teacher))


def _fields(recipe: Recipe) -> dict[str, Any]:
    return {name: getattr(recipe, name) for name in recipe.__dataclass_fields__}


def trained(asked: Plan) -> list[tuple[float, float, float, float]]:
    """(loss, gradient norm, divergence, cross-entropy) of each step of a run."""
    watcher = Notes()
    loop.run(asked, watchers=[watcher])
    return [
        (step.loss, step.grad_norm, step.figures["divergence"], step.figures["cross_entropy"]) for step in watcher.steps
    ]
