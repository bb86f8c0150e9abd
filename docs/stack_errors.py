"""The errors of docs/accuracy.md as data for `plan --for`: python -m docs.stack_errors writes them anew."""

import argparse
from collections.abc import Sequence
from pathlib import Path

PAGE = Path(__file__).parent / "accuracy.md"
TABLE = Path(__file__).parent.parent / "src/meshwright/stacks/published_errors.toml"


def rows(text: str, name: str) -> list[list[str]]:
    """Cells of a generated table, without its two head lines."""
    block = text.split(f"<!-- {name} -->")[1].split(f"<!-- end {name} -->")[0]
    lines = [line for line in block.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def document(text: str) -> str:
    """TOML: per source the rows timed and their zero-shot error, the peaks and their error."""
    sources: dict[str, dict[str, str]] = {}
    for source, number, error, *_ in rows(text, "time"):
        sources.setdefault(source, {}).update(rows=number, step=error)
    for source, number, error, *_ in rows(text, "memory"):
        if number:
            sources.setdefault(source, {}).update(peaks=number, memory=error)
    lines = ["# Of docs/accuracy.md, in percent, mean / median / 90 %: python -m docs.stack_errors"]
    for source, values in sources.items():
        lines += ["", f'[source."{source}"]', *(f'{key} = "{value}"' for key, value in values.items())]
    return "\n".join(lines) + "\n"


def main(words: Sequence[str] | None = None) -> None:
    """Write the table."""
    about = "Write the errors of docs/accuracy.md anew as the table that `plan --for` reads."
    argparse.ArgumentParser(prog="python -m docs.stack_errors", description=about).parse_args(words)
    TABLE.write_text(document(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
