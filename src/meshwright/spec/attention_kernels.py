"""Which kernel attends on a GPU in 16 bits: the fastest one that takes the work, by measured rates. The engine asks
here, and the planner has its rates from here.

Context parallelism goes by parts of rows through FlashAttention 2, which alone gives what parts are merged by.
"""

import importlib.util
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

from meshwright.spec.extras import install
from meshwright.spec.plan import Plan

Case = Literal["rows", "documents", "window", "cache"]
"""Whole causal rows; documents behind one another; a window, over documents or over rows; the last queries of sequences
over all their keys, with a window or without, where no gradient is made: what a cache is for."""


class AttentionCall(NamedTuple):
    """Causal attention of rows."""

    case: Case
    positions: int
    """Of a row."""
    width: int
    """Of a head's queries and keys."""
    value_width: int
    dropout: float = 0.0
    deterministic: bool = False
    gradients: bool = True
    """Whether a backward pass follows."""


class GpuLibraries(NamedTuple):
    """What can attend on a GPU."""

    major: int
    """Compute capability, its first number; 0 = no GPU."""
    cudnn: int = 0
    """Version of cuDNN, as 91900; 0 = torch cannot call its attention."""
    flash_4: bool = False
    """Whether flash-attn-4 is installed."""


class KernelChoice(NamedTuple):
    """The kernel, and why it is that one."""

    kernel: str
    """cudnn, flash-4 or flash (FlashAttention 2)."""
    reason: str


class AttentionRates(NamedTuple):
    """Of one kernel, over the data sheet's peak: what it reaches of long rows with heads of 128, and where it loses."""

    forward: float
    backward: float
    half: float
    """Positions at which it reaches half of that."""
    narrow: float
    """Of the rate, with heads of 64."""


FLASH_4_GAIN = 1.92
"""Over FlashAttention 2 on Hopper, both passes of 40,320 positions with 16 heads of 128: 74.1 of 142.3 ms
(github.com/ecmwf/anemoi-core/pull/959, 2026-03-09). Documents are taken to gain as much, as those of version 3 do: 104
of 108 TFLOP/s for rows of 2,048 on H20 (github.com/Dao-AILab/flash-attention/issues/1310)."""
HOPPER = {
    "flash": AttentionRates(0.333, 0.266, 500.0, 1.0),
    "cudnn": AttentionRates(0.626, 0.465, 500.0, 0.86),
    "flash-4": AttentionRates(FLASH_4_GAIN * 0.333, FLASH_4_GAIN * 0.266, 500.0, 0.77),
}
"""Steps on one H200, torch 2.11, cuDNN 9.19, 2026-11-27. Flash: 1,024 to 32,768 positions. cuDNN: 8,192 positions with
heads of 128 (0.94 and 3.17 ms of a layer of 8B, flash 1.84 and 5.47), and 32,768 with heads of 64. flash-4 was not
measured: flash times its gain; heads of 64 as version 3 has them, 497 of 648 TFLOP/s (arXiv:2407.08608, figure 5)."""
MAJORS = (9, 10)
"""Compute capabilities whose cuDNN and flash-4 are taken: Hopper, Blackwell. Flash has no kernel for either."""
LEAST_CUDNN = 91900
"""The version that was measured: older ones had errors that torch turned them off for."""
LEAST_POSITIONS = 1024
"""Rows from which on cuDNN is taken: shorter ones wait for launches, whichever kernel it is."""
WIDEST = 128
"""Heads up to which both have a backward pass on both generations."""
LATENT = (192, 128)
"""Widths of keys and values of latent attention that flash-4 was written for."""


def attention_call(plan: Plan) -> AttentionCall:
    """What attention of a training step is asked."""
    shape, recipe, mla = plan.model, plan.recipe, plan.model.mla
    width, value_width = (shape.head_dim,) * 2 if mla is None else (mla.nope_dim + mla.rope_dim, mla.v_dim)
    case: Case = "window" if 0 < shape.window < recipe.sequence else "documents" if recipe.document_mask else "rows"
    return AttentionCall(case, recipe.sequence, width, value_width, recipe.dropout, recipe.deterministic)


def attention_kernel(call: AttentionCall, gpu: GpuLibraries) -> KernelChoice:
    """For heads of at most 256. The reason names what keeps a faster kernel out."""
    if gpu.major not in MAJORS:
        return KernelChoice("flash", "no faster kernel is known for this GPU")
    faster, refused = ("cudnn", _cudnn_refuses) if call.case == "rows" else ("flash-4", _flash_4_refuses)
    if reason := _both_refuse(call) or refused(call, gpu):
        return KernelChoice("flash", reason)
    rate, plain = HOPPER[faster], HOPPER["flash"]
    gain = (1 / plain.forward + 2.5 / plain.backward) / (1 / rate.forward + 2.5 / rate.backward)
    source = "measured on an H200" if faster == "cudnn" else "by published figures"
    return KernelChoice(faster, f"{gain:.1f} times FlashAttention 2, {source}")


def _both_refuse(call: AttentionCall) -> str:
    """Why neither cuDNN nor flash-4 is taken: torch has dropout in FlashAttention 2 alone, and calls that alone
    deterministic."""
    if call.dropout:
        return "dropout"
    if call.deterministic:
        return "deterministic"
    return "" if call.width % 8 == 0 and call.value_width % 8 == 0 else "head widths are no multiples of 8"


def _cudnn_refuses(call: AttentionCall, gpu: GpuLibraries) -> str:
    """Lengths change from batch to batch without gradients, and cuDNN plans each of them anew."""
    if not call.gradients:
        return "no gradients"
    if call.positions < LEAST_POSITIONS:
        return f"rows below {LEAST_POSITIONS:,} positions"
    if call.width > WIDEST or call.value_width != call.width:
        return f"heads wider than {WIDEST}, or values of another width"
    oldest = f"{LEAST_CUDNN // 10_000}.{LEAST_CUDNN % 10_000 // 100}"
    return "" if gpu.cudnn >= LEAST_CUDNN else f"cuDNN is not there, or older than {oldest}"


def _flash_4_refuses(call: AttentionCall, gpu: GpuLibraries) -> str:
    widths = call.width, call.value_width
    if widths != LATENT and max(widths) > WIDEST:
        return f"heads wider than {WIDEST}"
    return "" if gpu.flash_4 else f"flash-attn-4 is not installed: {install('gpu')}"


@cache
def has_flash_4() -> bool:
    """Whether flash-attn-4 is installed here; it is not imported. Other packages share its first folder."""
    package = importlib.util.find_spec("flash_attn")
    folders = (package and package.submodule_search_locations) or ()
    return any(Path(folder, "cute", "interface.py").is_file() for folder in folders)
