"""Scripts that start a run on its nodes: by hand with torchrun or the launcher of the trainer, or as a job of Slurm."""

from meshwright.spec.layout.cluster import Cluster
from meshwright.spec.plan.plan import Plan
from meshwright.stacks.declaration.software import LaunchCommand

TORCHRUN = "--nnodes $NNODES --nproc_per_node $GPUS --node_rank $NODE_RANK --master_addr $HEAD --master_port $PORT"
PORT = 29500


def by_hand(plan: Plan, launch: LaunchCommand, title: str) -> str:
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


def slurm(plan: Plan, launch: LaunchCommand, title: str) -> str:
    """Return launch.sbatch: one task per node, which runs launch.sh."""
    cluster = plan.cluster
    return "\n".join([
        "#!/usr/bin/env bash", *_directives(cluster), f"# {title}",
            "# Run in its folder, which all nodes see: sbatch launch.sbatch", *_yours(launch), "set -euo pipefail",
        'export HEAD="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"',
        'HERE="${SLURM_SUBMIT_DIR:-$PWD}"',
            '[ -f "$HERE/launch.sh" ] || { echo "no launch.sh in $HERE: cd to its folder, then sbatch" >&2; exit 1; }',
        f'srun --nodes={cluster.nodes} --ntasks-per-node=1 --kill-on-bad-exit=1 bash -c \\',
        "    'NODE_RANK=$SLURM_NODEID exec bash \"$0/launch.sh\"' \"$HERE\"", "",
    ])  # fmt: skip


def _directives(cluster: Cluster) -> list[str]:
    return [
        "#SBATCH --job-name=meshwright-plan", f"#SBATCH --nodes={cluster.nodes}", "#SBATCH --ntasks-per-node=1",
        f"#SBATCH --gpus-per-node={cluster.devices_per_node}", "#SBATCH --exclusive",
    ]  # fmt: skip


def _yours(launch: LaunchCommand) -> list[str]:
    return [f"# Yours to set: {', '.join(launch.yours)}."] if launch.yours else []
