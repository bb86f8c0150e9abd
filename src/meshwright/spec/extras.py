"""Packages that an extra of this one installs: `pip install 'meshwright[serve]'`."""

import sys
from importlib.util import find_spec

from meshwright.spec.errors import MeshwrightError, PlanError

EXTRAS = {
    "parquet": ("pyarrow",), "pandas": ("pandas",), "hf": ("datasets", "pyarrow"), "gpu": ("flash_attn",),
    "gemlite": ("gemlite",), "grammar": ("llguidance",), "eval": ("lm_eval",),
    "serve": ("prometheus_client", "starlette", "uvicorn"), "tensorboard": ("tensorboard",), "wandb": ("wandb",),
}  # fmt: skip
"""Extra -> its packages as they are imported; pyproject.toml says which versions."""


def install(extra: str) -> str:
    """The command that installs an extra."""
    return f"pip install 'meshwright[{extra}]'"


def require(extra: str, user: str, otherwise: str = "", error: type[MeshwrightError] = PlanError) -> None:
    """Refuse to go on without the packages of an extra.

    `user`: what needs them; `otherwise`: what to do without, as ", or take rows()"; `error`: what is raised.
    """
    for package in EXTRAS[extra]:
        if not _is_importable(package):
            raise error(f"{user} needs {package}, which is not installed: {install(extra)}{otherwise}")


def _is_importable(package: str) -> bool:
    """Whether a package can be imported; one that has been is not looked for again."""
    if package in sys.modules:
        return sys.modules[package] is not None
    return find_spec(package) is not None
