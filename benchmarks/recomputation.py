"""What recomputation costs and saves on this machine: each policy, and `full` on half of the layers, in one run.

    python -m benchmarks.recomputation [--json] [--shapes 10m,100m] [--rounds 5]

A pass is the forward and the backward pass of one micro-batch in fp32, in a process of one thread; gradients are there
already. Policies take turns, so that a machine that slows down slows all of them; seconds are processor time, the
median of the rounds. Bytes are the peak of torch's own allocator beyond weights and gradients
(observe/profile/allocator.py). Beside them stand a dry run of the same plan, the planner, and what the FLOP say.

What the literature says (Korthikanti et al. 2022, arXiv:2205.05198): full recomputation costs 30 to 40 % more time;
selective saves 70 % of the activations for 2.7 %. That is for code that keeps the S x S weights of attention. The
kernels here never do, and selective saves nothing: `plain_selective_saving` is what the paper's formula gives.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from meshwright.model import build
from meshwright.model.seams import compute
from meshwright.model.transformer import Transformer
from meshwright.observe.dryrun.simulate import dry_run
from meshwright.observe.profile.allocator import watching
from meshwright.parallel import apply_block_call
from meshwright.planner.step.predict import predict
from meshwright.spec import Cluster, Layout, ModelShape, Plan, Recipe, presets
from meshwright.spec.layout.layout import RECOMPUTE
from meshwright.spec.weights.inventory import token_flop

SIZES = {"10m": (4, 512), "100m": (2, 512)}
"""Rows and tokens of each."""
ACTIVATIONS = ("activations", "logits", "temporaries")
"""Kinds of memory that a pass makes and lets go of."""
HALF = "full on half"


def layouts(layers: int) -> dict[str, Layout]:
    """All that are compared."""
    by_policy: dict[str, Layout] = {
        policy: Layout(recompute=policy, micro_batch=1, compile="off") for policy in RECOMPUTE
    }
    return {**by_policy, HALF: replace(by_policy["full"], recompute_layers=layers // 2)}


def switched(model: Transformer, layout: Layout) -> None:
    """Lay the model out anew."""
    model.seams.attend, model.seams.call = None, compute
    apply_block_call(model, layout, torch.device("cpu"))


def measured(shape: ModelShape, rows: int, sequence: int, rounds: int) -> dict[str, dict[str, float]]:
    """Layout -> processor seconds of a pass, peak bytes of one."""
    torch.set_num_threads(1)
    model = build(shape).train()
    tokens = torch.randint(0, shape.vocab, (rows, sequence + 1), generator=torch.Generator().manual_seed(0))

    def once() -> None:
        model.loss(tokens[:, :-1], tokens[:, 1:]).cross_entropy.backward()

    once()
    all_layouts = layouts(shape.layers)
    seconds: dict[str, list[float]] = {name: [] for name in all_layouts}
    names = list(all_layouts)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:  # none is always the first
            switched(model, all_layouts[name])
            seconds[name].append(_seconds(once))
    peaks = {}
    for name, layout in all_layouts.items():
        switched(model, layout)
        with watching() as recorder:
            once()
        peaks[name] = max(held for _, held in recorder.totals())
    return {name: {"seconds": statistics.median(seconds[name]), "bytes": peaks[name]} for name in all_layouts}


def _seconds(work: Callable[[], None]) -> float:
    begun = time.process_time()
    work()
    return time.process_time() - begun


def foreseen(shape: ModelShape, rows: int, sequence: int, layout: Layout) -> dict[str, float]:
    """Bytes of a dry run and of the planner, and how many times as long a pass takes by FLOP."""
    recipe = Recipe(sequence=sequence, global_batch=2 * rows, precision="fp32", document_mask=False)
    cores = replace(presets.cluster("h100x8").device, name="some cores")  # whose speeds do not matter to bytes
    plan = Plan(model=shape, recipe=recipe, layout=replace(layout, micro_batch=rows), cluster=Cluster(device=cores))
    seen, planned = dry_run(plan, device="cpu").ranks[0].kinds, predict(plan).worst.kinds
    flop = token_flop(shape, sequence, causal=True)
    return {
        "dry_bytes": sum(seen.get(kind, 0) for kind in ACTIVATIONS),
        "planned_bytes": sum(planned[kind] for kind in ACTIVATIONS),
        "flop_ratio": flop.hardware(layout.acting_recompute, plan.recomputed_share) / flop.training,
    }


def compared(name: str, rounds: int) -> dict[str, Any]:
    """All layouts of one shape."""
    shape, (rows, sequence) = presets.model(f"llama-{name}"), SIZES[name]
    policies = measured(shape, rows, sequence, rounds)
    none = policies["none"]
    for policy, layout in layouts(shape.layers).items():
        figures = policies[policy]
        figures |= foreseen(shape, rows, sequence, layout)
        figures["time_ratio"], figures["saving"] = (
            figures["seconds"] / none["seconds"],
            1 - figures["bytes"] / none["bytes"],
        )
        figures["dry_error"] = figures["dry_bytes"] / figures["bytes"] - 1
    squares = 5 * shape.heads * sequence / shape.hidden
    return {
        "policies": policies,
        "plain_selective_saving": squares / (34 + squares),
        "largest_dry_error": max(abs(figures["dry_error"]) for figures in policies.values()),
        "half_saving_of_full": policies[HALF]["saving"] / policies["full"]["saving"],
        "half_time_of_full": (policies[HALF]["time_ratio"] - 1) / (policies["full"]["time_ratio"] - 1),
    }


def main() -> None:
    """Print the table, or one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--shapes", default=",".join(SIZES))
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    figures = {name: compared(name, options.rounds) for name in options.shapes.split(",")}
    if options.json:
        print(json.dumps(figures, indent=1))
        return
    for name, shape in figures.items():
        print(f"{name}: {SIZES[name][0]} x {SIZES[name][1]} tokens, fp32")
        print(f"  {'':18} {'time':>6} {'by FLOP':>8} {'MB':>8} {'saved':>7} {'dry run':>8} {'planned':>8}")
        for policy, policy_figures in shape["policies"].items():
            times, sizes = (
                f"{policy_figures['time_ratio']:6.3f} {policy_figures['flop_ratio']:8.3f}",
                f"{policy_figures['bytes'] / 1e6:8.1f}",
            )
            beside = f"{policy_figures['dry_bytes'] / 1e6:8.1f} {policy_figures['planned_bytes'] / 1e6:8.1f}"
            print(f"  {policy:18} {times} {sizes} {policy_figures['saving']:7.1%} {beside}")


if __name__ == "__main__":
    main()
