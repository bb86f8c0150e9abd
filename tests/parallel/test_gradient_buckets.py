"""Which gradients of replicas are summed together: the engine's buckets beside the planner's calls. No rank talks."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from meshwright import compat
from meshwright.model import build
from meshwright.parallel.axes.data import Bucket, replicate
from meshwright.parallel.groups.mesh import make_mesh
from meshwright.planner.time.collectives import traffic
from meshwright.spec import Layout, ModelShape, MoEShape, Plan, Recipe
from meshwright.spec.memory import held
from meshwright.spec.memory.held import bucket_counts
from meshwright.spec.model.shape import LoRAShape

DENSE = ModelShape(vocab=64, layers=5, hidden=32, heads=4, kv_heads=2, ffn=64, max_positions=64)
MIXED = replace(DENSE, moe=MoEShape(experts=4, top_k=2, ffn=32, first_dense=1))
SHAPES = {
    "dense": DENSE,
    "tied": replace(DENSE, tied=True),
    "experts": MIXED,
    "adapters": replace(DENSE, lora=LoRAShape(rank=4)),
}


@pytest.mark.parametrize(
    ("sizes", "counts"),
    [([], []), ([3], [1]), ([3, 3, 3, 3], [3, 1]), ([9, 1, 9, 1], [1, 2, 1]), ([8, 8], [1, 1]), ([0, 8, 8], [2, 1])],
)
def test_a_bucket_is_full_from_its_bytes_on(
    monkeypatch: pytest.MonkeyPatch, sizes: list[int], counts: list[int]
) -> None:
    monkeypatch.setattr(held, "BUCKET_BYTES", 8)
    assert bucket_counts(sizes) == counts


def buckets_of(shape: ModelShape, layout: Layout) -> list[Bucket]:
    with compat.fake_world(0, layout.world):
        mesh = make_mesh(layout)
        model = build(shape, seed=0)
        if layout.ep > 1:
            for block in model.blocks:
                if block.routed:  # as many experts as a rank has
                    experts = block.mlp.experts  # type: ignore[union-attr]
                    for name, held in list(experts.named_parameters()):
                        setattr(experts, name, torch.nn.Parameter(held[: len(held) // layout.ep].clone()))
        return list(replicate([model], mesh)[0].buckets)


@pytest.mark.parametrize("bucket_bytes", [1, 10_000, 40_000, 2**23])
@pytest.mark.parametrize(
    ("name", "degrees"),
    [*((name, {"dp_replicate": 4}) for name in SHAPES), ("experts", {"dp_shard": 4, "ep": 2, "zero": 0})],
    ids=str,
)
def test_the_planner_counts_the_buckets_of_the_engine(
    monkeypatch: pytest.MonkeyPatch, name: str, degrees: dict[str, Any], bucket_bytes: int
) -> None:
    """Calls and bytes. Every parameter that learns is in one bucket, and all but the last of a group are full."""
    shape, layout = SHAPES[name], Layout(compile="off", **degrees)
    monkeypatch.setattr(held, "BUCKET_BYTES", bucket_bytes)
    buckets = buckets_of(shape, layout)
    sizes = [(bucket.group.axis, sum(p.numel() for p in bucket.parameters) * 4) for bucket in buckets]
    assert len({p for bucket in buckets for p in bucket.parameters}) == sum(
        len(bucket.parameters) for bucket in buckets
    )
    for axis in {axis for axis, _ in sizes}:
        full = [size for of_axis, size in sizes if of_axis == axis]
        assert all(size >= bucket_bytes for size in full[:-1])
    plan = Plan(model=shape, layout=layout, recipe=Recipe(sequence=32, global_batch=layout.dp, precision="fp32"))
    planned = {(bucket.axis, bucket.collective): (bucket.calls, bucket.sent_bytes) for bucket in traffic(plan)}
    for axis, count in Counter(axis for axis, _ in sizes).items():
        ranks = next(bucket.group.size for bucket in buckets if bucket.group.axis == axis)
        sent = sum(2 * (ranks - 1) * size // ranks for of_axis, size in sizes if of_axis == axis)
        numbers = (1, 2 * (ranks - 1) * 8 // ranks) if axis == "data" else (0, 0)  # tokens of the step
        assert planned[axis, "all_reduce"] == (count + numbers[0], sent + numbers[1])
