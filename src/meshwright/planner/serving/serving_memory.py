"""Bytes of a served model on one GPU: weights, activations, what the framework leaves, and room for sequences."""

from dataclasses import dataclass, replace
from math import floor

from meshwright.planner.memory.rank_memory import DRIVER_BYTES
from meshwright.planner.serving.cached_layers import sequence_bytes
from meshwright.planner.serving.deployment import Deployment
from meshwright.planner.serving.frameworks import MESHWRIGHT
from meshwright.spec.graph_sizes import GRAPH_POOLS, SPLIT, WIDEST, position_numbers
from meshwright.spec.inventory import Parameter, parameters
from meshwright.spec.serving_defaults import GPU_SEQUENCES

LANES = 16
"""Columns of a panel of Meshwright's compiled loops."""
GRAPHS_BYTES = 1.5e9
"""CUDA graphs and workspaces of kernels on a GPU (vLLM reports 0.5 to 2 GB as it starts)."""
WORKSPACE_BYTES = 0.5e9
"""Workspaces alone, the least of that: Meshwright's graphs are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingMemory:
    """Of one GPU."""

    weights_bytes: float
    activations_bytes: float
    """Of the largest step."""
    adapters_bytes: float
    """Of all that are held beside the model."""
    graphs_bytes: float
    """Of the CUDA graphs of Meshwright's engine; those of others are in what is not usable."""
    copies_bytes: float
    """Of matrices in a second order, which Meshwright's engine keeps on a CPU."""
    usable_bytes: float
    """What the framework takes of the device; infinite where its memory is not known."""
    cache_share: float
    """Of what is usable beside all else, what the framework gives to keys and values."""
    sequence_bytes: float
    """Of the cache, for one sequence of the asked length."""
    position_bytes: float
    """Of the cache, for one more token of a sequence."""

    @property
    def held_bytes(self) -> float:
        """Of all but the cache."""
        beside = self.adapters_bytes + self.activations_bytes + self.graphs_bytes + self.copies_bytes
        return self.weights_bytes + beside

    @property
    def cache_bytes(self) -> float:
        """Room for keys and values; negative where weights alone are too large."""
        free_bytes = self.usable_bytes - self.held_bytes
        return free_bytes * self.cache_share if free_bytes > 0 else free_bytes

    @property
    def most_sequences(self) -> float:
        """Whole sequences of the asked length that fit at once, on the ranks that share a cache."""
        if self.cache_bytes == float("inf"):
            return float("inf")
        return float(max(0, floor(self.cache_bytes / self.sequence_bytes)))


def serving_memory(of: Deployment, length: float) -> ServingMemory:
    """`length`: tokens of prompt and answer together."""
    device, tp = of.device, of.degrees.tp
    usable = float("inf")
    if device.memory_bytes:
        own = WORKSPACE_BYTES if of.framework.name == MESHWRIGHT.name else GRAPHS_BYTES
        beside = own + DRIVER_BYTES if device.is_gpu else 0.0
        usable = device.memory_bytes * of.framework.reserve - beside
    one = sequence_bytes(of.model, length, of.cache_width, tp)
    return ServingMemory(
        weights_bytes=weights_bytes(of),
        activations_bytes=activations_bytes(of),
        adapters_bytes=adapters_bytes(of),
        graphs_bytes=graphs_bytes(of, length),
        copies_bytes=_kept_copies(of),
        usable_bytes=usable,
        cache_share=of.framework.cache_share,
        sequence_bytes=one,
        position_bytes=one - sequence_bytes(of.model, length - 1, of.cache_width, tp),
    )


def weights_bytes(of: Deployment) -> float:
    """On one GPU."""
    return sum(part.numel / _ranks(of, part) * _width(of, part) for part in parameters(of.model.shape))


def adapters_bytes(of: Deployment) -> float:
    """Of all adapters on one GPU: A and B as their matrices are split. On a CPU Meshwright's engine keeps them once
    more for compiled loops, with a rank of whole lanes, where these take the matrix."""
    if of.adapter is None:
        return 0.0
    low = [one for one in parameters(replace(of.model.shape.base, lora=of.adapter)) if one.adapts]
    numbers = sum(part.numel / _ranks(of, part) for part in low)
    if of.framework.name == MESHWRIGHT.name and not of.device.is_gpu:
        lanes = -of.adapter.rank % LANES + of.adapter.rank
        for a, b in zip(low[::2], low[1::2], strict=True):
            taken = not b.shape[-2] / (_ranks(of, b) if b.axes[-2] == "tp" else 1) % LANES
            numbers += taken * lanes * (a.numel / _ranks(of, a) + b.numel / _ranks(of, b)) / of.adapter.rank
    return of.adapters * numbers * of.formats.other


def copies_bytes(of: Deployment, width: float = 4.0) -> float:
    """Of matrices in another order beside fp32 weights: those of attention, MLPs and the head, which Meshwright's
    engine keeps on a CPU with a C compiler, of one rank. Experts stay as they are. `width`: bytes of a number in that
    order, 2 where all numbers are the same in bf16."""
    shape = of.model.shape
    found = [part for part in parameters(shape) if part.group in ("attention", "mlp", "head") and len(part.shape) > 1]
    tied = shape.tied * shape.vocab * shape.hidden / of.degrees.tp
    return width * (sum(part.numel / _ranks(of, part) for part in found) + tied)


def _kept_copies(of: Deployment) -> float:
    """As copies_bytes, where there are some. Codes lie in one order, so of quantized weights nothing is counted."""
    own = of.framework.name == MESHWRIGHT.name and not of.device.is_gpu
    return 0.0 if not own or quantized(of) else copies_bytes(of, of.formats.other)


def quantized(of: Deployment) -> bool:
    """Whether some matrices have fewer bits than the rest."""
    formats = of.formats
    return min(formats.attention.width, formats.mlp.width, formats.experts.width) < formats.other


def _width(of: Deployment, part: Parameter) -> float:
    """Bytes of an element: matrices of attention and MLPs in their formats, all else in 16 bits, or 32 on a machine
    that computes in them."""
    plain = of.formats.other
    if len(part.shape) < 2 or part.matrices is None:
        return plain
    formats = of.formats
    return {"attention": formats.attention, "mlp": formats.mlp, "expert": formats.experts}[part.group].width


def _ranks(of: Deployment, part: Parameter) -> float:
    """How many GPUs share a parameter."""
    degrees, shape = of.degrees, of.model.shape
    if part.group == "expert" or "ep" in part.axes:
        return degrees.expert_ep * (degrees.expert_tp if "tp" in part.axes else 1)
    if "tp" not in part.axes:
        return 1
    letter = part.dims[part.axes.index("tp")]
    return min(degrees.tp, shape.kv_heads) if letter == "K" else degrees.tp


def activations_bytes(of: Deployment) -> float:
    """Of a step with as many tokens as the framework allows: the residual stream and its norm, the widest inner layer,
    and logits of the sequences that end in it, fp32."""
    logits = 4.0 * LOGITS * of.model.shape.vocab / of.degrees.tp
    return of.framework.budget * token_bytes(of) + logits


def token_bytes(of: Deployment) -> float:
    """Of the activations of one token, but its logits."""
    shape, tp, moe = of.model.shape, of.degrees.tp, of.model.shape.moe
    inner = 2 * shape.ffn / tp if shape.routed_layers < shape.layers else 0.0
    if moe:
        routed = of.degrees.attention_dp * moe.top_k / of.degrees.expert_ep
        inner = max(inner, routed * (2 * moe.ffn / of.degrees.expert_tp + shape.hidden))
    heads = (shape.heads + 2 * shape.kv_heads) / tp * shape.head_dim
    return 2.0 * (3 * shape.hidden + max(1.5 * inner, heads))


def graphs_bytes(of: Deployment, length: float) -> float:
    """Of the CUDA graphs of Meshwright's engine, on one GPU: the pool, with the parts of attention that are added up
    over runs of positions; and beside it the rows that graphs read, and their logits in fp32. Several ranks have
    none, nor have quantized experts, or latent attention that is wider than its kernel takes."""
    shape = of.model.shape
    ours = of.framework.name == MESHWRIGHT.name and of.device.is_gpu and of.degrees.gpus == 1
    if not ours or (shape.moe and quantized(of)) or (shape.mla and shape.mla.kv_rank + shape.mla.rope_dim > WIDEST):
        return 0.0
    longest = next(one for one in position_numbers(shape.max_positions) if one >= min(length, shape.max_positions))
    runs = longest // SPLIT if longest > SPLIT else 0
    width = shape.mla.kv_rank if shape.mla else shape.head_dim
    pool = token_bytes(of) + 2.0 * shape.vocab + 4.0 * runs * shape.heads * (width + 1)
    beside = 4.0 * shape.vocab + 8.0 * (5 + shape.max_positions / BLOCK)
    return GPU_SEQUENCES * (GRAPH_POOLS * pool + beside)


BLOCK = 16
"""Positions of a block of Meshwright's engine by default."""
LOGITS = 256
"""Sequences whose logits are held at once."""
