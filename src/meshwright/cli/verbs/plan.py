"""`meshwright plan MODEL --cluster NAME`: which layout, what it costs, why not the others. Needs no torch, no GPU."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.cli.inputs.plan_arguments import (
    AskedCluster,
    AskedModel,
    AskedNodes,
    AskedRecipe,
)

if TYPE_CHECKING:
    from meshwright.planner.search.ranking import Found
    from meshwright.planner.step.predict import Estimator
    from meshwright.planner.step.prediction import Prediction
    from meshwright.spec import Plan

SHOWN = 8


def plan(
    model: AskedModel,
    cluster: AskedCluster = None,
    nodes: AskedNodes = None,
    layout: Annotated[
        list[str] | None,
        typer.Option(
            "--layout",
            metavar="KEY=N,...",
            help="Fix some: dp=8,tp=2,zero=3,recompute=full; the rest is searched. `plan`: all, as in PLAN.yaml.",
        ),
    ] = None,
    recipe: AskedRecipe = None,
    tokens: Annotated[
        str | None, typer.Option("--tokens", metavar="N", help="Token budget, as 15T: says days and steps.")
    ] = None,
    price: Annotated[float, typer.Option("--price", help="Of a device hour, for the bill of --tokens.")] = 0.0,
    save: Annotated[
        Path | None, typer.Option("--save", metavar="FILE", help="Write the best plan, to be run by train.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the answer as one JSON document.")] = False,
) -> None:
    """Rank the layouts of a model on a cluster by predicted step time, with memory, traffic, bubble and reasons."""
    from meshwright.api import planning
    from meshwright.cli.terminal.output import print_json
    from meshwright.spec.errors import DoesNotFit, PlanError

    if save is not None and save == Path(model):
        raise PlanError(f"--save {save} is the plan that was read: name another file")
    try:
        answer = planning.plan(
            model, cluster=cluster, nodes=nodes, layout=layout, recipe=recipe, tokens=tokens, price=price
        )
    except DoesNotFit as error:
        if json and error.document:
            print_json(error.document)
        raise
    if save:
        answer.save(save)
    if json:
        print_json(answer.to_dict())
    else:
        _print(answer.estimator, answer.found, answer.tokens, price, save)


def _print(of: "Estimator", found: "Found", tokens: float, price: float, save: Path | None) -> None:
    from meshwright.planner.explain import outlook, reasons, summary

    best, asked = found.best[0], found.best[0].plan
    print(
        f"{asked.model.name}, sequence {asked.recipe.sequence}, {asked.recipe.global_batch} sequences a step, "
        f"{asked.recipe.precision}; {asked.cluster.nodes} x {asked.cluster.devices_per_node} "
        f"{asked.cluster.device.name}, kernels of {'a GPU' if asked.cluster.device.is_gpu else 'a CPU'}"
    )
    print()
    for line in summary(found):
        print(line)
    print()
    for line in _table(found.best[:SHOWN]):
        print(line)
    print()
    for line in _ledger(best):
        print(line)
    print()
    for line in (*reasons(of, best), *outlook(of, best, tokens, price)):
        print(line)
    print()
    if save:
        for line in _command(asked, save):
            print(line)
    else:
        print("To run it: --save FILE writes the plan, and says the command.")


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


def _table(best: "list[Prediction]") -> Iterator[str]:
    from meshwright.planner.explain import layout_words
    from meshwright.planner.search.recommend import is_tight
    from meshwright.spec.units import count

    yield f"{'step':>8} {'tok/s/dev':>9} {'MFU':>6} {'GiB':>6} {'bubble':>6}  layout"
    for one in best:
        yield (
            f"{_step(one.step_s):>8} {count(one.tokens_per_s_per_device):>9} {one.mfu(causal=False):6.1%} "
            f"{one.peak_bytes / 2**30:6.1f} {one.time.bubble_s / one.step_s:6.1%}  {layout_words(one.plan.layout)}"
            f"{'  (tight)' if is_tight(one) else ''}"
        )


def _step(seconds: float) -> str:
    """Three digits and more, since neighbours differ by a hundredth."""
    return f"{1e3 * seconds:.3g} ms" if seconds < 0.9995 else f"{seconds:.4g} s"


def _ledger(best: "Prediction") -> Iterator[str]:
    from dataclasses import fields

    from meshwright.planner.explain import NAMES
    from meshwright.spec.units import duration, gib

    memory = [(NAMES.get(kind, kind), gib(size)) for kind, size in best.worst.kinds.items() if size]
    time = [(part.name.removesuffix("_s"), getattr(best.time, part.name)) for part in fields(best.time)]
    shown = [(name, f"{duration(seconds)} ({seconds / best.step_s:.1%})") for name, seconds in time if seconds > 0]
    for index in range(max(len(memory), len(shown))):
        left = f"{memory[index][0]:<38}{memory[index][1]:>12}" if index < len(memory) else " " * 50
        right = f"{shown[index][0]:<12}{shown[index][1]:>20}" if index < len(shown) else ""
        yield f"{left}     {right}".rstrip()
