"""How near the planner comes on this machine after `calibrate`: random small plans, predicted, then measured.

    python -m benchmarks.calibration [--json] [--cluster FILE.toml] [--plans 20] [--seed 1] [--save FILE.toml]

The plans are drawn from a seed (models of 2 to 30 million parameters, sequences of 128 to 1,024, 1, 2 and 4 Gloo
processes, every kind of parallelism); their models are not those that the calibration looked at
(verbs/calibrate/campaign.py), and all are predicted before the first is run. A step counts from a barrier to the
end of the slowest rank; the median over the steps.
"""

import argparse
import json
import os
import random
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwright.observe.timed_steps import Timing, measure_steps
from meshwright.planner.explain import layout_words
from meshwright.planner.machine.clusterfile import load, text
from meshwright.spec import Layout, ModelShape, MoEShape, Plan, Recipe
from meshwright.spec.errors import MeshwrightError
from meshwright.spec.rules.legal import layout_violations
from meshwright.spec.weights.inventory import num_parameters
from meshwright.verbs.calibrate.campaign import calibrate

AXES = ("dp_shard", "tp", "pp", "cp", "dp_replicate")
PARAMETERS = (2e6, 30e6)
TOKENS = (256, 4096)
"""Of a step: enough to be a step, few enough to run twenty of them."""
FLOP = (1e10, 2.5e11)
"""6 N T of a step, for the same reason."""


def shape(draw: random.Random, sequence: int) -> ModelShape:
    """Llama-, GPT-2- or mixture-like."""
    kind = draw.choice(("llama", "llama", "gpt2", "moe"))
    hidden = draw.choice((128, 192, 256, 384, 512))
    heads = draw.choice([n for n in (4, 8) if hidden // n in (32, 48, 64, 96)] or [4])
    layers, vocab = draw.choice((4, 6, 8, 12)), draw.choice((2048, 4096, 8192, 16384))
    base: dict[str, Any] = {"layers": layers, "hidden": hidden, "heads": heads, "vocab": vocab, "max_positions": 1024}
    if kind == "gpt2":
        return ModelShape(
            name="gpt2-like", family="gpt2", ffn=4 * hidden, norm="layernorm", mlp="gelu_tanh", positions="learned",
            qkv_bias=True, out_bias=True, mlp_bias=True, tied=True, **base,
        )  # fmt: skip
    llama = ModelShape(
        name="llama-like", kv_heads=draw.choice((heads, heads // 2)), ffn=(hidden * 8 // 3 + 31) // 32 * 32, **base
    )
    if kind == "llama":
        return llama
    moe = MoEShape(experts=draw.choice((4, 8)), top_k=2, ffn=hidden)
    return replace(llama, name="moe-like", family="mixtral", moe=moe)


def layout(draw: random.Random, world: int, first: str, routed: bool) -> Layout:
    """Degrees that multiply to the world, `first` among them; some are illegal and drawn again."""
    degrees = dict.fromkeys(AXES, 1)
    for axis in [first, draw.choice(AXES)][: world.bit_length() - 1]:
        degrees[axis] *= 2
    shared = degrees["dp_shard"] * degrees["cp"] > 1
    pipeline = degrees["pp"] > 1
    return Layout(
        dp_replicate=degrees["dp_replicate"],
        dp_shard=degrees["dp_shard"],
        tp=degrees["tp"],
        cp=degrees["cp"],
        pp=degrees["pp"],
        zero=draw.choice((0, 1, 2, 3)) if shared else 0,
        sp=degrees["tp"] > 1 and draw.random() < 0.5,
        ep=2 if routed and degrees["dp_shard"] > 1 else 1,
        schedule=draw.choice(("1f1b", "afab", "zb-h1")) if pipeline else "1f1b",
        micro_batch=draw.choice((0, 1, 1, 2)) if not pipeline else draw.choice((1, 2)),
        recompute=draw.choice(("none", "none", "selective", "full")),
        compile="off",
    )


def plans(count: int, seed: int) -> list[Plan]:
    """So many legal plans; worlds of 1, 2 and 4 in turn, and every axis in turn."""
    draw, drawn = random.Random(seed), list[Plan]()
    while len(drawn) < count:
        world = (1, 2, 4)[len(drawn) % 3]
        sequence = draw.choice((128, 256, 512, 1024))
        model = shape(draw, sequence)
        laid = layout(draw, world, AXES[len(drawn) // 3 % len(AXES)], model.moe is not None)
        batch = draw.choice((2, 4, 8, 16))
        parameters, tokens = num_parameters(model), batch * sequence
        if not PARAMETERS[0] <= parameters <= PARAMETERS[1] or not TOKENS[0] <= tokens <= TOKENS[1]:
            continue
        if not FLOP[0] <= 6 * parameters * tokens <= FLOP[1]:
            continue
        plan = Plan(model=model, recipe=Recipe(sequence=sequence, global_batch=batch), layout=laid)
        if legal(plan):
            drawn.append(plan)
    return drawn


def legal(plan: Plan) -> bool:
    """Whether it can be run."""
    try:
        plan.layout.micro_batches(plan.recipe.global_batch)
        plan.check()
    except MeshwrightError:
        return False
    return not layout_violations(plan.model, plan.recipe, plan.layout)


def main() -> None:
    """Calibrate, predict, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--cluster", type=Path, help="a cluster file; without it `calibrate` runs first")
    parser.add_argument("--save", type=Path, help="keep what calibrate wrote")
    parser.add_argument("--plans", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as the command line sets it for the processes that it starts
    machine = load(options.cluster) if options.cluster else calibrate(say=lambda line: print(line, file=sys.stderr))
    if options.save:
        options.save.write_text(text(machine))
        machine = load(options.save)
    drawn = [replace(p, cluster=machine.cluster(p.layout.world)) for p in plans(options.plans, options.seed)]
    predicted = [machine.estimator(plan).predict(plan).step_s for plan in drawn]
    measured = measure_steps(drawn, Timing(seconds=3.0, least=4, most=15))
    errors = [p / m - 1 for p, m in zip(predicted, measured, strict=True)]
    sizes = [abs(error) for error in errors]
    figures: dict[str, Any] = {
        "mean_error": statistics.fmean(sizes),
        "median_error": statistics.median(sizes),
        "largest_error": max(sizes),
        "mean_by_processes": {
            world: statistics.fmean(s for s, plan in zip(sizes, drawn, strict=True) if plan.layout.world == world)
            for world in sorted({plan.layout.world for plan in drawn})
        },
        "load_after": os.getloadavg()[0],
        "plans": [
            {**described(plan), "predicted_s": p, "measured_s": m, "error": e}
            for plan, p, m, e in zip(drawn, predicted, measured, errors, strict=True)
        ],
    }
    if options.json:
        print(json.dumps(figures))
        return
    for row in figures["plans"]:
        print(
            f"{row['predicted_s']:7.3f} s predicted {row['measured_s']:7.3f} s measured {row['error']:+7.1%}  "
            f"{row['model']:<10} {row['parameters'] / 1e6:5.1f}M  {row['batch']:>2} x {row['sequence']:<4}  "
            f"{row['layout']}"
        )
    print(
        f"mean {figures['mean_error']:.1%}, median {figures['median_error']:.1%}, "
        f"largest {figures['largest_error']:.1%}"
    )
    print("mean by processes:", {world: f"{error:.1%}" for world, error in figures["mean_by_processes"].items()})


def described(plan: Plan) -> dict[str, Any]:
    """What was run, for a table."""
    return {
        "model": plan.model.name, "parameters": num_parameters(plan.model), "layers": plan.model.layers,
        "hidden": plan.model.hidden, "vocab": plan.model.vocab, "batch": plan.recipe.global_batch,
        "sequence": plan.recipe.sequence, "processes": plan.layout.world, "layout": layout_words(plan.layout),
    }  # fmt: skip


if __name__ == "__main__":
    main()
