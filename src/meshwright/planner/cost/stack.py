"""Training software: how it spends memory and time where shape, recipe and layout leave a choice.

The planner counts the same operations for every stack. `plan` uses Meshwright's own. The others exist because published
measurements were made with them. Every field says what it counts, and each stack names its sources.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

from meshwright.spec.layout.layout import Layout
from meshwright.spec.memory.held import CHUNK_BYTES

TUNING_BYTES = 60 * 2**20
"""Buffer that flushes an H200's L2 cache while the first call of a compiled kernel is tuned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Properties of a training stack. Bytes are per element of a 16-bit run unless a field says otherwise."""

    name: str
    """Name in accuracy tables."""
    is_meshwright: bool = False
    """Meshwright's engine, of which more is known than of the others.

    Each moment of its schedules, widths of its gradients, cost of its masks and split backward passes.
    """
    attention: Literal["flash", "fused-softmax", "unfused"] = "flash"
    """flash never writes the S x S weights. The others keep them, and unfused also moves them several times."""
    flash: Literal[1, 2, 3] = 2
    """Generation of the flash kernel. 3 stands for all that were written for Hopper and later, cuDNN's too.

    Meshwright takes the faster of 2 and cuDNN's (spec/plan/execution.py).
    """
    merges: Literal["fused", "eager"] = "fused"
    """Merging of partial attention outputs under context parallelism.

    fused: inside the next kernel. eager: step by step in fp32, and keys and values travel once per query head.
    """
    dropout: bool = False
    """Draws and keeps the masks of the lectures' 34 S B D + 5 H S^2 B."""
    norm_kept: float = 2.0
    """Bytes of its input that a norm keeps (2: the input itself, an eager fp32 norm keeps more)."""
    tensor_kept: float = 0.0
    """Copies of a whole hidden state that column-split products keep separately under tensor parallelism."""
    core_kept: float = 0.0
    """Packed copies per query element that the attention core keeps in addition to queries, keys, values and output."""
    activation_kept: float = 2.0
    """Beyond gate and up (or up): their product, input of the last matrix. 0 = recomputed, 4 = also silu(gate)."""
    shares_sequence: bool = False
    """Tensor parallelism comes with sequence parallelism where a published row does not say."""
    regather: bool = True
    """Sequence parallel: a product's gathered input is gathered again in the backward pass, not kept."""
    selective: Literal["core", "products", "alternate"] = "core"
    """Selective recomputation.

    core: drops the attention core (Korthikanti). products: keeps only products with weights. alternate: keeps every
    other one of these and the output of attention (torchtitan's policy per operation).
    """
    score_kept: float = 0.0
    """Unfused attention: bytes per weight in addition to the softmax itself."""
    logit_kept: float = 6.0
    """Bytes per logit from the forward to the backward pass of the head."""
    logit_peak: float = 10.0
    """Bytes per logit at the worst moment of the head."""
    logit_held: float = 0.0
    """Bytes per logit that stay until the whole backward pass ends: outputs that are still referenced."""
    vocab_parallel: bool = True
    """Tensor-parallel ranks never see each other's logits."""
    tensor_logit: float = 0.0
    """Extra bytes per logit at that moment with tensor parallelism: a loss written out, or joined parts."""
    head_chunk_bytes: float = 0.0
    """fp32 logits of a chunk, if head and loss run chunk by chunk and keep gradients instead of logits. 0 = whole."""
    loss_in_place: bool = False
    """Losses and gradients of a chunk overwrite its logits, whatever their dtype."""
    updates_at_once: bool = False
    """AdamW with fp32 states reads 16-bit gradients and writes masters and weights in one pass (GPU)."""
    sums_products: bool = False
    """Products that are gradients of 16-bit weights accumulate in fp32 (kernels/linear/weight_gradients.py, GPU)."""
    pads_head: bool = False
    """Logits whose rows would not start at 16 bytes lie in wider rows (kernels/loss/cross_entropy.py)."""
    rounds_in_place: bool = False
    """Operands are rounded to 8 bits without a scaled copy, in uncompiled code too."""
    gradient_bytes: float = 2.0
    """Bytes of a parameter's gradient during a step."""
    update_bucket_bytes: float = 0.0
    """fp32 bytes of 16-bit gradients that are widened at a time. 0 = all.

    A checkpoint is copied to host memory piece by piece and takes no device memory.
    """
    reserve_bytes: float = 0.0
    """Constant: cuBLAS and cuBLASLt workspaces (32 MiB each on Hopper), and rounding of torch's allocator.

    Blocks are rounded to 512 B, segments to 2 and 20 MiB.
    """
    kept_shares: tuple[tuple[str, float], ...] = ()
    """(tensor of a layer, share of it that is kept), for formats of fewer bits, and 0 for what is made again.

    Its repeated work is not counted.
    """
    slack: float = 1.0
    """Reserved over requested bytes of activations in the allocator. The excess counts as reserve."""
    sharding: Literal["flat", "fully_shard"] = "flat"
    """flat: parameters are whole until ZeRO-3 and gradients until ZeRO-2, each in one buffer.

    fully_shard: by tensor, with a rank's shards in addition to the whole ones. Gradients of a pipeline stage stay whole
    within a step.
    """
    ends_apart: bool = False
    """Embedding with positions, and norm with head, are gathered and reduced as separate units if the head is not tied.

    Otherwise they belong to what stays whole from the first forward to the last backward pass.
    """
    shard_bytes: float = 0.0
    """Bytes per parameter of a rank's shard under ZeRO-3. 0 = as the parameter, 4 = the shard is the master."""
    reports: Literal["worst", "first"] = "worst"
    """Pipeline rank whose peak its log prints."""
    split: Literal["even", "cost"] = "even"
    """Layers of pipeline stages: even as in spec.schedule, or until a stage has its share of the products' FLOP."""
    outputs_kept: bool = False
    """A pipeline stage also keeps its output for each micro-batch in flight."""
    step_buffers: bool = False
    """A pipeline stage has a receive buffer for every micro-batch of a step, and the last keeps all logits.

    torch.distributed.pipelining.
    """

    host_s: float = 6e-6
    """Seconds in which the host launches one kernel. A layer takes at least its launches."""
    operation_s: float = 0.0
    """Host seconds per operation in addition to its launches: Python, dispatch, autograd."""
    stalls: float = 0.0
    """0 = the host runs so far ahead that a pass takes the longer of its launches and its kernels.

    1 = it never does, and each kernel takes the longer of the two.
    """
    selective_repeats: float = 0.0
    """Share of the products that selective recomputation repeats."""
    product_bytes: float = 2.0
    """Bytes of an operand of the layers' products: 1 = fp8, 0.5 = fp4. The head is unaffected."""
    passes: float = 1.0
    """Memory traffic of elementwise operations over a fused kernel: bias, activation, residual, loss."""
    norm_passes: float = 1.0
    """The same for norms. An eager RMSNorm moves 32-bit copies, squares and products: 20 x 2 bytes forward."""
    layer_norm_passes: float = 0.0
    """The same for LayerNorm. 0 = as norm_passes."""
    swiglu_passes: float = 1.0
    """The same for SwiGLU, times passes: a CPU is bound by computing, not by moving."""
    gelu_passes: float = 1.0
    """The same for GELU."""
    loss_passes: float = 1.0
    """The same for softmax and loss."""
    rope_passes: float = 1.0
    """The same for the rotation of queries and keys. Eager: two products, a concatenation, a sum, each a kernel."""
    turns: float = 0.0
    """Copies of query-sized tensors around the attention core: transposed dimensions."""
    skew: float = 0.0
    """Wait of tensor-parallel ranks for the last one before each exchange, over the exchange's own time."""
    column_inputs: tuple[int, int] = (1, 1)
    """Column-split products that compute their input's gradient separately, in attention and MLP.

    Each reduces its own.
    """
    accumulates: bool = False
    """Each micro-batch's gradients are added by separate kernels, not inside the products."""
    send_s: float = 0.0
    """Host seconds of a pipeline transfer: waiting, packing, unpacking."""
    step_s: float = 0.0
    """Seconds per step: data, logging, synchronization."""
    micro_batch_s: float = 0.0
    """Seconds per micro-batch: the same."""
    hides_gradients: float = 1.0
    """Share of the backward pass that hides reductions of gradients."""
    hides_weights: float = 1.0
    """Share of the computation that hides ZeRO-3's gathers."""
    hides_beside: float = 1.0
    """Share of the computation scheduled during an exchange that hides it.

    An attention core while the next keys travel, weight gradients while input gradients are summed.
    """
    hides_tensor: float = 0.0
    """Share of tensor-parallel exchanges that runs behind products."""
    hides_with_sequence: bool = False
    """hides_tensor holds with sequence parallelism only."""
    routes_once: bool = False
    """Experts: a token goes to another node once, however many of its experts are there (DeepEP)."""
    dispatch_bytes: float = 0.0
    """Bytes per element on the way to experts, and of its gradient on the way back from where they were summed.

    0 = as any activation.
    """
    hides_experts: float = 0.0
    """Share of a layer's computation that hides the expert exchange of another micro-batch."""
    fused_experts: bool = False
    """Activation and rounding of experts run inside their products' kernels."""
    adds_expert_biases: bool = False
    """Biases of experts' last matrices are weighted and added expert by expert, by separate fp32 kernels."""
    counts_s: float = 0.0
    """Seconds per pass of a layer of experts in which the host waits for the token counts before launching."""
    expert_launch_s: float = 0.0
    """Seconds of launches per pass and expert on a rank.

    The device waits for them, because the host could not run ahead of the counts.
    """
    hides_sends: float = 1.0
    """Share of pipeline transfers that runs behind computation."""
    contention: float = 0.1
    """Slowdown of computation during a collective (streaming multiprocessors, memory)."""
    gradient_exchange_bytes: float = 0.0
    """Bytes of a gradient as it is reduced. 0 = as kept."""
    source: str = ""
    """Source of the figures."""

    def __hash__(self) -> int:
        # Keys of memos hold stacks, and all their fields would take as long to hash as an answer to find.
        return hash(self.name)

    @property
    def drops_scores_alone(self) -> bool:
        """True if selective recomputation drops only the S x S weights, as Meshwright's engine does."""
        return self.is_meshwright and self.selective == "core"


def eager(stack: Stack) -> Stack:
    """Return Meshwright's engine with uncompiled blocks.

    Activation, residual and rotation are separate kernels that store their outputs (kernels/linear/swiglu.py,
    kernels/attention/rope.py). Measured machines were timed that way.
    """
    known = stack.passes == stack.rope_passes == 1.0
    return replace(stack, passes=1.67, rope_passes=5.0) if stack.is_meshwright and known else stack


def plain_code(stack: Stack, layout: Layout, width: int, *, compiled: bool) -> Stack:
    """Return Meshwright's engine with its reference kernels, whose autograd keeps every intermediate tensor.

    Attention within a rank stores its S x S weights (kernels/attention/attend.py, attend_reference). The head keeps the
    fp32 log-softmax of all tokens, and its backward pass computes two more (kernels/loss/cross_entropy.py).
    Tensor-parallel ranks share the chunked head. Uncompiled, a norm keeps its input in fp32 and the normed input before
    the gain, and a gated MLP keeps silu(gate) and the product. `width` is the bytes of an activation.
    """
    plain = replace(stack, attention="unfused") if layout.writes_scores else stack
    if layout.tp == 1:
        plain = replace(plain, head_chunk_bytes=0.0, logit_kept=4.0, logit_peak=12.0)
    return plain if compiled else replace(plain, activation_kept=4.0, norm_kept=2 * (4 + width) / width)


ON_GPU: dict[str, Any] = {
    "norm_passes": 1.8, "layer_norm_passes": 2.9, "gelu_passes": 1.25, "operation_s": 5.5e-5, "step_s": 2.5e-3,
}  # fmt: skip
"""Overheads of steps on an H200 beyond the bytes that their kernels must move.

Backward passes of norms sum over rows separately (61 % of a copy's rate in RMSNorm alone, 36 % in LayerNorm). GELU is
bound by its polynomials. operation_s covers Python, autograd and torch (31.5 ms of a step of GPT-2 124M with 4 x 1,024
tokens). step_s is the gap between two steps in a profile (2.3 ms of GPT-2's).
"""


def on_gpu(stack: Stack) -> Stack:
    """Return Meshwright's engine with the overheads of a GPU, where fields have their defaults."""
    plain = {name: setting for name, setting in ON_GPU.items() if getattr(stack, name) == getattr(MESHWRIGHT, name)}
    return replace(stack, **plain) if stack.is_meshwright else stack


GRAPH_S = 2e-5
"""Host seconds to launch the graph of a micro-batch and copy its inputs."""


def graphed(stack: Stack) -> Stack:
    """Return Meshwright's engine with passes that are CUDA graphs (parallel/pipeline/pass_graphs.py).

    The host launches none of their kernels, and replicas are summed after the last pass.
    """
    return replace(stack, host_s=0.0, operation_s=0.0, hides_gradients=0.0, micro_batch_s=stack.micro_batch_s + GRAPH_S)


def serial(stack: Stack) -> Stack:
    """Return Meshwright's engine with `layout.overlap=off`: nothing overlaps with a collective, which slows nothing."""
    return replace(
        stack, hides_gradients=0.0, hides_weights=0.0, hides_beside=0.0, hides_tensor=0.0, hides_experts=0.0,
        contention=0.0,
    )  # fmt: skip


MESHWRIGHT = Stack(
    name="meshwright",
    is_meshwright=True,
    activation_kept=0.0,
    logit_kept=0.0,
    logit_peak=0.0,
    head_chunk_bytes=CHUNK_BYTES["cuda"],
    loss_in_place=True,
    updates_at_once=True,
    sums_products=True,
    pads_head=True,
    flash=3,
    rounds_in_place=True,
    sharding="fully_shard",
    ends_apart=True,
    update_bucket_bytes=16 * 2**20,
    reserve_bytes=96 * 2**20,
    source="src/meshwright: kernels/linear/swiglu.py, kernels/loss/cross_entropy.py, parallel/",
)
