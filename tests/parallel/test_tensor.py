"""What tensor and sequence parallelism keep between the passes, and what runs beside what in the second."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.observe.ranks import on_ranks
from meshwright.observe.tiny_models import shrink
from meshwright.parallel import build_engine, make_mesh
from meshwright.parallel.column_parallel import ColumnParallelProducts
from meshwright.spec import Layout, ModelShape

ROWS, SEQUENCE = 2, 32


def kept_bytes(shape: ModelShape, options: list[dict[str, object]]) -> list[int]:
    """Of each layout, what one block keeps for its backward pass: storages that are neither parameters nor tables."""
    found = []
    for each in options:
        layout = Layout(compile="off", **each)  # type: ignore[arg-type]
        model = build_engine(shape, layout).model
        positions = torch.arange(SEQUENCE).expand(ROWS, SEQUENCE)
        sights = model.sights(positions, SEQUENCE, None)
        block = next(iter(model.layers.values()))
        sight = sights[block.window]
        known = {p.data_ptr() for p in model.parameters()}
        known |= {t.data_ptr() for t in (sight.cos, sight.sin) if t is not None}
        kept: dict[int, int] = {}

        def keep(tensor: Tensor, known: set[int] = known, kept: dict[int, int] = kept) -> Tensor:
            storage = tensor.untyped_storage()
            if tensor.is_floating_point() and storage.data_ptr() not in known:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        slices = layout.tp if layout.sp else 1
        x = torch.randn(ROWS, SEQUENCE // slices, shape.hidden, requires_grad=True)
        with saved_tensors_hooks(keep, lambda tensor: tensor):
            out, _ = block(x, sight)
            found.append(sum(kept.values()))
        out.sum().backward()
    return found


@pytest.mark.parametrize(("kind", "t"), [("llama-3.1-8b", 4), ("gpt2-124m", 2)])
def test_sequence_parallelism_keeps_a_part_of_every_activation(kind: str, t: int) -> None:
    """Korthikanti et al. 2022, section 4.2.2: all activations of a block are divided by t, the products' inputs too."""
    shape = replace(shrink(kind), hidden=32, heads=4, kv_heads=4, head_dim=8, ffn=64)
    (whole,) = kept_bytes(shape, [{}])
    for split, unsplit in on_ranks(t, kept_bytes, shape, [{"tp": t, "sp": True}, {"tp": t}]):
        assert split * t == whole < unsplit * t


class Order(TorchDispatchMode):
    """Products and collectives in the order in which they begin."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = operation.overloadpacket.__name__
        if operation.namespace == "c10d" or name in ("mm", "addmm_"):
            self.seen.append(name.strip("_"))
        return operation(*args, **(kwargs or {}))


def backward_order(sp: bool) -> list[str]:
    tp = make_mesh(Layout(tp=2, sp=sp))["tp"]
    x = torch.randn(2, 4, 8, requires_grad=True)
    weights = [torch.randn(6, 8, requires_grad=True) for _ in range(2)]
    first, second = ColumnParallelProducts(tp, sp).linears(x, weights, (None, None))
    with Order() as order:
        (first.sum() + second.sum()).backward()
    assert x.grad is not None and x.grad.shape == x.shape
    return order.seen


@pytest.mark.parametrize(
    ("sp", "order"),
    [
        (False, ["mm", "addmm", "allreduce", "mm", "mm"]),
        (True, ["allgather_base", "mm", "addmm", "reduce_scatter_base", "mm", "mm"]),
    ],
)
def test_collectives_of_the_backward_pass_begin_before_the_products_that_they_run_beside(
    sp: bool, order: list[str]
) -> None:
    assert on_ranks(2, backward_order, sp) == [order, order]
