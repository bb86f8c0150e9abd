"""The planner of serving scored on published deployments; writes the tables `serving` of docs/accuracy.md.

    python -m evaluation.serving_leaderboard [FOLDER|FILE.csv] [--beside FILE.csv] [--write] [--json]

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

from evaluation.leaderboard import HOW, PAGE, ROOT, percent, written
from evaluation.published_serving import TABLE, UnknownRow, read_serving
from evaluation.serving_score import (
    JudgedServing,
    ServingJudge,
    ServingScore,
    held_out,
    score_serving,
)
from meshwright.planner.accuracy.score import quantile

Verdict = JudgedServing | UnknownRow
Key = Callable[[Verdict], str]
Beside = dict[int, tuple[float, float]]
HEADS = (
    "| {} | rows | planned | per token, median / 90 % | first token, median / 90 % | rank | groups |",
    "|---|---:|---:|---|---|---:|---:|",
)


def table_file(chosen: str | None) -> Path | None:
    """Where the rows lie; None where they do not."""
    places = (chosen,) if chosen else (os.environ.get("MESHWRIGHT_PUBLISHED"), ROOT.parent / "shared" / "published")
    for candidate in places:
        for path in (Path(candidate), Path(candidate) / TABLE) if candidate else ():
            if path.is_file():
                return path
    return None


def backend(verdict: Verdict) -> str:
    """Whose software, and how it splits requests."""
    columns = _columns(verdict)
    return columns["backend"] + (", prompts apart" if columns["mode"] == "disagg" else "")


def system(verdict: Verdict) -> str:
    """On which GPUs."""
    return _columns(verdict)["system"]


def model(verdict: Verdict) -> str:
    """Of what."""
    return _columns(verdict)["model_path"].rsplit("/", 1)[-1]


def half(verdict: Verdict) -> str:
    """Whether constants were chosen with the row in view."""
    row = verdict.row if isinstance(verdict, JudgedServing) else verdict
    return "held out" if held_out(row) else "looked at"


def _columns(verdict: Verdict) -> dict[str, str]:
    return dict(verdict.row.columns if isinstance(verdict, JudgedServing) else verdict.columns)


def scored(judged: Sequence[Verdict], key: Key) -> dict[str, ServingScore]:
    """By a property of rows."""
    groups: dict[str, list[Verdict]] = {}
    for verdict in judged:
        groups.setdefault(key(verdict), []).append(verdict)
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
    lines: list[str] = []
    for title, key in (("half", half), ("backend", backend), ("system", system), ("model", model)):
        lines += [HEADS[0].format(title), HEADS[1]]
        lines += [rows_of(name, score) for name, score in scored(judged, key).items()]
        lines += [rows_of("all", score_serving(judged))] if key is half else []
        lines.append("")
    if beside:
        lines += [*beside_table(judged, beside), ""]
    return lines + unknown_table(judged)


def beside_table(judged: Sequence[Verdict], beside: Beside) -> list[str]:
    """AIConfigurator's errors and ours, on the rows that both plan."""
    lines = [
        "| backend | rows that both plan | per token: AIConfigurator | ours | first token: AIConfigurator | ours |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    both = [verdict for verdict in judged if isinstance(verdict, JudgedServing) and verdict.row.number in beside]
    names = [*sorted({backend(verdict) for verdict in both}), "all"]
    for name in names:
        chosen = [verdict for verdict in both if name in ("all", backend(verdict))]
        theirs = [_apart(verdict, beside[verdict.row.number]) for verdict in chosen]
        cells = (
            name, len(chosen), percent(quantile([token for _, token in theirs], 0.5)),
            percent(quantile([abs(verdict.per_token_error) for verdict in chosen], 0.5)),
            percent(quantile([first for first, _ in theirs], 0.5)),
            percent(quantile([abs(verdict.first_token_error) for verdict in chosen], 0.5)),
        )  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


def _apart(verdict: JudgedServing, predicted: tuple[float, float]) -> tuple[float, float]:
    first, token = predicted
    return abs(first / 1e3 / verdict.row.first_token_s - 1), abs(token / 1e3 / verdict.row.per_token_s - 1)


def unknown_table(judged: Sequence[Verdict]) -> list[str]:
    """What could not be planned, and why."""
    reasons = Counter(verdict.reason for verdict in judged if isinstance(verdict, UnknownRow))
    lines = ["| rows that are not planned | why |", "|---:|---|"]
    return lines + [f"| {count} | {reason} |" for reason, count in reasons.most_common()]


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
    planned = sum(isinstance(verdict, JudgedServing) for verdict in judged)
    stamp = f"Scored on {time.strftime('%Y-%m-%d', time.gmtime())}: {len(judged)} rows, {planned} of them planned."
    lines = [stamp, "", *tables_of(judged, beside)]
    print("\n".join(lines))
    if options.write:
        PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), {"serving": lines}), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
