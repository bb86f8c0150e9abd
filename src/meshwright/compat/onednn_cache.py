"""How many products oneDNN keeps the code of."""

import os
from typing import Final

CAPACITY: Final = 128
"""Products, of which each has its own sizes. A model of one size of rows has some tens."""
NAMES: Final = "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "DNNL_PRIMITIVE_CACHE_CAPACITY"
"""oneDNN's own; it reads the first that is there, with its first product."""


def keep_few_products() -> None:
    """Have oneDNN keep CAPACITY products, where nobody says how many: of 1,024, its default, those of experts whose
    rows are other numbers in every step take hundreds of MiB, and memory between them is lost to larger tensors."""
    if not any(name in os.environ for name in NAMES):
        os.environ[NAMES[0]] = str(CAPACITY)
