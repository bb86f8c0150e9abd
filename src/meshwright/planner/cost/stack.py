"""Stack: how a piece of training software spends memory and time where shape, recipe and layout leave it a choice.

The planner counts the same operations for all of them. Meshwright's own is what `plan` uses; the others exist because
published measurements were made with them. Every field says what it counts; sources stand with each stack.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

from meshwright.spec.head_chunk import CHUNK_BYTES
from meshwright.spec.layout import Layout

TUNING_BYTES = 60 * 2**20
"""What empties an H200's cache (its L2) while the first call of a compiled kernel is tuned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Bytes are per element of a 16-bit run unless they say otherwise."""

    name: str
    """What accuracy tables call it."""
    own: bool = False
    """This package's engine, of which more is known than of the others: each moment of its schedules, widths of its
    gradients, what its masks and its split backward passes cost."""
    attention: Literal["flash", "fused-softmax", "unfused"] = "flash"
    """flash never writes the S x S weights; the others keep them; unfused also moves them several times."""
    flash: Literal[1, 2, 3] = 2
    """Generation of that kernel; 3 stands for all that were written for Hopper and later, cuDNN's too. This package
    takes the faster of 2 and cuDNN's (spec/attention_kernels.py)."""
    merges: Literal["fused", "eager"] = "fused"
    """Context parallelism, results of an attention core's parts: merged inside the kernel that follows, or step by step
    in fp32, with keys and values that travel once for each head of the queries."""
    dropout: bool = False
    """Keeps and draws the masks of the lectures' 34 S B D + 5 H S^2 B."""
    norm_kept: float = 2.0
    """A norm keeps so much of its input (2: the input itself; an eager fp32 norm keeps more)."""
    tensor_kept: float = 0.0
    """With tensor parallelism, of a whole hidden state: copies that column-split products take and keep apart."""
    core_kept: float = 0.0
    """Of a query: packed copies that the attention core keeps beside queries, keys, values and its output."""
    activation_kept: float = 2.0
    """Beyond gate and up (or up): their product, input of the last matrix; 0 = made again, 4 = also silu(gate)."""
    shares_sequence: bool = False
    """Tensor parallelism of this software comes with sequence parallelism, where a row does not say."""
    regather: bool = True
    """Sequence parallel: a product's gathered input is gathered again in the backward pass, not kept."""
    selective: Literal["core", "products", "alternate"] = "core"
    """selective recomputation drops the attention core (Korthikanti), or keeps products with weights only, or of those
    every other one and what attention makes (torchtitan's policy per operation)."""
    score_kept: float = 0.0
    """Unfused attention: bytes of a weight beside the softmax itself."""
    logit_kept: float = 6.0
    """Bytes of a logit from the forward to the backward pass of the head."""
    logit_peak: float = 10.0
    """Bytes of a logit at the worst moment of the head."""
    logit_held: float = 0.0
    """Bytes of a logit that stay until the whole backward pass has ended: outputs that something still refers to."""
    vocab_parallel: bool = True
    """Tensor-parallel ranks never see each other's logits."""
    tensor_logit: float = 0.0
    """Bytes of a logit more at that moment with tensor parallelism: a loss written out, or parts put together."""
    head_chunk_bytes: float = 0.0
    """Not 0: head and loss run chunk by chunk and keep gradients instead of logits; fp32 logits of a chunk."""
    loss_in_place: bool = False
    """Losses and gradients of such a chunk are made in the place of its logits, whatever their dtype."""
    updates_at_once: bool = False
    """AdamW with fp32 states reads gradients of 16 bits and writes masters and weights in one pass (a GPU's)."""
    sums_products: bool = False
    """Products that are gradients of 16-bit weights add to sums in fp32 (kernels/gradient_sums.py, a GPU's)."""
    pads_head: bool = False
    """Logits of a vocabulary that would not begin rows at 16 bytes lie in wider rows (kernels/head_matrix.py)."""
    rounds_in_place: bool = False
    """Operands are rounded to 8 bits with no scaled copy beside them, by code that is not compiled too."""
    gradient_bytes: float = 2.0
    """Bytes of a parameter's gradient as it is kept over a step."""
    update_bucket_bytes: float = 0.0
    """Not 0: gradients of 16 bit are widened so many fp32 bytes at a time. A checkpoint is copied to host memory piece
    by piece and takes nothing of a device."""
    reserve_bytes: float = 0.0
    """Constant: cuBLAS and cuBLASLt workspaces (32 MiB each on Hopper), and what torch's allocator rounds up (blocks to
    512 B, segments to 2 and 20 MiB)."""
    slack: float = 1.0
    """Allocator: reserved over asked-for bytes of activations; the excess is counted as reserve."""
    sharding: Literal["flat", "fully_shard"] = "flat"
    """flat: parameters are whole until ZeRO-3, gradients until ZeRO-2, each in one buffer. fully_shard: by tensors, a
    rank's shards kept beside what is whole; gradients of a pipeline stage stay whole within a step."""
    ends_apart: bool = False
    """Embedding with positions, and norm with head, are gathered and reduced as units of their own, where the head is
    not tied; else they are one with what stays whole from the first forward to the last backward pass."""
    shard_bytes: float = 0.0
    """Of a parameter of a rank's shard under ZeRO-3; 0 = as the parameter. 4 = the shard is the master."""
    reports: Literal["worst", "first"] = "worst"
    """Which pipeline rank's peak its log prints."""
    split: Literal["even", "cost"] = "even"
    """Layers of pipeline stages: as spec.schedule does, or until a stage has its share of the products' FLOP."""
    outputs_kept: bool = False
    """A pipeline stage also keeps its output for each micro-batch in flight."""
    step_buffers: bool = False
    """A pipeline stage has a place to receive every micro-batch of a step, and the last keeps the logits of all
    (torch.distributed.pipelining)."""

    host_s: float = 6e-6
    """Seconds of the host to launch one kernel: a layer takes at least its launches."""
    operation_s: float = 0.0
    """The same for an operation beside its launches: Python, dispatch, autograd."""
    stalls: float = 0.0
    """0 = the host runs so far ahead that a pass takes the longer of its launches and its kernels; 1 = it never does,
    each kernel takes the longer of the two."""
    selective_repeats: float = 0.0
    """Share of the products that selective recomputation repeats."""
    product_bytes: float = 2.0
    """Of an operand of the layers' products: 1 = fp8, 0.5 = fp4; the head stays as it is."""
    passes: float = 1.0
    """How often elementwise operations move their data, over a fused kernel: bias, activation, residual, loss."""
    norm_passes: float = 1.0
    """The same for norms. In eager RMSNorm 32-bit copies, squares and products pass by: 20 x 2 bytes forward."""
    layer_norm_passes: float = 0.0
    """The same where a norm is LayerNorm; 0 = as norm_passes."""
    swiglu_passes: float = 1.0
    """Of that activation, times passes: what a CPU computes, not what it moves."""
    gelu_passes: float = 1.0
    """Of a GELU, likewise."""
    loss_passes: float = 1.0
    """Of softmax and loss, likewise."""
    rope_passes: float = 1.0
    """The same for the rotation of queries and keys. Eager: two products, a concatenation, a sum, each a kernel."""
    turns: float = 0.0
    """Copies of queries-sized tensors around the attention core: other orders of dimensions."""
    skew: float = 0.0
    """Tensor-parallel ranks wait for the last of them before each exchange: so much of the exchange's own time."""
    column_inputs: tuple[int, int] = (1, 1)
    """Column-split products that take their input's gradient apart: of attention, of the MLP. Each reduces its own."""
    accumulates: bool = False
    """Adds each micro-batch's gradients in kernels of their own, not inside the products that make them."""
    send_s: float = 0.0
    """Of the host for a pipeline transfer: what is waited for, packed and unpacked."""
    step_s: float = 0.0
    """Of a step: data, logging, synchronisation."""
    micro_batch_s: float = 0.0
    """Of a micro-batch: the same."""
    hides_gradients: float = 1.0
    """Share of the backward pass behind which reductions of gradients run."""
    hides_weights: float = 1.0
    """Share of the computation behind which ZeRO-3's gathers run."""
    hides_beside: float = 1.0
    """Share of the computation made to run beside an exchange that hides it: an attention core while the next keys
    travel, gradients of weights while those of inputs are summed."""
    hides_tensor: float = 0.0
    """Share of tensor-parallel exchanges that runs behind products."""
    hides_with_sequence: bool = False
    """They do so with sequence parallelism only."""
    routes_once: bool = False
    """Experts: a token goes to another node once, however many of its experts are there (DeepEP)."""
    dispatch_bytes: float = 0.0
    """Of an element on its way to experts, and of its gradient on the way back from where they were summed; 0 = as any
    activation."""
    hides_experts: float = 0.0
    """Share of a layer's computation behind which tokens of another micro-batch travel to experts and back."""
    fused_experts: bool = False
    """Activation and rounding of experts run inside their products' kernels."""
    adds_expert_biases: bool = False
    """Biases of experts' last matrices are weighed and added expert by expert, by kernels of their own in fp32."""
    counts_s: float = 0.0
    """Of a pass through a layer of experts: the host waits for the counts of tokens before it launches the experts."""
    expert_launch_s: float = 0.0
    """Of a pass, for each expert on a rank: its launches, for which the device waits, since the host could not run
    ahead of the counts."""
    hides_sends: float = 1.0
    """Share of pipeline transfers that runs behind computation."""
    contention: float = 0.1
    """Computation is so much slower while a collective runs beside it (streaming multiprocessors, memory)."""
    gradient_exchange_bytes: float = 0.0
    """Bytes of a gradient as it is reduced; 0 = as kept."""
    source: str = ""
    """Where the figures stand or how they were found."""

    @property
    def drops_scores_alone(self) -> bool:
        """Whether selective recomputation drops S x S weights and nothing else, as this package's engine does."""
        return self.own and self.selective == "core"


def eager(stack: Stack) -> Stack:
    """This package's engine with blocks that are not compiled: activation, residual and rotation are kernels of their
    own, each with its results in memory (kernels/swiglu.py, kernels/rope.py). A measured machine's were timed so."""
    known = stack.passes == stack.rope_passes == 1.0
    return replace(stack, passes=1.67, rope_passes=5.0) if stack.own and known else stack


def plain_code(stack: Stack, layout: Layout, width: int, *, compiled: bool) -> Stack:
    """Return this package's engine with its reference kernels, whose autograd keeps every intermediate tensor.

    Attention within a rank stores its S x S weights (kernels/attention.py, attend_reference). The head keeps the fp32
    log-softmax of all tokens, beside which its backward pass makes two more (kernels/cross_entropy.py);
    tensor-parallel ranks share the chunked one. Uncompiled, a norm keeps its input in fp32 and the normed input before
    the gain, and a gated MLP silu(gate) and the product. `width`: bytes of an activation.
    """
    plain = replace(stack, attention="unfused") if layout.writes_scores else stack
    if layout.tp == 1:
        plain = replace(plain, head_chunk_bytes=0.0, logit_kept=4.0, logit_peak=12.0)
    return plain if compiled else replace(plain, activation_kept=4.0, norm_kept=2 * (4 + width) / width)


ON_GPU: dict[str, Any] = {
    "norm_passes": 1.8, "layer_norm_passes": 2.9, "gelu_passes": 1.25, "operation_s": 5.5e-5, "step_s": 2.5e-3,
}  # fmt: skip
"""What steps on an H200 took beyond what their kernels must move: backward passes of norms sum over rows apart (61 % of
a copy's rate in RMSNorm alone, 36 % in LayerNorm), GELU is bound by its polynomials. An operation with all
that Python, autograd and torch do for it (31.5 ms of a step of GPT-2 124M with 4 x 1,024 tokens); and between two
steps, what a profile leaves open (2.3 ms of GPT-2's)."""


def on_gpu(stack: Stack) -> Stack:
    """This package's engine with the kernels of a GPU, in what nobody changed."""
    plain = {name: value for name, value in ON_GPU.items() if getattr(stack, name) == getattr(MESHWRIGHT, name)}
    return replace(stack, **plain) if stack.own else stack


GRAPH_S = 2e-5
"""Of the host to launch a graph of a micro-batch, and copy what it reads."""


def graphed(stack: Stack) -> Stack:
    """This package's engine with passes that are CUDA graphs (parallel/pass_graphs.py): the host launches no kernel of
    theirs, and replicas are summed behind the last of them."""
    return replace(stack, host_s=0.0, operation_s=0.0, hides_gradients=0.0, micro_batch_s=stack.micro_batch_s + GRAPH_S)


MESHWRIGHT = Stack(
    name="meshwright",
    own=True,
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
    source="src/meshwright: kernels/swiglu.py, kernels/cross_entropy.py, parallel/",
)
