"""Capacity of oneDNN's cache of compiled products."""

import os
from typing import Final

CAPACITY: Final = 128
"""Cached products, one per combination of sizes. A model with one batch shape has some tens."""
NAMES: Final = "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "DNNL_PRIMITIVE_CACHE_CAPACITY"
"""oneDNN's environment variables. It reads the first that is set, at its first product."""


def keep_few_products() -> None:
    """Limit oneDNN's cache to CAPACITY products unless the environment sets a limit.

    With its default of 1,024, experts whose rows change in every step fill hundreds of MiB, and the gaps between these
    blocks are lost to larger tensors.
    """
    if not any(name in os.environ for name in NAMES):
        os.environ[NAMES[0]] = str(CAPACITY)
