"""Environment variables that libraries read when they are loaded: what this program sets where the user has not.

Each is a default: a value of the user's own is kept, and an empty one (`NAME= meshwright train ...`) leaves the
library's. `meshwright --debug` shows them; docs/training.md has the table.
"""

from collections.abc import MutableMapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Default:
    """A variable, its value, and other names that show that the user has decided."""

    name: str
    value: str
    why: str
    others: tuple[str, ...] = ()


DEFAULTS = (
    Default(
        name="GOMP_SPINCOUNT",
        value="1000",
        why="waiting threads sleep soon: 5% slower alone, 8 times faster where another program wants a core too",
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
        why="collectives get multiprocessors before the products that run beside them",
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
    """Set what the user has not; to be called before torch is loaded. Empty values are removed: the library's own."""
    for one in DEFAULTS:
        if not environ.keys() & {one.name, *one.others}:
            environ[one.name] = one.value
        elif environ.get(one.name) == "":
            del environ[one.name]


def described(environ: MutableMapping[str, str]) -> list[str]:
    """A line for each variable as it is now, for people."""
    lines = []
    for one in DEFAULTS:
        name = next((name for name in (one.name, *one.others) if name in environ), one.name)
        ours = name == one.name and environ.get(name) == one.value
        why = one.why if ours else "set by you" if name in environ else "the library's own"
        lines.append(f"{name}={environ.get(name, '')}: {why}")
    return lines
