"""Answers as JSON and as pages: what a document can hold, and where a page can go."""

import math
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from meshwright.spec.errors import ArgumentError
from meshwright.store.durable import one_line, refuse_unwritable, replace_file


def plain(value: Any) -> Any:
    """What JSON can hold: a dataclass is its fields, a number that is none becomes null."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def check_new_file(out: Path, *, option: str = "out=") -> None:
    """ArgumentError where a file is there already, or has no folder to be in. `option`: what it was given as."""
    if out.exists():
        raise ArgumentError(f"{option}{out} is there already: name another file")
    if not out.absolute().parent.is_dir():
        raise ArgumentError(f"{option}{out}: there is no folder {out.parent}; make it first")


def check_page(out: Path, name: str, *, option: str = "out=") -> None:
    """ArgumentError where no page can be written, said before anything is counted. `name`: of a page in a folder;
    `option`: what the file was given as."""
    if out.is_dir():
        raise ArgumentError(f"{option}{out} is a folder: name a file, as {option}{out / name}")
    if out.suffix not in (".html", ".htm"):
        raise ArgumentError(f"{option}{out}: name a file that ends in .html, as {option}{out.with_suffix('.html')}")
    if not out.parent.is_dir():
        raise ArgumentError(f"{option}{out}: there is no folder {out.parent}; make it first")
    refuse_unwritable(out.parent, option)


def write_page(file: Path, page: str) -> None:
    """A file that is whole or not there; what is no text in names are question marks. RunError names `--html`."""
    with one_line(file, "--html"):
        replace_file(file, page.encode(errors="replace"))
