"""Rows: documents that are fields of records, in .jsonl and .parquet files and in hub datasets."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from meshwright.spec.errors import DataError

_BATCH_ROWS = 64
"""Rows decoded at a time: a row may hold a whole book."""


def jsonl(path: Path, field: str) -> Iterator[tuple[str, str]]:
    """(FILE:LINE, text) of every line, blank lines passed over; DataError names file and line."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield f"{path}:{number}", _line_text(line, field, f"{path}, line {number}")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


def parquet(path: Path, field: str) -> Iterator[tuple[str, str]]:
    """(FILE:ROW, text) of every row, row groups streamed; needs pyarrow."""
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise DataError(f"{path} needs pyarrow to be read: pip install 'meshwright[parquet]'") from None
    try:
        with ParquetFile(path) as file:
            _require_field(field, file.schema_arrow.names, str(path))
            batches = file.iter_batches(batch_size=_BATCH_ROWS, columns=[field])
            texts = (text for batch in batches for text in batch.column(0).to_pylist())
            for number, text in enumerate(texts, start=1):
                yield f"{path}:{number}", _checked(text, field, f"{path}, row {number}")
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} is not a readable parquet file: {' '.join(str(error).split())}") from error


def hub(dataset: Any, name: str, field: str) -> Iterator[tuple[str, str]]:
    """(hub:NAME:ROW, text) of every row of a loaded hub dataset."""
    _require_field(field, dataset.column_names, name)
    for number, row in enumerate(dataset.select_columns([field]), start=1):
        yield f"{name}:{number}", _checked(row[field], field, f"{name}, row {number}")


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


def _line_text(line: bytes, field: str, where: str) -> str:
    try:
        row = json.loads(line)
    except UnicodeDecodeError:
        raise DataError(f"{where}: not UTF-8 text") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: broken JSON, {error}") from None
    if not isinstance(row, Mapping):
        raise DataError(f"{where}: each line must be an object with a field {field!r}, not {type(row).__name__}")
    _require_field(field, list(row), where)
    return _checked(row[field], field, where)


def _require_field(field: str, found: list[str], where: str) -> None:
    if field not in found:
        has = ", ".join(map(str, found)) or "no fields"
        raise DataError(f"{where}: no field {field!r}, it has: {has}; set data.text_field")


def _checked(text: Any, field: str, where: str) -> str:
    if not isinstance(text, str):
        raise DataError(f"{where}: field {field!r} is {_kind(text)}, not text; set data.text_field or mend the row")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise DataError(f"{where}: field {field!r} holds half a surrogate pair, which is no Unicode text") from None
    return text


def _kind(value: object) -> str:
    return "null" if value is None else type(value).__name__
