"""Seconds of the layers of a served model for so many tokens: products, experts, small kernels, exchanges."""

from meshwright.planner.serving.deployment import Deployment
from meshwright.planner.serving.kernel_times import KernelTimes
from meshwright.planner.serving.number_formats import BF16, NumberFormat
from meshwright.spec.linear_attention import LinearAttention

ACTIVATION = 2.0
"""Bytes of an activation."""


def layers_s(of: Deployment, kernels: KernelTimes, tokens: float) -> float:
    """Of all layers but their attention cores, for `tokens` tokens of each attention rank."""
    shape, tp = of.model.shape, of.degrees.tp
    attending = sum(one.layers for one in of.model.attending)
    total = attending * projections_s(of, kernels, tokens)
    if shape.unbuilt and shape.unbuilt.linear:
        total += of.model.state_layers * state_s(of, kernels, tokens, shape.unbuilt.linear)
    dense = shape.layers - shape.routed_layers
    total += dense * mlp_s(of, kernels, tokens, shape.ffn)
    if shape.moe:
        total += shape.routed_layers * mixture_s(of, kernels, tokens)
    reduced = kernels.all_reduce(tokens * shape.hidden * ACTIVATION, tp)
    total += (shape.layers + dense) * reduced
    return total + shape.layers * small_s(of, kernels, tokens)


def projections_s(of: Deployment, kernels: KernelTimes, tokens: float) -> float:
    """Queries, keys, values and the output of one layer."""
    shape, tp, how = of.model.shape, of.degrees.tp, of.formats.attention
    heads, hidden = shape.heads / tp, shape.hidden
    if shape.mla is None:
        kv_heads = max(1, shape.kv_heads // tp)
        inner, key = heads * shape.head_dim, kv_heads * shape.head_dim
        gate = (inner,) if shape.unbuilt and shape.unbuilt.gated_attention else ()
        return together_s(of, kernels, tokens, (inner, *gate, key, key), how) + kernels.product(
            tokens, inner, hidden, how
        )
    latent = shape.mla
    total = kernels.product(tokens, hidden, latent.q_rank + latent.kv_rank + latent.rope_dim, how)
    if latent.q_rank:
        total += kernels.product(tokens, latent.q_rank, heads * shape.head_dim, how)
    total += kernels.product(tokens, latent.nope_dim, latent.kv_rank, BF16, heads)
    total += kernels.product(tokens, latent.kv_rank, latent.v_dim, BF16, heads)
    return total + kernels.product(tokens, heads * latent.v_dim, hidden, how)


def together_s(
    of: Deployment, kernels: KernelTimes, tokens: float, columns: tuple[float, ...], how: NumberFormat
) -> float:
    """Of products of the hidden state with several matrices, one product where the framework joins them."""
    hidden = of.model.shape.hidden
    if of.framework.fuses:
        return kernels.product(tokens, hidden, sum(columns), how)
    return sum(kernels.product(tokens, hidden, each, how) for each in columns)


def state_s(of: Deployment, kernels: KernelTimes, tokens: float, linear: LinearAttention) -> float:
    """Products of a layer of linear attention with its weights: queries, keys, values, gates, rates, and the output."""
    hidden, tp, how = of.model.shape.hidden, of.degrees.tp, of.formats.attention
    columns = (linear.channels + linear.values + 2 * linear.value_heads * linear.delta) / tp
    return kernels.product(tokens, hidden, columns, how) + kernels.product(tokens, linear.values / tp, hidden, how)


def mlp_s(of: Deployment, kernels: KernelTimes, tokens: float, ffn: float) -> float:
    """A dense MLP."""
    shape, inner = of.model.shape, ffn / of.degrees.tp
    ups = (inner,) * (2 if shape.mlp == "swiglu" else 1)
    how = of.formats.mlp
    total = together_s(of, kernels, tokens, ups, how) + kernels.product(tokens, inner, shape.hidden, how)
    return total + kernels.moved(ACTIVATION * tokens * (sum(ups) + inner))


def mixture_s(of: Deployment, kernels: KernelTimes, tokens: float) -> float:
    """Router, routed and shared experts, and what the ranks exchange for them."""
    shape, degrees = of.model.shape, of.degrees
    moe = shape.moe
    assert moe is not None
    total = kernels.product(tokens, shape.hidden, moe.experts, BF16)
    everyone = tokens * degrees.attention_dp
    total += kernels.experts(
        everyone, shape.hidden, moe.ffn, moe.top_k, moe.experts, degrees.expert_tp, degrees.expert_ep,
        of.formats.experts,
    )  # fmt: skip
    if moe.shared_experts:
        total += mlp_s(of, kernels, tokens, moe.shared_experts * moe.ffn)
    size = tokens * shape.hidden * ACTIVATION
    if degrees.attention_dp == 1:
        return total + kernels.all_reduce(size, degrees.tp)
    ranks = degrees.gpus
    copies = min(moe.top_k, degrees.expert_ep) if degrees.expert_ep > 1 else ranks
    return total + kernels.exchanged(size * copies / 2, ranks) + kernels.exchanged(size * copies, ranks)


def small_s(of: Deployment, kernels: KernelTimes, tokens: float) -> float:
    """Norms with their residual, rotation and cache: launches, and bytes."""
    shape = of.model.shape
    inner = shape.heads / of.degrees.tp * shape.head_dim
    passes = ACTIVATION * tokens * (8 * shape.hidden + 3 * inner)
    return of.framework.layer_us / 1e6 + kernels.moved(passes)


def head_s(of: Deployment, kernels: KernelTimes, tokens: float) -> float:
    """Logits of so many tokens."""
    shape = of.model.shape
    return kernels.product(tokens, shape.hidden, shape.vocab / of.degrees.tp, BF16)
