"""The time of rounding weights (recipe.fake_quantize): its passes over memory, counted on the code that rounds."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshwright.model import build, fake_quantized
from meshwright.model.fake_quantized import put_fake_quantization, rounded_rows, straight_through
from meshwright.planner.cost.block import layer
from meshwright.planner.cost.micro_batch import local_shape
from meshwright.planner.cost.stack import MESHWRIGHT
from meshwright.planner.cost.weight_product import PASSES, ROWS
from meshwright.planner.cost.work import MemoryPass
from meshwright.planner.step.predict import predict
from meshwright.spec import Layout, Plan, Recipe, presets
from meshwright.spec.model.quantization_schemes import PIECE, SCHEMES
from meshwright.spec.model.shape import MoEShape
from meshwright.spec.rules.passes import learnable
from tests.training.distilling import ROUTED
from tests.training.running import SHAPE


class Counted(TorchDispatchMode):
    """Bytes that operations read and write, and how many do; what only looks at a tensor otherwise is none."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.operations = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outcome = func(*args, **(kwargs or {}))
        read, made = (
            [tensor for tensor in tree_leaves(tree) if isinstance(tensor, torch.Tensor)] for tree in (args, outcome)
        )
        if any(_same_memory(tensor, other) for tensor in made for other in read) and "_" not in func.__name__[-9:]:
            return outcome
        if "empty" not in func.__name__:
            self.bytes += sum(
                tensor.nbytes for tensor in (*read, *(tensor for tensor in made if all(tensor is not a for a in read)))
            )
            self.operations += 1
        return outcome


def _same_memory(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return tensor.untyped_storage().data_ptr() == other.untyped_storage().data_ptr() and tensor is not other


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("what", [*learnable(), ROWS])
def test_a_piece_takes_as_many_bytes_and_kernels_as_the_planner_says(what: str, dtype: torch.dtype) -> None:
    piece = torch.randn(1024, PIECE // 1024, dtype=dtype)
    with Counted() as counted, torch.no_grad():
        rounded_rows(piece) if what == ROWS else straight_through(piece, SCHEMES[what])
    fp32, narrow, launches = PASSES[what]
    moved = counted.bytes / piece.numel()
    assert moved == pytest.approx(fp32 if dtype == torch.float32 else narrow, rel=0.01)
    assert counted.operations == pytest.approx(launches, abs=2)


SHAPES = {
    "dense": replace(SHAPE, hidden=256, heads=4, kv_heads=2, head_dim=64, ffn=384),
    "mixture": replace(ROUTED, hidden=256, heads=4, kv_heads=1, head_dim=64, moe=MoEShape(experts=4, top_k=2, ffn=128)),
}


@pytest.mark.parametrize("scheme", ["int4-rtn", "int8"])
@pytest.mark.parametrize("name", SHAPES)
def test_a_model_rounds_in_a_pass_forward_what_the_planner_counts(
    name: str, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, counted = SHAPES[name], Counted()

    def counting(do: Any) -> Any:
        def counts(*args: Any) -> Any:
            with counted:
                return do(*args)

        return counts

    for each in ("straight_through", "rounded_rows"):
        monkeypatch.setattr(fake_quantized, each, counting(getattr(fake_quantized, each)))
    model = build(shape, seed=1)
    put_fake_quantization([model], shape, scheme)
    model(torch.randint(shape.vocab, (2, 32)))
    local = local_shape(shape, MESHWRIGHT, Layout(compile="off"), 32, 2, 4, fake_quantize=scheme)
    works = [
        work
        for number in range(shape.layers)
        for op in layer(local, routed=number >= shape.layers - shape.routed_layers).operations
        if op.name.startswith("rounding")
        for work in op.forward
    ]
    passes = [work for work in works if isinstance(work, MemoryPass)]
    assert counted.bytes == pytest.approx(sum(work.moved_bytes for work in passes), rel=0.03)
    assert counted.operations == pytest.approx(sum(work.launches for work in passes), rel=0.1)


@pytest.mark.parametrize("recompute", ["none", "norms", "selective", "full"])
def test_a_step_takes_longer_by_the_passes_and_again_where_copies_are_made_again(recompute: Any) -> None:
    """A step of Llama 3.1 8B with one sequence on a device: 84 bytes for each of 7 billion weights, in kernels so short
    that the host's launches take longer."""
    recipe = Recipe(sequence=4096, global_batch=8, precision="bf16", fake_quantize="int4-rtn")
    layout = Layout(dp_shard=8, zero=3, micro_batch=1, recompute=recompute, compile="off")
    plan = Plan(model=presets.model("llama-3.1-8b"), recipe=recipe, layout=layout, cluster=presets.cluster("h100x8", 1))
    plain = replace(plan, recipe=replace(recipe, fake_quantize="none"))
    longer = predict(plan).step_s - predict(plain).step_s
    weights = 32 * (2 * 4096 * (4096 + 1024) + 3 * 4096 * 14336)
    launched, moved = 52 * weights / PIECE * MESHWRIGHT.host_s, 84.1 * weights / plan.cluster.device.memory_bytes_per_s
    times = 1 + (recompute == "full")
    assert moved < longer / times < moved + launched
