"""The planner scored on every published row, zero-shot and calibrated; writes the tables of docs/accuracy.md.

    python -m evaluation.leaderboard [FOLDER] [--calibration FILE] [--fit] [--write] [--json]

FOLDER holds training_throughput.csv, peak_memory.csv and planner_accuracy_claims.csv; without it MESHWRIGHT_PUBLISHED,
then ../shared/published beside the checkout. The tables are no part of the repository: parts of them may not be
redistributed. --fit makes the calibration anew (minutes) and writes it to its file; --write puts the tables into
the page, and the quantiles of the errors into the package, from which `plan` has its ranges.
"""

import argparse
import csv
import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from evaluation import error_table, holdout
from meshwright.planner.accuracy import calibration as fit
from meshwright.planner.accuracy import published
from meshwright.planner.accuracy import score as accuracy
from meshwright.planner.accuracy.flop_conventions import convention_of, figures
from meshwright.planner.accuracy.published import JudgedRow, PublishedRow, Unreadable, read
from meshwright.planner.accuracy.score import layout_grids
from meshwright.planner.step.prediction import QUANTILES_FILE, RANGE_LEVEL

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "accuracy.md"
CALIBRATION = ROOT / "evaluation" / "calibration.json"
RANGES = ROOT / "src" / "meshwright" / "planner" / "step" / QUANTILES_FILE
TABLES = ("training_throughput.csv", "peak_memory.csv")
OWN = ROOT / "evaluation" / "published_runs.csv"
"""Rows of sources that may be redistributed, in this repository."""
CLAIMS = "planner_accuracy_claims.csv"
HOW = f"""The published tables are not here: give their folder, or set MESHWRIGHT_PUBLISHED to it.
It holds {", ".join(TABLES)} and {CLAIMS}, with the columns that docs/accuracy.md names; the sources of
the rows, from which they can be made again, are listed there."""


def folder(path: str | None) -> Path | None:
    """Where the tables lie; None where they do not."""
    places = (path,) if path else (os.environ.get("MESHWRIGHT_PUBLISHED"), ROOT.parent / "shared" / "published")
    candidates = (Path(candidate) for candidate in places if candidate)
    return next((candidate for candidate in candidates if (candidate / TABLES[0]).is_file()), None)


Verdicts = Sequence[JudgedRow | Unreadable]


def lines_of(zero: Verdicts, calibrated: Verdicts, calibration: fit.Calibration) -> list[dict[str, object]]:
    """A line for each family of sources."""
    lines = []
    for name, verdicts in _grouped(zero).items():
        after = _grouped(calibrated)[name]
        known = [verdict for verdict in verdicts if isinstance(verdict, JudgedRow)]
        clusters = sorted({published.cluster_of(verdict.row) for verdict in known if verdict.row.step_s})
        fitted = [calibration.clusters[cluster] for cluster in clusters if cluster in calibration.clusters]
        score = accuracy.score(verdicts)
        times = [abs(verdict.step_error) for verdict in known if verdict.step_error is not None]
        memory = [abs(verdict.memory_error) for verdict in known if verdict.memory_error is not None]
        unseen = [verdict for verdict in after if isinstance(verdict, JudgedRow) and verdict.step_error is not None]
        held = {id(row) for row in _held(known, clusters, calibration)}
        lines.append(
            {
                "family": name,
                "rows": len(verdicts),
                "timed": len(times),
                "time": _spread(times),
                "fitted": sum(len(verdict.rows) for verdict in fitted),
                "calibrated": _spread([abs(verdict.step_error or 0) for verdict in unseen]) if fitted else None,
                "held": len(held),
                "held_zero": _spread([abs(verdict.step_error or 0) for verdict in known if id(verdict.row) in held]),
                "held_calibrated": _spread(
                    [abs(verdict.step_error or 0) for verdict in unseen if id(verdict.row) in held]
                ),
                "peaks": len(memory),
                "memory": _spread(memory),
                "memory_p95": score.memory_p95,
                "oom_accuracy": score.oom_accuracy,
                "false_fits": score.false_fits,
                "grids": len(layout_grids([verdict for verdict in known if verdict.row.step_s])),
                "rank_correlation": score.rank_correlation,
                "regret": score.regret,
                "rank_calibrated": accuracy.score(after).rank_correlation if fitted else None,
                "regret_calibrated": accuracy.score(after).regret if fitted else None,
            }
        )
    return lines


PLAIN = (
    "memory_p95", "oom_accuracy", "false_fits", "rank_correlation", "regret", "rank_calibrated", "regret_calibrated",
)  # fmt: skip


def figures_of(lines: Sequence[dict[str, object]]) -> dict[str, dict[str, float]]:
    """`vtrain-single-node` -> its mean errors and scores, for claims; what was not scored is left out."""
    figures = {}
    for line in lines:
        means = {name: line[name][0] for name in ("time", "calibrated", "memory") if isinstance(line[name], tuple)}  # type: ignore[index]
        known = {**means, **{name: line[name] for name in PLAIN}}
        slug = str(line["family"]).lower().replace(" ", "-").replace(".", "-")
        figures[slug] = {name: value for name, value in known.items() if isinstance(value, float)}
    return figures


def _grouped(judged: Verdicts) -> dict[str, list[JudgedRow | Unreadable]]:
    groups: dict[str, list[JudgedRow | Unreadable]] = {}
    for verdict in judged:
        source = verdict.row.source if isinstance(verdict, JudgedRow) else verdict.source
        groups.setdefault(published.family_of(source), []).append(verdict)
    return groups


def _held(known: Sequence[JudgedRow], clusters: Sequence[str], calibration: fit.Calibration) -> list[PublishedRow]:
    """Rows of models and GPU counts that were held out whole."""
    held_rows: list[PublishedRow] = []
    for cluster in clusters:
        if cluster in calibration.clusters:
            rows = [
                verdict.row for verdict in known if verdict.row.step_s and published.cluster_of(verdict.row) == cluster
            ]
            held_rows += holdout.held_out(rows)
    return held_rows


def _spread(values: Sequence[float]) -> tuple[float | None, float | None, float | None]:
    return accuracy.mean(values), accuracy.quantile(values, 0.5), accuracy.quantile(values, 0.9)


def percent(value: float | None) -> str:
    """12.3, as a share of 100."""
    return "" if value is None else f"{100 * value:.1f}"


def _three(values: object) -> str:
    if not isinstance(values, tuple) or values[0] is None:
        return ""
    return " / ".join(percent(value) for value in values)


def step_table(lines: Sequence[dict[str, object]]) -> list[str]:
    """Step time: mean / median / 90 % of the absolute relative errors, in percent."""
    table = [
        "| source | rows timed | zero-shot | fitted to | calibrated, rows not seen | held out | zero-shot there "
        "| calibrated there |",
        "|---|---:|---|---:|---|---:|---|---|",
    ]
    for line in lines:
        if line["timed"]:
            cells = (
                line["family"], line["timed"], _three(line["time"]), line["fitted"] or "", _three(line["calibrated"]),
                line["held"] or "", _three(line["held_zero"]), _three(line["held_calibrated"]),
            )  # fmt: skip
            table.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return table


def memory_table(lines: Sequence[dict[str, object]]) -> list[str]:
    """Peak memory, and out of memory or not."""
    table = [
        "| source | peaks | error, mean / median / 90 % | 95 % | out of memory or not, right "
        "| did not fit, said to fit |",
        "|---|---:|---|---:|---:|---:|",
    ]
    for line in lines:
        if line["peaks"] or line["oom_accuracy"] is not None:
            cells = (
                line["family"], line["peaks"] or "", _three(line["memory"]), percent(line["memory_p95"]),  # type: ignore[arg-type]
                percent(line["oom_accuracy"]), percent(line["false_fits"]),  # type: ignore[arg-type]
            )  # fmt: skip
            table.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return table


def choice_table(lines: Sequence[dict[str, object]]) -> list[str]:
    """Rank correlation and regret."""
    table = [
        "| source | grids | rank correlation | regret, % | rank, calibrated | regret, calibrated, % |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for line in lines:
        if line["grids"]:
            ranks = [
                f"{rank:.3f}" if rank is not None else ""
                for rank in (line["rank_correlation"], line["rank_calibrated"])
            ]
            regrets = [percent(line[key]) for key in ("regret", "regret_calibrated")]  # type: ignore[arg-type]
            cells = (line["family"], line["grids"], ranks[0], regrets[0], ranks[1], regrets[1])
            table.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return table


def ranges_table(verdicts: Verdicts) -> list[str]:
    """Rows within the printed ranges, each row's range made without its model."""
    lines = [
        f"| software, kind of model | rows timed | within the {100 * RANGE_LEVEL:.0f} % range "
        "| typical range, high over low "
        "| peaks | within | high over low |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    time_, memory = (error_table.coverage(verdicts, what) for what in ("time", "memory"))
    for name in [*filter(None, time_), ""]:
        cells = [name or "all"]
        for coverage in (time_.get(name), memory.get(name)):
            cells += (
                [str(coverage.rows), percent(coverage.share), f"{coverage.width:.2f}"] if coverage else ["", "", ""]
            )
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def write_ranges(verdicts: Verdicts, today: str) -> None:
    """The table that the package ships."""
    document = {
        "date": today,
        "what": "logarithms of measured over predicted on published rows: python -m evaluation.leaderboard --write",
        **error_table.table(verdicts),
    }
    RANGES.parent.mkdir(exist_ok=True)
    text = json.dumps(document, indent=1)
    text = re.sub(r"\[[^\]]*\]", lambda match: " ".join(match[0].split()), text)
    RANGES.write_text(text + "\n", encoding="utf-8")


def unscored_table(judged: Verdicts) -> list[str]:
    """What could not be scored, and why."""
    reasons: Counter[tuple[str, str]] = Counter()
    for verdict in judged:
        if isinstance(verdict, Unreadable):
            reasons[published.family_of(verdict.source), _plain(verdict.reason)] += 1
    lines = ["| source | rows | why |", "|---|---:|---|"]
    return lines + [f"| {name} | {count} | {reason} |" for (name, reason), count in sorted(reasons.items())]


def _plain(reason: str) -> str:
    """Reasons that differ in numbers only are one."""
    if "stages need a layer each" in reason:
        return "crashed; the planner refuses it: more pipeline stages than layers"
    return reason.partition("; nearest")[0].replace("|", "/")


def convention_table(rows: Sequence[PublishedRow | Unreadable]) -> list[str]:
    """Whether each source's own figures follow from its tokens/s."""
    counts: dict[tuple[str, str, str], list[bool]] = {}
    for row in rows:
        if isinstance(row, PublishedRow) and (convention := convention_of(row.columns)) and not row.derived:
            for figure in figures(row.columns):
                counts.setdefault((convention.name, convention.formula, figure.kind), []).append(figure.agrees)
    lines = ["| source | FLOP of a token | figure | rows | made again within 0.5 % |", "|---|---|---|---:|---:|"]
    for (name, formula, kind), agree in counts.items():
        lines.append(f"| {name} | {formula} | {kind.upper()} | {len(agree)} | {sum(agree)} |")
    return lines


def claims_table(path: Path) -> list[str]:
    """What others say of themselves."""
    if not path.is_file():
        return []
    lines = ["| tool | says | of what | measures on a GPU first | source |", "|---|---|---|---|---|"]
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            cells = [row[key] for key in ("tool", "claimed_error", "metric_and_scope", "needs_gpu_profile", "source")]
            lines.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
    return lines


def written(page: str, tables: dict[str, list[str]]) -> str:
    """The page with each table between its markers."""
    for name, lines in tables.items():
        start, end = f"<!-- {name} -->\n", f"<!-- end {name} -->"
        head, _, rest = page.partition(start)
        tail = rest.partition(end)[2]
        page = head + start + "\n" + "\n".join(lines) + "\n\n" + end + tail
    return page


def main() -> int:
    """Score, print, and with --write put the tables into the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", nargs="?")
    parser.add_argument("--calibration", type=Path, default=CALIBRATION)
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    tables_folder = folder(options.folder)
    if tables_folder is None:
        print(HOW, file=sys.stderr)
        return 2
    today, python = time.strftime("%Y-%m-%d", time.gmtime()), sys.version.split()[0]
    files = [*(tables_folder / name for name in TABLES if (tables_folder / name).is_file()), OWN]
    rows = [row for file in files for row in read(file)]
    if options.fit or not options.calibration.is_file():
        holdout.calibrate([row for row in rows if isinstance(row, PublishedRow)], today).save(options.calibration)
    calibration = fit.load(options.calibration)
    zero, calibrated = accuracy.judge(rows), accuracy.judge(rows, calibration)
    lines = lines_of(zero, calibrated, calibration)
    if options.json:
        clusters = asdict(calibration)["clusters"]
        covered = {what: error_table.coverage(zero, what) for what in ("time", "memory")}
        within = {what: verdict[""].share for what, verdict in covered.items()}
        within["unscored"] = covered["time"][error_table.LEFT_OUT].share
        figures = {"by": figures_of(lines), "within": within, "clusters": clusters}
        print(json.dumps({"rows": len(rows), "lines": lines, **figures}, indent=1))
        return 0
    scored = sum(isinstance(verdict, JudgedRow) for verdict in zero)
    tables = {
        "stamp": [
            f"Scored on {today} with Python {python}: {len(rows)} rows, {scored} of them scored; "
            f"calibration of {calibration.date}."
        ],
        "time": step_table(lines),
        "memory": memory_table(lines),
        "ranges": ranges_table(zero),
        "choice": choice_table(lines),
        "conventions": convention_table(rows),
        "unscored": unscored_table(zero),
        "claims": claims_table(tables_folder / CLAIMS),
    }
    for name, table in tables.items():
        print(f"{name}\n\n" + "\n".join(table) + "\n")
    if options.write:
        write_ranges(zero, today)
        PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), tables), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
