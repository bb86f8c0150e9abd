"""A small routed model's step on this machine: eager, compiled around its experts, and compiled whole, in one run.

    python -m benchmarks.compiled_experts [--json] [--turns 30]

A step is the forward and the backward pass of 4 rows of 256 tokens in fp32, other tokens in each turn, so that experts
have other runs of rows. The three take turns in one process of one thread; seconds are processor time, and a ratio is
the median over the turns of the ratios within a turn.
"""

import argparse
import json
import statistics
import time
from typing import Any, Literal

import torch

from meshwright.model import Transformer, build
from meshwright.parallel import apply_block_call
from meshwright.parallel.compiling import compiled_call, prepare
from meshwright.spec import Layout, ModelShape
from meshwright.spec.shape import MoEShape

SHAPE = ModelShape(
    layers=4, hidden=256, heads=4, kv_heads=2, head_dim=64, ffn=256, vocab=512, max_positions=1024,
    moe=MoEShape(experts=8, top_k=2, ffn=256),
)  # fmt: skip
ROWS, SEQUENCE = 4, 256
POLICIES: tuple[Literal["none", "selective"], ...] = ("none", "selective")


def contestants(recompute: Literal["none", "selective"]) -> dict[str, Transformer]:
    """Three models with the same weights."""
    found = {name: build(SHAPE) for name in ("eager", "around experts", "whole")}
    for name, compiled in (("eager", "off"), ("whole", "on")):
        apply_block_call(found[name], Layout(recompute=recompute, compile=compiled), torch.device("cpu"))  # type: ignore[arg-type]  # two of the words
    prepare()
    found["around experts"].seams.call = compiled_call(recompute, apart=True)
    return found


def step(model: Transformer, turn: int) -> float:
    """Processor seconds of one."""
    tokens = torch.randint(SHAPE.vocab, (ROWS, SEQUENCE + 1), generator=torch.Generator().manual_seed(turn))
    begun = time.process_time()
    loss = model.loss(tokens[:, :-1], tokens[:, 1:])
    assert loss.balance is not None
    torch.autograd.backward([loss.cross_entropy + loss.balance.sum()])
    seconds = time.process_time() - begun
    model.zero_grad()
    return seconds


def compared(recompute: Literal["none", "selective"], turns: int) -> dict[str, Any]:
    """Milliseconds and ratios to eager of each, and the graphs that the last two were compiled to in all turns."""
    torch.compiler.reset()
    models = contestants(recompute)
    names, graphs = list(models), {}
    for name, model in models.items():
        torch._dynamo.utils.counters.clear()
        for turn in range(2):
            step(model, turn)
        graphs[name] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    torch._dynamo.utils.counters.clear()
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(turns):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            seconds[name].append(step(models[name], 2 + turn))
    return {
        "recompute": recompute,
        "compiled_later": torch._dynamo.utils.counters["stats"]["unique_graphs"],
        **{
            name: {
                "ms": 1e3 * statistics.median(seconds[name]),
                "over_eager": statistics.median(a / b for a, b in zip(seconds[name], seconds["eager"], strict=True)),
                "graphs": graphs[name],
            }
            for name in names
        },
    }


def main() -> None:
    """Print the table, or one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--turns", type=int, default=30)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = [compared(policy, options.turns) for policy in POLICIES]
    if options.json:
        print(json.dumps(found, indent=1))
        return
    for one in found:
        for name in ("eager", "around experts", "whole"):
            row = one[name]
            times = f"{row['ms']:7.1f} ms  {row['over_eager']:.2f} x"
            print(f"{one['recompute']:10} {name:15} {times}  {row['graphs']} graphs")


if __name__ == "__main__":
    main()
