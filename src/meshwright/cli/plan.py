"""`meshwright plan MODEL --cluster NAME`: which layout, what it costs, why not the others. Needs no torch, no GPU."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwright.cli.asked import asked_estimator, asked_plan

if TYPE_CHECKING:
    from meshwright.planner.predict import Estimator, Prediction
    from meshwright.planner.search import Found
    from meshwright.spec import Plan

SHOWN = 8


def plan(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL|PLAN.yaml", help="A preset, a Hugging Face folder or config.json, or a plan file."
        ),
    ],
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster",
            metavar="NAME|FILE.toml",
            help="Device and how many of it a node has: h100x8; or what calibrate wrote.",
        ),
    ] = None,
    nodes: Annotated[int, typer.Option("--nodes", help="Nodes of the cluster.")] = 1,
    layout: Annotated[
        str | None,
        typer.Option(
            "--layout",
            metavar="KEY=N,...",
            help="Fix some degrees: dp=8,tp=2,zero=3,recompute=full; the rest is searched.",
        ),
    ] = None,
    recipe: Annotated[
        list[str] | None,
        typer.Option("--recipe", metavar="KEY=VALUE", help="sequence=8192, global_batch=1024, precision=bf16 ..."),
    ] = None,
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
    from meshwright.planner.search import search, usable_bytes
    from meshwright.planner.words import failure, unfit
    from meshwright.spec.errors import DoesNotFit

    asked, budget = asked_plan(model, cluster, nodes, recipe or []), _tokens(tokens)
    _positive(price)
    fixed = _fixed(asked, layout)
    of = asked_estimator(asked, cluster)
    found = search(of, asked, fixed=fixed)
    if not found.best:
        one = found.nearest
        raise DoesNotFit(
            unfit(of, one) if one and found.legal == 1 and one.peak_bytes > usable_bytes(asked) else failure(of, found)
        )
    if save:
        from meshwright import planfile

        planfile.write(found.best[0].plan, save)
    if json:
        from meshwright.cli.output import print_json
        from meshwright.planner.report import document, ranked

        print_json({**document(found.best[0]), **ranked(found)})
    else:
        _print(of, found, budget, price, save)


def _fixed(asked: "Plan", layout: str | None) -> dict[str, tuple[Any, ...]]:
    """`dp=8,tp=2` -> {"dp": (8,), "tp": (2,)}."""
    from difflib import get_close_matches

    from meshwright.spec.errors import PlanError
    from meshwright.spec.schedule import NAMES

    degrees = ("dp", "dp_replicate", "dp_shard", "tp", "cp", "pp", "ep", "vp", "zero", "micro_batch")
    words = {"recompute": ("none", "selective", "full"), "schedule": NAMES, "sp": ("true", "false")}
    found: dict[str, tuple[Any, ...]] = {}
    for part in (layout or "").replace(" ", ",").split(","):
        if not part:
            continue
        key, _, value = part.partition("=")
        key = key.strip().removeprefix("layout.")
        if key in degrees and value.strip().isdecimal() and (int(value) > 0 or key == "zero"):
            found[key] = (int(value),)
        elif key in words and value in words[key]:
            found[key] = (value == "true",) if key == "sp" else (value,)
        elif key in degrees or key in words:
            legal = " or ".join(words[key]) if key in words else "a whole number of 1 or more"
            raise PlanError(f"--layout {part!r}: {key} takes {legal}")
        else:
            near = get_close_matches(key, [*degrees, *words], 1, 0.0)
            raise PlanError(f"--layout {part!r}: {key!r} is no field of a layout; nearest: {near[0]}")
    product = 1
    for axis in ("tp", "cp", "pp", "dp"):
        product *= found.get(axis, (1,))[0]
    devices = asked.cluster.devices
    if devices % product:
        raise PlanError(
            f"--layout {layout}: {product} does not divide the {devices} devices of the cluster "
            f"({asked.cluster.nodes} x {asked.cluster.devices_per_node}): take degrees whose product does"
        )
    return found


def _tokens(text: str | None) -> float:
    from meshwright.spec.errors import PlanError

    if text is None:
        return 0.0
    scale = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(text[-1:].upper(), 1.0)
    try:
        number = float(text[:-1] if scale > 1 else text) * scale
    except ValueError:
        number = -1.0
    if not 0 < number < 1e18:
        raise PlanError(f"--tokens {text} must be a number above 0, as 15T or 300B")
    return number


def _positive(price: float) -> None:
    from meshwright.spec.errors import PlanError

    if not 0 <= price < float("inf"):
        raise PlanError(f"--price {price} must be a number of 0 (none) or more")


def _print(of: "Estimator", found: "Found", tokens: float, price: float, save: Path | None) -> None:
    from meshwright.planner.words import outlook, overrides, reasons, summary

    best, asked = found.best[0], found.best[0].plan
    print(
        f"{asked.model.name}, sequence {asked.recipe.sequence}, {asked.recipe.global_batch} sequences a step, "
        f"{asked.recipe.precision}; {asked.cluster.nodes} x {asked.cluster.devices_per_node} "
        f"{asked.cluster.device.name}"
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
        print(f"Command: torchrun --nproc_per_node {min(8, asked.layout.world)} -m meshwright train {save}")
    else:
        print(f"Command: meshwright train PLAN.yaml {overrides(asked.layout)}   (--save FILE writes the plan)")


def _table(best: "list[Prediction]") -> Iterator[str]:
    from meshwright.planner.words import layout_words
    from meshwright.spec.units import count, duration

    yield f"{'step':>8} {'tok/s/dev':>9} {'MFU':>6} {'GiB':>6} {'bubble':>6}  layout"
    for one in best:
        yield (
            f"{duration(one.step_s):>8} {count(one.tokens_per_s_per_device):>9} {one.mfu(causal=False):6.1%} "
            f"{one.peak_bytes / 2**30:6.1f} {one.bubble_fraction:6.1%}  {layout_words(one.plan.layout)}"
        )


def _ledger(best: "Prediction") -> Iterator[str]:
    from dataclasses import fields

    from meshwright.planner.words import NAMES
    from meshwright.spec.units import duration, gib

    memory = [(NAMES.get(kind, kind), gib(size)) for kind, size in best.worst.kinds.items() if size]
    time = [(part.name.removesuffix("_s"), getattr(best.time, part.name)) for part in fields(best.time)]
    shown = [(name, f"{duration(seconds)} ({seconds / best.step_s:.1%})") for name, seconds in time if seconds > 0]
    for index in range(max(len(memory), len(shown))):
        left = f"{memory[index][0]:<38}{memory[index][1]:>12}" if index < len(memory) else " " * 50
        right = f"{shown[index][0]:<12}{shown[index][1]:>20}" if index < len(shown) else ""
        yield f"{left}     {right}".rstrip()
