"""Bytes of a served model on one GPU: weights, activations, the framework's own, and room for sequences."""

from dataclasses import dataclass, replace
from math import floor

from meshwright.planner.memory.rank_memory import DRIVER_BYTES
from meshwright.planner.serving.cached_layers import sequence_bytes
from meshwright.planner.serving.deployment import MESHWRIGHT, Deployment
from meshwright.spec.plan.execution import GPU_SEQUENCES, GRAPH_POOLS, SPLIT, WIDEST, position_numbers
from meshwright.spec.weights.inventory import Parameter, parameters

LANES = 16
"""Columns of a panel of Meshwright's compiled loops."""
GRAPHS_BYTES = 1.5e9
"""CUDA graphs and workspaces of kernels on a GPU (vLLM reports 0.5 to 2 GB as it starts)."""
WORKSPACE_BYTES = 0.5e9
"""Workspaces alone, the least of that: Meshwright's graphs are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingMemory:
    """Memory of one GPU."""

    weights_bytes: float
    activations_bytes: float
    """Bytes of the largest step."""
    adapters_bytes: float
    """Bytes of all adapters on top of the model."""
    graphs_bytes: float
    """Bytes of the CUDA graphs of Meshwright's engine. Those of others are in the unusable memory."""
    copies_bytes: float
    """Bytes of matrices in a second order, which Meshwright's engine keeps on a CPU."""
    usable_bytes: float
    """Bytes of the device that the framework takes. Infinite = its memory is not known."""
    cache_share: float
    """Share of the remaining usable memory that the framework gives to keys and values."""
    sequence_bytes: float
    """Bytes of the cache for one sequence of the requested length."""
    position_bytes: float
    """Bytes of the cache for one more token of a sequence."""

    @property
    def held_bytes(self) -> float:
        """Bytes of everything except the cache."""
        beside = self.adapters_bytes + self.activations_bytes + self.graphs_bytes + self.copies_bytes
        return self.weights_bytes + beside

    @property
    def cache_bytes(self) -> float:
        """Room for keys and values. Negative = weights alone are too large."""
        free_bytes = self.usable_bytes - self.held_bytes
        return free_bytes * self.cache_share if free_bytes > 0 else free_bytes

    @property
    def most_sequences(self) -> float:
        """Whole sequences of the requested length that fit at once, on the ranks that share a cache."""
        if self.cache_bytes == float("inf"):
            return float("inf")
        return float(max(0, floor(self.cache_bytes / self.sequence_bytes)))


def serving_memory(deployment: Deployment, length: float) -> ServingMemory:
    """Count the memory. `length`: tokens of prompt and answer together."""
    device, tp = deployment.device, deployment.degrees.tp
    usable = float("inf")
    if device.memory_bytes:
        fixed = WORKSPACE_BYTES if deployment.framework.name == MESHWRIGHT.name else GRAPHS_BYTES
        beside = fixed + DRIVER_BYTES if device.is_gpu else 0.0
        usable = device.memory_bytes * deployment.framework.reserve - beside
    whole = sequence_bytes(deployment.model, length, deployment.cache_width, tp)
    return ServingMemory(
        weights_bytes=weights_bytes(deployment),
        activations_bytes=activations_bytes(deployment),
        adapters_bytes=adapters_bytes(deployment),
        graphs_bytes=graphs_bytes(deployment, length),
        copies_bytes=_kept_copies(deployment),
        usable_bytes=usable,
        cache_share=deployment.framework.cache_share,
        sequence_bytes=whole,
        position_bytes=whole - sequence_bytes(deployment.model, length - 1, deployment.cache_width, tp),
    )


def weights_bytes(deployment: Deployment) -> float:
    """Return the bytes of weights on one GPU."""
    return sum(
        part.numel / _ranks(deployment, part) * _width(deployment, part) for part in parameters(deployment.model.shape)
    )


def adapters_bytes(deployment: Deployment) -> float:
    """Return the bytes of all adapters on one GPU: A and B are split as their matrices.

    On a CPU Meshwright's engine keeps them once more for compiled loops, with a rank of whole lanes, if these loops
    take the matrix.
    """
    if deployment.adapter is None:
        return 0.0
    low = [part for part in parameters(replace(deployment.model.shape.base, lora=deployment.adapter)) if part.adapts]
    numbers = sum(part.numel / _ranks(deployment, part) for part in low)
    if deployment.framework.name == MESHWRIGHT.name and not deployment.device.is_gpu:
        lanes = -deployment.adapter.rank % LANES + deployment.adapter.rank
        for a, b in zip(low[::2], low[1::2], strict=True):
            taken = not b.shape[-2] / (_ranks(deployment, b) if b.axes[-2] == "tp" else 1) % LANES
            numbers += (
                taken
                * lanes
                * (a.numel / _ranks(deployment, a) + b.numel / _ranks(deployment, b))
                / deployment.adapter.rank
            )
    return deployment.adapters * numbers * deployment.formats.other


def copies_bytes(deployment: Deployment, width: float = 4.0) -> float:
    """Return the bytes of matrices in another order, held in addition to fp32 weights, of one rank.

    They are those of attention, MLPs and the head, which Meshwright's engine keeps on a CPU with a C compiler. Experts
    have none. `width`: bytes of an element in that order, 2 if all values are exact in bf16.
    """
    shape = deployment.model.shape
    copied = [part for part in parameters(shape) if part.group in ("attention", "mlp", "head") and len(part.shape) > 1]
    tied = shape.tied * shape.vocab * shape.hidden / deployment.degrees.tp
    return width * (sum(part.numel / _ranks(deployment, part) for part in copied) + tied)


def _kept_copies(deployment: Deployment) -> float:
    """Return copies_bytes, or 0 without copies. Codes have one order, so quantized weights have none."""
    copies = deployment.framework.name == MESHWRIGHT.name and not deployment.device.is_gpu
    return 0.0 if not copies or quantized(deployment) else copies_bytes(deployment, deployment.formats.other)


def quantized(deployment: Deployment) -> bool:
    """Return whether some matrices have fewer bits than the rest."""
    formats = deployment.formats
    return min(formats.attention.width, formats.mlp.width, formats.experts.width) < formats.other


def _width(deployment: Deployment, part: Parameter) -> float:
    """Return the bytes of an element: matrices have their formats, all else the machine's plain numbers."""
    plain = deployment.formats.other
    if len(part.shape) < 2 or part.matrices is None:
        return plain
    formats = deployment.formats
    return {"attention": formats.attention, "mlp": formats.mlp, "expert": formats.experts}[part.group].width


def _ranks(deployment: Deployment, part: Parameter) -> float:
    """Return the number of GPUs that share a parameter."""
    degrees, shape = deployment.degrees, deployment.model.shape
    if part.group == "expert" or "ep" in part.axes:
        return degrees.expert_ep * (degrees.expert_tp if "tp" in part.axes else 1)
    if "tp" not in part.axes:
        return 1
    letter = part.dims[part.axes.index("tp")]
    # With more ranks than key heads, several ranks hold the same head.
    return min(degrees.tp, shape.kv_heads) if letter == "K" else degrees.tp


def activations_bytes(deployment: Deployment) -> float:
    """Return the bytes of a step with as many tokens as the framework allows.

    These are the residual stream and its norm, the widest inner layer, and fp32 logits of the sequences that end in it.
    """
    logits = 4.0 * LOGITS * deployment.model.shape.vocab / deployment.degrees.tp
    return deployment.framework.budget * token_bytes(deployment) + logits


def token_bytes(deployment: Deployment) -> float:
    """Return the bytes of the activations of one token, without its logits."""
    shape, tp, moe = deployment.model.shape, deployment.degrees.tp, deployment.model.shape.moe
    inner = 2 * shape.ffn / tp if shape.routed_layers < shape.layers else 0.0
    if moe:
        routed = deployment.degrees.attention_dp * moe.top_k / deployment.degrees.expert_ep
        inner = max(inner, routed * (2 * moe.ffn / deployment.degrees.expert_tp + shape.hidden))
    heads = (shape.heads + 2 * shape.kv_heads) / tp * shape.head_dim
    return 2.0 * (3 * shape.hidden + max(1.5 * inner, heads))


def graphs_bytes(deployment: Deployment, length: float) -> float:
    """Return the bytes of the CUDA graphs of Meshwright's engine on one GPU.

    These are the pool, with the parts of attention that are added up over runs of positions, the rows that graphs read,
    and their fp32 logits. There are no graphs on several ranks, with quantized experts, or with latent attention wider
    than its kernel takes.
    """
    shape = deployment.model.shape
    ours = deployment.framework.name == MESHWRIGHT.name and deployment.device.is_gpu and deployment.degrees.gpus == 1
    if (
        not ours
        or (shape.moe and quantized(deployment))
        or (shape.mla and shape.mla.kv_rank + shape.mla.rope_dim > WIDEST)
    ):
        return 0.0
    longest = next(
        number for number in position_numbers(shape.max_positions) if number >= min(length, shape.max_positions)
    )
    runs = longest // SPLIT if longest > SPLIT else 0
    width = shape.mla.kv_rank if shape.mla else shape.head_dim
    pool = token_bytes(deployment) + 2.0 * shape.vocab + 4.0 * runs * shape.heads * (width + 1)
    beside = 4.0 * shape.vocab + 8.0 * (5 + shape.max_positions / BLOCK)
    return GPU_SEQUENCES * (GRAPH_POOLS * pool + beside)


BLOCK = 16
"""Positions of a block of Meshwright's engine by default."""
LOGITS = 256
"""Sequences whose logits are held at once."""
