"""Seconds of an operation in a training run: matrix products by shape, attention cores, memory passes.

A product takes the time of its kernel alone (kernels/: tiles in waves, bytes, curves fitted to measured kernels) at
`product_share` of the rate. A machine that `calibrate` measured has curves of rates by size instead, interpolated
between points. A GPU's products follow from tiles and waves. A CPU's are measured.

`speeds_of` has the rates of published software. Meshwright's engine reaches others on Hopper (`engine_speeds`), where
its own steps were measured kernel by kernel: one H200 of 700 W, torch 2.11, cuBLAS 13, 2026-11-27, by the profiler's
times of whole steps (docs/accuracy.md). cuBLAS's kernels of 2025 multiply at 770 to 840 TFLOP/s there. The best product
of older ones, alone on the device, reaches 794.5, and published software of Hopper is held to 0.82 of that. Other
Hopper devices scale by their best product and memory rate. That is unmeasured, so their plans are predictions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from math import log
from typing import Literal

from meshwright.planner.cost.stack import Stack
from meshwright.planner.cost.work import MemoryPass, Work
from meshwright.planner.kernels.fitted_kernel import (
    LONG,
    NARROW_HEAD_SHARE,
    Kernel,
    RateGrid,
    core_us,
    kernel_of,
    product_us,
)
from meshwright.planner.kernels.kernel_operations import AttentionCore, Product
from meshwright.spec.layout.cluster import Device
from meshwright.spec.memory.held import is_aligned
from meshwright.spec.model.shape import ModelShape
from meshwright.spec.plan.execution import HOPPER as ATTENTION
from meshwright.spec.plan.execution import (
    LEAST_CUDNN,
    AttentionCall,
    AttentionRates,
    GpuLibraries,
    KernelChoice,
    attention_call,
    attention_kernel,
    has_flash_4,
)
from meshwright.spec.plan.plan import Plan

Triple = tuple[float, float, float]
"""Seconds (forward, backward, the most that selective recomputation adds where it repeats anything)."""
NOTHING: Triple = (0.0, 0.0, 0.0)
NEWTON = 4
"""Newton steps towards the clock, from full speed. Four find it to a thousandth."""
WIDE = 16
"""Ratio of the bf16 to the fp32 peak, where only the former is known: 16 (A100), 15 (H100), 28 (B200)."""
ARCHITECTURES: dict[str, dict[str, float]] = {
    "A100": {"product_share": 0.88, "wide_flop_per_s": 19.5e12},
    "H100": {"product_share": 0.82, "wide_flop_per_s": 67e12},
    "H200": {"product_share": 0.82, "wide_flop_per_s": 67e12},
    "H800": {"product_share": 0.82, "wide_flop_per_s": 67e12},
    "GH200": {"product_share": 0.85, "wide_flop_per_s": 67e12},
    "B200": {"product_share": 0.86, "wide_flop_per_s": 75e12},
    "GB200": {"product_share": 0.86, "wide_flop_per_s": 80e12},
    "B300": {"product_share": 0.86},
    "GB300": {"product_share": 1.0},
}
"""Shares of the best product, by prefix of a device's name.

Since Hopper, power rather than the tensor cores bounds long runs of products. GB200 is taken as B200, whose chip it is.
Of B300 in a rack no best product is known, so the share refers to four fifths of the data sheet. fp32: NVIDIA's data
sheets, CUDA cores (HGX B200: 600e12 of 8 GPUs, GB200 NVL72: 5,760e12 of 72).
"""
HOPPER_SHARES = {1: (0.22, 0.19), 2: (0.34, 0.29), 3: (0.54, 0.42)}
BLACKWELL_SHARES = {1: (0.10, 0.08), 2: (0.52, 0.40), 3: (0.52, 0.40)}
BEFORE_AMPERE = {generation: (0.35, 0.32) for generation in (1, 2, 3)}
"""Later kernels need Ampere (Dao-AILab/flash-attention, README.md).

The memory-efficient one is as fast as the first.
"""
FLASH: dict[str, dict[int, tuple[float, float]]] = {
    "A100": {1: (0.35, 0.32), 2: (0.64, 0.58), 3: (0.64, 0.58)},
    "V100": BEFORE_AMPERE,
    "T4": BEFORE_AMPERE,
    "H": HOPPER_SHARES,
    "GH": HOPPER_SHARES,
    "B": BLACKWELL_SHARES,
    "GB": BLACKWELL_SHARES,
}
"""Prefix of a device's name -> generation of the kernel -> shares forward and backward, long sequences.

Dao 2023 (arXiv:2307.08691): figures 4 to 7 (the second on A100 and H100), section 1 (the first reaches half of it).
Shah et al. 2024 (arXiv:2407.08608): the third; cuDNN's stands for it elsewhere. Since Hopper in sustained runs, as for
products: 0.85 of what a kernel alone reaches.
"""
FP4_OVER_FP8 = 2.0
"""Ratio of the data sheets (3 for Blackwell Ultra, which is unmeasured)."""
REACHED = {"H": 0.803, "A100": 0.868, "GH": 0.0, "B": 0.0, "GB": 0.0}
"""Share of the peak that the best product reaches at the data sheet's power. With less power everything is slower.

0 = FLASH says what attention reaches there. A device without a line in FLASH is compared with A100, whose line it uses.
"""
FP8_SHARE = 0.9
"""Share of bf16's share of the peak, where no fp8 product was measured.

0.89 on H100, 0.95 to 0.99 on Blackwell.
"""
HOPPER_DEVICES = ("H100", "H200", "H800", "GH200")
"""Prefixes of the names of Hopper devices."""
ENGINE_PRODUCT_SHARE = 1.05
"""Share of the best published product, for tiles with a long inner dim."""
ENGINE_UNALIGNED_SHARE = 0.155
"""Further factor.

GPT-2's head of 50,257 words takes 4.96 ms for a chunk of 2,521 rows (kernels of an older generation).
"""
ENGINE_TF32_SHARE = 0.63
"""Products and attention of an fp32 step with TF32, together."""
ENGINE_POWER = (1.94, 1.0)
"""Argument of Speeds.slowed."""
ENGINE_GROUPED_SHARE = 0.76
"""Further factor: CUTLASS's grouped kernel with experts' uneven rows."""
ENGINE_MEMORY_SHARE = 0.84
"""Fused kernels of SwiGLU, rotation and loss, alone: 0.84 to 0.99 of a copy at 4,134 GB/s."""
ENGINE_PACKED_HALF = (900.0, 700.0)
"""FlashAttention 2 over documents, measured with rows of 8 documents of 1,024 tokens only."""
ENGINE_UPDATE_SHARES = {
    "adamw": 0.605, "widen": 0.408, "add": 0.6, "copy": 0.748, "norm": 0.50, "narrow": 0.30, "half": 0.82,
}  # fmt: skip
"""Shares of the optimizer's kernels.

torch's fused AdamW, gradients widened to fp32, new weights in 16 bits, the norm, Meshwright's kernels for 8-bit and
16-bit moments. The kernel for fp32 states is assumed to be as fast as the last.
"""
WIDEST_FLASH = 256
"""Widest head that FlashAttention 2 takes."""
BLACKWELL_DEVICES = ("B200", "B300", "GB200", "GB300")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeviceCurves:
    """Rates that a device reaches while all others of its node do the same."""

    products: Mapping[float, RateGrid]
    """Operand width in bytes -> FLOP/s by (m, k, n)."""
    passes: RateGrid
    """Bytes/s by the bytes that a kernel moves."""
    attention: tuple[RateGrid, RateGrid]
    """FLOP/s by (sequence, head dim), forward and backward."""
    update: RateGrid
    """Bytes/s of the optimizer by the bytes that it moves."""

    def product_s(self, work: Product) -> float:
        """Return the seconds of a matrix product. An unmeasured width is timed as the next wider one."""
        wider = [width for width in self.products if width >= work.width]
        rates = self.products[min(wider, default=max(self.products))]
        return work.flop / rates.at(work.m, work.k, work.n)

    def pass_s(self, work: MemoryPass) -> float:
        """Return the seconds of all kernels of a memory pass."""
        return work.moved_bytes / self.passes.at(work.moved_bytes / work.launches) if work.moved_bytes else 0.0

    def attention_s(self, work: AttentionCore) -> float:
        """Return the seconds of an attention core."""
        return work.flop / self.attention[work.backward].at(work.sequence, work.dim)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LinkCurves:
    """Times of exchanges within a node while its other groups exchange as well."""

    seconds: Mapping[tuple[str, int], RateGrid]
    """(collective, ranks) -> seconds by bytes of the whole tensor."""

    def exchange_s(self, collective: str, size_bytes: float, ranks: int) -> float | None:
        """Return the seconds of one exchange, or None if the collective was not measured.

        Larger tensors extend the last bandwidth. Other group sizes scale the nearest one by the share that travels.
        """
        sizes = [known for name, known in self.seconds if name == collective]
        if not sizes:
            return None
        # Nearest by ratio, since latency and bandwidth follow the logarithm of the ranks.
        near = min(sizes, key=lambda known: abs(log(known / ranks)))
        grid = self.seconds[collective, near]
        travels = (ranks - 1) / ranks / ((near - 1) / near)
        return grid.at(size_bytes) * max(1.0, size_bytes / grid.axes[0][-1]) * travels


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Seconds of one layer and micro-batch beyond those of its kernels."""

    swiglu: Triple = NOTHING
    """A dense layer with a gated MLP."""
    gelu: Triple = NOTHING
    """A dense layer with a plain MLP."""
    routed: Triple = NOTHING
    """A mixture of experts: attention, router, dispatch and combine."""
    expert: Triple = NOTHING
    """Added by each expert that a rank holds."""

    def layer(self, shape: ModelShape, *, routed: bool, experts: float) -> Triple:
        """Return the seconds of a layer with this number of experts on the rank."""
        if not routed:
            return self.swiglu if shape.mlp == "swiglu" else self.gelu
        a, b, c = (base + experts * each for base, each in zip(self.routed, self.expert, strict=True))
        return a, b, c


KINDS = tuple(kind.name for kind in fields(Host))


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """Rates that a device reaches, from calibration or from data sheets (`speeds_of`)."""

    matmul_flop_per_s: float
    """Best matrix product."""
    peak_flop_per_s: float
    """Data sheet's peak, to which attention's shares refer."""
    memory_bytes_per_s: float
    low_flop_per_s: float = 0.0
    """Best fp8 matrix product. 0 = none, fp8 operands are multiplied as bf16."""
    lowest_flop_per_s: float = 0.0
    """Best fp4 matrix product. 0 = as fp8."""
    wide_flop_per_s: float = 0.0
    """fp32 products by torch's default, without TF32. 0 = 1 / WIDE of the data sheet's peak."""
    product_share: float = 0.95
    """Share of the best product in a training run: clocks, power, layouts."""
    inner_half: float = 1.0
    """Factor on the time to fill and drain a tile's pipeline, over the kernel alone."""
    wave_share: float = 0.0
    """Cost of a started wave beyond the kernel's own: 1 = a whole wave, 0 = as the kernel alone."""
    unaligned_share: float = 0.35
    """Factor for rows that are no multiple of 16 bytes: tensor cores are fed element by element."""
    tf32_share: float = 1.0
    """Share of half the bf16 rate that TF32 reaches."""
    narrow_heads: float = NARROW_HEAD_SHARE
    """Factor on attention's rate with heads of 64."""
    power: tuple[float, float] | None = None
    """Power draw of products beyond the device's limit, see `slowed`. None = its shares include that."""
    grouped_share: float = 1.0
    """Factor for many products in one kernel, over a single one."""
    attention_forward: float = 0.64
    """Share of the data sheet's peak that attention reaches with long sequences and heads of 128."""
    attention_backward: float = 0.58
    attention_masked: tuple[float, float] = (0.35, 0.32)
    """Shares, forward and backward, under a mask that is a tensor.

    The memory-efficient kernel takes it, which is as fast as the first generation of the other.
    """
    attention_half: tuple[float, float] = (400.0, 900.0)
    """Sequence length at which attention reaches half of that, forward and backward."""
    parted: AttentionRates | None = None
    """Rates of the kernel that takes parts of rows, if it is another one."""
    bordered: AttentionRates | None = None
    """Rates of the kernel that takes documents and windows. None = `parted`."""
    packed_half: tuple[float, float] | None = None
    """Sequence length of half the rate where rows consist of several documents."""
    memory_share: float = 0.80
    update_shares: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Shares of the memory rate of the optimizer's kernels (time/update_passes.py). Others: `memory_share`."""
    launch_s: float = 2.0e-6
    """Seconds of any kernel on the device, however small."""
    ranks_per_core: float = 1.0
    """Above 1, ranks take turns on the cores of a CPU, and a waiting rank yields its turns."""
    host: Host | None = None
    """Host time of a layer where the host computes itself, for ranks with a core each."""
    host_share: float = 1.0
    """Factor on that in a training run."""
    kernel: Kernel | None = None
    """Model of products alone. None = `curves` has them."""
    attention: Kernel | None = None
    """Model of fused attention alone, by length, heads and their dim. `attention_forward` sets the level."""
    attention_alone: float = 1.0
    """Share of the data sheet's peak that it reaches alone with long sequences and heads of 128."""
    curves: DeviceCurves | None = None
    """Measurements of this very machine, in place of peaks, tiles and waves. The shares stay factors."""
    _known: dict[Product | AttentionCore, float] = field(default_factory=dict, init=False, repr=False, compare=False)
    _alone: dict[Product, tuple[float, bool, float]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def reached_flop_per_s(self) -> float:
        """Best rate expected in training on a measured machine. 0 = not measured."""
        if self.curves is None:
            return 0.0
        return self.product_share * max(max(grid.values) for grid in self.curves.products.values())

    def seconds(self, work: Work) -> float:
        """Return the seconds of one operation, alone on the device."""
        # Each call pays for its own launch and its own last wave.
        if isinstance(work, Product) and work.calls > 1:
            return work.calls * self.seconds(work._replace(calls=1))
        if self.curves:
            return self._measured(self.curves, work)
        if isinstance(work, Product):
            return self._product(work)
        if isinstance(work, AttentionCore):
            if self.attention and not (work.backward or work.masked or work.width >= 4):
                return self._core(self.attention, work)
            peak = self.rate(work.width) if work.width >= 4 else self.peak_flop_per_s
            return work.flop / (peak * self._attention(work)) + self.launch_s
        return work.moved_bytes / (self.memory_bytes_per_s * self.memory_share) + work.launches * self.launch_s

    def alone(self, works: Sequence[Work]) -> list[tuple[float, bool, float]]:
        """Return (seconds alone on the device, True if power bounds them, launches) of each piece of work."""
        rate, launch_s, timed = self.memory_bytes_per_s * self.memory_share, self.launch_s, []
        for work in works:
            if isinstance(work, MemoryPass):  # the common case, inlined from `seconds`
                moved_bytes, launches = work
                took = self.seconds(work) if self.curves else moved_bytes / rate + launches * launch_s
                timed.append((took, False, launches))
            elif isinstance(work, Product):
                # Products repeat across layouts and their model is slow, so each is timed once.
                known = self._alone.get(work)
                if known is None:
                    bound = self.power is not None and self.is_bound(work)
                    known = self._alone[work] = self.seconds(work), bound, float(work.calls)
                timed.append(known)
            else:
                timed.append((self.seconds(work), False, 1.0))
        return timed

    def slowed(self, product_s: float, other_s: float) -> float:
        """Return how much slower power-bound products run, given their seconds and those of all that runs between them.

        What runs between them draws `rest` less than the limit L. At full clock products draw (dynamic - static) more.
        At 1 / s of the clock they draw static * s + dynamic / s^2 in the time they took before, since voltage falls
        with the clock. Energy over both is then L times their time: dynamic / s^2 - static s = rest (1 - g) / g, with g
        the products' share of the time. `power` is (dynamic, static) over rest.
        """
        if self.power is None or product_s <= 0:
            return 1.0
        dynamic, static = self.power
        spared = other_s / product_s
        # The pauses between products save enough energy for full clock.
        if dynamic - static <= spared:
            return 1.0
        slow = 1.0
        # Newton's method on the equation above, from full clock.
        for _ in range(NEWTON):
            left = dynamic / slow**2 - static * slow - spared
            slow += left / (2 * dynamic / slow**3 + static)
        return slow

    def is_bound(self, work: Work) -> bool:
        """Return True for a product that exceeds the power limit: one that keeps the tensor cores fed."""
        return isinstance(work, Product) and not _unaligned(work)

    def update_seconds(self, moved_bytes: float, kernel: str = "") -> float:
        """Return the seconds in which one of the optimizer's kernels moves these bytes."""
        if self.curves:
            return moved_bytes / self.curves.update.at(moved_bytes)
        # A kernel below the common share is timed as if it moved more bytes.
        slower = self.memory_share / self.update_shares.get(kernel, self.memory_share)
        return self.seconds(MemoryPass(moved_bytes * slower, 4))

    def _measured(self, curves: DeviceCurves, work: Work) -> float:
        if isinstance(work, Product):
            return curves.product_s(work) / self.product_share + work.batch * self.launch_s
        if isinstance(work, AttentionCore):
            share = self.attention_backward if work.backward else self.attention_forward
            return curves.attention_s(work) / share + self.launch_s
        return curves.pass_s(work) / self.memory_share + work.launches * self.launch_s

    def in_tf32(self) -> "Speeds":
        """Return the speeds with fp32 products in TF32, at half the bf16 rate.

        Data sheets: A100 156 of 312 TFLOP/s, H100 495 of 990.
        """
        return replace(self, wide_flop_per_s=self.matmul_flop_per_s / 2 * self.tf32_share)

    def rate(self, width: float) -> float:
        """Return FLOP/s of the best product with operands of this width in bytes."""
        if width >= 4:
            return self.wide_flop_per_s or self.peak_flop_per_s / WIDE
        if width >= 2 or not self.low_flop_per_s:
            return self.matmul_flop_per_s
        return self.lowest_flop_per_s or self.low_flop_per_s if width < 1 else self.low_flop_per_s

    def _attention(self, work: AttentionCore) -> float:
        share, half, narrow = self.attention_forward, self.attention_half[0], self.narrow_heads
        if work.backward:
            share, half = self.attention_backward, self.attention_half[1]
        # Whole rows have a kernel of their own, such as that of cuDNN.
        rates = None if work.kernel == "rows" else self.parted
        if self.bordered and work.kernel in ("documents", "window"):
            rates = self.bordered
        if rates:
            share, half, narrow = rates[work.backward], rates.half, rates.narrow
        # Short documents fill tiles worse than whole rows of the same length.
        if work.kernel.endswith("documents") and self.packed_half:
            half = self.packed_half[work.backward]
        if work.masked or work.width >= 4:
            share = self.attention_masked[work.backward]
        return share * work.sequence / (work.sequence + half) * (narrow if work.dim < 96 else 1.0)

    def _product(self, work: Product) -> float:
        if work not in self._known:
            self._known[work] = self._product_s(work)
        return self._known[work]

    def _core(self, kernel: Kernel, work: AttentionCore) -> float:
        if work not in self._known:
            slower = self.attention_alone / self.attention_forward
            self._known[work] = core_us(kernel, work) / 1e6 * slower + self.launch_s
        return self._known[work]

    def _product_s(self, work: Product) -> float:
        assert self.kernel is not None
        width, grouped = work.width, work.grouped
        rate = self.rate(width) * self.product_share
        if _unaligned(work):
            rate *= self.unaligned_share
        rate *= self.grouped_share if grouped else 1.0
        return product_us(self._in_training(self.kernel), work, rate / 1e6) / 1e6

    def _in_training(self, kernel: Kernel) -> Kernel:
        """Return the kernel with the constants that calibration changed."""
        if self.inner_half == 1 and not self.wave_share:
            return kernel
        wave = kernel.figures["wave"] + (1 - kernel.figures["wave"]) * self.wave_share
        changed = {"inner_half": self.inner_half * kernel.figures["inner_half"], "wave": wave}
        return kernel._replace(figures={**kernel.figures, **changed})


def _unaligned(work: Product) -> bool:
    """Return True if rows of an operand or of the output start between multiples of 16 bytes."""
    k, n, width = work.k, work.n, max(work.width, 1)
    # Fractions are means over ranks or experts, of which no alignment is known.
    return (k == int(k) and not is_aligned(k, width)) or (n == int(n) and not is_aligned(n, width))


@lru_cache(maxsize=16)
def speeds_of(device: Device, flash: int = 2) -> Speeds:
    """Return the speeds from a device's figures. Unknown ones are guessed from the others.

    `flash` is the generation of the attention kernel. Cached, so that the searches of a process share product times.
    """
    peak = device.half_flop_per_s or 1e12
    name = device.name.upper()
    known = next((v for start, v in ARCHITECTURES.items() if name.startswith(start)), {})
    shares = next((v for start, v in FLASH.items() if name.startswith(start)), FLASH["A100"])
    forward, backward = shares[flash]
    matmul = device.half_matmul_flop_per_s or 0.8 * peak
    reached = next((v for start, v in REACHED.items() if name.startswith(start)), REACHED["A100"])
    # A device with less power than the one measured loses as much in attention as in products.
    slow = min(1.0, matmul / peak / (reached or 1e-9))
    low = device.fp8_matmul_flop_per_s or FP8_SHARE * matmul / peak * device.fp8_flop_per_s
    core = kernel_of(device, "prefill")
    return Speeds(
        matmul_flop_per_s=matmul,
        peak_flop_per_s=peak,
        low_flop_per_s=low,
        # Only the tensor cores of Blackwell multiply fp4.
        lowest_flop_per_s=FP4_OVER_FP8 * low if name.lstrip("G").startswith("B") else 0.0,
        memory_bytes_per_s=device.memory_bytes_per_s or 1e11,
        attention_forward=forward * slow,
        attention_backward=backward * slow,
        attention_masked=(shares[1][0] * slow, shares[1][1] * slow),
        kernel=kernel_of(device, "product.bf16"),
        attention=core,
        attention_alone=LONG.flop / core_us(core, LONG) * 1e6 / peak,
        **known,  # type: ignore[arg-type]  # fields that are numbers
    )


def planned_speeds(stack: Stack, plan: Plan) -> Speeds:
    """Return the speeds of a plan's device, with the attention kernels used there."""
    device, flash = plan.cluster.device, attention_of(stack, plan)
    return engine_speeds(device, flash, takes_flash_4(plan)) if stack.is_meshwright else speeds_of(device, flash)


def attention_of(stack: Stack, plan: Plan) -> Literal[1, 2, 3]:
    """Return the generation of the kernel that the engine chooses for whole rows of a plan."""
    if not stack.is_meshwright or stack.flash < 3:
        return stack.flash
    call = attention_call(plan)._replace(case="rows")
    return 3 if _planned_kernel(call, plan.cluster.device).kernel == "cudnn" else 2


def takes_flash_4(plan: Plan) -> bool:
    """Return True if documents and windows of a plan use FlashAttention 4."""
    call = attention_call(plan)
    return call.case != "rows" and _planned_kernel(call, plan.cluster.device).kernel == "flash-4"


def prompt_kernel(device: Device, width: int, value_width: int) -> tuple[KernelChoice, AttentionRates] | None:
    """Return the kernel for prompts in Meshwright's serving engine, for heads of two widths, and its rates.

    Returns None where only published rates are known: on devices other than Hopper, and for heads wider than
    FlashAttention's.
    """
    if not device.name.upper().startswith(HOPPER_DEVICES) or max(width, value_width) > WIDEST_FLASH:
        return None
    choice = _planned_kernel(AttentionCall("cache", 0, width, value_width, gradients=False), device)
    return choice, _reached(device, choice.kernel)


def _planned_kernel(call: AttentionCall, device: Device) -> KernelChoice:
    """Return the attention kernel on a plan's device. FlashAttention 4 is assumed there if it is installed here."""
    return attention_kernel(call, GpuLibraries(_major(device), LEAST_CUDNN, has_flash_4()))


def _major(device: Device) -> int:
    """Return the major compute capability of a device from Hopper on. 0 = older, or another maker's."""
    name = device.name.upper()
    return 9 if name.startswith(HOPPER_DEVICES) else 10 if name.startswith(BLACKWELL_DEVICES) else 0


def _reached(device: Device, kernel: str) -> AttentionRates:
    """Return the rates of a kernel on a Hopper device. With less power it is slower than its data sheet says."""
    slow = min(1.0, device.half_matmul_flop_per_s / device.half_flop_per_s / 0.803)
    rates = ATTENTION[kernel]
    return rates._replace(forward=rates.forward * slow, backward=rates.backward * slow)


@lru_cache(maxsize=16)
def engine_speeds(device: Device, flash: int = 2, flash_4: bool = False) -> Speeds:
    """Return the engine's speeds on a device.

    Args:
        flash: 2, or 3 for cuDNN's attention of whole rows.
        flash_4: Documents and windows use FlashAttention 4 (spec/plan/execution.py).
    """
    published = speeds_of(device, flash)
    if not device.name.upper().startswith(HOPPER_DEVICES) or not device.half_matmul_flop_per_s:
        return published
    assert published.kernel is not None, "a preset's products are modelled"
    # Rates of whole steps, which the engine reached, replace those of published software.
    measured = replace(
        published,
        product_share=ENGINE_PRODUCT_SHARE / published.kernel.figures["rate"],
        unaligned_share=ENGINE_UNALIGNED_SHARE,
        power=ENGINE_POWER,
        tf32_share=ENGINE_TF32_SHARE,
        grouped_share=ENGINE_GROUPED_SHARE,
        memory_share=ENGINE_MEMORY_SHARE,
        update_shares=ENGINE_UPDATE_SHARES,
        packed_half=ENGINE_PACKED_HALF,
    )
    reached = {kernel: _reached(device, kernel) for kernel in ATTENTION}
    rows = reached["flash" if flash == 2 else "cudnn"]
    return replace(
        measured, attention=None, parted=reached["flash"], bordered=reached["flash-4"] if flash_4 else None,
        attention_forward=rows.forward, attention_backward=rows.backward,
        attention_half=(rows.half, rows.half), narrow_heads=rows.narrow,
    )  # fmt: skip
