"""Optional packages that this package's extras install: `pip install 'meshwright[serve]'`."""

import sys
from importlib.util import find_spec

from meshwright.spec.errors import MeshwrightError, PlanError

EXTRAS = {
    "parquet": ("pyarrow",), "zst": ("zstandard",), "pandas": ("pandas",), "hf": ("datasets", "pyarrow"),
    "gpu": ("flash_attn",), "gemlite": ("gemlite",), "grammar": ("llguidance",), "eval": ("lm_eval",),
    "s3": ("s3fs",), "gcs": ("gcsfs",), "azure": ("adlfs",), "hub": ("huggingface_hub",),
    "drill": ("moto", "s3fs"),
    "serve": ("prometheus_client", "starlette", "uvicorn"), "tensorboard": ("tensorboard",), "wandb": ("wandb",),
}  # fmt: skip
"""Extra -> names of its packages when imported. pyproject.toml has their versions."""


def install(extra: str) -> str:
    """Return the command that installs an extra."""
    return f"pip install 'meshwright[{extra}]'"


def require(extra: str, user: str, otherwise: str = "", error: type[MeshwrightError] = PlanError) -> None:
    """Raise `error` unless the packages of an extra are installed.

    Args:
        user: Subject of the message: the part that needs them.
        otherwise: Alternative at the end of the message, such as ", or take rows()".
    """
    for package in EXTRAS[extra]:
        # An entry None in sys.modules blocks an import, and find_spec raises ValueError for it.
        module = sys.modules[package] if package in sys.modules else find_spec(package)
        if module is None:
            raise error(f"{user} needs {package}, which is not installed: {install(extra)}{otherwise}")
