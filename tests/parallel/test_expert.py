"""Experts on 2 and 4 processes against all experts on one device."""

from collections.abc import Callable
from dataclasses import replace
from itertools import groupby
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from meshwright.kernels import fast
from meshwright.model import Transformer
from meshwright.model.feed_forward import Experts, MoE
from meshwright.observe.ranks import on_ranks
from meshwright.parallel.axes.expert import apply_expert_parallel, apply_sequence_groups, sort_runs
from meshwright.parallel.blocks.recompute import block_call
from meshwright.parallel.groups.group import Group, Pending
from meshwright.parallel.groups.mesh import make_mesh
from meshwright.spec import Layout
from tests.model.shrunk import model, shrink, tokens
from tests.parallel.strict import strict
from tests.parallel.telling import Told
from tests.parallel.test_tensor import Order

LENGTH, HIDDEN = 16, 24


def layer(name: str, **changes: object) -> MoE:
    """A routed feed-forward with all its experts, the same on every rank."""
    shape = shrink(name)
    assert shape.moe is not None
    mixture = MoE(replace(shape, moe=replace(shape.moe, **changes)), fast())  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in mixture.parameters():
            parameter.normal_(0, 0.4, generator=generator)
        if mixture.moe.correction_bias:
            mixture.router.correction_bias.normal_(0, 0.3, generator=generator)
    return mixture


def only(*experts: int) -> Callable[[MoE], None]:
    """Bend a router so that every token (whose numbers are positive) goes to these experts."""

    def bend(mixture: MoE) -> None:
        with torch.no_grad():
            mixture.router.weight.mul_(0.01)
            mixture.router.weight[list(experts)] += 0.1

    return bend


def uneven(mixture: MoE) -> None:
    """Every token goes to expert 1, none to expert 6."""
    with torch.no_grad():
        mixture.router.weight[1] += 0.3
        mixture.router.weight[6] -= 10.0


def as_it_is(mixture: MoE) -> None:
    pass


CASES: dict[str, tuple[str, dict[str, object], Callable[[MoE], None]]] = {
    "top-2": ("mixtral-8x7b", {}, as_it_is),
    "top-3": ("qwen3-30b-a3b", {}, as_it_is),
    "top-1, uneven": ("mixtral-8x7b", {"top_k": 1}, uneven),
    "top-3, uneven": ("qwen3-30b-a3b", {}, uneven),
    "top-1, one expert": ("mixtral-8x7b", {"top_k": 1}, only(5)),
    "top-2, first rank": ("mixtral-8x7b", {}, only(0, 1)),
    "sigmoid, groups, bias, shared": ("deepseek-v3", {}, as_it_is),
    "sigmoid, groups, bias, shared, uneven": ("deepseek-v3", {}, only(7)),
}


def distance(computed: Tensor, wanted: Tensor) -> float:
    """Distance relative to the size of what is wanted."""
    assert computed.shape == wanted.shape
    return ((computed - wanted).norm() / wanted.norm().clamp(min=1e-30)).item()


def assert_gradients(split: nn.Module, whole: nn.Module, group: Group) -> None:
    """Experts: the slice of one device's, summed already. The rest: equal once summed over the ranks."""
    wanted = dict(whole.named_parameters())
    for name, parameter in split.named_parameters():
        assert parameter.grad is not None, name
        expected = wanted[name].grad
        assert expected is not None
        if ".experts." in f".{name}":
            local = len(expected) // group.size
            expected = expected[group.index * local : (group.index + 1) * local]
            unseen = [i for i in range(local) if not expected[i].any()]
            assert not parameter.grad[unseen].any(), name
        else:
            group.all_reduce(parameter.grad)
        assert distance(parameter.grad, expected) < 1e-5, name


def visits(whole: MoE, x: Tensor) -> list[Tensor]:
    """Rows that each rank (a sequence of x) has for each expert."""
    with torch.no_grad():
        return [torch.bincount(whole.router(part)[1].flatten(), minlength=whole.moe.experts) for part in x]


def closed_form_bytes(rows: list[Tensor], group: Group) -> dict[str, int]:
    """What a rank sends in the forward pass (counts, rows, results) and in the backward pass."""
    local = len(rows[0]) // group.size
    runs = torch.stack(rows).view(group.size, group.size, local).sum(2)
    here = group.index
    leaving = int(runs[here].sum() - runs[here, here])
    arriving = int(runs[:, here].sum() - runs[here, here])
    exchange_passes = (leaving + arriving) * HIDDEN * 4
    return {"forward": 8 * (len(rows[0]) - local) + exchange_passes, "backward": exchange_passes}


def _layer_cases(world: int, pieces: int) -> list[dict[str, Any]]:
    told = Told()
    group = make_mesh(Layout(dp_shard=world, ep=world), traffic=told)["ep"]
    with strict(pieces):
        return [_layer_case(case, group, told, pieces) for case in CASES]


def _layer_case(case: str, group: Group, told: Told, pieces: int) -> dict[str, Any]:
    name, changes, bend = CASES[case]
    whole, split = layer(name, **changes), layer(name, **changes)
    bend(whole)
    bend(split)
    apply_expert_parallel(split, group, lambda rows: pieces)
    assert len(split.experts.gate) == len(split.experts.down) == 8 // group.size
    generator = torch.Generator().manual_seed(1)
    x, pull = (torch.randn(group.size, LENGTH, HIDDEN, generator=generator) for _ in range(2))
    x = x if bend is as_it_is else x.abs()
    here = slice(group.index, group.index + 1)
    mine, x = x[here].clone().requires_grad_(), x.requires_grad_()
    out, balance = whole(x)
    ((out * pull).sum() + balance.sum()).backward()
    told.calls.clear()
    my_out, my_balance = split(mine)
    forward = list(told.calls)
    ((my_out * pull[here]).sum() + my_balance.sum()).backward()
    backward = told.calls[len(forward) :]
    assert distance(my_out, out[here]) < 1e-5 and distance(my_balance, balance[here]) < 1e-5, case
    assert mine.grad is not None and x.grad is not None
    assert distance(mine.grad, x.grad[here]) < 1e-5, case
    sent = {key: sum(what[2] for what in part) for key, part in (("forward", forward), ("backward", backward))}
    rows = visits(whole, x)
    assert sent == closed_form_bytes(rows, group), case
    assert_gradients(split, whole, group)
    return {"kinds": [what[:2] for what in forward + backward], "rows": torch.stack(rows).sum(0).tolist()}


@pytest.mark.parametrize(("world", "pieces"), [(2, 1), (2, 2), (2, 4), (4, 1), (4, 2)])
@pytest.mark.long
def test_outputs_gradients_and_bytes_equal_one_device(world: int, pieces: int) -> None:
    """In pieces for several experts of a rank, and for one each. Under collectives as strict as NCCL's."""
    results = on_ranks(world, _layer_cases, world, pieces)
    for number, case in enumerate(CASES):
        kinds = [result[number]["kinds"] for result in results]
        calls = 1 + 4 * pieces
        assert kinds == [[("ep", "all_to_all")] * calls] * world, "the same on all ranks, whatever the routing"
        rows = results[0][number]["rows"]
        assert (0 in rows) == (CASES[case][2] is not as_it_is), (case, rows)
    seen = dict(zip(CASES, (result["rows"] for result in results[0]), strict=True))
    assert [seen["top-1, one expert"][i] for i in (0, 5)] == [0, LENGTH * world], "ranks whose experts see nobody"
    assert not any(seen["top-2, first rank"][2:]), "others send all they have"
    assert 0 < max(seen["top-3, uneven"]) == LENGTH * world and seen["top-3, uneven"][6] == 0


def _order(name: str, pieces: int) -> list[list[str]]:
    """Products and collectives of a forward and of a backward pass, as they begin; runs of products as one."""
    mesh, split = make_mesh(Layout(dp_shard=2, ep=2)), layer(name)
    apply_expert_parallel(split, mesh["ep"], lambda rows: pieces)
    x = torch.ones(1, LENGTH, HIDDEN, requires_grad=True)
    with torch.no_grad():  # every token has every expert's attention: no product is left out
        split.router.weight.zero_()
    split.moe = split.router.moe = replace(split.moe, top_k=8, groups=1, top_groups=1)
    with Order() as forward:
        out = split(x)[0]
    with Order() as backward:
        out.sum().backward()
    return [merged(["mm" if name == "addmm" else name for name in log.seen]) for log in (forward, backward)]


@pytest.mark.parametrize("pieces", [1, 2, 4])
@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "deepseek-v3"])
@pytest.mark.long
def test_rows_are_under_way_while_others_are_multiplied(name: str, pieces: int) -> None:
    """The first products are the router's; shared experts multiply while rows come and while they return."""
    shared = ["mm"] if name == "deepseek-v3" else []
    trip, visits = ["alltoall_base"], (["mm", "alltoall_base"] * pieces)
    exchange_passes = [*trip * pieces, *shared, *visits, *shared]
    forward = ["mm", *trip, *exchange_passes]
    backward = [*exchange_passes, "mm"]
    assert on_ranks(2, _order, name, pieces) == [[merged(forward), merged(backward)]] * 2


def merged(names: list[str]) -> list[str]:
    return [name for name, _ in groupby(names)]


def one_pass(transformer: Transformer, rows: Tensor) -> Tensor:
    loss = transformer.loss(rows[:, :-1], rows[:, 1:])
    assert loss.balance is not None
    total = loss.cross_entropy + loss.balance.sum()
    total.backward()
    return total.detach()


def _whole_models(world: int, name: str) -> dict[str, list[tuple[str, str]]]:
    """Loss and gradients with every recomputation equal one device's, and without it, bit for bit, each other."""
    told = Told()
    group = make_mesh(Layout(dp_shard=world, ep=world), traffic=told)["ep"]
    rows = tokens(world, 13)
    whole, kinds, plain = model(name), {}, {}
    wanted = one_pass(whole, rows)
    for recompute in ("none", "selective", "full"):
        split = model(name)
        apply_expert_parallel(split, group)
        split.seams.call = block_call(recompute)
        told.calls.clear()
        loss = one_pass(split, rows[group.index : group.index + 1])
        kinds[recompute] = [what[:2] for what in told.calls]
        gradients = {name: parameter.grad.clone() for name, parameter in split.named_parameters()}
        plain = plain or gradients
        assert all(torch.equal(gradient, plain[name]) for name, gradient in gradients.items()), recompute
        assert distance(group.all_reduce(loss), wanted) < 1e-5
        assert_gradients(split, whole, group)
    return kinds


@pytest.mark.parametrize("name", ["mixtral-8x7b", "deepseek-v3"])
def test_recomputation_repeats_the_collectives_on_all_ranks(name: str) -> None:
    results = on_ranks(2, _whole_models, 2, name)
    assert results[0] == results[1]
    routed = 3 if name == "mixtral-8x7b" else 2
    assert {key: len(value) for key, value in results[0].items()} == {
        "none": 5 * routed,
        "selective": 5 * routed,
        "full": 8 * routed,
    }


def _parts_of_sequences(padded: bool) -> list[float]:
    """ep over cp and tp ranks, each with a quarter of both sequences; the last quarter of one and more may be
    padding."""
    mesh = make_mesh(Layout(cp=2, tp=2, ep=4, sp=True))
    group, whole, split = mesh["ep"], layer("deepseek-v3"), layer("deepseek-v3")
    apply_expert_parallel(split, group)
    apply_sequence_groups(split, mesh["cp"], mesh["tp"])
    generator = torch.Generator().manual_seed(1)
    x, pull = (torch.randn(2, LENGTH, HIDDEN, generator=generator).chunk(4, 1) for _ in range(2))
    inputs = torch.cat(x, 1).requires_grad_()
    padding = torch.arange(LENGTH) >= torch.tensor([[LENGTH], [LENGTH // 4 + 1]]) if padded else None
    out, balance = whole(inputs, padding)
    weight = torch.tensor([3.0, 5.0])
    ((out * torch.cat(pull, 1)).sum() + (balance * weight).sum()).backward()
    mine = x[group.index].clone().requires_grad_()
    my_out, my_balance = split(mine, None if padding is None else padding.chunk(4, 1)[group.index])
    ((my_out * pull[group.index]).sum() + (my_balance * weight).sum() / group.size).backward()
    assert distance(my_out, out.chunk(4, 1)[group.index]) < 1e-5
    assert mine.grad is not None and inputs.grad is not None
    assert distance(mine.grad, inputs.grad.chunk(4, 1)[group.index]) < 1e-5
    assert_gradients(split, whole, group)
    alone = layer("deepseek-v3")(mine.detach())[1]
    assert distance(alone, balance) > 1e-3, "a part alone has another balance"
    assert distance(my_balance, balance) < 1e-5
    return balance.tolist()


@pytest.mark.parametrize("padded", [False, True])
def test_the_balance_loss_is_that_of_whole_sequences(padded: bool) -> None:
    assert len(on_ranks(4, _parts_of_sequences, padded)) == 4


@pytest.mark.parametrize("counts", [[[2, 0, 3], [1, 4, 0]], [[0, 0], [0, 0]], [[0, 5], [0, 0], [3, 1]]])
def test_runs_are_sorted_by_expert_and_then_by_rank(counts: list[list[int]]) -> None:
    arrived = [(e, r, i) for r, run in enumerate(counts) for e, count in enumerate(run) for i in range(count)]
    order, inverse = sort_runs(torch.tensor(counts), len(arrived))
    assert order is not None and inverse is not None
    assert [arrived[i] for i in order.tolist()] == sorted(arrived)
    assert order[inverse].tolist() == list(range(len(arrived)))


def test_each_piece_is_sorted_and_numbered_by_itself() -> None:
    counts = torch.tensor([[[2, 0, 3], [1, 4, 0]], [[0, 0, 1], [2, 0, 0]]])
    order, inverse = sort_runs(counts, int(counts.sum()))
    assert order is not None and inverse is not None
    for piece, begin, end in ((0, 0, 10), (1, 10, 13)):
        alone = sort_runs(counts[piece], end - begin)
        assert alone[0] is not None and alone[1] is not None
        assert torch.equal(order[begin:end], alone[0]) and torch.equal(inverse[begin:end], alone[1])


def test_one_expert_a_rank_needs_no_sorting() -> None:
    assert sort_runs(torch.tensor([[2], [3]]), 5) == (None, None)


class Unsent(Group):
    """A group of ranks that are not there: what arrives has the right shape and no values."""

    def start_all_to_all(
        self, rows: Tensor, sent: Any, received: Any, *, overlaps: bool = True, into: Tensor | None = None
    ) -> Pending:
        return Pending(rows.new_empty(sum(received), *rows.shape[1:]) if into is None else into)


def evenly(counts: Tensor, rows: int) -> list[list[int]]:
    """Routing that is given: every expert sees as many rows as any other."""
    tables, experts = counts.shape
    return [[rows // experts] * experts for _ in range(tables)]


def test_a_dry_run_is_given_its_routing() -> None:
    """Tensors without values: the counts are told by what stands in place of counts_on_host."""
    with FakeTensorMode():
        mixture = MoE(shrink("qwen3-30b-a3b"), fast())
        apply_expert_parallel(mixture, Unsent("ep", ranks=(0, 1, 2, 3), index=1))
        assert mixture.seams.dispatch.travels
        mixture.seams.counts_on_host = evenly
        x = torch.empty(2, LENGTH, HIDDEN, requires_grad=True)
        out, balance = mixture(x)
        (out.sum() + balance.sum()).backward()
        assert out.shape == x.shape and balance.shape == (2,)
        assert x.grad is not None and x.grad.shape == x.shape
        assert mixture.experts.gate.grad is not None and mixture.experts.gate.grad.shape == (2, 12, HIDDEN)


def test_stacks_that_are_this_ranks_already_are_left_alone() -> None:
    mixture = layer("mixtral-8x7b")
    group = Group("ep", ranks=(0, 1), index=1)
    apply_expert_parallel(mixture, group)
    gate = mixture.experts.gate
    assert torch.equal(gate, layer("mixtral-8x7b").experts.gate[4:])
    apply_expert_parallel(mixture, group)
    assert mixture.experts.gate is gate and isinstance(mixture.experts, Experts)
