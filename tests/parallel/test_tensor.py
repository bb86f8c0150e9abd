"""What tensor and sequence parallelism keep between the passes, and what runs beside what in the second."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.observe.oracle.features import shrink
from meshwright.observe.ranks import on_ranks
from meshwright.parallel import build_engine, make_mesh
from meshwright.parallel.axes.sequence import SequenceSlices, gather
from meshwright.parallel.axes.tensor import ColumnParallelProducts, RowParallelProducts
from meshwright.parallel.groups.group import Group
from meshwright.spec import Layout, ModelShape

ROWS, SEQUENCE = 2, 32


def kept_bytes(shape: ModelShape, options: list[dict[str, object]]) -> list[int]:
    """Of each layout, what one block keeps for its backward pass: storages that are neither parameters nor tables."""
    sizes = []
    for each in options:
        layout = Layout(compile="off", **each)  # type: ignore[arg-type]
        model = build_engine(shape, layout).model
        positions = torch.arange(SEQUENCE).expand(ROWS, SEQUENCE)
        attention_metadata = model.attention_metadata(positions, SEQUENCE, None)
        block = next(iter(model.layers.values()))
        metadata = attention_metadata[block.window]
        known = {p.data_ptr() for p in model.parameters()}
        known |= {t.data_ptr() for t in (metadata.cos, metadata.sin) if t is not None}
        storages: dict[int, int] = {}

        def keep(tensor: Tensor, known: set[int] = known, storages: dict[int, int] = storages) -> Tensor:
            storage = tensor.untyped_storage()
            if tensor.is_floating_point() and storage.data_ptr() not in known:
                storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        slices = layout.tp if layout.sp else 1
        x = torch.randn(ROWS, SEQUENCE // slices, shape.hidden, requires_grad=True)
        with saved_tensors_hooks(keep, lambda tensor: tensor):
            out, _ = block(x, metadata)
            sizes.append(sum(storages.values()))
        out.sum().backward()
    return sizes


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


def slices(pieces: int, sp: bool) -> SequenceSlices:
    layout = Layout(tp=2, sp=sp, tp_chunks=pieces)
    return SequenceSlices(make_mesh(layout)["tp"], sp, partial(layout.tp_pieces, hidden=8, device="cpu"))


def column_order(sp: bool, pieces: int) -> tuple[list[str], list[str]]:
    """(of the forward pass, of the backward pass)"""
    x = torch.randn(2, 4, 8, requires_grad=True)
    weights = [torch.randn(6, 8, requires_grad=True) for _ in range(2)]
    with Order() as forward:
        first, second = ColumnParallelProducts(slices(pieces, sp)).linears(x, weights, (None, None))
    with Order() as backward:
        (first.sum() + second.sum()).backward()
    assert x.grad is not None and x.grad.shape == x.shape
    return forward.seen, backward.seen


def row_order(sp: bool, pieces: int) -> tuple[list[str], list[str]]:
    x, weight = torch.randn(1, 8, 6, requires_grad=True), torch.randn(8, 6, requires_grad=True)
    with Order() as forward:
        out = RowParallelProducts(slices(pieces, sp)).linear(x, weight)
    with Order() as backward:
        out.sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape
    return forward.seen, backward.seen


GATHER, SCATTER, SUM = "allgather_base", "reduce_scatter_base", "allreduce"


@pytest.mark.parametrize(
    ("sp", "pieces", "forward", "backward"),
    [
        (False, 1, ["mm", "mm"], ["mm", "addmm", SUM, "mm", "mm"]),
        (True, 1, [GATHER, "mm", "mm"], [GATHER, "mm", "addmm", SCATTER, "mm", "mm"]),
        (True, 2, [GATHER, GATHER] + 4 * ["mm"], [GATHER, GATHER, "mm", "addmm", SCATTER, SCATTER, "mm", "mm"]),
    ],
)
def test_collectives_before_products_begin_before_the_products_that_they_run_beside(
    sp: bool, pieces: int, forward: list[str], backward: list[str]
) -> None:
    assert on_ranks(2, column_order, sp, pieces) == [(forward, backward)] * 2


@pytest.mark.parametrize(
    ("sp", "pieces", "forward", "backward"),
    [
        (False, 1, ["mm", SUM], ["mm", "mm"]),
        (False, 2, ["mm", SUM, "mm", SUM], ["mm", "mm"]),
        (True, 1, ["mm", SCATTER], [GATHER, "mm", "mm"]),
        (True, 2, ["mm", SCATTER, "mm", SCATTER], [GATHER, GATHER, "mm", "mm", "mm"]),
    ],
)
def test_the_sum_behind_a_product_is_under_way_while_the_next_piece_is_multiplied(
    sp: bool, pieces: int, forward: list[str], backward: list[str]
) -> None:
    assert on_ranks(2, row_order, sp, pieces) == [(forward, backward)] * 2


def in_pieces(sp: bool, rows: int, pieces: int) -> list[Tensor]:
    """On one rank: a column-parallel and a row-parallel product, one after the other, and all gradients; everything
    that is in slices is put in the order of the sequence."""
    made, generator = slices(pieces, sp), torch.Generator().manual_seed(7)

    def number(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator, dtype=torch.float64)

    x, first, bias, second, last = number(rows, 12, 8), number(10, 8), number(10), number(8, 10), number(8)
    begin, rank = made.group.index * 5, made.group.index
    x = made.mine(x) if sp else x
    inputs = [x, *(t.narrow(dim, begin, 5).clone() for t, dim in ((first, 0), (bias, 0), (second, 1)))]
    leaves = [tensor.requires_grad_() for tensor in inputs]
    (inner,) = ColumnParallelProducts(made).linears(leaves[0], (leaves[1],), (leaves[2],))
    out = RowParallelProducts(made).linear(torch.tanh(inner), leaves[3], last if rank == 0 else None)
    weights = torch.arange(out.numel() * (2 if sp else 1), dtype=torch.float64).view(rows, 12, 8).sin()
    (out * (made.mine(weights) if sp else weights)).sum().backward()
    gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
    assert len(gradients) == 4
    whole = [
        gather(made.group, tensor.detach(), made.of_slice(tensor)) if sp else tensor for tensor in (out, gradients[0])
    ]
    return [tensor.detach() for tensor in (*whole, *gradients[1:])]


@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
def test_pieces_give_what_the_whole_sequence_gives(sp: bool, rows: int) -> None:
    for pieces in (2, 3):
        for whole, other in zip(
            on_ranks(2, in_pieces, sp, rows, 1), on_ranks(2, in_pieces, sp, rows, pieces), strict=True
        ):
            for expected, computed in zip(whole, other, strict=True):
                torch.testing.assert_close(computed, expected, rtol=1e-12, atol=1e-12)


def test_a_rank_has_its_slice_of_every_piece() -> None:
    positions = torch.arange(8).view(1, 8)

    def mine(rank: int, pieces: int) -> list[int]:
        made = SequenceSlices(Group("tp", (0, 1), rank), True, lambda _: pieces)
        mine: list[int] = made.mine(positions)[0].tolist()
        return mine

    assert [mine(rank, 1) for rank in (0, 1)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [mine(rank, 2) for rank in (0, 1)] == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_long_sequences_pass_in_two_pieces_on_the_gpus_of_a_node() -> None:
    assert [Layout(tp=2, sp=True).tp_pieces(n, 4096, "cuda") for n in (4096, 8192, 8194)] == [1, 2, 1]
    assert Layout(tp=2).tp_pieces(8194, 4096, "cuda") == 2
    assert Layout(tp=16).tp_pieces(8192, 4096, "cuda") == 1
    assert Layout(tp=2).tp_pieces(8192, 4096, "cpu") == Layout().tp_pieces(8192, 4096, "cuda") == 1
    assert Layout(tp=2, tp_chunks=4).tp_pieces(16, 8, "cpu") == 4
