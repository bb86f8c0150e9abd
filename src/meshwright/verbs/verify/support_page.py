"""The support matrix as a page: which features were tried together, and the outcome."""

import platform
from collections.abc import Mapping, Sequence
from datetime import date
from itertools import combinations

import torch

from meshwright.observe.oracle.feature_matrix import Trial, trial
from meshwright.observe.oracle.feature_names import FEATURES

MARKS = {"equal": "yes", "different": "**no**", "refused": "refused", "alternatives": "-", "untried": ""}


def support_page(outcomes: Sequence[tuple[Trial, str | None]], refused: Mapping[frozenset[str], str]) -> str:
    """Return Markdown: the table, reasons of refusals, every layout that was run."""
    state: dict[frozenset[str], str] = dict.fromkeys(refused, "refused")
    for ran, difference in outcomes:
        for pair in combinations(sorted(ran.features), 2):
            key = frozenset(pair)
            if difference:
                state[key] = "different"
            else:
                state.setdefault(key, "equal")
    features = {name for ran, _ in outcomes for name in ran.features}
    names = [name for name in FEATURES if name != "compiled" or name in features]
    lines = [
        "# Support",
        "",
        "Which features train the same model together, found by running them: a tiny model, two steps, on real",
        "processes beside one device (loss, gradient norm, every gradient, every weight, within 1e-5; in bf16 and fp8:",
        "beside one device, within the band of [decision 5](decisions/0005-gradient-precision.md)). **yes**: some",
        "layout with both was equal. **refused**: with a sentence, below. **-**: alternatives, or more than 8 ranks.",
        "Nothing, right of a row's own place: not run.",
        f"Written by `meshwright verify --page docs/support.md` on {date.today()}, torch {torch.__version__}, Python",
        f"{platform.python_version()}, {len(outcomes)} layouts.",
        "",
        "| | " + " | ".join(names[1:]) + " |",
        "|---" * len(names) + "|",
    ]
    for row, name in enumerate(names[:-1]):
        cells = []
        for column in range(1, len(names)):
            key = frozenset((name, names[column]))
            cells.append("" if column <= row else MARKS[state.get(key) or _untried_state(*sorted(key))])
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += ["", "## Refused", ""]
    lines += [f"- {' with '.join(sorted(pair))}: {reason}" for pair, reason in refused.items()]
    lines += ["", "## Layouts that were run", "", "| ranks | features | outcome |", "|---|---|---|"]
    lines += [f"| {ran.layout.world} | {ran.title} | {why or 'equal'} |" for ran, why in outcomes]
    return "\n".join(lines) + "\n"


def _untried_state(first: str, second: str) -> str:
    """Return the state of a pair that no executed layout had."""
    return "alternatives" if trial((first, second)) is None else "untried"
