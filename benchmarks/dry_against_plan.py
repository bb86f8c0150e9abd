"""What the planner says that plans hold, against a dry run of the training program, for random plans of real models.

    python -m benchmarks.dry_against_plan [--plans 40] [--seed 0] [--only 3,17] [--optimizer muon] [--lora]
        [--base nf4-double] [--json]

Models of 8 to 405 billion parameters on 8 to 16,384 ranks. A plan is taken as drawn where it is legal and what it would
hold is of the order of a GPU's memory (ROOM_BYTES), by the planner's own word. Dry-run are the pipeline's first and
last rank and the one that the planner takes for the worst; each is compared with what the planner says of it, and of
a plan the highest of them counts.
"""

import argparse
import json
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from statistics import mean, median
from typing import Any, Literal

from meshwright.observe.dryrun.rank_run import WatchedRank
from meshwright.observe.dryrun.simulate import dry_run
from meshwright.planner.step.predict import predict
from meshwright.planner.step.prediction import Prediction
from meshwright.spec import Layout, Plan, Recipe, presets
from meshwright.spec.errors import MeshwrightError
from meshwright.spec.layout.layout import RECOMPUTE, rank_of
from meshwright.spec.layout.schedule import KINDS, NAMES
from meshwright.spec.memory.held import PLANNED
from meshwright.spec.model.shape import SAME_BASE, LoRAShape
from meshwright.spec.weights.inventory import num_parameters

MODELS = (
    "llama-3.1-8b", "llama-2-13b", "qwen3-14b", "qwen3-32b", "llama-3.1-70b", "qwen2.5-72b", "llama-3.1-405b",
    "mixtral-8x7b", "mixtral-8x22b", "qwen3-30b-a3b",
)  # fmt: skip
WORLDS = tuple(2**n for n in range(3, 15))
ROOM_BYTES = (10 * 2**30, 160 * 2**30)
LATER = ("reserve",)
"""Kinds that the planner adds for what no tensor holds: workspaces of libraries, roundings of the allocator."""


def drawn(
    seed: int, count: int, optimizer: Literal["adamw", "muon"] = "adamw", lora: bool = False, base: str = SAME_BASE
) -> list[Plan]:
    """So many plans, the same for a seed, but for what an optimizer's states leave no room for. `lora`: of adapters,
    beside frozen matrices of `base`."""
    draw = random.Random(seed)
    plans: list[Plan] = []
    while len(plans) < count:
        plan = _draw(draw, MODELS[len(plans) % len(MODELS)])
        plan = plan and replace(plan, recipe=replace(plan.recipe, optimizer=optimizer))
        plan = plan and _with_adapters(draw, plan, base) if lora else plan
        if plan is not None and not plan.violations() and ROOM_BYTES[0] < predict(plan).peak_bytes < ROOM_BYTES[1]:
            plans.append(plan)
    return plans


def _with_adapters(draw: random.Random, plan: Plan, base: str) -> Plan:
    targets = draw.choice(("all", "all", "attention", "mlp", "q,v", "o,down"))
    dora = plan.model.moe is None and draw.random() < 0.2
    lora = LoRAShape(rank=draw.choice((8, 16, 64, 256)), targets=targets, dora=dora, base=base)
    if plan.layout.tp * plan.layout.cp == 1 and not dora:
        lora = replace(lora, dropout=draw.choice((0.0, 0.1)))
    return replace(plan, model=replace(plan.model, lora=lora))


def _draw(draw: random.Random, name: str) -> Plan | None:
    shape = presets.model(name)
    world = draw.choice(WORLDS)
    tp, pp, cp = draw.choice((1, 2, 4, 8)), draw.choice((1, 1, 2, 4, 8, 16)), draw.choice((1, 1, 1, 2, 4))
    if world % (tp * pp * cp):
        return None
    dp = world // (tp * pp * cp)
    replicas = draw.choice([n for n in (1, 1, 2, 4, 8) if dp % n == 0])
    schedule = draw.choice(NAMES) if pp > 1 else "1f1b"
    kind, more = KINDS[schedule], draw.choice((0, 1, 2))
    vp = kind.stages + more * (kind.deeper and kind.stages > 1)
    experts = [n for n in (1, 2, 4, 8) if dp // replicas * cp * tp % n == 0] if shape.moe else [1]
    micro, accumulate = draw.choice((1, 1, 2, 4)), draw.choice((1, 2, 4)) * (pp if pp > 1 else 1)
    try:
        layout = Layout(
            dp_replicate=replicas, dp_shard=dp // replicas, tp=tp, cp=cp, pp=pp, ep=draw.choice(experts), vp=vp,
            zero=draw.choice((0, 1, 2, 3)), sp=tp > 1 and draw.random() < 0.7,
            context=draw.choice(("ring", "all-gather")),
            context_split=draw.choice(("zigzag", "zigzag", "striped", "chunks")),
            schedule=schedule,  # type: ignore[arg-type]  # the keys of KINDS are its words
            micro_batch=micro, recompute=(again := draw.choice(RECOMPUTE)), compile="off",
            recompute_layers=draw.choice((0, 0, 1, 2, 5)) if again != "none" else 0,
        )  # fmt: skip
        recipe = Recipe(
            sequence=draw.choice((2048, 4096, 8192)), global_batch=dp * micro * accumulate, precision="bf16",
            document_mask=cp == 1 and draw.random() < 0.3, reduce_dtype=draw.choice(("fp32", "fp32", "model")),
        )  # fmt: skip
    except MeshwrightError:
        return None
    return Plan(model=shape, layout=layout, recipe=recipe, cluster=presets.cluster("h100x8"))


def compared(plan: Plan) -> list[dict[str, Any]]:
    """For each rank: bytes by kind as planned and as dry-run."""
    prediction = predict(plan)
    places = sorted({0, plan.layout.pp - 1, prediction.worst.pp_rank})
    first = dict.fromkeys(("pp", "dp_replicate", "dp_shard", "cp", "tp"), 0)
    ranks = [rank_of(plan.layout, {**first, "pp": stage}) for stage in places]
    run = dry_run(plan, ranks=ranks, device="cuda")
    return [_row(prediction, stage, seen) for stage, seen in zip(places, run.ranks, strict=True)]


def _row(prediction: Prediction, stage: int, seen: WatchedRank) -> dict[str, Any]:
    memory = prediction.memory[stage]
    planned = memory.total_bytes - sum(memory.kinds[kind] for kind in LATER)
    peak = seen.peak_bytes
    kinds = {kind: (memory.kinds.get(kind, 0.0), seen.kinds.get(kind, 0)) for kind in PLANNED if kind not in LATER}
    return {
        "place": stage, "planned": planned, "dry": peak, "error": planned / peak - 1,
        "when": (memory.when, seen.when),
        "kinds": kinds, "largest": [str(large) for large in seen.largest],
    }  # fmt: skip


def rows(plans: list[Plan], only: set[int]) -> Iterator[dict[str, Any]]:
    """Of each plan."""
    for number, plan in enumerate(plans):
        if only and number not in only:
            continue
        begun = time.perf_counter()
        ranks = compared(plan)
        planned, dry = (max(float(rank[key]) for rank in ranks) for key in ("planned", "dry"))
        yield {
            "number": number, "plan": words(plan), "planned": planned, "dry": dry, "error": planned / dry - 1,
            "ranks": ranks, "seconds": time.perf_counter() - begun,
        }  # fmt: skip


def words(plan: Plan) -> str:
    """A plan in a line: what differs from the default."""
    layout, recipe = plan.layout, plan.recipe
    fields = [
        f"{name}={getattr(layout, name)}"
        for name in ("dp_replicate", "dp_shard", "tp", "cp", "pp", "ep", "vp")
        if getattr(layout, name) > 1
    ]
    fields += [f"zero={layout.zero}", *(["sp"] if layout.sp else []), *([layout.schedule] if layout.pp > 1 else [])]
    fields += [layout.context, layout.context_split] if layout.cp > 1 else []
    fields += [
        layout.recompute + (f" on {layout.recompute_layers}" if layout.recompute_layers else ""),
        f"mb={layout.micro_batch}x{layout.micro_batches(recipe.global_batch)}",
        f"S={recipe.sequence}",
    ]
    fields += ["documents"] if recipe.document_mask else []
    fields += ["reduce=model"] if recipe.reduce_dtype == "model" else []
    return f"{num_parameters(plan.model) / 1e9:.0f}B {' '.join(fields)}"


def show(row: dict[str, Any], detail: bool) -> None:
    """A line for a plan; with `detail` the kinds of each rank."""
    gib = 2**30
    sizes = f"{row['planned'] / gib:8.2f} {row['dry'] / gib:8.2f} GiB"
    print(f"{row['number']:3} {row['error']:+7.1%} {sizes}  {row['plan']}  ({row['seconds']:.0f} s)", flush=True)
    for rank in row["ranks"] if detail else ():
        print(f"      pp {rank['place']}: {rank['error']:+.1%} {rank['when']}")
        for kind, (planned, dry) in rank["kinds"].items():
            if planned or dry:
                print(f"        {kind:12} {planned / gib:8.3f} {dry / gib:8.3f}")


def main() -> None:
    """Draw, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plans", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="")
    parser.add_argument("--optimizer", default="adamw", choices=("adamw", "muon"))
    parser.add_argument("--base", default=SAME_BASE, help="with --lora: how frozen matrices are held, as nf4-double")
    parser.add_argument("--lora", action="store_true", help="models with frozen weights and adapters")
    parser.add_argument("--detail", action="store_true")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    only = {int(number) for number in asked.only.split(",") if number}
    collected = []
    for row in rows(drawn(asked.seed, asked.plans, asked.optimizer, asked.lora, asked.base), only):
        collected.append(row)
        if not asked.json:
            show(row, asked.detail)
    errors = [abs(float(row["error"])) for row in collected]
    total = {
        "plans": len(collected),
        "mean": mean(errors),
        "median": median(errors),
        "largest": max(errors),
        "within_5": sum(e <= 0.05 for e in errors),
    }
    if asked.json:
        print(json.dumps({**total, "rows": collected}))
    else:
        rest = f"largest {total['largest']:.1%}, {total['within_5']} within 5 %"
        print(f"{total['plans']} plans: mean {total['mean']:.1%}, median {total['median']:.1%}, {rest}")


if __name__ == "__main__":
    main()
