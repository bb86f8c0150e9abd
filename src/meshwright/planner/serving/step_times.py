"""Seconds of one step of an engine: chunks of prompts, and one token for each sequence that decodes.

A step is made of layers (products, experts, small kernels, exchanges), and a layer of kernel times. `KernelTimes` is
their interface: curves of a data sheet, or a machine that `calibrate` measured.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from math import log2
from typing import Protocol

from meshwright.planner.cost.speeds import prompt_kernel
from meshwright.planner.serving.deployment import BF16, LATENT, MESHWRIGHT, Deployment, NumberFormat
from meshwright.planner.serving.device_kernels import DeviceKernels
from meshwright.spec.model.shape import MLAShape
from meshwright.spec.model.unbuilt_parts import LinearAttention
from meshwright.spec.plan.execution import AttentionRates, KernelChoice


class KernelTimes(Protocol):
    """Seconds of single operations, forward, on an otherwise idle device."""

    def product(self, m: float, k: float, n: float, number_format: NumberFormat, batch: float = 1.0) -> float:
        """Return the time of (m, k) x (k, n) with weights in a format, `batch` times."""

    def moved(self, size_bytes: float) -> float:
        """Return the time of reading and writing so many bytes."""

    def prefill(self, sequence: float, start: float, heads: float, kv_heads: float, dim: float) -> float:
        """Return the time of causal attention of one sequence's tokens `start` to `sequence`."""

    def decode(
        self, batch: float, context: float, heads: float, kv_heads: float, dim: float, cache_width: float
    ) -> float:
        """Return the time of one new token for each of `batch` sequences over `context` cached ones."""

    def latent_decode(self, batch: float, context: float, heads: float, latent: MLAShape, cache_width: float) -> float:
        """Return the time of decoding over latents, which all heads share."""

    def experts(
        self, tokens: float, hidden: float, ffn: float, top_k: float, number: float, tp: float, ep: float,
        number_format: NumberFormat,
    ) -> float:  # fmt: skip
        """Return the time of the routed experts of one rank."""

    def all_reduce(self, size_bytes: float, ranks: int) -> float:
        """Return the time over `ranks` ranks of a node."""

    def exchanged(self, size_bytes: float, ranks: int) -> float:
        """Return the time of one all-to-all of so many bytes of a rank."""


ACTIVATION = 2.0
"""Bytes of an activation."""


def layers_s(deployment: Deployment, kernels: KernelTimes, tokens: float) -> float:
    """Return the time of all layers except their attention cores, for `tokens` tokens of each attention rank."""
    shape, tp = deployment.model.shape, deployment.degrees.tp
    attending = sum(group.layers for group in deployment.model.attending)
    total = attending * projections_s(deployment, kernels, tokens)
    if shape.unbuilt and shape.unbuilt.linear:
        total += deployment.model.state_layers * state_s(deployment, kernels, tokens, shape.unbuilt.linear)
    dense = shape.layers - shape.routed_layers
    total += dense * mlp_s(deployment, kernels, tokens, shape.ffn)
    if shape.moe:
        total += shape.routed_layers * mixture_s(deployment, kernels, tokens)
    reduced = kernels.all_reduce(tokens * shape.hidden * ACTIVATION, tp)
    # Attention of every layer and the MLP of dense ones are summed over tp; mixture_s sums experts.
    total += (shape.layers + dense) * reduced
    return total + shape.layers * small_s(deployment, kernels, tokens)


def projections_s(deployment: Deployment, kernels: KernelTimes, tokens: float) -> float:
    """Return the time of queries, keys, values and the output of one layer."""
    shape, tp, number_format = deployment.model.shape, deployment.degrees.tp, deployment.formats.attention
    heads, hidden = shape.heads / tp, shape.hidden
    if shape.mla is None:
        kv_heads = max(1, shape.kv_heads // tp)
        inner, key = heads * shape.head_dim, kv_heads * shape.head_dim
        gate = (inner,) if shape.unbuilt and shape.unbuilt.gated_attention else ()
        return together_s(deployment, kernels, tokens, (inner, *gate, key, key), number_format) + kernels.product(
            tokens, inner, hidden, number_format
        )
    latent = shape.mla
    total = kernels.product(tokens, hidden, latent.q_rank + latent.kv_rank + latent.rope_dim, number_format)
    if latent.q_rank:
        total += kernels.product(tokens, latent.q_rank, heads * shape.head_dim, number_format)
    # Absorbed form: queries go into the latent space and outputs come back, head by head.
    total += kernels.product(tokens, latent.nope_dim, latent.kv_rank, BF16, heads)
    total += kernels.product(tokens, latent.kv_rank, latent.v_dim, BF16, heads)
    return total + kernels.product(tokens, heads * latent.v_dim, hidden, number_format)


def together_s(
    deployment: Deployment, kernels: KernelTimes, tokens: float, columns: tuple[float, ...], number_format: NumberFormat
) -> float:
    """Return the time of products of the hidden state with several matrices, joined if the framework does so."""
    hidden = deployment.model.shape.hidden
    if deployment.framework.fuses:
        return kernels.product(tokens, hidden, sum(columns), number_format)
    return sum(kernels.product(tokens, hidden, each, number_format) for each in columns)


def state_s(deployment: Deployment, kernels: KernelTimes, tokens: float, linear: LinearAttention) -> float:
    """Return the time of the products of linear attention with its weights, the output included."""
    hidden, tp, number_format = deployment.model.shape.hidden, deployment.degrees.tp, deployment.formats.attention
    columns = (linear.channels + linear.values + 2 * linear.value_heads * linear.delta) / tp
    return kernels.product(tokens, hidden, columns, number_format) + kernels.product(
        tokens, linear.values / tp, hidden, number_format
    )


def mlp_s(deployment: Deployment, kernels: KernelTimes, tokens: float, ffn: float) -> float:
    """Return the time of a dense MLP."""
    shape, inner = deployment.model.shape, ffn / deployment.degrees.tp
    ups = (inner,) * (2 if shape.mlp == "swiglu" else 1)
    number_format = deployment.formats.mlp
    total = together_s(deployment, kernels, tokens, ups, number_format) + kernels.product(
        tokens, inner, shape.hidden, number_format
    )
    return total + kernels.moved(ACTIVATION * tokens * (sum(ups) + inner))


def mixture_s(deployment: Deployment, kernels: KernelTimes, tokens: float) -> float:
    """Return the time of router, routed and shared experts, and the exchanges between ranks."""
    shape, degrees = deployment.model.shape, deployment.degrees
    moe = shape.moe
    assert moe is not None
    total = kernels.product(tokens, shape.hidden, moe.experts, BF16)
    # Ranks that attend to sequences of their own share the experts, which see the tokens of all.
    everyone = tokens * degrees.attention_dp
    total += kernels.experts(
        everyone, shape.hidden, moe.ffn, moe.top_k, moe.experts, degrees.expert_tp, degrees.expert_ep,
        deployment.formats.experts,
    )  # fmt: skip
    if moe.shared_experts:
        total += mlp_s(deployment, kernels, tokens, moe.shared_experts * moe.ffn)
    size = tokens * shape.hidden * ACTIVATION
    if degrees.attention_dp == 1:
        return total + kernels.all_reduce(size, degrees.tp)
    ranks = degrees.gpus
    # A token travels to a rank once, however many of its experts are there.
    copies = min(moe.top_k, degrees.expert_ep) if degrees.expert_ep > 1 else ranks
    return total + kernels.exchanged(size * copies / 2, ranks) + kernels.exchanged(size * copies, ranks)


def small_s(deployment: Deployment, kernels: KernelTimes, tokens: float) -> float:
    """Return the time of norms with their residual, rotation and cache: launches, and bytes."""
    shape = deployment.model.shape
    inner = shape.heads / deployment.degrees.tp * shape.head_dim
    passes = ACTIVATION * tokens * (8 * shape.hidden + 3 * inner)
    return deployment.framework.layer_us / 1e6 + kernels.moved(passes)


def head_s(deployment: Deployment, kernels: KernelTimes, tokens: float) -> float:
    """Return the time of the logits of so many tokens."""
    shape = deployment.model.shape
    return kernels.product(tokens, shape.hidden, shape.vocab / deployment.degrees.tp, BF16)


GRID = tuple(float(round(2 ** (n / 2))) for n in range(33))
"""Tokens at which times are counted. Between them times are interpolated linearly."""


class StepTimes:
    """Step times of one deployment. `batch` and tokens are those of one attention rank."""

    def __init__(self, deployment: Deployment, kernels: KernelTimes | None = None) -> None:
        self.deployment = deployment
        chosen = prompt_kernel_of(deployment)
        self.kernels: KernelTimes = kernels or DeviceKernels(
            deployment.device, deployment.per_node, chosen[1] if chosen else None
        )
        self._layers: dict[float, float] = {}
        self._heads: dict[float, float] = {}
        self._cores: dict[float, dict[float, float]] = {}
        self._chunks: dict[tuple[float, float], float] = {}

    def prefill_s(self, chunks: Sequence[tuple[float, float]], batch: float = 0.0, context: float = 0.0) -> float:
        """Return the time of a step with chunks, (new tokens, tokens read before) each, next to `batch` sequences."""
        tokens = sum(new for new, _ in chunks)
        kernels = self.on_grid(self._layers, tokens + batch, self._linear)
        kernels += sum(self.chunk_s(new, start) for new, start in chunks)
        kernels += self.on_grid(self._heads, len(chunks) + batch, self._logits)
        if batch:
            kernels += self.core_s(batch, context)
        shape = self.deployment.model.shape
        # Short prompts are bound by the host, which launches every kernel.
        launched = shape.layers * self.deployment.framework.launched_us * (LATENT if shape.mla else 1.0) / 1e6
        beside = shape.layers * self.deployment.framework.prompt_layer_us / 1e6
        return max(kernels / self.deployment.framework.share, launched) + beside + self._host(batch)

    def decode_s(self, batch: float, context: float) -> float:
        """Return the time of a step in which each of `batch` sequences gets a token, or several with drafts."""
        drafted = self.deployment.drafted
        tokens = batch * (1 + drafted)
        linear = self.on_grid(self._layers, tokens, self._linear)
        logits = self.on_grid(self._heads, tokens, self._logits)
        core = self.core_s(batch, context) * (1 + 0.1 * drafted)
        if drafted:
            each = self.on_grid(self._layers, batch, self._linear) + self.core_s(batch, context)
            # A drafted token takes one layer and the head.
            each = each / self.deployment.model.shape.layers + self.on_grid(self._heads, batch, self._logits)
            linear += drafted * each
        return (linear + logits + core) / self.deployment.framework.share + self._host(batch)

    def _host(self, batch: float) -> float:
        return (self.deployment.framework.step_us + self.deployment.framework.sequence_us * batch) / 1e6

    def _linear(self, tokens: float) -> float:
        return layers_s(self.deployment, self.kernels, tokens)

    def _logits(self, tokens: float) -> float:
        return head_s(self.deployment, self.kernels, tokens)

    def chunk_s(self, tokens: float, start: float) -> float:
        """Return the time of attention of a chunk in all layers, `start` tokens into its prompt."""
        # In tens, since a simulation asks for thousands of lengths that differ by a few tokens.
        key = round(tokens, -1), round(start, -1)
        seconds = self._chunks.get(key)
        if seconds is None:
            seconds = self._chunks[key] = self._chunk(max(key[0], 1.0), key[1])
        return seconds

    def _chunk(self, tokens: float, start: float) -> float:
        shape, tp = self.deployment.model.shape, self.deployment.degrees.tp
        heads = shape.heads / tp
        total = 0.0
        for group in self.deployment.model.attending:
            if shape.mla:
                kv_heads, dim = heads, (shape.head_dim + shape.mla.v_dim) / 2
            else:
                kv_heads, dim = max(1.0, shape.kv_heads / tp), float(shape.head_dim)
            end = start + tokens
            if group.window and end > group.window:
                seen = tokens * group.window
                each = self.kernels.prefill(max(tokens, 1.0), 0.0, heads, kv_heads, dim)
                each *= min(1.0, 2 * seen / tokens**2)
            else:
                each = self.kernels.prefill(end, start, heads, kv_heads, dim)
            total += group.layers * each
        linear = shape.unbuilt.linear if shape.unbuilt else None
        if linear:
            pieces = tokens / linear.chunk * linear.value_heads / tp
            rule = sum(self.kernels.product(*size, BF16, pieces) for size in linear.products())
            total += self.deployment.model.state_layers * rule
        return total

    def core_s(self, batch: float, context: float) -> float:
        """Return the time of attention of decoding in all layers."""
        # Counted at powers of two only: each point takes the kernels of all layers.
        low = 2.0 ** int(log2(max(context, 16.0)))
        share = max(context, 16.0) / low - 1
        left = self._at(batch, low)
        return left + share * (self._at(batch, 2 * low) - left) if share else left

    def _at(self, batch: float, context: float) -> float:
        """Return the time at a context that is a power of two."""
        known = self._cores.setdefault(context, {})
        return self.on_grid(known, batch, lambda size: self._core(size, context))

    def _core(self, batch: float, context: float) -> float:
        deployment, shape, tp = self.deployment, self.deployment.model.shape, self.deployment.degrees.tp
        heads, total = shape.heads / tp, 0.0
        for group in deployment.model.groups:
            seen = min(context, group.window or context, deployment.model.selected or context)
            if group.state_elements:
                # A state is read and written in fp32, 8 bytes an element.
                each = self.kernels.moved(8.0 * batch * group.state_elements / tp) + 5e-6
            elif shape.mla:
                each = self.kernels.latent_decode(batch, seen, heads, shape.mla, deployment.cache_width)
            else:
                kv_heads = max(1.0, shape.kv_heads / tp)
                each = self.kernels.decode(batch, seen, heads, kv_heads, float(shape.head_dim), deployment.cache_width)
            total += group.layers * each
        return total

    def on_grid(self, known: dict[float, float], tokens: float, count: Callable[[float], float]) -> float:
        """Interpolate between the two nearest points of GRID. Outside, extrapolate from its ends."""
        index = bisect_left(GRID, tokens)
        if index >= len(GRID):
            return count(GRID[-1]) * tokens / GRID[-1]
        high = GRID[index]
        low = GRID[index - 1] if high > tokens and index else high
        # Counted on first use, as most simulations touch few points.
        for point in (low, high):
            if point not in known:
                known[point] = count(point)
        if low == high:
            return known[low]
        share = (tokens - low) / (high - low)
        return known[low] + share * (known[high] - known[low])


def prompt_kernel_of(deployment: Deployment) -> tuple[KernelChoice, AttentionRates] | None:
    """Return the kernel of prompts in Meshwright's own engine, and its rates. None = not known here."""
    if deployment.framework.name != MESHWRIGHT.name:
        return None
    shape = deployment.model.shape
    return prompt_kernel(deployment.device, shape.head_dim, shape.mla.v_dim if shape.mla else shape.head_dim)
