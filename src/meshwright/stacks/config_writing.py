"""Files of a plan for a training software: its configuration, launch.sh and launch.sbatch."""

from pathlib import Path

from meshwright.spec.errors import PlanError
from meshwright.spec.plan.plan import Plan
from meshwright.stacks.declaration.software import TrainingSoftware
from meshwright.stacks.file_forms import text_of
from meshwright.stacks.launch_scripts import by_hand, slurm

MARK = "Written by meshwright plan --for"
"""First words of every written file with comments. A file without them is never overwritten."""


def texts(software: TrainingSoftware, plan: Plan) -> dict[str, str]:
    """Return the text of each file by name. Raises PlanError if the software lacks such a model."""
    facts, launch = software.all_facts(plan), software.launch(plan)
    cluster = plan.cluster
    machines = f"{cluster.nodes} x {cluster.devices_per_node} {cluster.device.name}"
    title = f"{plan.model.name} on {machines}, {plan.recipe.global_batch} x {plan.recipe.sequence} tokens per step"
    configs = {
        file.name: text_of(file, facts, [f"{MARK} {software.word}: {file.title}.", title]) for file in software.files
    }
    heading = f"{MARK} {software.word}: {title}"
    return {**configs, "launch.sh": by_hand(plan, launch, heading), "launch.sbatch": slurm(plan, launch, heading)}


def write(software: TrainingSoftware, plan: Plan, folder: Path) -> list[Path]:
    """Write the files into a folder, which is created. Raises PlanError rather than replace somebody else's file."""
    files = texts(software, plan)
    for name in files:
        check_writable(folder / name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise PlanError(f"{folder} cannot be written: {error.strerror}") from None
    return [folder / name for name in files]


def check_writable(path: Path) -> None:
    """Raise PlanError if the path holds a file that meshwright did not write."""
    if not path.exists():
        return
    # JSON has no comments: such a file is recognized by the launch script beside it.
    marked = path.with_name("launch.sh") if path.suffix == ".json" else path
    if not marked.is_file() or MARK not in marked.read_text(encoding="utf-8", errors="replace"):
        raise PlanError(f"{path} would be replaced, and meshwright did not write it: take another folder")
