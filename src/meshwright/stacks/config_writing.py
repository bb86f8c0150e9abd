"""The files of a plan for a training software: its configuration, launch.sh and launch.sbatch."""

from pathlib import Path

from meshwright.spec.errors import PlanError
from meshwright.spec.plan import Plan
from meshwright.stacks.declaration.software import TrainingSoftware
from meshwright.stacks.file_forms import text_of
from meshwright.stacks.launch_scripts import by_hand, slurm

MARK = "Written by meshwright plan --for"
"""Stands in every file with comments, so that no other file is overwritten."""


def texts(software: TrainingSoftware, plan: Plan) -> dict[str, str]:
    """File name -> text; PlanError where the software has no such model."""
    facts, launch = software.all_facts(plan), software.launch(plan)
    cluster = plan.cluster
    on = f"{cluster.nodes} x {cluster.devices_per_node} {cluster.device.name}"
    title = f"{plan.model.name} on {on}, {plan.recipe.global_batch} x {plan.recipe.sequence} tokens per step"
    found = {one.name: text_of(one, facts, [f"{MARK} {software.word}: {one.title}.", title]) for one in software.files}
    said = f"{MARK} {software.word}: {title}"
    return {**found, "launch.sh": by_hand(plan, launch, said), "launch.sbatch": slurm(plan, launch, said)}


def write(software: TrainingSoftware, plan: Plan, folder: Path) -> list[Path]:
    """Write them into a folder, which is made; PlanError where that would replace a file of somebody else."""
    found = texts(software, plan)
    for name in found:
        check_place(folder / name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in found.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise PlanError(f"{folder} cannot be written: {error.strerror}") from None
    return [folder / name for name in found]


def check_place(path: Path) -> None:
    """JSON has no comments: such a file is known by the launch script beside it."""
    if not path.exists():
        return
    marked = path.with_name("launch.sh") if path.suffix == ".json" else path
    if not marked.is_file() or MARK not in marked.read_text(encoding="utf-8", errors="replace"):
        raise PlanError(f"{path} would be replaced, and meshwright did not write it: take another folder")
