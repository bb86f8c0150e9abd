"""What every answer that has a document and a table can do."""

from abc import ABC, abstractmethod
from importlib import import_module
from typing import Any

from meshwright.spec.extras import require


class Answer(ABC):
    """Its figures as one document, and as rows."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """The document that the verb prints with --json."""

    @abstractmethod
    def rows(self) -> list[dict[str, Any]]:
        """Its table."""

    @abstractmethod
    def _repr_html_(self) -> str:
        """What a notebook shows."""

    def to_pandas(self) -> Any:
        """`rows` as a pandas.DataFrame. PlanError names the extra where pandas is not installed."""
        require("pandas", "to_pandas", ", or take rows()")
        return import_module("pandas").DataFrame(self.rows())
