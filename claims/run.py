"""`python -m claims.run [--slow] [--only id,id] [--page]`: write docs/claims.md; fail where a claim does not hold."""

import argparse
import difflib
import sys
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path

from claims import measure, record, table
from claims.record import Record
from claims.table import Claim, ClaimsError

ROOT = Path(__file__).resolve().parent.parent


def choose(claims: list[Claim], slow: bool, only: Sequence[str]) -> list[Claim]:
    """The rows to run: those named, else all but the slow ones, else all."""
    known = [claim.id for claim in claims]
    for name in only:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.0) or ["none: the table is empty"]
            raise ClaimsError(f"there is no claim {name!r}; the nearest is {near[0]!r}")
    return [claim for claim in claims if (claim.id in only if only else slow or not claim.slow)]


def run(chosen: list[Claim], records: dict[str, Record], root: Path) -> Iterator[list[str]]:
    """Per command: run it, update `records` in place, say how it went, and yield the ids that do not hold."""
    machine, versions, today = record.machine(), record.versions(), date.today().isoformat()
    for command, claims in measure.by_command(chosen).items():
        print(f"$ {command}", flush=True)
        finished = measure.execute(command, max(claim.limit_s for claim in claims), root)
        failed = []
        for claim in claims:
            reading = measure.read(claim, finished)
            if reading.skipped:
                print(f"  {claim.id}: not measured here: {reading.skipped}", flush=True)
                continue
            made = Record(
                id=claim.id,
                command=claim.command,
                read=claim.read,
                figure=reading.figure,
                error=reading.error,
                date=today,
                machine=machine,
                versions=versions,
            )
            records[claim.id] = made
            if not made.holds(claim):
                failed.append(claim.id)
            print(f"  {_outcome(claim, made)}", flush=True)
        yield failed


def main(arguments: Sequence[str] | None = None) -> int:
    """0: all measured claims hold; 1: one does not, or its command failed; 2: the table or the arguments are wrong."""
    parser = argparse.ArgumentParser(prog="claims.run", description="Measure the claims and write docs/claims.md.")
    parser.add_argument("--slow", action="store_true", help="also the rows marked slow")
    parser.add_argument("--only", default="", metavar="ID[,ID]", help="these rows alone, slow or not")
    parser.add_argument("--page", action="store_true", help="run nothing: write the page from kept figures")
    parser.add_argument("--table", type=Path, default=ROOT / "claims" / "claims.toml", help="the rows")
    parser.add_argument("--out", type=Path, default=ROOT / "docs", help="folder of claims.md and claims.json")
    options = parser.parse_args(arguments)
    try:
        claims = table.load(options.table)
        chosen = choose(claims, options.slow, [name for name in options.only.split(",") if name])
        records = _current_records(claims, options.out)
        record.save(claims, records, options.out)
        if options.page:
            return 0
        failed = []
        for below in run(chosen, records, ROOT):
            failed += below
            record.save(claims, records, options.out)
    except ClaimsError as error:
        print(f"claims: {error}", file=sys.stderr)
        return 2
    print(f"{len(chosen)} of {len(claims)} claims run, {len(failed)} do not hold", *failed, flush=True)
    return 1 if failed else 0


def _current_records(claims: list[Claim], folder: Path) -> dict[str, Record]:
    """Records of earlier runs that still speak of a row of the table."""
    old = record.load(folder / "claims.json")
    return {claim.id: old[claim.id] for claim in claims if claim.id in old and old[claim.id].belongs_to(claim)}


def _outcome(claim: Claim, made: Record) -> str:
    figure = made.error if made.figure is None else f"{made.figure:.4g} {claim.unit}".strip()
    verdict = "holds" if made.holds(claim) else "DOES NOT HOLD"
    return f"{claim.id}: {figure} (bar {claim.bar} {claim.unit}".rstrip() + f") {verdict}"


if __name__ == "__main__":
    sys.exit(main())
