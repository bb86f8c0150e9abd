"""Base of all answers that have a document and a table."""

from abc import ABC, abstractmethod
from importlib import import_module
from typing import Any

from meshwright.spec.extras import require


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
