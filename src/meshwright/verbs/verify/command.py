"""`meshwright verify`: compare layouts of up to 8 processes, covering every pair of features, with one device."""

import platform
import sys
from collections.abc import Mapping, Sequence
from datetime import date
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.interface.answers.answer import check_parent
from meshwright.spec.errors import ArgumentError, OutsideTolerance, PlanError, argument
from meshwright.spec.units import many

if TYPE_CHECKING:
    from meshwright.observe.oracle.feature_matrix import Trial

MARKS = {"equal": "yes", "different": "**no**", "refused": "refused", "alternatives": "-", "untried": ""}
"""State of a pair of features -> its cell on the support page."""


def verify(
    processes: Annotated[int, typer.Option(help="Most processes of a layout.")] = 8,
    only: Annotated[str, typer.Option(help="Try only layouts with all these features, as 'tp,zero 3'.")] = "",
    compiled: Annotated[
        bool,
        typer.Option(
            "--compiled", help="Also try layouts under torch.compile, with --random every case: some minutes more."
        ),
    ] = False,
    device: Annotated[
        str, typer.Option(help="cpu, or cuda with a GPU for each process; one GPU tries recipes and kernels.")
    ] = "cpu",
    page: Annotated[Path | None, typer.Option(help="Write the support matrix as a Markdown page.")] = None,
    random: Annotated[
        int | None, typer.Option(help="Try N random shapes, layouts and recipes instead.", metavar="N")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the random cases.  [default: 0]")] = None,
    case: Annotated[
        str | None, typer.Option(help="Repeat one case, as --random prints it.", metavar="'KEY=VALUE ...'")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the outcome as one JSON document.")] = False,
) -> None:
    """Train a tiny model under every kind of layout, on processes of this machine, and compare it with one device.

    It compares loss, every gradient, gradient norm, and the weights after two steps. Exit code 4 where any differs.
    """
    wanted_features = {name.strip() for name in only.split(",") if name.strip()}
    _check_options(wanted_features, processes=processes, device=device, random=random, seed=seed, page=page)
    # Options are checked by now; these imports load torch, which takes seconds.
    from meshwright.observe.oracle.feature_matrix import run, trials, trials_of_one_rank
    from meshwright.observe.oracle.features import FEATURES
    from meshwright.verbs.verify.random_run import verify_case, verify_random  # loads torch

    allowed = _devices(device)
    # On GPUs each rank takes one, since NCCL refuses two ranks on a device.
    processes = min(processes, allowed)
    if random is not None or case is not None:
        if (random is not None and case is not None) or wanted_features or page:
            raise PlanError("give either --random or --case, with --seed, --processes, --device and --json only")
        if random is not None:
            return verify_random(random, seed or 0, processes=processes, device=device, json=json, compiled=compiled)
        if compiled:
            raise PlanError("--compiled is for --random: add compile=on to the case")
        if not (case or "").strip():
            raise PlanError("--case is empty: give a case as --random prints it, as 'kv_heads=1 tp=2'")
        return verify_case(case or "", device=device, json=json, processes=processes)
    one_gpu = device == "cuda" and processes == 1
    selected, refused = (
        trials_of_one_rank(every_compiled=compiled)
        if one_gpu
        else trials([name for name in FEATURES if compiled or name != "compiled" or name in wanted_features])
    )
    # The matrix covers pairs. A request for three features or more may need a layout of its own.
    matching_trials = [
        trial for trial in selected if trial.layout.world <= processes and wanted_features <= trial.features
    ]
    selected = matching_trials or [_fitting_trial(wanted_features, processes, allowed)]
    compiled_count = sum(trial.layout.compile == "on" for trial in selected)
    summary = f"{many(len(selected), 'case')}, {compiled_count} of them compiled"
    if one_gpu:
        summary = f"1 GPU: {summary}, each compared with plain code on it; layouts over ranks take 2 GPUs or more"
    # On stderr, so that --json leaves one document on stdout.
    print(summary, file=sys.stderr, flush=True)
    outcomes = []
    for trial, difference in run(selected, device):
        outcomes.append((trial, difference))
        if not json:
            progress = f"{len(outcomes):>3}/{len(selected)}  {many(trial.layout.world, 'rank')}"
            print(f"{progress}  {trial.title}: {difference or 'equal'}", flush=True)
    if page:
        page.write_text(support_page(outcomes, refused))
    _report(outcomes, len(refused), json=json)


def _check_options(
    wanted_features: "set[str]", *, processes: int, device: str, random: int | None, seed: int | None,
    page: Path | None,
) -> None:  # fmt: skip
    """Raise ArgumentError for an option that cannot hold, before torch is loaded."""
    from meshwright.observe.oracle.features import ALL

    if unknown := sorted(wanted_features - ALL.keys()):
        raise ArgumentError("only", unknown[0], "is not a feature", f"choose from {', '.join(ALL)}")
    if processes < 1:
        raise ArgumentError("processes", processes, "must be at least 1")
    if seed is not None and random is None:
        raise ArgumentError("seed", seed, "chooses random cases", f"add {argument('random', 'N')}")
    if page is not None:
        check_parent(page, "page")
    if random is not None and random < 1:
        raise ArgumentError("random", random, "must be at least 1")
    if device not in ("cpu", "cuda"):
        raise ArgumentError("device", device, "is not known", "take cpu or cuda")


def _report(outcomes: Sequence[tuple["Trial", str | None]], refused: int, *, json: bool) -> None:
    """Print the outcome. Raises OutsideTolerance where a layout differs. `refused`: pairs of features."""
    from meshwright.interface.terminal.screen_text import print_json

    failed = [f"{trial.title}: {difference}" for trial, difference in outcomes if difference]
    if json:
        results = [
            {"features": trial.title, "ranks": trial.layout.world, "difference": difference}
            for trial, difference in outcomes
        ]
        counts = {"layouts": len(outcomes), "different": len(failed), "refused_pairs": refused}
        print_json({**counts, "results": results})
    if failed:
        raise OutsideTolerance(f"{len(failed)} of {len(outcomes)} layouts differ from one device; {failed[0]}")
    if not json:
        print(
            f"{many(len(outcomes), 'layout')} {'equals' if len(outcomes) == 1 else 'equal'} one device; "
            f"{many(refused, 'pair')} of features {'is' if refused == 1 else 'are'} refused"
        )


def _fitting_trial(wanted: "set[str]", processes: int, allowed: int) -> "Trial":
    """Return a layout with features that no layout of the matrix combines, or not on so few processes."""
    from meshwright.observe.oracle.feature_matrix import Trial, trial
    from meshwright.observe.oracle.features import ALL, LARGEST_WORLD

    names = [name for name in ALL if name in wanted]
    built = trial(names)
    if not isinstance(built, Trial):
        why = built or f"some are alternatives, or it would take more than {LARGEST_WORLD} processes"
        raise PlanError(f"--only {', '.join(names)}: no layout has all of these: {why}")
    if built.layout.world > processes:
        raise PlanError(
            f"no layout of at most {many(processes, 'process', 'processes')} has {' and '.join(names) or 'anything'}: "
            + (f"take --processes {built.layout.world}" if built.layout.world <= allowed else "there are no more GPUs")
        )
    return built


def _devices(device: str) -> int:
    """Return the most processes that this kind of device allows here."""
    import torch

    from meshwright.observe.oracle.features import LARGEST_WORLD

    if device == "cpu":
        return LARGEST_WORLD
    if not torch.cuda.is_available():
        raise PlanError("--device cuda: torch finds no GPU here; take --device cpu")
    return torch.cuda.device_count()


def support_page(outcomes: Sequence[tuple["Trial", str | None]], refused: Mapping[frozenset[str], str]) -> str:
    """Return the support matrix in Markdown: the table, reasons of refusals, every layout that was run."""
    import torch

    from meshwright.observe.oracle.features import FEATURES

    state: dict[frozenset[str], str] = dict.fromkeys(refused, "refused")
    for ran, difference in outcomes:
        for pair in combinations(sorted(ran.features), 2):
            key = frozenset(pair)
            if difference:
                # One failing layout condemns a pair, whatever the other layouts with it say.
                state[key] = "different"
            else:
                state.setdefault(key, "equal")
    features = {name for ran, _ in outcomes for name in ran.features}
    # Without --compiled no layout has this feature, and its row would be empty.
    names = [name for name in FEATURES if name != "compiled" or name in features]
    lines = [
        "# Support",
        "",
        "Which features train the same model together, found by running them: a tiny model, two steps, on real",
        "processes compared with one device (loss, gradient norm, every gradient, every weight, within 1e-5; in bf16",
        "and fp8 within the band of [decision 5](decisions/0005-gradient-precision.md)). **yes**: some",
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
    from meshwright.observe.oracle.feature_matrix import trial

    return "alternatives" if trial((first, second)) is None else "untried"
