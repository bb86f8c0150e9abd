"""Rows: records with fields, in .jsonl, .json and .parquet files and in hub datasets; streamed, each with its place."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from meshwright.data.json_array import MOST_CHARACTERS
from meshwright.data.json_array import objects as json_array_objects
from meshwright.spec.errors import DataError

_BUFFER_BYTES = 2**20
"""Read of a column at a time; without it Arrow reads whole row groups."""
_BATCH_ROWS = 64
"""Rows decoded at a time: a row may hold a whole book."""

_OF_SAMPLES = frozenset({"messages", "conversations", "completion", "output", "chosen", "input_ids"})
"""Columns of rows for fine-tuning (data/samples.py)."""

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
            for number, line in enumerate(iter(lambda: file.readline(MOST_CHARACTERS + 1), b""), start=1):
                if len(line) > MOST_CHARACTERS:
                    raise DataError(f"{path}, line {number} has more than {MOST_CHARACTERS:,} bytes: one row a line")
                if line.strip():
                    yield f"{path}:{number}", _line(line, f"{path}, line {number}")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


def json_array(path: Path) -> Iterator[Row]:
    """Every object of a .json file that is one array, streamed."""
    return ((f"{path}:{number}", row) for number, row in json_array_objects(path))


def parquet(path: Path, columns: Sequence[str] | None = None) -> Iterator[Row]:
    """Every row, streamed: a row group may be larger than memory. `columns` = only these. Needs pyarrow."""
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise DataError(f"{path} needs pyarrow to be read: pip install 'meshwright[parquet]'") from None
    try:
        with ParquetFile(path, buffer_size=_BUFFER_BYTES, pre_buffer=False) as file:
            for column in columns or ():
                _require_field(column, file.schema_arrow.names, str(path))
            batches = file.iter_batches(batch_size=_BATCH_ROWS, columns=columns and list(columns))
            rows = (row for batch in batches for row in batch.to_pylist())
            for number, row in enumerate(rows, start=1):
                yield f"{path}:{number}", _filled(row)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} is not a readable parquet file: {' '.join(str(error).split())}") from error


def hub(dataset: Any, name: str, columns: Sequence[str] | None = None) -> Iterator[Row]:
    """(hub:NAME:ROW, fields) of every row of a loaded hub dataset; `columns` = only these."""
    for column in columns or ():
        _require_field(column, dataset.column_names, name)
    chosen = dataset.select_columns(list(columns)) if columns else dataset
    for number, row in enumerate(chosen, start=1):
        yield f"{name}:{number}", _filled(row)


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


def _filled(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """A row of a table, whose objects have every field of all rows, null where a row has none."""
    return {name: _without_null(value) for name, value in row.items()}


def _without_null(value: Any) -> Any:
    """Objects without fields that are null, at any depth."""
    if isinstance(value, Mapping):
        return {name: _without_null(one) for name, one in value.items() if one is not None}
    return [_without_null(one) for one in value] if isinstance(value, list) else value


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
        raise DataError(f"{where}: a row is an object with fields, not {_kind(row)}")
    return row


def _require_field(field: str, found: list[str], where: str) -> None:
    if field not in found:
        has = ", ".join(map(str, found)) or "no fields"
        hint = "set data.text_field" if _OF_SAMPLES.isdisjoint(found) else "`meshwright tune` trains on such rows"
        raise DataError(f"{where}: no field {field!r}, it has: {has}; {hint}")


def _kind(value: object) -> str:
    return "null" if value is None else type(value).__name__
