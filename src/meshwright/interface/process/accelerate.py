"""Support for `accelerate launch`: the rank numbers it sets, and its settings that a plan replaces.

Its multi-device launcher is torchrun and keeps torchrun's variables. Its CPU launcher starts one process, or many by
mpirun, which has variables of its own (accelerate 1.15, utils/launch.py and utils/environment.py).
"""

from collections.abc import Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshwright.spec import Plan

MARK = "ACCELERATE_MIXED_PRECISION"
"""Variable that each of accelerate's launchers sets."""
RANKS = {
    "RANK": ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK"),
    "WORLD_SIZE": ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"),
    "LOCAL_RANK": ("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK"),
    "LOCAL_WORLD_SIZE": ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE"),
}
"""torchrun's variable -> mpirun's variables."""
SHARDING = {"FSDP": "USE_FSDP", "DeepSpeed": "USE_DEEPSPEED", "Megatron-LM": "USE_MEGATRON_LM"}


def number_ranks(environ: MutableMapping[str, str]) -> None:
    """Copy mpirun's rank numbers to torchrun's variables, in a process that accelerate started by mpirun."""
    if MARK not in environ or "WORLD_SIZE" in environ:
        return
    for name, others in RANKS.items():
        number = next((environ[other] for other in others if other in environ), None)
        if number is not None:
            environ.setdefault(name, number)


def unread(environ: Mapping[str, str], plan: "Plan") -> Iterator[str]:
    """Yield a note for each accelerate setting that this run ignores, with the plan key that decides instead."""
    if MARK not in environ:
        return
    precision = environ[MARK].lower()
    if precision not in ("no", plan.recipe.precision):
        yield (
            f"--mixed_precision {precision} of accelerate is not read: the plan has "
            f"recipe.precision={plan.recipe.precision}"
        )
    for name, variable in SHARDING.items():
        if environ.get(f"ACCELERATE_{variable}", "").lower() == "true":
            yield f"{name} settings of accelerate are not read: the keys of layout say how ranks share the model"
    backend = environ.get("ACCELERATE_DYNAMO_BACKEND", "NO").upper()
    if backend != "NO":
        yield f"--dynamo_backend {backend.lower()} of accelerate is not read: layout.compile says what is compiled"
    if "WORLD_SIZE" not in environ and "MASTER_ADDR" in environ:
        yield (
            "accelerate launch started one process, whatever --num_processes says, as it does with --cpu: take "
            "--multi_gpu, which starts as many on CPUs too, or torchrun --nproc_per_node"
        )
