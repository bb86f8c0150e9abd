"""Environment variables that libraries read on import, with the defaults that this program sets.

A variable that the user has set is kept. An empty one (`NAME= meshwright train ...`) restores the library's default.
`meshwright --debug` prints them, and docs/training.md has the table.
"""

from collections.abc import MutableMapping
from dataclasses import dataclass


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
    """Set what the user has not, before torch is imported. Empty variables are removed."""
    for default in DEFAULTS:
        if not environ.keys() & {default.name, *default.others}:
            environ[default.name] = default.value
        elif environ.get(default.name) == "":
            del environ[default.name]


def described(environ: MutableMapping[str, str]) -> list[str]:
    """List each variable with its current value and the reason for it."""
    lines = []
    for default in DEFAULTS:
        name = next((name for name in (default.name, *default.others) if name in environ), default.name)
        ours = name == default.name and environ.get(name) == default.value
        why = default.why if ours else "set by you" if name in environ else "the library's own"
        lines.append(f"{name}={environ.get(name, '')}: {why}")
    return lines
