"""Environment variables: defaults for libraries, rank numbers, and what a deterministic run needs.

Libraries read most of them on import. A variable that the user has set is kept. An empty one
(`NAME= meshwright train ...`) restores the library's default. `meshwright --debug` prints them, and
docs/training.md has the table.

Multi-device launches of accelerate are torchrun and keep torchrun's variables. Its CPU launcher starts one process, or
many by mpirun, which has variables of its own (accelerate 1.15, utils/launch.py and utils/environment.py).
"""

import os
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshwright.spec.errors import PlanError

if TYPE_CHECKING:
    from meshwright.spec import Plan

ACCELERATE_MARK = "ACCELERATE_MIXED_PRECISION"
"""Variable that each of accelerate's launchers sets."""
MPI_VARIABLES = {
    "RANK": ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK"),
    "WORLD_SIZE": ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"),
    "LOCAL_RANK": ("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK"),
    "LOCAL_WORLD_SIZE": ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE"),
}
"""torchrun's variable -> mpirun's variables."""
TASK_COUNTS = {"SLURM_STEP_NUM_TASK_COUNTS": "srun", "OMPI_COMM_WORLD_SIZE": "mpirun", "PMI_SIZE": "mpiexec"}
"""Variables with the process count of launchers that do not set torch's -> launcher."""
ACCELERATE_SHARDING = {"FSDP": "USE_FSDP", "DeepSpeed": "USE_DEEPSPEED", "Megatron-LM": "USE_MEGATRON_LM"}
CUBLAS_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"


@dataclass(frozen=True, slots=True, kw_only=True)
class Default:
    """A variable, its default, and other variables that also show the user's choice."""

    name: str
    value: str
    why: str
    others: tuple[str, ...] = ()


DEFAULTS = (
    Default(
        name="GOMP_SPINCOUNT",
        value="1000",
        why="waiting threads sleep soon: 5 to 25% slower alone, 2 to 8 times faster next to other programs",
        others=("OMP_WAIT_POLICY",),
    ),
    Default(
        name="PYTORCH_ALLOC_CONF",
        value="expandable_segments:True",
        why="GPU memory is not lost between blocks of unequal sizes (as torchtitan)",
        others=("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"),
    ),
    Default(
        name="TORCH_NCCL_HIGH_PRIORITY",
        value="1",
        why="collectives get multiprocessors before the products that run at the same time",
    ),
    Default(
        name="CUDA_MODULE_LOADING",
        value="EAGER",
        why="no kernel is loaded while a receive waits on the GPU, which can block both",
    ),
)
"""CUDA_DEVICE_MAX_CONNECTIONS stays unset: 1 orders collectives before products, and costs FSDP its overlap
(Megatron-FSDP user guide, recommended configurations)."""


def set_defaults(environ: MutableMapping[str, str]) -> None:
    """Set what the user has not, before torch is imported. Empty variables are removed."""
    for default in DEFAULTS:
        # A user who set a related variable has chosen too, and this one would win over it.
        if not environ.keys() & {default.name, *default.others}:
            environ[default.name] = default.value
        # Some libraries take an empty text for a bad value, so it must not reach them.
        elif environ.get(default.name) == "":
            del environ[default.name]


def describe_defaults(environ: MutableMapping[str, str]) -> list[str]:
    """List each variable with its current value and the reason for it."""
    lines = []
    for default in DEFAULTS:
        name = next((name for name in (default.name, *default.others) if name in environ), default.name)
        ours = name == default.name and environ.get(name) == default.value
        why = default.why if ours else "set by you" if name in environ else "the library's own"
        lines.append(f"{name}={environ.get(name, '')}: {why}")
    return lines


def number_mpi_ranks(environ: MutableMapping[str, str]) -> None:
    """Copy mpirun's rank numbers to torchrun's variables, in a process that accelerate started by mpirun."""
    # mpirun without accelerate stays unnumbered: `refuse_unnumbered` then explains how to launch.
    if ACCELERATE_MARK not in environ or "WORLD_SIZE" in environ:
        return
    for name, others in MPI_VARIABLES.items():
        number = next((environ[other] for other in others if other in environ), None)
        if number is not None:
            environ.setdefault(name, number)


def rank() -> int:
    """Return this process's rank under torchrun, 0 when alone."""
    return int(os.environ.get("RANK", "0"))


def processes() -> int:
    """Return the number of processes that torchrun started, 1 when alone."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def nodes() -> int:
    """Return the number of machines with equally many processes each, 1 if unknown."""
    launchers = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    return launchers if processes() % launchers == 0 else 1


def use_nodes(number: int) -> None:
    """Restrict the run to the first nodes. Processes of the others stand by."""
    per_node = processes() // nodes()
    os.environ["WORLD_SIZE"], os.environ["GROUP_WORLD_SIZE"] = str(number * per_node), str(number)


def refuse_unnumbered(environ: Mapping[str, str]) -> None:
    """Raise PlanError for processes that a launcher started without rank numbers.

    Each would train alone, and all would write one folder.
    """
    for name, launcher in TASK_COUNTS.items() if "WORLD_SIZE" not in environ else ():
        if environ.get(name, "1") not in ("", "0", "1"):
            raise PlanError(
                f"{launcher} started {environ[name]} processes without RANK and WORLD_SIZE, so each would train "
                "alone. Start one torchrun per node: srun --ntasks-per-node=1 torchrun --nproc-per-node=8 ... "
                "(`meshwright launch PLAN.yaml --to slurm` writes the job), or set RANK and WORLD_SIZE"
            )


def unread_accelerate_settings(environ: Mapping[str, str], plan: "Plan") -> Iterator[str]:
    """Yield a note for each accelerate setting that this run ignores, with the plan key that decides instead."""
    if ACCELERATE_MARK not in environ:
        return
    # accelerate sets "no" by default, which is no wish of the user.
    precision = environ[ACCELERATE_MARK].lower()
    if precision not in ("no", plan.recipe.precision):
        yield (
            f"--mixed_precision {precision} of accelerate is not read: the plan has "
            f"recipe.precision={plan.recipe.precision}"
        )
    for name, variable in ACCELERATE_SHARDING.items():
        if environ.get(f"ACCELERATE_{variable}", "").lower() == "true":
            yield f"{name} settings of accelerate are not read: the keys of layout say how ranks share the model"
    backend = environ.get("ACCELERATE_DYNAMO_BACKEND", "NO").upper()
    if backend != "NO":
        yield f"--dynamo_backend {backend.lower()} of accelerate is not read: layout.compile says what is compiled"
    # The launcher of one process sets an address exactly where --num_processes is above 1.
    if "WORLD_SIZE" not in environ and "MASTER_ADDR" in environ:
        yield (
            "accelerate launch started one process, whatever --num_processes says, as it does with --cpu: take "
            "--multi_gpu, which starts as many on CPUs too, or torchrun --nproc_per_node"
        )


def fix_cublas_workspace(plan: "Plan") -> None:
    """Set cuBLAS's workspace for recipe.deterministic, before the first product.

    cuBLAS repeats its results with a fixed workspace only, and torch refuses to multiply without one.
    """
    if plan.recipe.deterministic:
        # Eight buffers of 4 MiB. cuBLAS documents one more setting as deterministic, and that it may limit speed.
        os.environ.setdefault(CUBLAS_VARIABLE, ":4096:8")
