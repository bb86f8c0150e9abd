"""Rows: records with fields, in .jsonl, .json and .parquet files and in hub datasets; streamed, each with its place."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from meshwright.spec.errors import DataError

_BATCH_ROWS = 64
"""Rows decoded at a time: a row may hold a whole book."""

Row = tuple[str, Mapping[str, Any]]
"""(`FILE:LINE`, fields)."""


def texts(found: Iterator[Row], field: str) -> Iterator[tuple[str, str]]:
    """(place, text) of one field of every row; DataError names the place."""
    for where, row in found:
        yield where, text_of(row, field, spoken(where))


def spoken(where: str) -> str:
    """A place as a sentence has it: `FILE, line 3`."""
    path, _, number = where.rpartition(":")
    return f"{path}, {'line' if path.endswith('.jsonl') else 'row'} {number}"


def jsonl(path: Path) -> Iterator[Row]:
    """Every line, blank lines passed over; DataError names file and line."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield f"{path}:{number}", _line(line, f"{path}, line {number}")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


def json_array(path: Path) -> Iterator[Row]:
    """Every object of a .json file that is one array, in memory whole."""
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:
        raise DataError(f"{path}: not UTF-8 text") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: broken JSON, {error}") from None
    if not isinstance(found, list):
        raise DataError(
            f"{path} holds {_kind(found)}, not an array of objects: give one object a line in a .jsonl file"
        )
    for number, row in enumerate(found, start=1):
        yield f"{path}:{number}", _object(row, f"{path}, row {number}")


def parquet(path: Path, columns: Sequence[str] | None = None) -> Iterator[Row]:
    """Every row, row groups streamed; `columns` = only these. Needs pyarrow."""
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise DataError(f"{path} needs pyarrow to be read: pip install 'meshwright[parquet]'") from None
    try:
        with ParquetFile(path) as file:
            for column in columns or ():
                _require_field(column, file.schema_arrow.names, str(path))
            batches = file.iter_batches(batch_size=_BATCH_ROWS, columns=columns and list(columns))
            rows = (row for batch in batches for row in batch.to_pylist())
            for number, row in enumerate(rows, start=1):
                yield f"{path}:{number}", row
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} is not a readable parquet file: {' '.join(str(error).split())}") from error


def hub(dataset: Any, name: str, columns: Sequence[str] | None = None) -> Iterator[Row]:
    """(hub:NAME:ROW, fields) of every row of a loaded hub dataset; `columns` = only these."""
    for column in columns or ():
        _require_field(column, dataset.column_names, name)
    chosen = dataset.select_columns(list(columns)) if columns else dataset
    for number, row in enumerate(chosen, start=1):
        yield f"{name}:{number}", row


def load_hub(name: str) -> Any:
    """The `train` split of `hub:NAME` or `hub:NAME:CONFIG`; needs the datasets library and, once, a network."""
    try:
        import datasets
    except ImportError:
        raise DataError(f"data.path={name} needs the datasets library: pip install 'meshwright[hf]'") from None
    parts = name.removeprefix("hub:").split(":")
    try:
        return datasets.load_dataset(*parts, split="train")
    except Exception as error:  # the library raises whatever its transports raise
        raise DataError(f"data.path={name} cannot be loaded from the hub: {' '.join(str(error).split())}") from error


def text_of(row: Mapping[str, Any], field: str, where: str) -> str:
    """One field as text; DataError where it is missing or no text."""
    _require_field(field, list(row), where)
    text = row[field]
    if not isinstance(text, str):
        raise DataError(f"{where}: field {field!r} is {_kind(text)}, not text; set data.text_field or correct the row")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise DataError(f"{where}: field {field!r} holds half a surrogate pair, which is no Unicode text") from None
    return text


def _line(line: bytes, where: str) -> Mapping[str, Any]:
    try:
        row = json.loads(line.rstrip())
    except UnicodeDecodeError:
        raise DataError(f"{where}: not UTF-8 text") from None
    except json.JSONDecodeError as error:
        raise DataError(f"{where}, column {error.colno}: broken JSON, {error.msg}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: broken JSON, {error}") from None
    return _object(row, where)


def _object(row: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(row, Mapping):
        raise DataError(f"{where}: each line must be an object with fields, not {type(row).__name__}")
    return row


def _require_field(field: str, found: list[str], where: str) -> None:
    if field not in found:
        has = ", ".join(map(str, found)) or "no fields"
        raise DataError(f"{where}: no field {field!r}, it has: {has}; set data.text_field")


def _kind(value: object) -> str:
    return "null" if value is None else type(value).__name__
