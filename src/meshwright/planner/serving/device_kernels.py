"""Seconds of the operations of a served layer on one device, from fits to measured kernels."""

from dataclasses import dataclass, field

from meshwright.planner.kernels import Collective, Decode, Prefill, fitted_kernel, kernel_seconds
from meshwright.planner.kernels.fitted_kernel import decode_place, experts_place, kernel_of, product_us
from meshwright.planner.kernels.kernel_operations import Product
from meshwright.planner.serving.deployment import NumberFormat
from meshwright.spec.layout.cluster import Device
from meshwright.spec.model.shape import MLAShape
from meshwright.spec.plan.execution import AttentionRates

LATENT_MEMORY, LATENT_RATE = 0.75, 0.45
"""Shares of bandwidth and bf16 peak that decoding with latents reaches.
(deepseek-ai/FlashMLA: 3,000 of 3,350 GB/s and 580 of 989 TFLOP/s at best.)
"""
NARROW = 96
"""Width of heads below which less of a rate is reached."""
SWITCHED_US, SWITCHED_LINK = 4.5, 0.4
"""Time of an all-reduce by the frameworks' own kernels, and the share of the link they reach for twice the bytes.
They write into their neighbours' memory (AIConfigurator's custom_allreduce tables: 4.5 to 7 us up to 32 KiB, 28 us at
2 MiB).
"""


@dataclass(slots=True)
class DeviceKernels:
    """Kernel times of one device in a node of `per_node`."""

    device: Device
    per_node: int = 8
    prompts: AttentionRates | None = None
    """Rates of the kernel that attends to prompts. None = as fast as the published ones in the tables."""
    _known: dict[tuple[object, ...], float] = field(default_factory=dict)

    def product(self, m: float, k: float, n: float, number_format: NumberFormat, batch: float = 1.0) -> float:
        """Return the time of (m, k) x (k, n) with weights in a format."""
        key = (m, k, n, number_format.name, batch)
        seconds = self._known.get(key)
        if seconds is None:
            seconds = self._known[key] = self._product(m, k, n, number_format, batch)
        return seconds

    def _product(self, m: float, k: float, n: float, number_format: NumberFormat, batch: float) -> float:
        blackwell = self.device.name.lstrip("G").startswith("B")
        if number_format.computes >= 2 or (number_format.computes < 1 and not blackwell):
            kernel = kernel_of(self.device, "product.bf16")
            return product_us(kernel, Product(m, k, n, batch, min(number_format.width, 2.0)), kernel.chip.best) / 1e6
        kernel = kernel_of(self.device, "product.fp8")
        best = kernel.chip.low_best * (2 if number_format.computes < 1 else 1)
        return product_us(kernel, Product(m, k, n, batch, number_format.width), best, quantize=True) / 1e6

    def moved(self, size_bytes: float) -> float:
        """Return the time of reading and writing so many bytes, without the launch."""
        return size_bytes / (0.8 * (self.device.memory_bytes_per_s or 1e11))

    def prefill(self, sequence: float, start: float, heads: float, kv_heads: float, dim: float) -> float:
        """Return the time of causal attention of one sequence's tokens `start` to `sequence`."""
        begin = self._attended_s(start, heads, kv_heads, dim) if start > 0 else 0.0
        return self._attended_s(sequence, heads, kv_heads, dim) - begin

    def _attended_s(self, sequence: float, heads: float, kv_heads: float, dim: float) -> float:
        """Return the time of a whole sequence, with `half` more positions to fill the kernel."""
        rates = self.prompts
        if rates is None:
            return kernel_seconds(self.device, Prefill(1, sequence, heads, kv_heads, dim))
        flop = 2.0 * heads * dim * sequence * (sequence + rates.half)
        peak = self.device.half_flop_per_s * rates.forward * (rates.narrow if dim < NARROW else 1.0)
        launch = kernel_of(self.device, "prefill").figures["launch_us"] / 1e6
        return launch + flop / peak

    def decode(
        self, batch: float, context: float, heads: float, kv_heads: float, dim: float, cache_width: float
    ) -> float:
        """Return the time of one new token for each of `batch` sequences. A narrower cache is read faster."""
        kernel = kernel_of(self.device, "decode")
        work, faster = Decode(batch, context, heads, kv_heads, dim), 2 / cache_width
        chip = kernel.chip._replace(memory=kernel.chip.memory * faster, cache_bytes=kernel.chip.cache_bytes * faster)
        factor = kernel.curve.at(*decode_place(*work))
        return factor * fitted_kernel.decode_us(kernel.figures, chip, *work) / 1e6

    def latent_decode(self, batch: float, context: float, heads: float, latent: MLAShape, cache_width: float) -> float:
        """Return the time of decoding over latents, which all heads share."""
        kernel = kernel_of(self.device, "decode")
        keys = latent.kv_rank + latent.rope_dim
        moving = batch * context * keys * cache_width / (kernel.chip.memory * LATENT_MEMORY)
        flop = 2.0 * batch * context * max(heads, 16.0) * (keys + latent.kv_rank)
        computing = flop / (kernel.chip.peak * LATENT_RATE * (2 / cache_width) ** 0.5)
        seconds: float = (kernel.figures["launch_us"] + (moving**3 + computing**3) ** (1 / 3)) / 1e6
        return seconds

    def experts(
        self, tokens: float, hidden: float, ffn: float, top_k: float, number: float, tp: float, ep: float,
        number_format: NumberFormat,
    ) -> float:  # fmt: skip
        """Return the time of the routed experts of one rank, skewed as real routing is."""
        key = ("experts", tokens, hidden, ffn, top_k, number, tp, ep, number_format.name)
        seconds = self._known.get(key)
        if seconds is None:
            kernel = kernel_of(self.device, "experts")
            blackwell = self.device.name.lstrip("G").startswith("B")
            narrow = number_format.computes < 2 and (number_format.computes >= 1 or blackwell)
            best = kernel.chip.low_best * (2 if number_format.computes < 1 else 1) if narrow else kernel.chip.best
            chip = kernel.chip._replace(best=best, memory=kernel.chip.memory * 2 / number_format.width)
            work = (tokens, hidden, ffn, top_k, number, tp, ep, SKEW)
            figures = dict(kernel.figures)
            if number_format.computes < 1 and blackwell:
                figures |= {name: FUSED * figures[name] for name in ("launch_us", "expert_us", "tile_us")}
            factor = kernel.curve.at(*experts_place(*work))
            seconds = self._known[key] = factor * fitted_kernel.experts_us(figures, chip, *work) / 1e6
        return seconds

    def all_reduce(self, size_bytes: float, ranks: int) -> float:
        """Return the time over `ranks` ranks of a node: NCCL's or the frameworks' own kernel, whichever is faster."""
        if ranks <= 1:
            return 0.0
        link = self.device.link_bytes_per_s or 1e10
        switched = (SWITCHED_US + 0.3 * ranks) / 1e6 + 2 * size_bytes / (link * SWITCHED_LINK)
        return min(switched, kernel_seconds(self.device, Collective("all-reduce", size_bytes, ranks)))

    def exchanged(self, size_bytes: float, ranks: int) -> float:
        """Return the time of one all-to-all of so many bytes of a rank."""
        if ranks <= 1:
            return 0.0
        link = self.device.link_bytes_per_s or 1e10
        return 1.5e-5 + size_bytes * (ranks - 1) / ranks / (link * 0.6)


FUSED = 0.5
"""Factor on the latencies of vLLM's Triton kernels, which the tables hold.
Kernels for 4 bits route, multiply and sum in fewer launches (TensorRT-LLM's, which vLLM and SGLang call through
FlashInfer).
"""
SKEW = 1.01
"""Exponent of routing's power law."""
