"""The planner of serving scored on published deployments; writes the tables `serving` of docs/accuracy.md.

    python -m benchmarks.serving_leaderboard [FOLDER|FILE.csv] [--beside FILE.csv] [--write] [--json]

The rows are those of serving_measured.csv (docs/accuracy.md names its source and columns). FOLDER holds it; without it
MESHWRIGHT_PUBLISHED, then ../shared/published beside the checkout. --beside: rows that AIConfigurator's own script
predicted (tools/accuracy_regression_testing/predict_silicon_sample.py; columns row, ttft_ms, tpot_ms), scored beside
ours on the same rows.
"""

import argparse
import csv
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.leaderboard import HOW, PAGE, ROOT, percent, written
from meshwright.planner.accuracy.published_serving import TABLE, UnknownRow, read_serving
from meshwright.planner.accuracy.score import quantile
from meshwright.planner.accuracy.serving_score import (
    JudgedServing,
    ServingJudge,
    ServingScore,
    held_out,
    score_serving,
)

Verdict = JudgedServing | UnknownRow
Key = Callable[[Verdict], str]
Beside = dict[int, tuple[float, float]]
HEADS = (
    "| {} | rows | planned | per token, median / 90 % | first token, median / 90 % | rank | groups |",
    "|---|---:|---:|---|---|---:|---:|",
)


def table_file(given: str | None) -> Path | None:
    """Where the rows lie; None where they do not."""
    places = (given,) if given else (os.environ.get("MESHWRIGHT_PUBLISHED"), ROOT.parent / "shared" / "published")
    for place in places:
        for path in (Path(place), Path(place) / TABLE) if place else ():
            if path.is_file():
                return path
    return None


def backend(one: Verdict) -> str:
    """Whose software, and how it splits requests."""
    columns = _columns(one)
    return columns["backend"] + (", prompts apart" if columns["mode"] == "disagg" else "")


def system(one: Verdict) -> str:
    """On which GPUs."""
    return _columns(one)["system"]


def model(one: Verdict) -> str:
    """Of what."""
    return _columns(one)["model_path"].rsplit("/", 1)[-1]


def half(one: Verdict) -> str:
    """Whether constants were chosen with the row in view."""
    row = one.row if isinstance(one, JudgedServing) else one
    return "held out" if held_out(row) else "looked at"


def _columns(one: Verdict) -> dict[str, str]:
    return dict(one.row.columns if isinstance(one, JudgedServing) else one.columns)


def scored(judged: Sequence[Verdict], key: Key) -> dict[str, ServingScore]:
    """By a property of rows."""
    groups: dict[str, list[Verdict]] = {}
    for one in judged:
        groups.setdefault(key(one), []).append(one)
    return {name: score_serving(groups[name]) for name in sorted(groups)}


def rows_of(name: str, score: ServingScore) -> str:
    """A line of a table."""
    cells = (
        name, score.rows, score.planned, f"{percent(score.per_token_median)} / {percent(score.per_token_p90)}",
        f"{percent(score.first_token_median)} / {percent(score.first_token_p90)}",
        "" if score.rank is None else f"{score.rank:.3f}", score.groups or "",
    )  # fmt: skip
    return "| " + " | ".join(map(str, cells)) + " |"


def tables_of(judged: Sequence[Verdict], beside: Beside) -> list[str]:
    """All tables, one below the other."""
    found: list[str] = []
    for title, key in (("rows", half), ("backend", backend), ("system", system), ("model", model)):
        found += [HEADS[0].format(title), HEADS[1]]
        found += [rows_of(name, score) for name, score in scored(judged, key).items()]
        found += [rows_of("all", score_serving(judged))] if key is half else []
        found.append("")
    if beside:
        found += [*beside_table(judged, beside), ""]
    return found + unknown_table(judged)


def beside_table(judged: Sequence[Verdict], beside: Beside) -> list[str]:
    """AIConfigurator's errors and ours, on the rows that both plan."""
    found = [
        "| backend | rows that both plan | per token: AIConfigurator | ours | first token: AIConfigurator | ours |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    both = [one for one in judged if isinstance(one, JudgedServing) and one.row.number in beside]
    names = [*sorted({backend(one) for one in both}), "all"]
    for name in names:
        own = [one for one in both if name in ("all", backend(one))]
        theirs = [_apart(one, beside[one.row.number]) for one in own]
        cells = (
            name, len(own), percent(quantile([token for _, token in theirs], 0.5)),
            percent(quantile([abs(one.per_token_error) for one in own], 0.5)),
            percent(quantile([first for first, _ in theirs], 0.5)),
            percent(quantile([abs(one.first_token_error) for one in own], 0.5)),
        )  # fmt: skip
        found.append("| " + " | ".join(map(str, cells)) + " |")
    return found


def _apart(one: JudgedServing, predicted: tuple[float, float]) -> tuple[float, float]:
    first, token = predicted
    return abs(first / 1e3 / one.row.first_token_s - 1), abs(token / 1e3 / one.row.per_token_s - 1)


def unknown_table(judged: Sequence[Verdict]) -> list[str]:
    """What could not be planned, and why."""
    reasons = Counter(one.reason for one in judged if isinstance(one, UnknownRow))
    found = ["| rows that are not planned | why |", "|---:|---|"]
    return found + [f"| {count} | {reason} |" for reason, count in reasons.most_common()]


def read_beside(path: Path) -> Beside:
    """Number of a row -> milliseconds to the first token, and per later one."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return {int(row["row"]): (float(row["ttft_ms"]), float(row["tpot_ms"])) for row in rows if row["tpot_ms"]}


def document(judged: Sequence[Verdict]) -> dict[str, object]:
    """For claims and for rows kept elsewhere."""
    return {
        "all": asdict(score_serving(judged)),
        "halves": {name.replace(" ", "_"): asdict(score) for name, score in scored(judged, half).items()},
        "backends": {name: asdict(score) for name, score in scored(judged, backend).items()},
        "models": {name: asdict(score) for name, score in scored(judged, model).items()},
    }


def main() -> int:
    """Score, print, and with --write put the tables into the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", nargs="?")
    parser.add_argument("--beside", type=Path)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    path = table_file(options.folder)
    if path is None:
        print(HOW.replace("published tables are", f"table {TABLE} is"), file=sys.stderr)
        return 2
    judged = ServingJudge().judge(read_serving(path))
    if options.json:
        print(json.dumps(document(judged), indent=1))
        return 0
    beside = read_beside(options.beside) if options.beside else {}
    planned = sum(isinstance(one, JudgedServing) for one in judged)
    stamp = f"Scored on {time.strftime('%Y-%m-%d', time.gmtime())}: {len(judged)} rows, {planned} of them planned."
    lines = [stamp, "", *tables_of(judged, beside)]
    print("\n".join(lines))
    if options.write:
        PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), {"serving": lines}), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
