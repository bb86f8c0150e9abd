"""Muon on one device: against torch's own in 16 bits, against its polynomial in fp64, its states, its skipped steps."""

from dataclasses import replace
from math import sqrt
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright import compat
from meshwright.compat import fake_tensors
from meshwright.kernels.optimizer.adamw import COEFFICIENTS
from meshwright.parallel import Engine, build_engine, make_mesh
from meshwright.spec import Layout, ModelShape, MoEShape, Recipe
from meshwright.spec.memory.matrix_exchange import ITERATIONS
from meshwright.spec.weights.inventory import parameters
from meshwright.training.optimizer.optimizer import Optimizer
from meshwright.training.optimizer.precision import DTYPES

ONE, ZERO = torch.ones(()), torch.zeros(())
SHAPE = ModelShape(
    vocab=64, layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, max_positions=16, qkv_bias=True,
    moe=MoEShape(experts=3, top_k=2, ffn=20, first_dense=1),
)  # fmt: skip
LARGE = replace(SHAPE, hidden=96, head_dim=24, ffn=128, moe=MoEShape(experts=3, top_k=2, ffn=64, first_dense=1))
"""Of matrices that are large enough for 8-bit momentum."""
RATE = 1e-2
KINDS = [
    ("fp32", "fp32", "fp32"), ("bf16", "fp32", "fp32"), ("fp16", "fp32", "fp32"), ("fp32", "bf16", "fp32"),
    ("bf16", "int8", "fp32"), ("bf16", "fp32", "none"), ("bf16", "bf16", "none"), ("bf16", "int8", "none"),
]  # fmt: skip
"""precision, optimizer_states, master_weights."""


def recipe_of(precision: str, states: str = "fp32", masters: str = "fp32", **changes: Any) -> Recipe:
    return Recipe(
        optimizer="muon", precision=precision, optimizer_states=states, master_weights=masters, **changes
    )  # type: ignore[arg-type]  # fmt: skip


def made(recipe: Recipe, shape: ModelShape = SHAPE) -> tuple[Engine, Optimizer]:
    engine = build_engine(shape, Layout(), mesh=make_mesh(Layout()), dtype=DTYPES[recipe.precision])
    return engine, Optimizer.for_engine(engine, recipe)


def gradients(named: dict[str, nn.Parameter], step: int) -> dict[str, Tensor]:
    """Of rows that differ by orders of magnitude."""
    generator, by_name = torch.Generator().manual_seed(100 + step), {}
    for name, parameter in named.items():
        scale = 10.0 ** (torch.arange(parameter.shape[0]) % 4 - 3.0)
        x = torch.randn(parameter.shape, generator=generator) * scale.view(-1, *[1] * (parameter.dim() - 1))
        by_name[name] = x.to(parameter.dtype)
    return by_name


def run(mine: Optimizer, steps: range, divide_by: float = 1.0) -> None:
    for step in steps:
        for name, gradient in gradients(mine.parameters, step).items():
            mine.parameters[name].grad = gradient
        mine.step(RATE, divide_by=torch.tensor(divide_by), skip=ZERO)
        mine.zero_grad()


def weights(mine: Optimizer) -> dict[str, Tensor]:
    return {name: mine.masters.get(name, p).detach().clone() for name, p in mine.parameters.items()}


def matrices(shape: ModelShape) -> set[str]:
    return {parameter.name for parameter in parameters(shape) if parameter.matrices}


def by_torch(start: dict[str, Tensor], mine: Optimizer, recipe: Recipe, steps: range) -> dict[str, Tensor]:
    """torch.optim.Muon over each matrix, torch.optim.AdamW over the rest."""
    hidden = matrices(SHAPE)
    each = {
        (name, n): nn.Parameter(x.clone())
        for name in hidden
        for n, x in enumerate(start[name].view(-1, *start[name].shape[-2:]))
    }
    rest = {name: nn.Parameter(x.clone()) for name, x in start.items() if name not in hidden}
    muon = torch.optim.Muon(
        each.values(), lr=RATE, weight_decay=recipe.weight_decay, momentum=recipe.momentum, eps=recipe.epsilon,
        adjust_lr_fn="match_rms_adamw",
    )  # fmt: skip
    groups = [
        {"params": [p for p in rest.values() if (p.dim() > 1) == decays], "weight_decay": 0.1 * decays}
        for decays in (True, False)
    ]
    adamw = torch.optim.AdamW(groups, lr=RATE, betas=(recipe.beta1, recipe.beta2), eps=recipe.epsilon)
    for step in steps:
        by_name = gradients(mine.parameters, step)
        for (name, n), parameter in each.items():
            parameter.grad = by_name[name].float().view(-1, *parameter.shape)[n].clone()
        for name, parameter in rest.items():
            parameter.grad = by_name[name].float()
        muon.step()
        adamw.step()
    updated = {name: p.detach() for name, p in rest.items()}
    for name in hidden:
        updated[name] = torch.stack([p.detach() for (owner, _), p in each.items() if owner == name]).view_as(
            start[name]
        )
    return updated


def test_every_step_is_that_of_torchs_muon_and_adamw(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bf16, in which torch orthogonalizes on every CPU: masters to fp32's rounding, step by step, experts one by
    one."""
    monkeypatch.setattr(compat, "cpu_multiplies", lambda dtype: True)
    recipe = recipe_of("bf16")
    for steps in range(1, 6):
        _, mine = made(recipe)
        start = weights(mine)
        run(mine, range(steps))
        right = by_torch(start, mine, recipe, range(steps))
        for name, weight in weights(mine).items():
            torch.testing.assert_close(weight, right[name], rtol=1e-5, atol=1e-6, msg=name)


def exact(start: dict[str, Tensor], mine: Optimizer, recipe: Recipe, steps: range) -> dict[str, Tensor]:
    """Of matrices in fp64: the polynomial is applied to the singular values."""
    updated, means = {}, {}
    for name in matrices(SHAPE):
        updated[name], means[name] = start[name].double(), torch.zeros_like(start[name], dtype=torch.float64)
    for step in steps:
        for name, gradient in gradients(mine.parameters, step).items():
            if name not in updated:
                continue
            g = gradient.double()
            means[name] = recipe.momentum * means[name] + (1 - recipe.momentum) * g
            direction = recipe.momentum * means[name] + (1 - recipe.momentum) * g
            u, s, v = torch.linalg.svd(direction, full_matrices=False)
            s = s / s.square().sum(-1, keepdim=True).sqrt()
            for _ in range(ITERATIONS):
                s = sum(c * s ** (2 * k + 1) for k, c in enumerate(COEFFICIENTS))  # type: ignore[assignment]
            step_size = RATE * 0.2 * sqrt(max(direction.shape[-2:]))
            updated[name] = updated[name] * (1 - RATE * recipe.weight_decay) - step_size * (u * s.unsqueeze(-2)) @ v
    return updated


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_updates_are_near_those_in_fp64(kind: tuple[str, str, str]) -> None:
    """Of the way that weights went in 4 steps. fp32: the iteration multiplies small singular values, and what they
    were rounded by, by up to 485. bf16: 2**-9 in each product. Weights in bf16 alone add their own rounding."""
    recipe = recipe_of(*kind)
    _, mine = made(recipe)
    start = weights(mine)
    run(mine, range(4))
    right, updated = exact(start, mine, recipe, range(4)), weights(mine)
    limit = 0.2 if kind[2] == "none" else 0.05 if kind[0] != "fp32" else {"fp32": 1e-4, "bf16": 3e-2}[kind[1]]
    for name, x in right.items():
        off = (updated[name].double() - x).norm() / (x - start[name].double()).norm()
        assert off < limit, (name, off)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_skipped_step_leaves_every_bit(kind: tuple[str, str, str]) -> None:
    _, mine = made(recipe_of(*kind), LARGE)
    run(mine, range(2))
    before = {name: x.detach().clone() for name, x in {**mine.tensors(), **mine.parameters}.items()}
    for parameter in mine.parameters.values():
        parameter.grad = torch.full_like(parameter, float("nan"))
    mine.step(RATE, divide_by=ONE, skip=ONE)
    after = {**mine.tensors(), **mine.parameters}
    assert all(torch.equal(x, before[name]) for name, x in after.items())


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_state_goes_on_from_where_it_was_copied(kind: tuple[str, str, str]) -> None:
    recipe = recipe_of(*kind)
    (_, mine), (_, other) = made(recipe, LARGE), made(recipe, LARGE)
    run(mine, range(3))
    with torch.no_grad():
        for name, x in {**other.tensors(), **other.parameters}.items():
            x.copy_({**mine.tensors(), **mine.parameters}[name])
    run(mine, range(3, 5))
    run(other, range(3, 5))
    theirs = {**other.tensors(), **other.parameters}
    assert all(torch.equal(x, theirs[name]) for name, x in {**mine.tensors(), **mine.parameters}.items())


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_matrices_have_one_moment_and_the_rest_two(kind: tuple[str, str, str]) -> None:
    recipe = recipe_of(*kind)
    _, mine = made(recipe, LARGE)
    states, hidden = mine.tensors(), matrices(LARGE)
    for name in mine.parameters:
        assert "moment1." + name in states
        assert ("moment2." + name in states) == (name not in hidden)
    moments = sum(x.nbytes for name, x in states.items() if name.startswith("moment"))
    assert moments == sum(
        recipe.storage.format_of(parameter).nbytes(parameter.shape) for parameter in parameters(LARGE)
    )
    assert any("moment1_scale." in name for name in states) == (kind[1] == "int8")


def test_a_divisor_takes_the_loss_scale_out() -> None:
    """Of fp16 gradients, which are divided before anything is added to them."""
    ends = []
    for scale in (1.0, 256.0):
        _, mine = made(recipe_of("fp16"))
        for step in range(2):
            for name, gradient in gradients(mine.parameters, step).items():
                mine.parameters[name].grad = (gradient.float() * scale).half()
            mine.step(RATE, divide_by=torch.tensor(scale), skip=ZERO)
        ends.append(weights(mine))
    for name in matrices(SHAPE):
        torch.testing.assert_close(ends[0][name], ends[1][name], rtol=2e-2, atol=2e-3)


def test_a_matrix_without_a_gradient_goes_on_by_its_momentum() -> None:
    """An expert without tokens, say: what it gets is 0, and the others are as they were."""
    (_, mine), (_, other) = made(recipe_of("fp32")), made(recipe_of("fp32"))
    name = "layers.0.mlp.up.weight"
    for optimizer in (mine, other):
        run(optimizer, range(1))
        for owner, gradient in gradients(optimizer.parameters, 1).items():
            optimizer.parameters[owner].grad = gradient
    mine.parameters[name].grad = None
    grad = other.parameters[name].grad
    assert grad is not None
    grad.zero_()
    for optimizer in (mine, other):
        optimizer.step(RATE, divide_by=ONE, skip=ZERO)
    assert all(torch.equal(x, weights(other)[owner]) for owner, x in weights(mine).items())


def test_nothing_is_made_of_nothing() -> None:
    _, mine = made(recipe_of("fp32", weight_decay=0.0))
    start = weights(mine)
    for parameter in mine.parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    mine.step(RATE, divide_by=ONE, skip=ZERO)
    assert all(torch.equal(x, start[name]) for name, x in weights(mine).items() if name in matrices(SHAPE))


def test_what_is_frozen_stays() -> None:
    engine = build_engine(SHAPE, Layout(), mesh=make_mesh(Layout()))
    frozen = "layers.1.mlp.experts.up"
    engine.parameters[frozen].requires_grad_(False)
    mine = Optimizer.for_engine(engine, recipe_of("fp32"))
    start = engine.parameters[frozen].detach().clone()
    run(mine, range(1))
    assert torch.equal(engine.parameters[frozen].detach(), start)
    assert not any(frozen in name for name in mine.tensors())


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_an_update_needs_no_values(kind: tuple[str, str, str]) -> None:
    with fake_tensors():
        _, mine = made(recipe_of(*kind), LARGE)
        for parameter in mine.parameters.values():
            parameter.grad = torch.ones_like(parameter)
        mine.step(1e-3, divide_by=torch.ones(()), skip=torch.zeros(()))
