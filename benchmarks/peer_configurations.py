"""Configurations from other trainers' own repositories, read and predicted; writes its table into docs/accuracy.md.

    python -m benchmarks.peer_configurations [--write] [--json]

peer_configurations.toml has their options as facts with the source of each, and the figures that are published of them.
"""

import argparse
import json
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import meshwright as mw
from evaluation.leaderboard import PAGE, percent, written
from meshwright.spec.errors import PlanError

TABLE = Path(__file__).parent / "peer_configurations.toml"


class PeerConfiguration(NamedTuple):
    """One, as it was read: the answer, or why it was refused."""

    entry: dict[str, Any]
    answer: Any = None
    refusal: str = ""

    @property
    def error(self) -> float | None:
        """Of the predicted rate, where one is published: predicted over measured step time, minus 1."""
        published = self.entry.get("published")
        return published / self.answer.given.tokens_per_second_per_device - 1 if published and self.answer else None


def entries() -> list[dict[str, Any]]:
    """Of the table."""
    return list(tomllib.loads(TABLE.read_text(encoding="utf-8"))["configuration"])


def read(entry: dict[str, Any], folder: Path) -> PeerConfiguration:
    """One, written to a folder and read there."""
    path = folder / entry["file"]
    path.write_text(entry["text"], encoding="utf-8")
    asked = {name: entry[name] for name in ("cluster", "nodes", "model", "recipe", "layout") if name in entry}
    try:
        return PeerConfiguration(entry, mw.plan_from(path, **asked))
    except PlanError as error:
        return PeerConfiguration(entry, refusal=str(error))


def all_read() -> Iterator[PeerConfiguration]:
    """In the order of the table."""
    for entry in entries():
        with tempfile.TemporaryDirectory() as folder:
            yield read(entry, Path(folder))


def table(configurations: list[PeerConfiguration]) -> list[str]:
    """For the page."""
    lines = [
        "| configuration | on | tokens/s per device | published | step time off by, % | fits |",
        "|---|---|---:|---:|---:|---|",
    ]
    for configuration in configurations:
        entry = configuration.entry
        where = f"{entry.get('nodes', 1)} x {entry['cluster']}" if entry.get("nodes", 1) > 1 else entry["cluster"]
        cells = [entry["name"], where]
        if configuration.answer is None:
            cells += [f"refused: {entry['refused']}", "", "", ""]
        else:
            rate = configuration.answer.given.tokens_per_second_per_device
            cells += [
                f"{rate:,.0f}",
                f"{entry['published']:,}" if "published" in entry else "",
                percent(configuration.error),
            ]
            cells.append("yes" if configuration.answer.fits else "no")
        lines.append("| " + " | ".join(cells) + " |")
    return [
        *lines,
        "",
        *(f"- {configuration.entry['name']}: {configuration.entry['source']}." for configuration in configurations),
    ]


def main() -> int:
    """Read, predict, print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    configurations = list(all_read())
    errors = [abs(configuration.error) for configuration in configurations if configuration.error is not None]
    if options.json:
        print(
            json.dumps(
                {
                    "predicted": sum(configuration.answer is not None for configuration in configurations),
                    "worst": max(errors),
                }
            )
        )
        return 0
    lines = table(configurations)
    print("\n".join(lines))
    if options.write:
        PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), {"configurations": lines}), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
