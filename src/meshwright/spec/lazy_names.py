"""Names of a package that are loaded when they are first used."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a module's `__getattr__` (PEP 562), which takes each name from its home and keeps it.

    `homes`: name -> module below `package`, in dots. AttributeError for other names.
    """

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        loaded = getattr(import_module(f"{package}.{homes[name]}"), name)
        setattr(sys.modules[package], name, loaded)
        return loaded

    return load
