"""Small runs of each operation, forward and backward, beside its reference, before a kernel is chosen on a device."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright import compat
from meshwright.kernels.triton import (
    code_trials,
    flash,
    gated,
    grouped,
    loss_rows,
    many_tensors,
    mean_norm,
    merging,
    narrow_piece,
    narrow_update,
    permute,
    root_norm,
    rotary,
    step_trials,
)
from meshwright.kernels.triton.code_trials import Made

LARGEST_ERROR = 0.03
"""Largest relative error: some roundings to bf16."""


def problem(operation: str, device: torch.device, dtype: torch.dtype) -> str:
    """Return what is wrong with the kernels of an operation here. Empty = they run and are right."""
    try:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            error = TRIALS[operation](partial(_normal, device, dtype))
    except Exception as failure:  # compilers, drivers and launches fail in many ways
        lines = str(failure).splitlines() or [""]
        return f"its trial failed: {type(failure).__name__} {lines[0]}".strip()
    return "" if error < LARGEST_ERROR else f"its trial was off by {error:.2g}"


def _normal(device: torch.device, dtype: torch.dtype, *size: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(size))
    return torch.randn(*size, generator=generator).to(device, dtype)


def _largest_error(ours: Made, plain: Made, inputs: Sequence[Tensor]) -> float:
    """Return the largest relative error of the result and of each gradient. NaN counts as infinite."""
    outcome, exact = _outcome(ours, inputs), _outcome(plain, [x.double() for x in inputs])
    errors = [((a.double() - b).norm() / b.norm()).item() for a, b in zip(outcome, exact, strict=True)]
    return max(error if error == error else float("inf") for error in errors)


def _outcome(function: Made, inputs: Sequence[Tensor]) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]


def _rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight


def _norm(make: Made) -> float:
    return _largest_error(partial(root_norm.rms_norm, eps=1e-5), _rms, (make(5, 200), make(200)))


def _add_norm(make: Made) -> float:
    def ours(x: Tensor, added: Tensor, weight: Tensor) -> Tensor:
        return torch.cat(root_norm.add_rms_norm(x, added, weight, 1e-5))

    def plain(x: Tensor, added: Tensor, weight: Tensor) -> Tensor:
        return torch.cat((_rms(x + added, weight), x + added))

    return _largest_error(ours, plain, (make(5, 200), make(6, 200)[:5], make(200)))


def _layer_norm(make: Made) -> float:
    def plain(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(x, (200,), weight, bias, 1e-5)

    return _largest_error(partial(mean_norm.layer_norm, eps=1e-5), plain, (make(5, 200), make(200), make(1, 200)[0]))


def _swiglu(make: Made) -> float:
    return _largest_error(gated.swiglu, lambda gate, up: F.silu(gate) * up, (make(5, 300), make(6, 300)[:5]))


def _rope(make: Made) -> float:
    turn = make(1, 3, 1, 32).float()

    def ours(q: Tensor, k: Tensor) -> Tensor:
        return torch.cat(rotary.rotate_pair(q * 1, k * 1, turn.cos(), turn.sin()), 2)

    def plain(q: Tensor, k: Tensor) -> Tensor:
        first, second = torch.cat((q, k), 2).chunk(2, -1)
        cos, sin = turn.double().cos(), turn.double().sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    return _largest_error(ours, plain, (make(2, 3, 4, 64), make(2, 3, 2, 64)))


def _merge(make: Made) -> float:
    scores, values = make(1, 2, 5, 8).float(), make(1, 2, 8, 32)
    (first, second), (first_values, second_values) = scores.split(4, -1), values.float().split(4, 2)
    out, lse = first.softmax(-1) @ first_values, first.logsumexp(-1)
    part_lse = second.logsumexp(-1)
    merging.merge(out, lse, second.softmax(-1) @ second_values, part_lse, part_lse)
    exact = scores.softmax(-1) @ values.float()
    error: float = ((out - exact).norm() / exact.norm()).item()
    return error


def _loss(make: Made) -> float:
    logits = make(4, 9000)
    targets = torch.tensor([1, 8999, -100, 5], device=logits.device)
    wide = logits.double().requires_grad_()
    exact = F.cross_entropy(wide, targets, reduction="none")
    (slope,) = torch.autograd.grad(exact.sum(), wide)
    losses = loss_rows.losses(logits, targets, None, ignored=-100, gradient=True, smoothing=0.0, z=0.0)
    errors = [((a.double() - b).norm() / b.norm()).item() for a, b in ((losses, exact.detach()), (logits, slope))]
    return max(error if error == error else float("inf") for error in errors)


def _permute(make: Made) -> float:
    rows = make(6, 100)
    order = torch.tensor([3, 0, 5, 1, 4, 2], device=rows.device)
    inverse = order.argsort()
    copies = _largest_error(lambda x: permute.spread(x, order, inverse, 2), lambda x: x[order // 2], (rows[:3],))

    def plain(rows: Tensor, weights: Tensor) -> Tensor:
        return (rows[inverse].view(3, 2, -1) * weights.unsqueeze(-1)).sum(1)

    return max(copies, _largest_error(lambda x, w: permute.combine(x, w, inverse), plain, (rows, make(3, 2))))


def _grouped(make: Made) -> float:
    rows, weights = make(37, 40), make(3, 24, 40)
    counts = torch.tensor([20, 0, 17], device=rows.device)

    def plain(rows: Tensor, weights: Tensor) -> Tensor:
        return torch.cat((rows[:20] @ weights[0].T, rows[20:] @ weights[2].T))

    return _largest_error(partial(grouped.expert_linear, counts=counts), plain, (rows, weights))


def _attention(make: Made) -> float:
    q, k, v = make(70, 2, 32), make(71, 1, 32)[:70], make(72, 1, 32)[:70]
    borders = torch.tensor([0, 70], dtype=torch.int32, device=q.device)

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.einsum("she,toe->hst", q, k) * 0.2
        hidden = torch.ones(70, 70, dtype=torch.bool, device=q.device).triu(1)
        return torch.einsum("hst,toe->she", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)

    return _largest_error(lambda q, k, v: flash.attend(q, k, v, borders, 70, scale=0.2)[0], plain, (q, k, v))


def _narrow(make: Made) -> float:
    """Try three updates beside AdamW in fp64.

    A bf16 weight has 8-bit moments, an fp32 one a copy and bf16 moments.
    """
    gradient, weight = make(5, 300), make(6, 300)[:5].float()
    narrow, copy = weight.to(torch.bfloat16), weight.to(torch.bfloat16)
    coded = _narrow_error(gradient, narrow, None, (_no_moment(narrow, 127, True), _no_moment(narrow, 0, False)))
    signed, plain = (narrow_piece.Moment(torch.zeros_like(copy), None, sign) for sign in (True, False))
    return max(coded, _narrow_error(gradient, weight, copy, (signed, plain)))


def _narrow_error(
    gradient: Tensor, weight: Tensor, copy: Tensor | None, moments: tuple[narrow_piece.Moment, narrow_piece.Moment]
) -> float:
    step, exact = torch.zeros((), device=weight.device), weight.double()
    mean, square, wide_gradient = torch.zeros_like(exact), torch.zeros_like(exact), gradient.double()
    numbers = narrow_piece.UpdateNumbers(
        rate=0.1, beta1=0.9, beta2=0.95, epsilon=1e-8, decay=0.1, divide_by=step + 1, skip=step * 0
    )
    piece = narrow_piece.NarrowPiece(
        weight=weight, copy=copy, moments=moments, step=step,
        books=narrow_piece.code_books(weight.device),
        position=narrow_piece.PositionInWhole(seed=1, rows=5, whole_rows=5, first=0, second=0, width=300, column=0),
    )  # fmt: skip
    for number in range(1, 4):
        step.fill_(number)
        narrow_update.narrow_adamw(piece, gradient, numbers)
        mean, square = 0.9 * mean + 0.1 * wide_gradient, 0.95 * square + 0.05 * wide_gradient**2
        size = (square / (1 - 0.95**number)).sqrt() + 1e-8
        exact = exact * (1 - 0.1 * 0.1) - 0.1 / (1 - 0.9**number) * mean / size
    updated = weight if copy is None else copy
    error: float = ((updated.double() - exact).norm() / exact.norm()).item()
    return error


def _adamw(make: Made) -> float:
    """Try gradients and weights of each dtype that training has, aligned to 16 bytes and not.

    Masters, by which the kernel is chosen, are always fp32.
    """
    forms = ((dtype, aligned) for dtype in (torch.float32, torch.bfloat16, torch.float16) for aligned in (True, False))
    return code_trials.worst_of(_adamw_error(make, dtype, aligned) for dtype, aligned in forms)


def _adamw_error(make: Made, dtype: torch.dtype, aligned: bool) -> float:
    """Return the error of two updates of tensors of several sizes beside torch's kernel."""
    sizes = (5, 1), (70, 600), (3, 7)
    gradients = [make(*size).to(dtype) for size in sizes]
    if not aligned:
        gradients[2] = torch.cat((gradients[0].flatten()[:1], gradients[2].flatten()))[1:].view(3, 7)
    unit = torch.ones((), device=gradients[0].device)
    numbers = narrow_piece.UpdateNumbers(
        rate=0.1, beta1=0.9, beta2=0.95, epsilon=1e-8, decay=0.1, divide_by=2 * unit, skip=0 * unit
    )
    ours, exact = ([make(*size).float() for size in sizes] for _ in range(2))
    copies = None if dtype == torch.float32 else [x.to(dtype) for x in ours]
    states = [[[torch.zeros_like(x) for x in ours] for _ in range(2)] for _ in range(2)]
    for number in (1, 2):
        steps = [number * unit for _ in sizes]
        many_tensors.adamw(gradients, ours, (states[0][0], states[0][1]), copies, steps, numbers)
        compat.fused_adamw(
            exact, [x.float() for x in gradients], (states[1][0], states[1][1]), steps, lr=0.1, beta1=0.9, beta2=0.95,
            weight_decay=0.1, eps=1e-8, grad_scale=numbers.divide_by, found_inf=numbers.skip,
        )  # fmt: skip
    pairs = [*zip(ours, exact, strict=True), *(() if copies is None else zip(copies, exact, strict=True))]
    return code_trials.worst_of(((a.float() - b).norm() / b.norm()).item() for a, b in pairs)


def _squares(make: Made) -> float:
    """Try tensors of several sizes and dtypes, one of several chunks, aligned to 16 bytes and not."""
    errors = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for start in (0, 3):
            tensors = [make(5).to(dtype), make(300, 301).to(dtype), make(7, 9).to(dtype)[start:]]
            exact = torch.stack([x.double().square().sum() for x in tensors]).sum()
            errors.append((many_tensors.squares(tensors).double().sum() / exact - 1).abs().item())
    return code_trials.worst_of(errors)


def _no_moment(weight: Tensor, zero: int, signed: bool) -> narrow_piece.Moment:
    """Return a moment of zeros, whose index in the code book is `zero`, in blocks of 256."""
    codes = torch.full(weight.shape, zero, dtype=torch.uint8, device=weight.device)
    scales = torch.zeros(len(weight), -(-weight.shape[1] // 256), device=weight.device)
    return narrow_piece.Moment(codes, scales, signed, 256)


TRIALS: dict[str, Callable[[Made], float]] = {
    "loss_rows": _loss,
    "rms_norm": _norm,
    "add_rms_norm": _add_norm,
    "layer_norm": _layer_norm,
    "swiglu": _swiglu,
    "gelu": lambda make: _largest_error(gated.gelu, F.gelu, (make(5, 300),)),
    "rope": _rope,
    "merge": _merge,
    "permute": _permute,
    "grouped": _grouped,
    "attention": _attention,
    "paged_attention": step_trials.attended,
    "adamw": _adamw,
    "square_sums": _squares,
    "turn_and_keep": step_trials.stored,
    "likeliest": step_trials.likeliest_token,
    "narrow_adamw": _narrow,
    "narrow": code_trials.narrowed,
    "restore": code_trials.restored,
    "packed_product": code_trials.packed,
    "int8_product": code_trials.int8,
}
"""Trial of each operation of chooser.RULES."""
