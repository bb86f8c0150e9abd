"""What must not change the training: recomputation (no bit), and how a step is cut into micro-batches (rounding only).

    python -m benchmarks.exactness [--json]

A step is trained on a small model of every kind of layer, with rows of unequally many valid tokens. The gradients are
read from the optimizer's first moment, which after one step without clipping is the gradient times 1 - beta1.
"""

import argparse
import json
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from meshwright.model import build
from meshwright.parallel import on_one_device
from meshwright.spec import Layout, MLAShape, ModelShape, MoEShape, Recipe
from meshwright.spec.layout.layout import RECOMPUTE, Recompute
from meshwright.training.optimizer.optimizer import Optimizer
from meshwright.training.step.batches import Batch, split
from meshwright.training.step.step import train_step

ROWS, SEQUENCE = 8, 64
SMALL = ModelShape(vocab=256, layers=3, hidden=48, heads=4, kv_heads=2, ffn=96, max_positions=SEQUENCE)
SHAPES = {
    "dense": SMALL,
    "window": replace(SMALL, window=9, qk_norm=True, qkv_bias=True),
    "gpt2": replace(SMALL, family="gpt2", kv_heads=4, norm="layernorm", mlp="gelu_tanh", positions="learned"),
    "experts": replace(SMALL, family="mixtral", moe=MoEShape(experts=4, top_k=2, ffn=48)),
    "latent": replace(SMALL, kv_heads=4, mla=MLAShape(q_rank=24, kv_rank=16, nope_dim=12, rope_dim=8, v_dim=12)),
    "long": replace(SMALL, layers=2, hidden=128, heads=2, kv_heads=1, head_dim=64, max_positions=256),
}
"""`long`: rows and heads as of real models, which attend on a CPU in compiled loops (kernels.attention.attend.LONG)."""
AGAIN = RECOMPUTE[1:]
"""Policies beside `none`."""


def batch(sequence: int) -> Batch:
    """Random tokens; row r counts 8 r + 1 targets, so that no two micro-batches weigh alike."""
    tokens = torch.randint(0, SMALL.vocab, (ROWS, sequence + 1), generator=torch.Generator().manual_seed(0))
    targets = tokens[:, 1:].clone()
    for row in range(ROWS):
        targets[row, 8 * row + 1 :] = -100
    return Batch(tokens=tokens[:, :-1], targets=targets, valid=int((targets >= 0).sum()))


def step(shape: ModelShape, micro_batch: int, recompute: Recompute) -> dict[str, Tensor]:
    """Loss and every gradient of one step."""
    model = build(shape, seed=1)
    engine = on_one_device(model, Layout(recompute=recompute))
    optimizer = Optimizer(model.train().named_parameters(), Recipe())
    whole = batch(shape.max_positions)
    micro_batches = [replace(part, valid=int((part.targets >= 0).sum())) for part in split(whole, micro_batch)]
    result = train_step(engine, optimizer, micro_batches, rate=0.0, clip=0.0, balance_loss=0.01)
    moments = {name: t.clone() for name, t in optimizer.tensors().items() if name.startswith("moment1.")}
    return {"loss": result.loss, **moments}


def relative_difference(values: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest over all tensors of |a - b| / |a|, Euclidean norms."""
    return max(float((values[name] - other[name]).norm() / values[name].norm().clamp(min=1e-30)) for name in values)


def measure() -> dict[str, Any]:
    """Per shape: tensors that any recomputation changes, and how far 1 x 8 is from 8 x 1."""
    figures = {}
    for name, shape in SHAPES.items():
        plain = step(shape, ROWS, "none")
        again = [step(shape, ROWS, policy) for policy in AGAIN]
        changed = sum(not torch.equal(plain[key], other[key]) for other in again for key in plain)
        figures[name] = {
            "recompute_differing_tensors": changed,
            "accumulation_relative_difference": relative_difference(plain, step(shape, 1, "none")),
        }
    return {
        "recompute_differing_tensors": sum(row["recompute_differing_tensors"] for row in figures.values()),
        "accumulation_relative_difference": max(row["accumulation_relative_difference"] for row in figures.values()),
        "shapes": figures,
    }


def main() -> None:
    """Print the table, or one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    result = measure()
    if options.json:
        print(json.dumps(result, indent=1))
        return
    print("gradients with recomputation against none; one batch of 8 sequences against 8 accumulated ones of 1")
    for name, row in result["shapes"].items():
        changed, far = row["recompute_differing_tensors"], row["accumulation_relative_difference"]
        print(
            f"{name:<10} {changed} gradients differ by recomputation; by accumulation they differ by at most {far:.1e}"
        )


if __name__ == "__main__":
    main()
