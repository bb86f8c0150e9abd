"""Choice of the attention kernel on this GPU: by the table of spec/plan/execution.py, after a small trial.

A trial runs forward and backward and is compared with plain sums in fp64, once for each width, dtype and number of
heads that share keys. A kernel that raises or is wrong there is not used in this process. The log of a run and the
doctor's answer state the reason.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import cache, lru_cache, partial
from itertools import pairwise

import torch
from torch import Tensor

from meshwright import compat
from meshwright.kernels.attention.partial import fused_width, padded
from meshwright.kernels.chooser import NARROW, dtype_name, simulated_kind
from meshwright.spec.plan.execution import (
    AttentionCall,
    Case,
    GpuLibraries,
    KernelChoice,
    attention_kernel,
    has_flash_4,
)

LARGEST_ERROR = 0.03
"""Largest relative error of a tensor: some roundings to bf16."""
ROWS = 320
"""Positions of a trial: several tiles of keys of every kernel, and a part of one."""
DOCUMENTS = (0, 1, 130, 131, 320, 320)
"""Borders of a trial's documents: one of one position, some of several tiles, and an empty one."""
QUERIES = 150
"""Queries of a trial over past keys."""
WINDOW = 70
SCALE = 0.2


@lru_cache(maxsize=4096)
def choose(device: torch.device, dtype: torch.dtype, call: AttentionCall, group: int) -> KernelChoice:
    """Return the kernel for a call whose key heads serve `group` query heads each. A new form of call is tried first.

    Cached, since eager attention asks at each call.
    """
    if device.type != "cuda" or dtype not in NARROW:
        return KernelChoice("flash", "no GPU" if device.type != "cuda" else dtype_name(dtype))
    gpu = installed(device)
    choice = attention_kernel(call, gpu)
    if choice.kernel == "flash":
        return choice
    wrong = problem(choice.kernel, device, dtype, call.width, call.value_width, group, call.case)
    if wrong:
        return KernelChoice("flash", f"{choice.kernel}: {wrong}")
    return choice._replace(reason=f"sm_{gpu.major}0, {dtype_name(dtype)}: {choice.reason}")


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch has no annotations there
def chosen_kernel(
    device: torch.device, dtype: torch.dtype, case: Case, positions: int, width: int, value_width: int, group: int,
    gradients: bool,
) -> str:  # fmt: skip
    """Return `choose`'s kernel, as a constant of compiled code."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    call = AttentionCall(case, positions, width, value_width, deterministic=deterministic, gradients=gradients)
    return choose(device, dtype, call, group).kernel


def attend_past(q: Tensor, k: Tensor, v: Tensor, *, window: int, scale: float) -> Tensor:
    """Attend the last queries q (B, S, H, E) over k (B, T, K, E) and v (B, T, K, V). Returns (B, S, H, V).

    For a GPU in 16 bits, without gradients and without an S x T mask. `window`: most keys that a query sees, 0 = all.
    """
    width = v.shape[3]
    if past_kernel(q, k, v) == "flash-4":
        queries, keys, values = (padded(x, fused_width(x.shape[3])) for x in (q, k, v))
        return compat.flash_4_past(queries, keys, values, window=window, scale=scale)[..., :width]
    common = fused_width(max(q.shape[3], width))
    queries, keys, values = (padded(x, common).transpose(1, 2) for x in (q, k, v))
    # The kernel counts positions before the query, without itself. -1 is no border.
    before = window - 1 if window else -1
    out, _ = compat.banded_attention(queries, keys, values, left=before, right=0, scale=scale)
    return out.transpose(1, 2)[..., :width]


def past_kernel(q: Tensor, k: Tensor, v: Tensor) -> str:
    """Return the kernel of `attend_past`: flash-4 or flash."""
    if simulated_kind():
        return "flash"
    return choose_past(q.device, q.dtype, q.shape[3], v.shape[3], q.shape[2] // k.shape[2]).kernel


def choose_past(device: torch.device, dtype: torch.dtype, width: int, value_width: int, group: int) -> KernelChoice:
    """Return that kernel with its reason, by the widths of heads and how many share a key head."""
    call = AttentionCall("cache", 0, fused_width(width), fused_width(value_width), gradients=False)
    return choose(device, dtype, call, group)


@cache
def installed(device: torch.device) -> GpuLibraries:
    """Return the attention libraries of a device."""
    if device.type != "cuda" or not torch.cuda.is_available() or torch.version.hip is not None:
        return GpuLibraries(0)
    major = torch.cuda.get_device_capability(device)[0]
    return GpuLibraries(major, compat.cudnn_version(), has_flash_4())


@cache
def problem(
    kernel: str, device: torch.device, dtype: torch.dtype, width: int, value_width: int, group: int, case: Case
) -> str:
    """Return what is wrong with a kernel here. Empty = it runs and is right."""
    try:
        # A block in progress may have hooks and modes, which are local to this thread.
        with ThreadPoolExecutor(1) as pool:
            error = pool.submit(_largest_error, kernel, device, dtype, (width, value_width), group, case).result()
    except Exception as failure:  # compilers, drivers and launches fail in many ways
        line = (str(failure).splitlines() or [""])[0]
        return f"its trial failed: {type(failure).__name__} {line}".strip()
    return "" if error < LARGEST_ERROR else f"its trial was off by {error:.2g}"


def _largest_error(
    kernel: str, device: torch.device, dtype: torch.dtype, widths: tuple[int, int], group: int, case: Case
) -> float:
    """Return the largest relative error of results and gradients. NaN counts as infinite."""
    # Drawn on the host, so the trial has the same numbers on every device.
    generator = torch.Generator().manual_seed(1)
    sizes = (2 * group, widths[0]), (2, widths[0]), (2, widths[1])
    inputs = [torch.randn(ROWS, *size, generator=generator).to(device, dtype) for size in sizes]
    gradient = torch.randn(ROWS, 2 * group, widths[1], generator=generator).to(device, dtype)
    worst = 0.0
    for window in {"cache": (0, WINDOW), "window": (WINDOW,)}.get(case, (0,)):
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            if kernel == "cudnn":
                outcome = _row_outputs(inputs, gradient)
            else:
                outcome = (
                    _past_outputs(inputs, window) if case == "cache" else _packed_outputs(inputs, gradient, window)
                )
        seen = _visible_keys(case in ("documents", "window"), window).to(device)
        exact = _output_and_gradients(
            partial(_exact_attention, seen=seen), [x.double() for x in inputs], gradient.double()
        )
        exact = [exact[0][-QUERIES:]] if case == "cache" else exact
        # Norms are compared, not elements: single numbers near 0 are far off in 16 bits.
        errors = [((a.double() - b).norm() / b.norm()).item() for a, b in zip(outcome, exact, strict=True)]
        worst = max(worst, *(error if error == error else float("inf") for error in errors))
    return worst


def _past_outputs(inputs: list[Tensor], window: int) -> list[Tensor]:
    """Return flash-4's result for the last queries of a sequence."""
    q, k, v = inputs
    return [compat.flash_4_past(q[None, -QUERIES:], k[None], v[None], window=window, scale=SCALE)[0]]


def _row_outputs(inputs: list[Tensor], gradient: Tensor) -> list[Tensor]:
    """Return cuDNN's result and gradients."""

    def attend(*rows: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in rows)
        return compat.cudnn_attention(q, k, v, scale=SCALE)[0].transpose(0, 1)

    return _output_and_gradients(attend, inputs, gradient)


def _packed_outputs(inputs: list[Tensor], gradient: Tensor, window: int) -> list[Tensor]:
    """Return flash-4's result and gradients."""
    q, k, v = inputs
    borders = torch.tensor(DOCUMENTS, dtype=torch.int32, device=q.device)
    documents = borders, max(end - begin for begin, end in pairwise(DOCUMENTS))
    out, lse = compat.flash_4_attention(q, k, v, *documents, window=window, scale=SCALE)
    gradients = compat.flash_4_attention_backward(gradient, q, k, v, out, lse, *documents, window=window, scale=SCALE)
    return [out, *gradients]


def _output_and_gradients(attend: Callable[..., Tensor], inputs: list[Tensor], gradient: Tensor) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, gradient)]


def _visible_keys(packed: bool, window: int) -> Tensor:
    """Return which keys a query sees, (ROWS, ROWS) bool."""
    back = torch.arange(ROWS)[:, None] - torch.arange(ROWS)
    seen = (back >= 0) & (back < (window or ROWS))
    if packed:
        document = torch.bucketize(torch.arange(ROWS), torch.tensor(DOCUMENTS), right=True)
        seen &= document[:, None] == document
    return seen


def _exact_attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """Attend q (T, H, E) over k (T, K, E) and v (T, K, V). Returns (T, H, V)."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = torch.einsum("she,the->hst", q, k) * SCALE
    return torch.einsum("hst,thv->shv", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)
