"""`meshwright accuracy`: score the planner on published runs."""

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from meshwright.planner.accuracy.published import JudgedRow, Unreadable

REASONS = 20
"""Most reasons printed of why rows cannot be scored. --json prints none, since its rows count them all."""


def accuracy(
    files: Annotated[list[Path], typer.Argument(metavar="FILE.csv...", help="Tables of published runs.")],
    json: Annotated[bool, typer.Option("--json", help="Print the figures as one JSON document.")] = False,
    calibration: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Calibration file; without it the planner is scored zero-shot.")
    ] = None,
) -> None:
    """Score the planner on measured runs: step time, memory, out of memory, and the choice of layout, by source."""
    from dataclasses import asdict

    from meshwright.interface.terminal.screen_text import print_json
    from meshwright.planner.accuracy.calibration import load
    from meshwright.planner.accuracy.published import read
    from meshwright.planner.accuracy.score import by_source, judge, score

    loaded = load(calibration) if calibration else None
    judged = judge([row for path in files for row in read(path)], loaded)
    scores = {source: score(rows) for source, rows in by_source(judged).items()}
    used = loaded.name if loaded else "zero-shot"
    if json:
        by_name = {source: asdict(figures) for source, figures in scores.items()}
        print_json({"rows": len(judged), "by_source": by_name, "calibration": used})
        return
    print(f"{len(judged)} rows, {used}. Errors are relative; n counts rows, scored or not.")
    heads = ("n", "time mean", "median", "memory mean", "p95", "oom right", "false fits", "rank", "regret")
    width = max(len(_short(source)) for source in scores)
    print(" " * width, *(f"{head:>11}" for head in heads))
    for source, figures in scores.items():
        print(f"{_short(source):<{width}}", *(f"{_shown(name, value):>11}" for name, value in asdict(figures).items()))
    _print_reasons(judged)


def _short(source: str, most: int = 60) -> str:
    return source if len(source) <= most else source[: most // 2 - 2] + " .. " + source[-most // 2 + 2 :]


def _shown(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    if name == "n":
        return str(value)
    return f"{value:.3f}" if name == "rank_correlation" else f"{100 * value:.1f}%"


def _print_reasons(judged: "list[JudgedRow | Unreadable]") -> None:
    from meshwright.planner.accuracy.published import Unreadable

    reasons = Counter(row.reason for row in judged if isinstance(row, Unreadable))
    if not reasons:
        return
    print(f"\n{reasons.total()} rows cannot be scored:")
    for reason, count in reasons.most_common(REASONS):
        print(f"{count:>6}  {reason}")
    left = reasons.total() - sum(count for _, count in reasons.most_common(REASONS))
    if left:
        print(f"{left:>6}  for {len(reasons) - REASONS} other reasons")
