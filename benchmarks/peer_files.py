"""Files of other trainers' repositories, read as they are; writes the table of answers into docs/plan-for.md.

    python -m benchmarks.peer_files FOLDER [--write]

FOLDER holds a clone of each repository, as OWNER/NAME. peer_files.toml names commit and path of each file, and what the
file leaves to its user.
"""

import argparse
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import meshwright as mw
from evaluation.leaderboard import written
from meshwright.spec.errors import PlanError
from meshwright.spec.units import short_gib, step_time

TABLE = Path(__file__).parent / "peer_files.toml"
PAGE = Path(__file__).parents[1] / "docs" / "plan-for.md"
ASKED = ("cluster", "nodes", "model", "recipe", "layout")


def files() -> Iterator[dict[str, Any]]:
    """Each file of the table, with what its repository leaves to its user."""
    for repository in tomllib.loads(TABLE.read_text(encoding="utf-8"))["repository"]:
        shared = {"drawn": repository.get("drawn", False), **{key: repository[key] for key in ("name", "commit")}}
        yield from ({**shared, **file} for file in repository["files"])


def text_of(clones: Path, file: dict[str, Any]) -> str:
    """The file at its commit, from a clone with or without a work tree."""
    clone = clones / file["name"]
    command = ["git", "-C", str(clone), "show", f"{file['commit']}:{file['path']}"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def answer(file: dict[str, Any], text: str, folder: Path) -> tuple[bool, str, str]:
    """(answered, on which devices, memory, time and what is not counted; else the reason of the refusal)."""
    path = folder / Path(file["path"]).name
    path.write_text(text, encoding="utf-8")
    source = f"{path}:{file['function']}" if "function" in file else str(path)
    try:
        planned = mw.plan_from(source, **{name: file[name] for name in ASKED if name in file})
    except PlanError as error:
        return False, file["cluster"], f"refused: {str(error).replace(str(path), '').lstrip(',: ')}"
    bound = "at most " if planned.config.bounds else ""
    fits = "fits" if planned.fits else "does not fit as counted" if bound else "does not fit"
    words = f"{planned.plan.model.name}: {bound}{short_gib(planned.given.peak_bytes)}, {fits}, "
    named = [sentence.removesuffix(": not counted.").partition(" ")[0].lower() for sentence in planned.config.bounds]
    nodes, per_node = planned.plan.cluster.nodes, planned.plan.cluster.devices_per_node
    where = f"{nodes} x " * (nodes > 1) + f"{file['cluster'].rpartition('x')[0]}x{per_node}"
    return (
        True,
        where,
        f"{words}{step_time(planned.given.step_seconds)}" + f"; not counted: {', '.join(named)}" * bool(named),
    )


def table(clones: Path) -> tuple[list[str], int, int]:
    """Lines of the page, files that were answered, and all files."""
    lines, answered, drawn = ["| file | on | answer |", "|---|---|---|"], 0, 0
    listed = list(files())
    for file in listed:
        with tempfile.TemporaryDirectory() as folder:
            is_answered, where, words = answer(file, text_of(clones, file), Path(folder))
        answered += is_answered
        drawn += is_answered and file["drawn"]
        function = f":{file['function']}" if "function" in file else ""
        url = f"https://github.com/{file['name']}/blob/{file['commit']}/{file['path']}"
        lines.append(f"| [{file['name']}]({url}) {Path(file['path']).name}{function} | {where} | {words} |")
    others = sum(file["drawn"] for file in listed)
    told = f"{answered} of {len(listed)} files are answered: {drawn} of {others} that were drawn at random, and "
    told += f"{answered - drawn} of {len(listed) - others} examples of the trainers' own repositories."
    return [told, "", *lines], answered, len(listed)


def main() -> int:
    """Read, predict, print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    lines, answered, count = table(options.folder)
    print("\n".join(lines))
    if options.write:
        PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), {"files of others": lines}), encoding="utf-8")
    return 0 if answered >= 0.8 * count else 1


if __name__ == "__main__":
    sys.exit(main())
