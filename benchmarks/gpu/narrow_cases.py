"""What is narrower than 16 bit, or rounded to it at random: updates of optimizer states, and products of 8 bits. Plain
code is the slow twin of the same rounding; the wider form that it replaces is a rival."""

from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu import exact_forms
from benchmarks.gpu.case import EIGHT_BITS, ROWS, Case, Count, Leaf, Run, implementations, taken
from benchmarks.gpu.product_cases import Routing
from meshwright import compat
from meshwright.kernels.experts import experts
from meshwright.kernels.linear import fp8
from meshwright.kernels.linear.linear import weight_product
from meshwright.kernels.optimizer.adamw import (
    WideStates,
    adamw,
    adamw_reference,
    euclidean_norm,
    in_one_pass,
    narrow_adamw,
)
from meshwright.kernels.quantized.matrix import QuantizedMatrix
from meshwright.kernels.quantized.rounding import unpack
from meshwright.kernels.triton.narrow_piece import UpdateNumbers
from meshwright.spec.model.quantization_schemes import NF4, SCHEMES
from meshwright.spec.weights.boxes import BLOCK, Box, MomentFormat
from meshwright.training.optimizer.optimizer import Held, NarrowStates

BF16 = torch.bfloat16
RATE, BETA1, BETA2, EPSILON, DECAY = 1e-3, 0.9, 0.95, 1e-8, 0.1
MOST = 2**22
"""Elements of which plain code may have temporaries, as in training."""


def fp32_update(rows: int, width: int, parts: int, *, dtype: torch.dtype, device: torch.device) -> Case:
    """AdamW with fp32 moments on fp32 weights and their 16-bit copies, so many matrices at once. Per element 4 + 4
    bytes of the weight, 8 + 8 of moments, the gradient and the copy. Plain code widens the gradient, calls torch's
    kernel and copies."""
    step, scale = torch.ones((), device=device), torch.ones((), device=device)
    numbers = UpdateNumbers(
        rate=RATE, beta1=BETA1, beta2=BETA2, epsilon=EPSILON, decay=DECAY, divide_by=scale, skip=scale - 1
    )
    moments: dict[str, list[Tensor]] = {}
    copy = torch.empty(rows, width, dtype=dtype, device=device)

    def run(weight: Tensor, gradient: Tensor, prefer: str, part: str = "") -> Tensor:
        mine = part or prefer
        if mine not in moments:
            moments[mine] = [torch.zeros(rows, width, device=device) for _ in range(2)]
        first, second = (list(moment.chunk(parts)) for moment in moments[mine])
        masters = list(weight.detach().chunk(parts))
        states = WideStates(masters, (first, second), [step] * len(masters))
        if prefer != "eager" and in_one_pass(masters, prefer):
            adamw(states, gradient.chunk(parts), copy.chunk(parts), numbers)
        else:
            adamw_reference(states, gradient.float().chunk(parts), copy.chunk(parts), numbers)
        return weight

    return Case(
        operation="AdamW, fp32 states", size=f"{rows:,} x {width:,} in {parts}", dtype=dtype,
        leaves=(Leaf((rows, width), width**-0.5, torch.float32), Leaf((rows, width), dtype=dtype)), exact=_first_step,
        eager=partial(run, prefer="eager", part="twin"), ours=implementations("adamw", run, device, dtype),
        chosen=taken("adamw", device, dtype), counts={"forward": Count(rows * width * (24 + 2 * dtype.itemsize))},
        kinds=(ROWS,), learns=False, compiles=False,
    )  # fmt: skip


def gradient_norm(rows: int, width: int, parts: int, *, dtype: torch.dtype, device: torch.device) -> Case:
    """The Euclidean norm of so many matrices at once: the gradients, read once."""

    def run(gradient: Tensor, prefer: str) -> Tensor:
        return euclidean_norm(gradient.detach().chunk(parts), prefer)

    return Case(
        operation="norm of gradients", size=f"{rows:,} x {width:,} in {parts}", dtype=dtype,
        leaves=(Leaf((rows, width), dtype=dtype),), exact=lambda gradient: gradient.norm(),
        eager=partial(run, prefer="eager"), ours=implementations("square_sums", run, device, dtype),
        chosen=taken("square_sums", device, dtype), counts={"forward": Count(rows * width * dtype.itemsize)},
        kinds=(ROWS,), learns=False, compiles=False,
    )  # fmt: skip


def int8_update(rows: int, width: int, *, dtype: torch.dtype, device: torch.device) -> Case:
    """AdamW with moments of 8 bits on an fp32 weight and its 16-bit copy, one matrix. Per element 4 + 4 bytes of the
    weight, 2 of its copy, 4 of moments, and the gradient; a scale of each block twice."""
    moved = rows * width * (8 + dtype.itemsize + 4 + 4) + 16 * rows * width // BLOCK
    return _update(
        "AdamW, 8-bit states", MomentFormat(dtype="int8", block=BLOCK), rows, width, torch.float32, dtype, device, moved
    )


def bf16_update(rows: int, width: int, *, dtype: torch.dtype, device: torch.device) -> Case:
    """AdamW with moments in bf16 on a bf16 weight, stochastically rounded. Per element 4 bytes of the weight, 8 of
    moments, and the gradient."""
    name = "AdamW, bf16 states and weights"
    return _update(name, MomentFormat(dtype="bf16"), rows, width, BF16, dtype, device, rows * width * 16)


def _update(
    operation: str, stored: MomentFormat, rows: int, width: int, weights: torch.dtype, dtype: torch.dtype,
    device: torch.device, moved: int,
) -> Case:  # fmt: skip
    """Of a state that begins with zeros, each contestant's own, step after step. The gradient is fp32, as it is
    summed."""
    numbers = UpdateNumbers(
        rate=RATE, beta1=BETA1, beta2=BETA2, epsilon=EPSILON, decay=DECAY,
        divide_by=torch.ones((), device=device), skip=torch.zeros((), device=device),
    )  # fmt: skip

    held = Held(Box(whole=(rows, width), offsets=(0, 0), sizes=(rows, width)), stored)
    step = torch.ones((), device=device)
    states: dict[str, NarrowStates] = {}
    copy = torch.empty(rows, width, dtype=dtype, device=device) if weights == torch.float32 else None

    def run(weight: Tensor, gradient: Tensor, prefer: str, part: str = "") -> Tensor:
        mine = part or prefer
        if mine not in states:
            states[mine] = NarrowStates({"weight": held}, 0, device)
        piece = states[mine].piece("weight", (weight.detach(), copy), step)
        narrow_adamw(piece, gradient, numbers, MOST, prefer)
        return weight

    size = f"{rows:,} x {width:,}"
    return Case(
        operation=operation, size=size, dtype=dtype,
        leaves=(Leaf((rows, width), width**-0.5, weights), Leaf((rows, width), dtype=torch.float32)),
        exact=_first_step, eager=partial(run, prefer="eager", part="twin"),
        ours=implementations("narrow_adamw", run, device, dtype),
        chosen=taken("narrow_adamw", device, dtype), rivals={"torch, fp32 states": _fused(rows, width, device)},
        counts={"forward": Count(moved)}, kinds=(ROWS,), learns=False, compiles=False,
    )  # fmt: skip


def _first_step(weight: Tensor, gradient: Tensor) -> Tensor:
    """AdamW's first: its moments are the gradient and its square, but for what the corrections divide by."""
    return weight * (1 - RATE * DECAY) - RATE * gradient / (gradient.abs() + EPSILON)


def _fused(rows: int, width: int, device: torch.device) -> Run:
    """torch's own kernel, on an fp32 weight and fp32 moments."""
    master, *moments = (torch.zeros(rows, width, device=device) for _ in range(3))
    step, scale = torch.ones((), device=device), torch.ones((), device=device)

    def run(weight: Tensor, gradient: Tensor) -> Tensor:
        target = weight if weight.dtype == torch.float32 else master.copy_(weight)
        compat.fused_adamw(
            [target], [gradient], ([moments[0]], [moments[1]]), [step], lr=RATE, beta1=BETA1, beta2=BETA2,
            weight_decay=DECAY, eps=EPSILON, grad_scale=scale, found_inf=scale - 1,
        )  # fmt: skip
        return weight if target is weight else weight.copy_(target)

    return run


def restored(rows: int, width: int, *, dtype: torch.dtype, device: torch.device) -> Case:
    """A matrix made of NF4 codes, as a product beside adapters takes it: half a byte and a share of a scale read, the
    matrix written, per element."""
    scheme = SCHEMES["nf4"]
    codes = (torch.arange(rows * width // 2, device=device) * 37 % 256).view(rows, -1).to(torch.uint8)
    numbers = torch.tensor(NF4, dtype=torch.float64, device=device)

    def run(scales: Tensor, prefer: str) -> Tensor:
        matrix = QuantizedMatrix(scheme=scheme, size_in=width, codes=codes, scales=scales, prefer=prefer)
        return matrix.restored(dtype)

    def exact(scales: Tensor) -> Tensor:
        return numbers[unpack(codes, 4, width).long()] * scales.repeat_interleave(scheme.group, 1)

    moved = rows * width * (0.5 + dtype.itemsize) + 4 * rows * scheme.groups(width)
    return Case(
        operation="NF4 restored", size=f"{rows:,} x {width:,}", dtype=dtype,
        leaves=(Leaf((rows, scheme.groups(width)), dtype=torch.float32),), exact=exact,
        eager=partial(run, prefer="eager"), ours=implementations("restore", run, device, dtype),
        chosen=taken("restore", device, dtype), counts={"forward": Count(moved)}, kinds=(ROWS,), learns=False,
        compiles=False,
    )  # fmt: skip


def weight_gradient_fp8(tokens: int, out: int, into: int, *, dtype: torch.dtype, device: torch.device) -> Case:
    """gradient^T x, both rounded by columns. Read twice for that, written once in 8 bits, then read by the product."""
    operands = tokens * (out + into)
    counts = {"forward": Count(operands * (2 * 2 + 2) + 2 * out * into, 2.0 * tokens * out * into)}

    def twin(gradient: Tensor, x: Tensor) -> Tensor:
        return (fp8.narrow(gradient.t()).wide() @ fp8.narrow(x.t()).wide().t()).to(x.dtype)

    def exact(gradient: Tensor, x: Tensor) -> Tensor:
        return gradient.t() @ x

    return Case(
        operation="fp8 weight gradient", size=f"{tokens:,} x {out:,} x {into:,}", dtype=BF16,
        leaves=(Leaf((tokens, out), dtype=BF16), Leaf((tokens, into), dtype=BF16)), exact=exact, eager=twin,
        ours={"ours, torch": partial(fp8.weight_gradient, dtype=BF16)}, chosen="ours, torch",
        rivals={"bf16": partial(weight_product, dtype=BF16)}, counts=counts, kinds=(EIGHT_BITS,), learns=False,
        compiles=False,
    )  # fmt: skip


def grouped_fp8(
    tokens: int, width: int, ffn: int, number: int, top_k: int, *, dtype: torch.dtype, device: torch.device
) -> Case:  # fmt: skip
    """Each expert's rows times its matrix, and both gradients, all operands rounded. Least bytes: as of 16 bit, read
    once more for the scales, and both ways in 8 bits."""
    counts, rows = Routing(tokens, top_k, number, device).counts, tokens * top_k
    known: list[int] = counts.tolist()
    matrices, flop = number * width * ffn, 2.0 * rows * width * ffn
    forward = Count((rows * width + matrices) * 6 + 2 * rows * ffn, flop)
    leaves = Leaf((rows, width), dtype=BF16), Leaf((number, ffn, width), width**-0.5, BF16)

    def ours(x: Tensor, weights: Tensor) -> Tensor:
        return fp8.expert_linear(x, weights, counts)

    def wide(x: Tensor, weights: Tensor) -> Tensor:
        on_device = experts.groups_on_device(x, weights)
        return experts.expert_linear(x, weights, counts if on_device else known)

    return Case(
        operation="MoE grouped product, fp8", size=f"{rows:,} x {width:,} x {ffn:,}, {number} experts", dtype=BF16,
        leaves=leaves, exact=partial(exact_forms.grouped, counts=known),
        eager=partial(fp8.expert_linear_reference, counts=known), ours={"ours, torch": ours},
        chosen="ours, torch", rivals={"bf16": wide},
        counts={"forward": forward, "backward": Count(2 * forward.bytes_moved, 2 * flop)}, kinds=(EIGHT_BITS,) * 3,
        compiles=False,
    )  # fmt: skip
