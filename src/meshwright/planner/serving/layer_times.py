"""Seconds of the layers of a served model for so many tokens: products, experts, small kernels, exchanges."""

from meshwright.planner.serving.deployment import Deployment
from meshwright.planner.serving.kernel_times import KernelTimes
from meshwright.planner.serving.number_formats import BF16, NumberFormat
from meshwright.spec.model.unbuilt_parts import LinearAttention

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
