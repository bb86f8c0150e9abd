"""Passes over many tensors in the interpreter: AdamW beside fp64, sums of squares, and the bytes that they move."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from triton.runtime.interpreter import InterpreterBuilder

from meshwright.kernels.optimizer.adamw import WideStates, adamw, euclidean_norm, in_one_pass
from meshwright.kernels.triton import trials, updates
from meshwright.kernels.triton.narrow_piece import UpdateNumbers
from meshwright.planner.cost.stack import MESHWRIGHT
from meshwright.planner.time.update_passes import update_passes
from meshwright.spec import Recipe
from meshwright.training.optimizer.optimizer import Optimizer
from tests.kernels.interpreted.poison import nothing_is_left_unwritten  # noqa: F401  # a fixture

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NUMBERS = UpdateNumbers(
    rate=1e-2, beta1=0.9, beta2=0.95, epsilon=1e-8, decay=0.1, divide_by=torch.tensor(4.0), skip=torch.zeros(())
)
SIZES = [(1,), (17,), (64, 64), (3, 700), (2, 17_000), (0, 5)]
"""The fifth has two chunks."""
FORMS = [(FP32, FP32), (BF16, BF16), (FP16, FP16), (FP32, BF16)]
"""Of gradients and of the weights that are computed with."""
ULP = 1.2e-7
"""fp32's last place, over the number."""


def drawn(size: tuple[int, ...], seed: int, dtype: torch.dtype = FP32, first: int = 0) -> Tensor:
    """Normal numbers, `first` elements behind the beginning of their memory."""
    generator, number = torch.Generator().manual_seed(seed), torch.Size(size).numel()
    memory = torch.randn(number + first, generator=generator).to(dtype)
    return memory[first:].view(size)


def states_of(sizes: list[tuple[int, ...]]) -> WideStates:
    masters = [drawn(size, at) for at, size in enumerate(sizes)]
    moments = [torch.zeros_like(tensor) for tensor in masters], [torch.zeros_like(tensor) for tensor in masters]
    return WideStates(masters, moments, [torch.zeros(()) for _ in sizes])


def exact(states: WideStates, gradients: list[list[Tensor]], numbers: UpdateNumbers) -> list[tuple[Tensor, ...]]:
    """The definition in fp64, over all steps."""
    actual = []
    for at, master in enumerate(states.masters):
        w, m, v = master.double(), torch.zeros_like(master).double(), torch.zeros_like(master).double()
        for step, incoming in enumerate(gradients, start=1):
            g = incoming[at].double() / numbers.divide_by.double()
            m, v = numbers.beta1 * m + (1 - numbers.beta1) * g, numbers.beta2 * v + (1 - numbers.beta2) * g * g
            size = (v / (1 - numbers.beta2**step)).sqrt() + numbers.epsilon
            w = w * (1 - numbers.rate * numbers.decay) - numbers.rate / (1 - numbers.beta1**step) * m / size
        actual.append((w, m, v))
    return actual


def is_copy(copy: Tensor, master: Tensor) -> bool:
    """Whether it is the master, rounded. To bf16 the interpreter cuts off where a GPU rounds."""
    right = master.view(torch.int32).bitwise_and(-65536).view(FP32) if copy.dtype == BF16 else master
    return torch.equal(copy, right.to(copy.dtype))


@pytest.mark.parametrize("first", [0, 3], ids=["aligned", "anywhere"])
@pytest.mark.parametrize(("gradient_dtype", "copied"), FORMS, ids=str)
def test_adamw_is_as_exact_as_fp32(gradient_dtype: torch.dtype, copied: torch.dtype, first: int) -> None:
    states = states_of(SIZES)
    copies = states.masters if copied == FP32 else [tensor.to(copied) for tensor in states.masters]
    steps = [
        [drawn(size, 100 * step + at, gradient_dtype, first) for at, size in enumerate(SIZES)] for step in range(2)
    ]
    right = exact(states, steps, NUMBERS)
    for number, gradients in enumerate(steps, start=1):
        for tensor in states.steps:
            tensor.fill_(number)
        adamw(states, gradients, copies, NUMBERS)
    for at, (weight, mean, square) in enumerate(right):
        moments = states.moments[0][at], states.moments[1][at]
        for ours, theirs in zip((states.masters[at], *moments), (weight, mean, square), strict=True):
            off = (ours.double() - theirs).abs()
            assert (off <= 8 * ULP * theirs.abs().clamp(min=0.05)).all(), "a few roundings"
        assert is_copy(copies[at], states.masters[at]), "rounded once, from the new master"


def test_gradients_and_weights_of_several_dtypes_in_one_list() -> None:
    sizes = [(40,), (50, 3), (60,), (70,)]
    states, plain = states_of(sizes), states_of(sizes)
    dtypes = [(FP32, FP32), (BF16, BF16), (FP32, BF16), (BF16, FP32)]
    copies = [tensor.to(kind) for tensor, (_, kind) in zip(states.masters, dtypes, strict=True)]
    copies = [
        tensor if kind == FP32 else copy for tensor, copy, (_, kind) in zip(states.masters, copies, dtypes, strict=True)
    ]
    gradients = [drawn(size, at, kind) for at, (size, (kind, _)) in enumerate(zip(sizes, dtypes, strict=True))]
    for tensor in states.steps:
        tensor.fill_(1)
    adamw(states, gradients, copies, NUMBERS)
    for ours, (weight, _, _), copy in zip(states.masters, exact(plain, [gradients], NUMBERS), copies, strict=True):
        torch.testing.assert_close(ours.double(), weight, rtol=1e-6, atol=1e-7)
        assert is_copy(copy, ours)


def test_what_is_skipped_is_not_written() -> None:
    states = states_of(SIZES)
    copies = [torch.full_like(tensor, 7.0, dtype=BF16) for tensor in states.masters]
    before = [tensor.clone() for tensor in (*states.masters, *states.moments[0], *states.moments[1])]
    gradients = [torch.full(size, torch.nan) for size in SIZES]
    adamw(states, gradients, copies, replace(NUMBERS, skip=torch.ones(())))
    after = (*states.masters, *states.moments[0], *states.moments[1])
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert all((tensor == 7).all() for tensor in copies)


def test_each_parameter_has_a_step_of_its_own() -> None:
    """One that had no gradient for a while is corrected for fewer updates."""
    states, gradients = states_of([(8,), (8,)]), [drawn((8,), 1), drawn((8,), 1)]
    states.masters[1].copy_(states.masters[0])
    for tensor, number in zip(states.steps, (1, 5), strict=True):
        tensor.fill_(number)
    adamw(states, gradients, states.masters, replace(NUMBERS, decay=0.0))
    moved = [(tensor - drawn((8,), 0)).abs().mean() for tensor in states.masters]
    assert moved[1] < moved[0] and torch.equal(states.moments[0][0], states.moments[0][1])


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize("first", [0, 3])
def test_the_norm_of_many_tensors(dtype: torch.dtype, first: int) -> None:
    inputs = [drawn(size, at, dtype, first) for at, size in enumerate(SIZES)]
    right = torch.cat([tensor.double().flatten() for tensor in inputs]).norm()
    actual = euclidean_norm(inputs, "triton")
    assert actual.dtype == FP32 and actual.dim() == 0
    torch.testing.assert_close(actual.double(), right, rtol=2e-7, atol=0)
    assert euclidean_norm([torch.zeros(0)], "triton") == 0


def test_the_trials_of_a_device_pass() -> None:
    for operation in ("adamw", "square_sums"):
        assert trials.problem(operation, torch.device("cpu"), FP32) == ""


@contextmanager
def moved() -> Iterator[dict[str, int]]:
    """Counts bytes that programs load and store, where masks let them."""
    counts = {"loaded": 0, "stored": 0}
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def size(pointer: Any, mask: Any) -> int:
        number: int = mask.data.sum() * pointer.get_element_ty().primitive_bitwidth // 8
        return number

    def loads(self: Any, pointer: Any, mask: Any, *more: Any) -> Any:
        counts["loaded"] += size(pointer, mask)
        return load(self, pointer, mask, *more)

    def stores(self: Any, pointer: Any, values: Any, mask: Any, *more: Any) -> Any:
        counts["stored"] += size(pointer, mask)
        return store(self, pointer, values, mask, *more)

    InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store = loads, stores
    try:
        yield counts
    finally:
        InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store = load, store


@pytest.mark.parametrize(
    ("gradient_dtype", "copied", "expected"), [(BF16, BF16, 28), (FP32, BF16, 30), (FP32, FP32, 28)]
)
def test_bytes_that_an_update_moves(gradient_dtype: torch.dtype, copied: torch.dtype, expected: int) -> None:
    """Per parameter, and 0.3 % for addresses: a second look at anything would show. The norm reads gradients once."""
    sizes = [(300, 300), (32_768,)]
    count = sum(torch.Size(size).numel() for size in sizes)
    states = states_of(sizes)
    for tensor in states.steps:
        tensor.fill_(1)
    copies = states.masters if copied == FP32 else [tensor.to(copied) for tensor in states.masters]
    gradients = [torch.ones(size, dtype=gradient_dtype) for size in sizes]
    with moved() as counts:
        adamw(states, gradients, copies, NUMBERS)
    assert expected <= sum(counts.values()) / count <= expected * 1.003
    assert counts["stored"] / count == 12 + (0 if copied == FP32 else 2)
    recipe = Recipe(precision="fp32" if copied == FP32 else "bf16")
    planned = sum(
        update.weight_bytes + 8 * update.moments
        for update in update_passes(MESHWRIGHT, recipe, gradient_dtype.itemsize, at_once=True)
    )
    assert planned == expected + gradient_dtype.itemsize, "a plan counts the same, and the norm"
    euclidean_norm(gradients, "triton")  # the kernel's trial reads, too
    with moved() as counts:
        euclidean_norm(gradients, "triton")
    assert gradient_dtype.itemsize <= sum(counts.values()) / count <= gradient_dtype.itemsize * 1.01


def counted(launches: list[int], update: Callable[..., None], gradients: list[Tensor], *more: Any) -> None:
    launches.append(len(gradients))
    update(gradients, *more)


def test_an_optimizer_updates_all_in_two_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many parameters there are; 16-bit gradients are widened nowhere, and weights are what torch's kernel
    makes, to fp32's last places."""
    actual = []
    for prefer in ("triton", "eager"):
        named = {f"{at}": nn.Parameter(drawn((at, 9)[: 1 + at % 2], at, BF16)) for at in range(1, 21)}
        mine = Optimizer(named.items(), Recipe(precision="bf16", weight_decay=0.1), prefer=prefer)
        assert in_one_pass(list(mine.masters.values()), prefer) == (prefer == "triton")
        launches: list[int] = []
        monkeypatch.setattr(updates, "adamw", partial(counted, launches, updates.adamw))
        for step in range(2):
            for at, parameter in enumerate(named.values()):
                parameter.grad = drawn(tuple(parameter.shape), 50 * step + at, BF16)
            mine.step(1e-2, divide_by=torch.tensor(2.0), skip=torch.zeros(()))
            assert all(parameter.grad is None for parameter in named.values())
        assert launches == ([10, 10] * 2 if prefer == "triton" else [])
        monkeypatch.undo()
        actual.append(mine)
    ours, theirs = (optimizer.tensors() for optimizer in actual)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=3e-6, atol=1e-7, msg=name)
