"""What the planner says that adapters beside frozen matrices keep, against the engine and against a dry run of it."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from meshwright.kernels.linear.linear import WeightProduct
from meshwright.kernels.linear.weight_gradients import WeightGradients, splitting
from meshwright.model import build
from meshwright.observe.dryrun.simulate import dry_run
from meshwright.planner.cost.block import _widths
from meshwright.planner.cost.micro_batch import local_shape
from meshwright.planner.cost.stack import MESHWRIGHT
from meshwright.planner.cost.weight_product import queued
from meshwright.planner.step.predict import predict
from meshwright.spec import Layout, ModelShape, Recipe
from meshwright.spec.model.shape import LoRAShape
from tests.planner.test_peaks import plan

SHAPE = ModelShape(layers=4, hidden=256, heads=4, kv_heads=2, ffn=768, vocab=2048, max_positions=8192)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_what_a_split_backward_pass_leaves_of_adapters_is_as_large_as_planned(dropout: float) -> None:
    """With dropout each adapter reads an input of its own."""
    shape = replace(SHAPE, lora=LoRAShape(rank=8, targets="attention", dropout=dropout))
    tokens = torch.randint(0, SHAPE.vocab, (2, 128))
    model = build(shape, dropout=0.0)
    with splitting():
        loss = model.loss(tokens, tokens).cross_entropy
        queue = WeightGradients()
        with queue:
            loss.backward()
    products = [product for each in queue._deferred.values() for product in each]
    left = [
        part for product in products if isinstance(product, WeightProduct) for part in (product.gradient, product.x)
    ]
    assert len(left) == 2 * len(products)
    storages = {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes()
                for part in left if isinstance(part, torch.Tensor)}  # fmt: skip
    local = local_shape(shape, MESHWRIGHT, Layout(compile="off"), 128, 2, 4)
    planned = SHAPE.layers * queued(local, _widths(local), None)
    assert sum(storages.values()) == pytest.approx(planned, rel=0.1)


@pytest.mark.parametrize("recompute", ["none", "norms"])
def test_what_was_gathered_beside_codes_is_kept_whatever_norms_do(recompute: str) -> None:
    """Under sequence parallelism an adapter reads what was gathered, which no norm can make again."""
    shape = replace(SHAPE, lora=LoRAShape(rank=8, targets="q,v", base="nf4-double"))
    recipe = Recipe(sequence=2048, global_batch=4, precision="bf16")
    asked = plan(shape, recipe, tp=4, sp=True, recompute=recompute, compile="off", micro_batch=4)
    seen = dry_run(asked, ranks=[0], device="cuda").ranks[0]
    planned = predict(asked).memory[0]
    assert planned.kinds["activations"] == pytest.approx(seen.kinds["activations"], rel=0.06)


UNCOMPILED: dict[str, dict[str, Any]] = {
    "codes": {"shape": replace(SHAPE, lora=LoRAShape(rank=8, base="nf4"))},
    "rounded": {"recipe": Recipe(sequence=2048, global_batch=4, fake_quantize="nf4")},
}


@pytest.mark.parametrize("name", UNCOMPILED)
def test_what_is_not_compiled_takes_as_long_as_with_compiling_off(name: str) -> None:
    """Without Triton's kernels, which fuse as the compiler does."""
    plain: dict[str, Any] = {"shape": SHAPE, "recipe": Recipe(sequence=2048, global_batch=4)}
    for settings, alike in ((plain, False), (plain | UNCOMPILED[name], True)):
        on, off = (predict(plan(**settings, compile=compile, kernels="eager")).step_s for compile in ("on", "off"))
        assert (on == off) == alike
