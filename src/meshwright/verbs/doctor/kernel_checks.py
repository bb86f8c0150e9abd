"""Kernel checks: results beside plain fp64 arithmetic, the attention kernel in use, the speed of products."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import get_args

import torch
from torch import Tensor

from meshwright import compat
from meshwright.kernels import Kernels, fast
from meshwright.kernels.attention import gpu
from meshwright.kernels.attention.attend import UNKNOWN, DocumentSpans, Mask, attend_reference, causal_mask
from meshwright.kernels.experts.experts import expert_linear_reference, groups_on_device
from meshwright.kernels.loss.cross_entropy import linear_cross_entropy_reference
from meshwright.kernels.quantized import device_products
from meshwright.kernels.quantized.device_products import ProductContest
from meshwright.kernels.quantized.quantize import quantize_matrix
from meshwright.observe.rates import synchronize
from meshwright.spec.model.quantization_schemes import SCHEMES
from meshwright.spec.plan.execution import LEAST_POSITIONS, MAJORS, AttentionCall, Case
from meshwright.training.device import known_device
from meshwright.verbs.doctor.findings import Finding, failure, ok, skipped, warning

BARS = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}
"""Largest allowed relative error by dtype: a few roundings. TF32 products are not compared."""
SLOW = 0.6
"""Share of a known GPU's best measured product rate below which something slows it."""


LENGTH = 256


@dataclass(frozen=True, slots=True)
class Form:
    """One use of attention: sizes of q, k and v, and the mask."""

    heads: int
    keys: int
    width: int
    values: int
    packed: bool = False
    window: int = 0
    positions: int = LENGTH


FORMS = {
    "causal": Form(4, 4, 64, 64),
    "grouped (GQA)": Form(8, 2, 64, 64),
    "long rows": Form(8, 2, 128, 128, positions=LEAST_POSITIONS),
    "packed documents": Form(4, 4, 64, 64, packed=True),
    "latent (MLA)": Form(4, 4, 96, 64),
    "packed, grouped": Form(8, 2, 64, 64, packed=True),
    "packed, latent": Form(4, 4, 96, 64, packed=True),
    "packed, odd heads": Form(4, 2, 20, 20, packed=True),
    "window": Form(8, 2, 64, 64, window=50),
    "packed, window": Form(4, 4, 64, 64, packed=True, window=50),
}


def check_attention(device: torch.device, dtype: torch.dtype, kernels: Kernels | None = None) -> Finding:
    """Check every form of attention, forward and backward."""
    attend = (kernels or fast()).attend
    worst: dict[str, float] = {}
    used: dict[str, str] = {}
    for name, form in FORMS.items():
        sizes = ((form.heads, form.width), (form.keys, form.width), (form.keys, form.values))
        length = form.positions
        tensors = [_random((2, length, *size), device, dtype, seed) for seed, size in enumerate(sizes)]
        documents = (torch.arange(length, device=device) // 100).expand(2, -1) if form.packed else None
        spans = DocumentSpans(6, 100) if form.packed else UNKNOWN
        mask = causal_mask(length, length, window=form.window, documents=documents, spans=spans, device=device)

        def plain(q: Tensor, k: Tensor, v: Tensor, mask: Mask = mask) -> Tensor:
            return attend_reference(q, k, v, mask, scale=0.1)

        def ours(q: Tensor, k: Tensor, v: Tensor, mask: Mask = mask) -> Tensor:
            attended: Tensor = attend(q, k, v, mask, scale=0.1)
            return attended

        worst[name] = _error(ours, plain, tensors)
        q, k, v = tensors
        used[name] = _backend(partial(ours, q, k, v), device)
    return _judge(
        "attention", worst, BARS[dtype], {"backends": used}, _backend_names(used) + _flash_2_reasons(device, dtype)
    )


def check_flash_parts(device: torch.device, dtype: torch.dtype) -> Finding:
    """Check the fused kernel with its log-sum-exp, from which context parallelism combines parts."""
    if not compat.has_flash_attention(device.type):
        return skipped("attention by parts", "this torch has no fused kernel that returns the log-sum-exp")
    q, k, v = (_random((2, 4, LENGTH, 64), device, dtype, seed) for seed in range(3))
    out, lse = compat.flash_attention(q, k, v, causal=False, scale=0.1, device=device.type)
    scores = torch.einsum("bhse,bhte->bhst", q.double(), k.double()) * 0.1
    expected = {"result": scores.softmax(-1) @ v.double(), "log-sum-exp": scores.logsumexp(-1)}
    computed = {"result": out, "log-sum-exp": lse}
    worst = {name: _relative(computed[name], expected[name]) for name in expected}
    gradient = _random(tuple(out.shape), device, dtype, 7)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    recomputed = (torch.einsum("bhse,bhte->bhst", *leaves[:2]) * 0.1).softmax(-1) @ leaves[2]
    exact = torch.autograd.grad(recomputed, leaves, gradient.double())
    ours = compat.flash_attention_backward(gradient, q, k, v, out, lse, causal=False, scale=0.1, device=device.type)
    worst |= {f"gradient of {n}": _relative(a, b) for n, a, b in zip("qkv", ours, exact, strict=True)}
    return _judge("attention by parts", worst, BARS[dtype])


def check_experts(device: torch.device, dtype: torch.dtype, kernels: Kernels | None = None) -> Finding:
    """Check products of a mixture of experts. Experts without tokens must get zero gradients."""
    product = (kernels or fast()).expert_linear
    counts = [40, 0, 24, 0, 64]
    rows = _random((sum(counts), 64), device, dtype, 0)
    weights = _random((len(counts), 32, 64), device, dtype, 1)
    on_device = torch.tensor(counts, device=device)
    grouped = groups_on_device(rows, weights)

    def engine_product(x: Tensor, w: Tensor) -> Tensor:
        rows_out: Tensor = product(x, w, on_device if grouped else counts)
        return rows_out

    def plain_product(x: Tensor, w: Tensor) -> Tensor:
        return expert_linear_reference(x, w, counts)

    leaves = [x.detach().clone().requires_grad_() for x in (rows, weights)]
    engine_product(*leaves).sum().backward()
    gradient = leaves[1].grad
    empty = [n for n, count in enumerate(counts) if not count and gradient is not None and gradient[n].any()]
    if empty:
        return failure(
            "experts", f"experts {empty} had no token and got a gradient that is not zero",
            "update torch (pytorch issue 172439), or train without grouped products: layout.kernels=reference",
        )  # fmt: skip
    worst = {"products": _error(engine_product, plain_product, [rows, weights])}
    return _judge("experts", worst, BARS[dtype], {"grouped": grouped}, "grouped products" if grouped else "one by one")


def check_loss(device: torch.device, dtype: torch.dtype, kernels: Kernels | None = None) -> Finding:
    """Check the fused head and loss."""
    targets = torch.arange(64, device=device) % 50
    targets[3] = -100
    cross_entropy = (kernels or fast()).linear_cross_entropy
    worst = {
        "head and loss": _error(
            lambda x, w: cross_entropy(x, w, targets),
            lambda x, w: linear_cross_entropy_reference(x, w, targets),
            [_random((64, 32), device, dtype, 0), _random((50, 32), device, dtype, 1)],
        )
    }
    return _judge("loss", worst, BARS[dtype])


def check_products(device: torch.device, dtype: torch.dtype, flop_per_s: float = 0.0) -> Finding:
    """Compare the speed of a large product with that of a known GPU. `flop_per_s` of 0 = measure it."""
    rate = flop_per_s or product_flop_per_s(device, dtype)
    shown = f"{rate / 1e12:.3g} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:.3g} GFLOP/s"
    summary = f"{shown} in {str(dtype).removeprefix('torch.')}"
    preset = known_device(device)
    best = preset.half_matmul_flop_per_s or preset.half_flop_per_s if preset else 0.0
    if best and dtype != torch.float32 and rate < SLOW * best:
        return warning(
            "products", f"{summary}: {rate / best:.0%} of what this GPU reaches elsewhere",
            "nvidia-smi -q -d PERFORMANCE,POWER,TEMPERATURE tells what slows it; end other programs on it",
            flop_per_s=rate,
        )  # fmt: skip
    return ok("products", summary, flop_per_s=rate)


def check_quantized_products(
    device: torch.device, make: Callable[[Callable[[str], None]], ProductContest] | None = None, size: int = 4096
) -> Finding:
    """Hold the contest of 4-bit products that `serve` holds at its start, for one matrix of size x size.

    The finding names the competitors, the winner and the time it takes.

    Args:
        make: Returns the contest for a function that prints. None = all ways of a GPU, including those that need a
            second layout (serve --second-layouts).
    """
    name = "4-bit products"
    if device.type != "cuda" and make is None:
        return skipped(name, "ways of multiplying with 4-bit codes are timed on a GPU alone")
    lines: list[str] = []
    contest = make(lines.append) if make else device_products.new_contest(copies=True, say=lines.append)
    weight = _random((size, size), device, torch.bfloat16, 0)
    matrix = quantize_matrix(name, weight, SCHEMES["int4-rtn"], None, torch.bfloat16)
    began = time.perf_counter()
    out = contest.product(weight[:2].contiguous(), matrix, None)
    seconds = time.perf_counter() - began
    contest.close()
    sentence = f"{lines[0]}; the contest takes {seconds:.1f} s for each size of matrix at the start of serve"
    if out is None:
        return failure(name, sentence, "no way is right: serve models in bf16, and report this line")
    return ok(name, sentence, contest_seconds=seconds)


def product_flop_per_s(device: torch.device, dtype: torch.dtype, rounds: int = 5) -> float:
    """Return the median rate of a square product: 8192 on a GPU, 1024 on a CPU."""
    size = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    taken = []
    for _ in range(rounds + 1):
        synchronize(device)
        began = time.perf_counter()
        torch.mm(a, b)
        synchronize(device)
        taken.append(time.perf_counter() - began)
    return 2.0 * size**3 / statistics.median(taken[1:])


def _random(size: tuple[int, ...], device: torch.device, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def _error(ours: Callable[..., Tensor], plain: Callable[..., Tensor], tensors: list[Tensor]) -> float:
    """Return the largest relative error of output and gradients, beside the plain form in fp64."""
    computed: list[Tensor] = []
    expected: list[Tensor] = []
    for function, inputs, collected in ((ours, tensors, computed), (plain, [x.double() for x in tensors], expected)):
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        out = function(*leaves)
        collected += [out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))]
    return max(_relative(a, b) for a, b in zip(computed, expected, strict=True))


def _relative(computed: Tensor, expected: Tensor) -> float:
    error = (computed.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-12)
    return float(error) if bool(torch.isfinite(error)) else float("inf")


def _judge(
    check: str, worst: Mapping[str, float], bar: float, figures: Mapping[str, object] | None = None, more: str = ""
) -> Finding:
    name = max(worst, key=lambda key: worst[key])
    summary = f"largest error {worst[name]:.1e} ({name}), allowed {bar:.0e}"
    if not worst[name] <= bar:
        return failure(
            check, summary, "layout.kernels=reference avoids the kernel; report it with this file", errors=dict(worst)
        )
    return ok(check, f"{summary}{f'; {more}' if more else ''}", errors=dict(worst), **(figures or {}))


def _backend(run: Callable[[], Tensor], device: torch.device) -> str:
    if device.type != "cuda":
        return "cpu"
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        run()
        torch.cuda.synchronize(device)
    names = " ".join(event.key.lower() for event in seen.key_averages())
    known = {
        "cudnn": "cudnn",
        "flash_attncute": "flash-4",
        "flash": "flash",
        "fmha": "efficient",
        "efficient": "efficient",
    }
    return next((kernel for word, kernel in known.items() if word in names), "plain products")


def _flash_2_reasons(device: torch.device, dtype: torch.dtype) -> str:
    """Return why FlashAttention 2 runs where a faster kernel is known. Empty = it does not."""
    cases_by_reason: dict[str, list[Case]] = {}
    for case in get_args(Case) if gpu.installed(device).major in MAJORS else ():
        kernel, reason = gpu.choose(device, dtype, AttentionCall(case, LEAST_POSITIONS, 128, 128), 4)
        if kernel == "flash":
            cases_by_reason.setdefault(reason, []).append(case)
    return "".join(f"; FlashAttention 2 for {', '.join(cases)}: {why}" for why, cases in cases_by_reason.items())


def _backend_names(used: Mapping[str, str]) -> str:
    kinds = sorted(set(used.values()))
    if kinds == ["cpu"]:
        return ""
    return "kernels: " + ", ".join(f"{name} {kernel}" for name, kernel in used.items())
