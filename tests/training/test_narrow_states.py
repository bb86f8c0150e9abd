"""Optimizer states that are not fp32: against torch's AdamW in fp64, their bytes, their reproducibility, their cuts."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.compat import fake_tensors
from meshwright.kernels.optimizer.adamw import hashed, quantized, rounded
from meshwright.kernels.triton.narrow_piece import code_book, code_books
from meshwright.spec.recipe.recipe import Recipe
from meshwright.spec.weights.boxes import SMALL, Box, MomentFormat
from meshwright.training.optimizer import optimizer as module
from meshwright.training.optimizer.optimizer import Held, Optimizer
from tests.training.tiny import RECIPE

ONE, ZERO = torch.ones(()), torch.zeros(())
SIZES = {"matrix": (24, 320), "experts": (3, 10, 160), "vector": (96,), "small": (9, 16)}
"""Rows of whole vector registers: torch's kernel rounds the rest of a tensor in another way."""
FORMATS = {name: MomentFormat(dtype=name, block=64 if name == "int8" else 0) for name in ("fp32", "bf16", "int8")}
KINDS = [
    ("fp32", "bf16", "fp32"), ("fp32", "int8", "fp32"), ("bf16", "bf16", "fp32"), ("bf16", "int8", "fp32"),
    ("bf16", "fp32", "none"), ("bf16", "bf16", "none"), ("bf16", "int8", "none"),
]  # fmt: skip
"""precision, optimizer_states, master_weights."""


def recipe_of(precision: str, states: str, masters: str, **changes: Any) -> Recipe:
    return replace(
        RECIPE, precision=precision, optimizer_states=states, master_weights=masters, **{"epsilon": 1e-8} | changes
    )  # type: ignore[arg-type]


def box_of(sizes: tuple[int, ...]) -> Box:
    return Box(whole=sizes, offsets=(0,) * len(sizes), sizes=sizes)


def stored(recipe: Recipe, sizes: tuple[int, ...]) -> MomentFormat:
    small = recipe.optimizer_states == "int8" and torch.Size(sizes).numel() < SMALL
    return FORMATS["fp32" if small else recipe.optimizer_states]


def weights_of(recipe: Recipe, seed: int = 0) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.float32 if recipe.precision == "fp32" else torch.bfloat16
    return {name: nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for name, s in SIZES.items()}


def made(named: dict[str, nn.Parameter], recipe: Recipe, boxes: dict[str, Box] | None = None) -> Optimizer:
    by_name = boxes or {name: box_of(tuple(p.shape)) for name, p in named.items()}
    return Optimizer(
        named.items(), recipe, {name: Held(box, stored(recipe, box.whole)) for name, box in by_name.items()}
    )


def gradients(named: dict[str, nn.Parameter], step: int) -> dict[str, Tensor]:
    """Of sizes that differ by orders of magnitude from row to row."""
    generator = torch.Generator().manual_seed(100 + step)
    by_name = {}
    for name, sizes in SIZES.items():
        scale = 10.0 ** (torch.arange(sizes[0]) % 5 - 4.0)
        by_name[name] = torch.randn(sizes, generator=generator) * scale.view(-1, *[1] * (len(sizes) - 1))
    return {name: by_name[name].to(parameter.dtype) for name, parameter in named.items()}


def give(named: dict[str, nn.Parameter], step: int) -> None:
    for name, gradient in gradients(named, step).items():
        named[name].grad = gradient


def run(mine: Optimizer, named: dict[str, nn.Parameter], steps: range, rate: float = 1e-2) -> None:
    for step in steps:
        give(named, step)
        mine.step(rate, divide_by=torch.tensor(2.0), skip=ZERO)
        mine.zero_grad()


def exact(recipe: Recipe, steps: range, rate: float = 1e-2) -> dict[str, Tensor]:
    """torch.optim.AdamW in fp64 on the same gradients."""
    named = weights_of(recipe)
    wide = {name: nn.Parameter(p.detach().double()) for name, p in named.items()}
    groups = [
        {"params": [p for p in wide.values() if p.dim() > 1], "weight_decay": recipe.weight_decay},
        {"params": [p for p in wide.values() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    usual = torch.optim.AdamW(groups, lr=rate, betas=(recipe.beta1, recipe.beta2), eps=recipe.epsilon)
    for step in steps:
        for name, gradient in gradients(named, step).items():
            wide[name].grad = gradient.double() / 2
        usual.step()
    return {name: p.detach() for name, p in wide.items()}


def moved(weight: Tensor, start: Tensor, right: Tensor) -> float:
    """How far an update is from the right one, as a share of that."""
    return float((weight.double() - right).norm() / (right - start.double()).norm())


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_updates_are_near_those_of_torchs_adamw_in_fp64(kind: tuple[str, str, str]) -> None:
    """After 10 steps, of the way that the weights went: bf16 moments err by 2**-9 each step, 8-bit ones by a few
    percent of the smaller elements; bf16 weights alone by their own rounding, here a tenth of a step."""
    recipe = recipe_of(*kind)
    named, start = weights_of(recipe), weights_of(recipe)
    mine = made(named, recipe)
    run(mine, named, range(10))
    right = exact(recipe, range(10))
    for name, parameter in named.items():
        weight = mine.masters.get(name, parameter).detach()
        limit = 0.3 if kind[2] == "none" else {"bf16": 4e-3, "int8": 5e-2}[kind[1]]
        assert moved(weight, start[name].detach(), right[name]) < limit, name


def test_the_first_update_is_exact_in_every_format() -> None:
    """Moments begin at 0 and are stored after they were used."""
    for precision, states, _ in KINDS[:2]:
        recipe = recipe_of(precision, states, "fp32")
        named, start = weights_of(recipe), weights_of(recipe)
        run(made(named, recipe), named, range(1))
        right = exact(recipe, range(1))
        assert all(moved(p.detach(), start[name].detach(), right[name]) < 1e-5 for name, p in named.items())


def test_bf16_steps_below_the_last_place_add_up_on_average() -> None:
    """Without masters: a weight of 1 and steps of 1e-4, 1/39 of its last place. Nearest rounding would never move."""
    recipe = recipe_of("bf16", "fp32", "none", weight_decay=0.0)
    named = {"matrix": nn.Parameter(torch.ones(100, 100, dtype=torch.bfloat16))}
    mine = Optimizer(named.items(), recipe, {"matrix": Held(box_of((100, 100)), FORMATS["fp32"])})
    for _ in range(40):
        named["matrix"].grad = torch.ones(100, 100, dtype=torch.bfloat16)
        mine.step(1e-4, divide_by=ONE, skip=ZERO)
    assert abs((1 - named["matrix"].detach().double().mean()).item() - 40e-4) < 1.5e-4
    assert not mine.masters


def test_stochastic_rounding_has_the_mean_of_what_it_rounds() -> None:
    x = torch.tensor([1.0 + 2.0**-10, -3.3, 1e-30, 0.0, 2.0]).repeat_interleave(2**16)
    bits = hashed(torch.arange(len(x), dtype=torch.int32))
    means = rounded(x, bits).double().view(5, -1).mean(1)
    torch.testing.assert_close(means, x.double().view(5, -1)[:, 0], rtol=1e-4, atol=0)
    whole = x.to(torch.bfloat16).float()
    assert torch.equal(rounded(whole, bits).float(), whole), "what bf16 holds is not rounded"


def test_what_is_not_a_number_stays_so() -> None:
    """The NaN that arithmetic makes on a GPU is all ones: any bit added to it carries into the sign."""
    bits = torch.tensor([0x7FFFFFFF, 0x7FC00000, -1], dtype=torch.int32)
    assert bool(rounded(bits.view(torch.float32), torch.full((3,), 0xFFFF, dtype=torch.int32)).isnan().all())


def test_the_code_book_is_that_of_the_paper() -> None:
    """Dettmers et al. 2022, section 2.1, written the other way around, from the bits of a code: a sign, zeros that
    count the power of ten, a one, and the rest is a place between 0.1 and 1."""
    for signed in (True, False):
        book, signs = {0.0, 1.0}, (1, -1) if signed else (1,)
        for code in range(1, 128 if signed else 256):
            length = code.bit_length() - 1
            power = length - (6 if signed else 7)
            part = (code - (1 << length) + 0.5) / (1 << length)
            if power <= 0 and (signed or length):
                book |= {sign * 10.0**power * (0.1 + 0.9 * part) for sign in signs}
        assert code_book(signed) == pytest.approx(sorted(book), rel=1e-12)
        assert len(code_book(signed)) == 256


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("width", [1, 63, 64, 200])
def test_a_code_is_that_of_the_nearest_number(signed: bool, width: int) -> None:
    x = torch.randn(7, width, generator=torch.Generator().manual_seed(width)) * 10.0 ** -torch.arange(7.0)[:, None]
    x = x if signed else x.square()
    x[3] = 0
    codes, scales = quantized(x, 64, code_books(x.device), signed=signed)
    book = torch.tensor(code_book(signed), dtype=torch.float64)
    for row in range(7):
        for column in range(width):
            block = x[row, column // 64 * 64 : column // 64 * 64 + 64]
            scale = block.abs().max()
            assert scales[row, column // 64] == scale
            away = (book - (x[row, column] / scale if scale > 0 else 0.0)).abs()
            nearest = away.argmin().item()
            if not signed and x[row, column] > 0:
                nearest = max(1, nearest)  # AdamW would divide by epsilon alone
            assert abs(away[codes[row, column].long()] - away[nearest]) < 1e-7


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_same_seed_gives_the_same_bits_and_another_one_others(kind: tuple[str, str, str]) -> None:
    ends = []
    for seed in (1, 1, 2):
        recipe = recipe_of(*kind, seed=seed)
        named = weights_of(recipe)
        mine = made(named, recipe)
        run(mine, named, range(4))
        ends.append({**mine.tensors(), **{n: p.detach() for n, p in named.items()}})
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    rounds = kind[1] == "bf16" or kind[2] == "none"
    assert rounds != all(torch.equal(ends[0][name], ends[2][name]) for name in ends[0])


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_skipped_step_leaves_every_bit(kind: tuple[str, str, str]) -> None:
    recipe = recipe_of(*kind)
    named = weights_of(recipe)
    mine = made(named, recipe)
    run(mine, named, range(2))
    before = {name: x.clone() for name, x in {**mine.tensors(), **named}.items()}
    give(named, 3)
    mine.step(1e-2, divide_by=ONE, skip=ONE)
    assert all(torch.equal(x, before[name]) for name, x in {**mine.tensors(), **named}.items())


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_state_goes_on_from_where_it_was_copied(kind: tuple[str, str, str]) -> None:
    recipe = recipe_of(*kind)
    named, later = weights_of(recipe), weights_of(recipe, seed=1)
    mine, other = made(named, recipe), made(later, recipe)
    run(mine, named, range(3))
    with torch.no_grad():
        for name, tensor in {**other.tensors(), **later}.items():
            tensor.copy_({**mine.tensors(), **named}[name])
    run(mine, named, range(3, 6))
    run(other, later, range(3, 6))
    assert all(torch.equal(x, {**other.tensors(), **later}[name]) for name, x in {**mine.tensors(), **named}.items())


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("cut", [(0, 2), (0, 3), (1, 1)], ids=["rows", "uneven rows", "inside rows"])
def test_pieces_are_updated_as_the_whole(kind: tuple[str, str, str], cut: tuple[int, int]) -> None:
    """To the bit, however a parameter is cut: along rows as ZeRO does, along columns between blocks as tp does."""
    recipe, (dim, parts) = recipe_of(*kind), cut
    named = weights_of(recipe)
    mine = made(named, recipe)
    run(mine, named, range(3))
    for index in range(parts + 1):
        boxes = {}
        for name, sizes in SIZES.items():
            along = len(sizes) - 1 if dim else 0
            each = 64 if dim and len(sizes) > 1 else -(-sizes[along] // (parts + 1))
            start = min(each * index, sizes[along])
            size = (sizes[along] - start) if index == parts else min(each, sizes[along] - start)
            offsets, held = [0] * len(sizes), list(sizes)
            offsets[along], held[along] = start, size
            boxes[name] = Box(whole=sizes, offsets=tuple(offsets), sizes=tuple(held))
        start_weights = weights_of(recipe)
        pieces = {name: nn.Parameter(p.detach()[boxes[name].slices].clone()) for name, p in start_weights.items()}
        part = made(pieces, recipe, boxes)
        for step in range(3):
            for name, gradient in gradients(start_weights, step).items():
                pieces[name].grad = gradient[boxes[name].slices].clone()
            part.step(1e-2, divide_by=torch.tensor(2.0), skip=ZERO)
        whole = mine.tensors()
        for name, parameter in pieces.items():
            assert torch.equal(parameter.detach(), named[name].detach()[boxes[name].slices]), name
        for state, tensor in part.tensors().items():
            name = state.partition(".")[2]
            if tensor.dim():
                assert torch.equal(tensor, whole[state][part.box(state, boxes[name]).slices]), state


def test_little_is_widened_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row by row or all together: the same bits."""
    recipe, peaks = recipe_of("bf16", "int8", "none"), []
    for size in (1, 2**24):
        monkeypatch.setattr(module, "BUCKET_BYTES", size)
        named = weights_of(recipe)
        mine = made(named, recipe)
        run(mine, named, range(2))
        peaks.append({**mine.tensors(), **named})
    assert all(torch.equal(peaks[0][name], peaks[1][name]) for name in peaks[0])


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_bytes_are_those_of_the_format(kind: tuple[str, str, str]) -> None:
    recipe = recipe_of(*kind)
    mine = made(weights_of(recipe), recipe)
    moments = sum(x.nbytes for name, x in mine.tensors().items() if name.startswith("moment"))
    assert moments == sum(stored(recipe, sizes).nbytes(sizes) for sizes in SIZES.values())
    masters = sum(x.nbytes for name, x in mine.tensors().items() if name.startswith("master."))
    elements = sum(torch.Size(sizes).numel() for sizes in SIZES.values())
    assert masters == (4 * elements if kind[0] == "bf16" and kind[2] == "fp32" else 0)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_an_update_needs_no_values(kind: tuple[str, str, str]) -> None:
    with fake_tensors():
        recipe = recipe_of(*kind)
        dtype = torch.float32 if kind[0] == "fp32" else torch.bfloat16
        named = {name: nn.Parameter(torch.zeros(sizes, dtype=dtype)) for name, sizes in SIZES.items()}
        mine = made(named, recipe)
        for parameter in named.values():
            parameter.grad = torch.ones_like(parameter)
        mine.step(1e-3, divide_by=torch.ones(()), skip=torch.zeros(()))
