"""`accelerate launch`: what it says of ranks, and what of its settings a plan says instead.

Its multi-device launcher is torchrun, whose variables it leaves as they are. Its launcher for CPUs starts one process,
or many by mpirun, which numbers them by names of its own (accelerate 1.15, utils/launch.py and utils/environment.py).
"""

from collections.abc import Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshwright.spec import Plan

MARK = "ACCELERATE_MIXED_PRECISION"
"""Each of its launchers sets it."""
RANKS = {
    "RANK": ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK"),
    "WORLD_SIZE": ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"),
    "LOCAL_RANK": ("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK"),
    "LOCAL_WORLD_SIZE": ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE"),
}
"""torchrun's name -> those of mpirun."""
SHARDING = {"FSDP": "USE_FSDP", "DeepSpeed": "USE_DEEPSPEED", "Megatron-LM": "USE_MEGATRON_LM"}


def number_ranks(environ: MutableMapping[str, str]) -> None:
    """Where accelerate started this process by mpirun: the same under torchrun's names."""
    if MARK not in environ or "WORLD_SIZE" in environ:
        return
    for name, others in RANKS.items():
        found = next((environ[other] for other in others if other in environ), None)
        if found is not None:
            environ.setdefault(name, found)


def unread(environ: Mapping[str, str], plan: "Plan") -> Iterator[str]:
    """A note for each setting of accelerate's that this run does not follow, with the key that says it."""
    if MARK not in environ:
        return
    asked = environ[MARK].lower()
    if asked not in ("no", plan.recipe.precision):
        yield (
            f"--mixed_precision {asked} of accelerate is not read, and recipe.precision={plan.recipe.precision} stands"
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
