"""Lazy imports: names of a package that are loaded on first use.

The module imports nothing of this package, since `import meshwright` runs it.
"""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a module's `__getattr__` (PEP 562), which imports each name on first use and stores it.

    `homes` maps a name to its module below `package`, in dots. Other names raise AttributeError.
    """

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        loaded = getattr(import_module(f"{package}.{homes[name]}"), name)
        setattr(sys.modules[package], name, loaded)
        return loaded

    return load
