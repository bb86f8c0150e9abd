"""`meshwright plan MODEL --cluster NAME`: which layout, what it costs, why not the others. Needs no torch, no GPU."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwright.cli.inputs.plan_arguments import (
    AskedCluster,
    AskedModel,
    AskedNodes,
    AskedRecipe,
    asked_estimator,
    asked_plan,
)

if TYPE_CHECKING:
    from meshwright.planner.search.ranking import Found
    from meshwright.planner.step.predict import Estimator
    from meshwright.planner.step.prediction import Prediction
    from meshwright.spec import Plan
MOST_SHOWN = 1000
"""Alternatives that --top may ask for."""


def plan(
    model: AskedModel,
    cluster: AskedCluster = None,
    nodes: AskedNodes = None,
    layout: Annotated[
        list[str] | None,
        typer.Option(
            "--layout",
            metavar="KEY=N,...",
            help="Fix some: dp=8,tp=2,zero=3,recompute=full; the rest is searched. `plan`: all, as in PLAN.yaml. A "
            "layout as this verb prints it, in quotes, is that one.",
        ),
    ] = None,
    recipe: AskedRecipe = None,
    tokens: Annotated[
        str | None, typer.Option("--tokens", metavar="N", help="Token budget, as 15T: says days and steps.")
    ] = None,
    price: Annotated[
        float,
        typer.Option("--price", metavar="NUMBER", help="Price per device-hour; with --tokens, prints the total cost."),
    ] = 0.0,
    save: Annotated[
        Path | None, typer.Option("--save", metavar="FILE", help="Write the best plan, to be run by train.")
    ] = None,
    details: Annotated[
        bool, typer.Option("--details", help="Also memory and time by part, what was rejected, half the machine.")
    ] = False,
    top: Annotated[int | None, typer.Option("--top", metavar="INT", help="So many alternatives. [default: 4]")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the answer as one JSON document.")] = False,
) -> None:
    """Rank the layouts of a model on a cluster by predicted step time, with memory, traffic, bubble and reasons."""
    from meshwright.cli.inputs.layout_argument import fixed_layout
    from meshwright.cli.terminal.plan_answer import Asked, answer
    from meshwright.cli.terminal.screen_text import show
    from meshwright.planner.search.ranking import LISTED, search
    from meshwright.planner.search.recommend import recommended
    from meshwright.planner.search.refused import answered

    if save is not None and save == Path(model):
        _refuse(f"--save {save} is the plan that was read: name another file")
    asked, budget = asked_plan(model, cluster, nodes, recipe or []), _tokens(tokens)
    _positive(price, budget, top)
    fixed = fixed_layout(asked, layout or [])
    of = asked_estimator(asked, cluster)
    found = search(of, asked, fixed=fixed, listed=max(LISTED, (top or 0) + 1))
    if not found.legal:
        found = answered(of, asked, fixed)
    if not found.best:
        _nothing(of, found, free=not fixed, json=json)
    found = recommended(of, asked, found, fixed)
    if save:
        _save(found.best[0].plan, budget, save)
    if json:
        from meshwright.cli.terminal.output import print_json
        from meshwright.planner.plan_document import document, ranked

        print_json({**document(found.best[0]), **ranked(found), **_bill(found.best[0], budget, price)})
    else:
        show(answer(of, found, Asked(fixed=fixed, tokens=budget, price=price, details=details, top=top,
                                     saved=str(save or ""))))  # fmt: skip
        if save:
            show(["", *_command(found.best[0].plan, save)])


def _nothing(of: "Estimator", found: "Found", *, free: bool, json: bool) -> None:
    """Raise DoesNotFit with the nearest layout; with --json the document is that one's."""
    from meshwright.planner.explain import failure, unfit
    from meshwright.planner.search.changes import enough_nodes
    from meshwright.spec.errors import DoesNotFit

    one = found.nearest
    assert one is not None
    if json:
        from meshwright.cli.terminal.output import print_json
        from meshwright.planner.plan_document import document, ranked

        print_json({**document(one), **ranked(found)})
    else:
        from meshwright.cli.terminal.plan_answer import unfit as lines
        from meshwright.cli.terminal.screen_text import show

        show(lines(one))
    raise DoesNotFit(
        unfit(of, one) if found.legal == 1 else failure(found, enough_nodes(of, one.plan) if free else 0, free=free)
    )


def _save(best: "Plan", tokens: float, file: Path) -> None:
    """The plan as `train` runs it, with as many steps as the token budget gives."""
    from dataclasses import replace

    from meshwright import planfile

    recipe = best.recipe
    if tokens and not recipe.batch_ramp:
        steps = -(-int(tokens) // (recipe.global_batch * recipe.sequence))
        follows = recipe == replace(recipe, warmup_steps=-1)
        if steps >= 2**31:
            _refuse(f"--tokens {tokens:g} are {steps:,} steps, more than a recipe can have: take a larger global_batch")
        best = replace(
            best, recipe=replace(recipe, steps=steps, warmup_steps=-1 if follows else min(recipe.warmup_steps, steps))
        )
    best.check()
    planfile.write(best, file, open_warmup=True)


def _refuse(sentence: str) -> None:
    from meshwright.spec.errors import PlanError

    raise PlanError(sentence)


def _bill(best: "Prediction", tokens: float, price: float) -> dict[str, Any]:
    if not tokens:
        return {}
    from dataclasses import asdict

    from meshwright.planner.step.budget import budget

    return {"budget": asdict(budget(tokens, best.tokens_per_step, best.step_s, best.plan.layout.world, price))}


def _tokens(text: str | None) -> float:
    from meshwright.spec.errors import PlanError

    if text is None:
        return 0.0
    scale = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(text[-1:].upper(), 1.0)
    try:
        number = float(text[:-1] if scale > 1 else text) * scale
    except ValueError:
        number = -1.0
    if not 1 <= number < 1e18:
        raise PlanError(f"--tokens {text} must be a number of 1 or more and below 10**18, as 15T or 300B")
    return number


def _positive(price: float, tokens: float, top: int | None) -> None:
    if top is not None and not 1 <= top <= MOST_SHOWN:
        _refuse(f"--top {top} must be at least 1 and at most {MOST_SHOWN}")
    if not 0 <= price < float("inf"):
        _refuse(f"--price {price} must be a number of 0 (none) or more")
    if price and not tokens:
        _refuse(f"--price {price} is for the bill of a run: say how long it is, as --tokens 15T")


def _command(best: "Plan", file: Path) -> Iterator[str]:
    """How the saved plan is run, and what of it nobody has chosen."""
    cluster, recipe = best.cluster, best.recipe
    yield f"Written to {file}; data ({best.data.path}) and learning rate ({recipe.learning_rate:g}) are as in the plan."
    if cluster.devices == 1:
        yield f"Command: meshwright train {file}"
    elif cluster.nodes == 1:
        yield f"Command: torchrun --nproc_per_node {cluster.devices_per_node} -m meshwright train {file}"
    else:
        yield (
            f"Command, on each of the {cluster.nodes} nodes, HOST being one of them: torchrun --nnodes {cluster.nodes} "
            f"--nproc_per_node {cluster.devices_per_node} --rdzv_backend c10d --rdzv_endpoint HOST:29400 "
            f"--rdzv_id {file.stem} -m meshwright train {file}"
        )
