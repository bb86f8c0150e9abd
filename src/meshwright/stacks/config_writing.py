"""Files of a plan for a training software: its configuration, launch.sh and launch.sbatch."""

from pathlib import Path

from meshwright.spec.errors import PlanError
from meshwright.spec.plan.plan import Plan
from meshwright.stacks.declaration.software import LaunchCommand, TrainingSoftware
from meshwright.stacks.file_forms import text_of

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
    scripts = {"launch.sh": launch_script(plan, launch, heading), "launch.sbatch": slurm_script(plan, launch, heading)}
    return configs | scripts


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


TORCHRUN = "--nnodes $NNODES --nproc_per_node $GPUS --node_rank $NODE_RANK --master_addr $HEAD --master_port $PORT"
PORT = 29500


def launch_script(plan: Plan, launch: LaunchCommand, title: str) -> str:
    """Return launch.sh, which is run on each node with the number of the node."""
    cluster = plan.cluster
    many = cluster.nodes > 1
    usage = f"on each node: NODE_RANK=0..{cluster.nodes - 1} HEAD=name of node 0" if many else "on its node"
    return "\n".join([
        "#!/usr/bin/env bash", f"# {title}", f"# Run {usage}: bash launch.sh", *_yours(launch), "set -euo pipefail",
        'HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"', f"NNODES={cluster.nodes}",
        f"GPUS={cluster.devices_per_node}",
        "NODE_RANK=${NODE_RANK:?number of this node}" if many else "NODE_RANK=${NODE_RANK:-0}",
        "HEAD=${HEAD:?name of node 0}" if many else "HEAD=${HEAD:-localhost}", f"PORT=${{PORT:-{PORT}}}",
        f'TORCHRUN="{TORCHRUN}"', *launch.before, launch.command, "",
    ])  # fmt: skip


def slurm_script(plan: Plan, launch: LaunchCommand, title: str) -> str:
    """Return launch.sbatch: one task per node, which runs launch.sh."""
    cluster = plan.cluster
    return "\n".join([
        "#!/usr/bin/env bash",
        # sbatch reads its directives up to the first command, so they stand at the top.
        "#SBATCH --job-name=meshwright-plan", f"#SBATCH --nodes={cluster.nodes}", "#SBATCH --ntasks-per-node=1",
        f"#SBATCH --gpus-per-node={cluster.devices_per_node}", "#SBATCH --exclusive", f"# {title}",
        "# Run in its folder, which all nodes see: sbatch launch.sbatch", *_yours(launch), "set -euo pipefail",
        'export HEAD="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"',
        'HERE="${SLURM_SUBMIT_DIR:-$PWD}"',
        '[ -f "$HERE/launch.sh" ] || { echo "no launch.sh in $HERE: cd to its folder, then sbatch" >&2; exit 1; }',
        f'srun --nodes={cluster.nodes} --ntasks-per-node=1 --kill-on-bad-exit=1 bash -c \\',
        "    'NODE_RANK=$SLURM_NODEID exec bash \"$0/launch.sh\"' \"$HERE\"", "",
    ])  # fmt: skip


def _yours(launch: LaunchCommand) -> list[str]:
    return [f"# Yours to set: {', '.join(launch.yours)}."] if launch.yours else []
