"""Environment of a deterministic run."""

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshwright.spec import Plan

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


def set_environment(plan: "Plan") -> None:
    """Set cuBLAS's workspace for recipe.deterministic, before the first product.

    cuBLAS repeats its results with a fixed workspace only, and torch refuses to multiply without one.
    """
    if plan.recipe.deterministic:
        os.environ.setdefault(CUBLAS, ":4096:8")
