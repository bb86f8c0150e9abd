"""Seconds of one kernel on an otherwise idle device, forward: the formula of its kind times its curve."""

from meshwright.planner.kernels import attention_times as attention
from meshwright.planner.kernels import expert_times as experts
from meshwright.planner.kernels import node_collective_times as collective
from meshwright.planner.kernels import product_times as product
from meshwright.planner.kernels.fitted_kernel import Kernel, kernel_of
from meshwright.planner.kernels.kernel_operations import (
    AttentionCore,
    Decode,
    FusedExperts,
    Operation,
    Prefill,
    Product,
)
from meshwright.spec.layout.cluster import Device

KINDS = tuple(collective.ROUNDS)


def kernel_seconds(device: Device, work: Operation) -> float:
    """Return the time of one call. A product of width 1 is fp8, with the kernel that quantizes activations."""
    if isinstance(work, Product):
        return _product(device, work)
    if isinstance(work, Prefill):
        kernel = kernel_of(device, "prefill")
        factor = kernel.curve.at(*prefill_place(*work))
        return factor * attention.prefill_us(kernel.figures, kernel.chip, *work) / 1e6
    if isinstance(work, Decode):
        kernel = kernel_of(device, "decode")
        factor = kernel.curve.at(*decode_place(*work))
        return factor * attention.decode_us(kernel.figures, kernel.chip, *work) / 1e6
    if isinstance(work, FusedExperts):
        kernel = kernel_of(device, "experts")
        factor = kernel.curve.at(*experts_place(*work))
        return factor * experts.experts_us(kernel.figures, kernel.chip, *work) / 1e6
    kernel, kind = kernel_of(device, "collective"), KINDS.index(work.name)
    rounds, size = collective.ROUNDS[work.name], (work.size_bytes, work.ranks)
    factor = kernel.curve.at(*collective_place(kind, *size))
    return factor * collective.collective_us(kernel.figures, kernel.chip, rounds, *size) / 1e6


def _product(device: Device, work: Product) -> float:
    if work.width >= 2:
        return product_us(kernel_of(device, "product.bf16"), work) / 1e6
    kernel = kernel_of(device, "product.fp8")
    return product_us(kernel, work, kernel.chip.low_best, quantize=True) / 1e6


def product_us(kernel: Kernel, work: Product, best: float = 0.0, *, quantize: bool = False) -> float:
    """Return microseconds of a product. `best`: FLOP per microsecond of the best one, if not bf16's."""
    m, k, n, batch, width, moved, *_ = work
    first = product.quantizing_us(kernel.figures, kernel.chip, m, k) if quantize else 0.0
    alone = product.product_us(kernel.figures, kernel.chip, m, n, k, width, batch, best, moved)
    return kernel.curve.at(m, n, k) * (first + alone)


LONGEST = 32768.0
"""Rows beyond which an attention core is no faster."""


def core_us(kernel: Kernel, work: AttentionCore) -> float:
    """Return microseconds of a causal forward core of so many FLOP, without the launch."""
    sequence = min(work.sequence, LONGEST)
    pairs = work.flop / (2 * sequence * sequence * work.dim)
    shape = pairs, sequence, 1.0, 1.0, 128.0
    alone = attention.prefill_us(kernel.figures, kernel.chip, *shape) - kernel.figures["launch_us"]
    return kernel.curve.at(*prefill_place(*shape)) * alone * work.dim / 128 / (0.86 if work.dim < 96 else 1)


LONG = AttentionCore(2 * 256 * LONGEST**2 * 128, sequence=LONGEST)
"""A core that keeps any device busy."""


def prefill_place(
    batch: float, sequence: float, heads: float, kv_heads: float, dim: float
) -> tuple[float, float, float, float]:
    """Return the coordinates of a shape on the axes of the curve: sequences x heads, length, group, dim."""
    return batch * heads, sequence, heads / kv_heads, dim


def decode_place(
    batch: float, context: float, heads: float, kv_heads: float, dim: float
) -> tuple[float, float, float, float]:
    """Return sequences x key heads, context, group, dim."""
    return batch * kv_heads, context, heads / kv_heads, dim


def experts_place(
    tokens: float, hidden: float, ffn: float, top_k: float, experts: float, tp: float, ep: float, skew: float
) -> tuple[float, float, float, float, float]:
    """Return tokens, experts of a rank, their width, ranks, 1 + skew."""
    return tokens, experts / ep, ffn / tp, ep, 1 + skew


def collective_place(kind: float, size_bytes: float, ranks: float) -> tuple[float, float, float]:
    """Return collective (1, 2, 4, 8), ranks, bytes."""
    return 2.0**kind, ranks, size_bytes
