"""Choices on a device that engine and planner share: the serving engine's sizes and the attention kernel on a GPU.

Sizes are those of a step, of the cache and of CUDA graphs. The kernel, in 16 bits, is the fastest one that supports the
call, by measured rates. The engine chooses by these rules, and the planner takes its rates from them. Context
parallelism always uses FlashAttention 2, the only kernel that returns the log-sum-exp needed to merge partial results.
"""

import importlib.util
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from meshwright.spec.extras import install
from meshwright.spec.plan.plan import Plan

CacheForm = Literal["model", "fp8", "int8"]
"""Format of cached keys and values: the model's dtype, or 8 bits with a scale per position and head."""
CACHE_FORMS: tuple[CacheForm, ...] = get_args(CacheForm)
HeadForm = Literal["model", "int8"]
"""Format of the head's products: the model's dtype, or 8 bits."""
HEADS: tuple[HeadForm, ...] = get_args(HeadForm)

BESIDE_ANSWERS = 128
"""Tokens of prompts in a step that also extends answers, on a CPU. A step there takes time in proportion to its tokens,
so a long chunk delays every answer, and larger chunks hardly finish prompts sooner. On a GPU a step reads as many as
fit."""
CPU_TOKENS, CPU_SEQUENCES, CPU_CACHE_BYTES = 512, 64, 2**30
"""Tokens of a step, answers at once, and memory of keys and values on a CPU, whose memory the engine shares."""
GPU_SEQUENCES = 256
"""Answers that a GPU makes at once. They share one read of the weights per step."""
MEMORY_SHARE = 0.9
"""Share of a GPU's memory for keys and values, of that left free by weights, CUDA graphs and the largest step. The rest
is for fragmentation, adapters loaded later, and libraries."""
TILE_ELEMENTS = 128 * 256
"""Elements of a product that one processor of a GPU computes at a time: the tile of cuBLAS's fastest bf16 kernels."""
LEAST_WAVES = 4.5
"""Rounds of tiles after which a product reaches 90 % of its rate: half of the processors idle in the last round on
average, and 4.5 / (4.5 + 0.5) = 0.9."""
MOST_STEP_TOKENS = 16_384
"""Limit for narrow models, whose larger steps would delay answers for reasons other than products."""


def step_tokens(processors: int, hidden: int, sequences: int = GPU_SEQUENCES) -> int:
    """Return the number of tokens at which a GPU's products reach 90 % of their rate, a power of two.

    The narrowest products of a block give `hidden` columns. Each of the `sequences` has a token in a step, and prompts
    have at least as many tokens.
    """
    wanted = LEAST_WAVES * processors * TILE_ELEMENTS / hidden
    # Rounded up to a power of two.
    tokens = 1 << max(0, int(wanted) - 1).bit_length()
    return max(2 * sequences, min(tokens, MOST_STEP_TOKENS))


SPLIT = 256
"""Positions per program of the row-wise attention kernel. Small enough to occupy the GPU with one row of 8,192
positions, large enough that partial results take little memory compared with keys."""
WIDEST = 256
"""Widest heads that this kernel supports. Models with wider ones have no graphs."""
FINE = 8
"""Row counts up to here are powers of two. Above, one more lies between two powers."""
GRAPH_POOLS = 1.25
"""Memory pool of all graphs, relative to the largest graph. That one is captured first, and smaller ones reuse its
memory apart from gaps."""
SPARSE = 4
"""Ratio of successive position counts. A position that a row does not see costs a launch but no read."""


def row_numbers(most: int) -> tuple[int, ...]:
    """Return the row counts of graphs for steps of at most `most` rows: 1, 2, 4, 8, 12, 16, 24, 32 ..."""
    counts, size = list[int](), 1
    while size < most:
        counts += [size] if size < FINE else [size, size + size // 2]
        size *= 2
    return (*(count for count in counts if count < most), most)


def position_numbers(longest: int) -> tuple[int, ...]:
    """Return the position counts of graphs for sequences of at most `longest` positions."""
    counts = [SPLIT]
    while counts[-1] < longest:
        # The last count is the longest sequence, rounded up to a whole program.
        counts.append(min(counts[-1] * SPARSE, -(-longest // SPLIT) * SPLIT))
    return tuple(counts)


Case = Literal["rows", "documents", "window", "cache"]
"""Form of a call. rows: whole causal rows. documents: several documents in a row, masked from each other. window: a
sliding window. cache: the last queries of sequences over cached keys, without gradients."""


class AttentionCall(NamedTuple):
    """Properties of a causal attention call that decide which kernels support it."""

    case: Case
    positions: int
    """Positions in a row."""
    width: int
    """Width of a query or key head."""
    value_width: int
    dropout: float = 0.0
    deterministic: bool = False
    gradients: bool = True
    """A backward pass follows."""


class GpuLibraries(NamedTuple):
    """Attention libraries available on a GPU."""

    major: int
    """Major number of the compute capability. 0 = no GPU."""
    cudnn: int = 0
    """Version of cuDNN, such as 91900. 0 = torch cannot call its attention."""
    flash_4: bool = False
    """flash-attn-4 is installed."""


class KernelChoice(NamedTuple):
    """A kernel and the reason for choosing it."""

    kernel: str
    """cudnn, flash-4 or flash (FlashAttention 2)."""
    reason: str


class AttentionRates(NamedTuple):
    """Measured rates of one kernel, as shares of the data sheet's peak, for long rows and heads of 128."""

    forward: float
    backward: float
    half: float
    """Positions at which the kernel reaches half of its rate."""
    narrow: float
    """Factor on the rate for heads of 64."""


FLASH_4_GAIN = 1.92
"""Speedup over FlashAttention 2 on Hopper, both passes of 40,320 positions with 16 heads of 128: 74.1 instead of 142.3
ms (github.com/ecmwf/anemoi-core/pull/959, 2026-03-09). Documents are assumed to gain as much, as they do with version
3: 104 of 108 TFLOP/s for rows of 2,048 on H20 (github.com/Dao-AILab/flash-attention/issues/1310)."""
HOPPER = {
    "flash": AttentionRates(0.333, 0.266, 500.0, 1.0),
    "cudnn": AttentionRates(0.626, 0.465, 500.0, 0.86),
    "flash-4": AttentionRates(FLASH_4_GAIN * 0.333, FLASH_4_GAIN * 0.266, 500.0, 0.77),
}
"""Rates from steps on one H200, torch 2.11, cuDNN 9.19, 2026-11-27. Flash: 1,024 to 32,768 positions. cuDNN: 8,192
positions with heads of 128 (0.94 and 3.17 ms for a layer of 8B; flash 1.84 and 5.47), and 32,768 with heads of 64.
flash-4 is flash times its gain, not measured. Its factor for heads of 64 is that of version 3, 497 of 648 TFLOP/s
(arXiv:2407.08608, figure 5)."""
MAJORS = (9, 10)
"""Compute capabilities on which cuDNN and flash-4 are used: Hopper and Blackwell. Flash has no kernel written for
either."""
LEAST_CUDNN = 91900
"""Oldest cuDNN that is used, the version that was measured. torch disabled older ones because of errors."""
LEAST_POSITIONS = 1024
"""Shortest rows for which cuDNN is used. Shorter ones are bound by launches, whichever the kernel."""
WIDEST_HEAD = 128
"""Widest heads for which both kernels have a backward pass on both generations."""
LATENT = (192, 128)
"""Key and value widths of latent attention that flash-4 supports."""


def attention_call(plan: Plan) -> AttentionCall:
    """Return the properties of a training step's attention that decide its kernel."""
    shape, recipe, mla = plan.model, plan.recipe, plan.model.mla
    width, value_width = (shape.head_dim,) * 2 if mla is None else (mla.nope_dim + mla.rope_dim, mla.v_dim)
    case: Case = "window" if 0 < shape.window < recipe.sequence else "documents" if recipe.document_mask else "rows"
    return AttentionCall(case, recipe.sequence, width, value_width, recipe.dropout, recipe.deterministic)


def attention_kernel(call: AttentionCall, gpu: GpuLibraries) -> KernelChoice:
    """Choose the kernel for heads of at most 256. The reason names the obstacle to a faster kernel, if any."""
    if gpu.major not in MAJORS:
        return KernelChoice("flash", "no faster kernel is known for this GPU")
    faster, refuses = ("cudnn", _cudnn_refuses) if call.case == "rows" else ("flash-4", _flash_4_refuses)
    if reason := _both_refuse(call) or refuses(call, gpu):
        return KernelChoice("flash", reason)
    rate, plain = HOPPER[faster], HOPPER["flash"]
    # The backward pass has 2.5 times the products of the forward pass.
    gain = (1 / plain.forward + 2.5 / plain.backward) / (1 / rate.forward + 2.5 / rate.backward)
    source = "measured on an H200" if faster == "cudnn" else "by published figures"
    return KernelChoice(faster, f"{gain:.1f} times FlashAttention 2, {source}")


def _both_refuse(call: AttentionCall) -> str:
    """Return why neither cuDNN nor flash-4 is used: in torch only FlashAttention 2 has dropout and determinism."""
    if call.dropout:
        return "dropout"
    if call.deterministic:
        return "deterministic"
    return "" if call.width % 8 == 0 and call.value_width % 8 == 0 else "head widths are not multiples of 8"


def _cudnn_refuses(call: AttentionCall, gpu: GpuLibraries) -> str:
    if not call.gradients:  # lengths then change from batch to batch, and cuDNN plans each one anew
        return "no gradients"
    if call.positions < LEAST_POSITIONS:
        return f"rows below {LEAST_POSITIONS:,} positions"
    if call.width > WIDEST_HEAD or call.value_width != call.width:
        return f"heads wider than {WIDEST_HEAD}, or values of another width"
    oldest = f"{LEAST_CUDNN // 10_000}.{LEAST_CUDNN % 10_000 // 100}"
    return "" if gpu.cudnn >= LEAST_CUDNN else f"cuDNN is missing or older than {oldest}"


def _flash_4_refuses(call: AttentionCall, gpu: GpuLibraries) -> str:
    widths = call.width, call.value_width
    if widths != LATENT and max(widths) > WIDEST_HEAD:
        return f"heads wider than {WIDEST_HEAD}"
    return "" if gpu.flash_4 else f"flash-attn-4 is not installed: {install('gpu')}"


@cache
def has_flash_4() -> bool:
    """Return whether flash-attn-4 is installed, without importing it. Other packages share its top folder."""
    package = importlib.util.find_spec("flash_attn")
    folders = (package and package.submodule_search_locations) or ()
    return any(Path(folder, "cute", "interface.py").is_file() for folder in folders)
