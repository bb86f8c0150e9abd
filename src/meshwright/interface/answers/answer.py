"""Base of all answers that have a document and a table, JSON-ready values, and checks of the files they go to."""

import math
from abc import ABC, abstractmethod
from dataclasses import asdict, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from meshwright.spec.errors import ArgumentError
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


def check_new_file(out: Path, *, option: str = "out=") -> None:
    """Raise ArgumentError if the file exists or its folder does not. `option`: name of the argument."""
    if out.exists():
        raise ArgumentError(f"{option}{out} is there already: name another file")
    if not out.absolute().parent.is_dir():
        raise ArgumentError(f"{option}{out}: there is no folder {out.parent}; make it first")


def check_page(out: Path, name: str, *, option: str = "out=") -> None:
    """Raise ArgumentError, before anything is computed, if no page can be written.

    `name`: suggested name of a page in a folder. `option`: name of the argument.
    """
    if out.is_dir():
        raise ArgumentError(f"{option}{out} is a folder: name a file, as {option}{out / name}")
    if out.suffix not in (".html", ".htm"):
        raise ArgumentError(f"{option}{out}: name a file that ends in .html, as {option}{out.with_suffix('.html')}")
    if not out.parent.is_dir():
        raise ArgumentError(f"{option}{out}: there is no folder {out.parent}; make it first")
    refuse_unwritable(out.parent, option)


def write_page(file: Path, page: str) -> None:
    """Write a page whole or not at all. Names that are no valid text get question marks. Raises RunError."""
    with report_in_one_line(file, "--html"):
        replace_file(file, page.encode(errors="replace"))
