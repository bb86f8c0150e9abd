"""Base of all answers that have a document and a table, JSON-ready values, and checks of the files they go to."""

import math
from abc import ABC, abstractmethod
from dataclasses import asdict, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from meshwright.spec.errors import ArgumentError, argument
from meshwright.spec.extras import require
from meshwright.store.durable import refuse_unwritable, replace_file, report_in_one_line


class Answer(ABC):
    """An answer with a JSON document, a table, and a view in a notebook."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Return the document that the verb prints with --json."""

    @abstractmethod
    def rows(self) -> list[dict[str, Any]]:
        """Return the table as one dictionary per row."""

    @abstractmethod
    def _repr_html_(self) -> str:
        """Return the HTML that a notebook shows."""

    def to_pandas(self) -> Any:
        """Return `rows` as a pandas.DataFrame. Raises PlanError, which names the extra, without pandas."""
        require("pandas", "to_pandas", ", or take rows()")
        return import_module("pandas").DataFrame(self.rows())


def plain(content: Any) -> Any:
    """Convert to what JSON can hold. Dataclasses become their fields, NaN and infinity null."""
    if is_dataclass(content) and not isinstance(content, type):
        return plain(asdict(content))
    if isinstance(content, dict):
        return {str(key): plain(entry) for key, entry in content.items()}
    if isinstance(content, list | tuple):
        return [plain(entry) for entry in content]
    if isinstance(content, Path):
        return str(content)
    if isinstance(content, float) and not math.isfinite(content):
        return None
    return content


def check_parent(file: Path, key: str) -> None:
    """Raise ArgumentError if the folder of a file does not exist. `key`: name of the argument."""
    if not file.absolute().parent.is_dir():
        raise ArgumentError(key, file, remedy=f"there is no folder {file.parent}; make it first")


def check_new_file(file: Path, key: str = "out") -> None:
    """Raise ArgumentError if the file exists or its folder does not. `key`: name of the argument."""
    if file.exists():
        raise ArgumentError(key, file, "is there already", "name another file")
    check_parent(file, key)


def check_page(file: Path, name: str, key: str = "out") -> None:
    """Raise ArgumentError, before anything is computed, if no page can be written.

    `name`: suggested name of a page in a folder. `key`: name of the argument.
    """
    if file.is_dir():
        raise ArgumentError(key, file, "is a folder", f"name a file, as {argument(key, file / name)}")
    if file.suffix not in (".html", ".htm"):
        page = file.with_suffix(".html")
        raise ArgumentError(key, file, remedy=f"name a file that ends in .html, as {argument(key, page)}")
    check_parent(file, key)
    refuse_unwritable(file.parent, key)


def write_page(file: Path, page: str, key: str = "html") -> None:
    """Write a page whole or not at all. Names that are no valid text get question marks. Raises RunError."""
    with report_in_one_line(file, argument(key)):
        replace_file(file, page.encode(errors="replace"))
