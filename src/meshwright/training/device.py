"""The device a run is on: which one, its memory, its peak."""

import re
import resource
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from meshwright import compat
from meshwright.compat import torch_compile
from meshwright.compat.onednn_cache import keep_few_products
from meshwright.kernels import chooser, fp8, gpu_attention
from meshwright.kernels.attention import Mask, backend, causal_mask, triton_obstacle, wants_loops
from meshwright.kernels.compiled import training_library
from meshwright.kernels.linear import SAME
from meshwright.kernels.partial import can_fuse
from meshwright.spec import Plan
from meshwright.spec.attention_kernels import LEAST_POSITIONS, attention_call
from meshwright.spec.cluster import Cluster, Device
from meshwright.spec.compiled_blocks import leaves_compiler_out
from meshwright.spec.errors import PlanError
from meshwright.spec.frozen_code_rules import holds_codes
from meshwright.spec.presets import device as device_preset
from meshwright.spec.presets import device_names
from meshwright.spec.units import GIB
from meshwright.training.precision import DTYPES, reduce_dtype

MEMORY_TOLERANCE = 0.12
"""What drivers keep for themselves and for error correction: at most 8 % so far (L40S)."""
FORMS = frozenset({"sxm", "pcie", "16", "32", "40", "80", "141"})
"""Parts of a preset's name that a driver spells in another way: form and memory."""
SLOWER = frozenset({"nvl", "laptop", "d", "ti"})
"""Words of a name that mean other peaks: H100 NVL, RTX 4090 Laptop GPU, RTX 4090 D, RTX 3090 Ti."""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes. GPU: peaks of live tensors and of what the allocator holds. CPU: resident now, and its peak."""

    allocated_bytes: int
    reserved_bytes: int


def pick_device() -> torch.device:
    """The GPU this process uses (the first, if nobody chose), else the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def prepare(
    device: torch.device, precision: str, *, tf32: bool = False, deterministic: bool = False, products: str = "same"
) -> None:  # fmt: skip
    """Process-wide settings for training on a device.

    `deterministic` is only ever switched on: a program may have done so itself. cuBLAS also wants the variable
    CUBLAS_WORKSPACE_CONFIG, which the command line sets.
    """
    if products != SAME and device.type != "cpu" and (why := fp8.missing(device)):
        raise PlanError(f"{why}: take recipe.products=same")
    if device.type == "cpu":
        compat.keep_freed_memory()
        keep_few_products()
    elif precision == "bf16" and not torch.cuda.is_bf16_supported():
        raise PlanError(f"{torch.cuda.get_device_name(device)} has no bf16: take recipe.precision=fp16 or fp32")
    else:
        compat.pin_flash_attention()
    if device.type == "cuda":  # the switch that both of torch's ways to ask for TF32 follow
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
    if deterministic:
        torch.use_deterministic_algorithms(True)
        torch_compile.choose_without_trying()
        # Filling is a pass over all memory that is taken, for nothing.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # of its class
        torch.backends.cudnn.benchmark = False


def deterministic_plan(plan: Plan, device: torch.device) -> Plan:
    """The plan as its bits are repeated fastest here: a deterministic one on a GPU compiles no blocks of itself.

    Compiled blocks would repeat their bits, too, since torch then has Inductor choose kernels without trying them. So
    they lose what they gain, while the kernels of this package add up in one order anyway (kernels/triton).
    """
    if plan.layout.compile != "auto" or device.type != "cuda" or not leaves_compiler_out(plan.recipe):
        return plan
    return replace(plan, layout=replace(plan.layout, compile="off"))


def deterministic_notes(plan: Plan, device: torch.device, compiled: bool) -> list[str]:
    """What repeating every bit costs on a GPU."""
    if not plan.recipe.deterministic or device.type != "cuda":
        return []
    blocks = "compiled blocks take kernels that were not tried" if compiled else "blocks run uncompiled"
    return [
        "recipe.deterministic=true costs speed: attention's backward pass has one program for each document and head, "
        f"in place of one for each block of keys; {blocks} (docs/training.md)"
    ]


ASKED = LEAST_POSITIONS
"""Positions of which attention's kernel is asked for: no kernel's choice changes beyond them."""


def _attended(plan: Plan, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Mask]:
    """What attention of a training step is asked on one rank: q, k, v and the mask of a row."""
    shape, layout, recipe, call = plan.model, plan.layout, plan.recipe, attention_call(plan)
    positions, heads = min(recipe.sequence, ASKED), shape.heads // layout.tp
    key_heads = max(1, shape.kv_heads // layout.tp) if shape.mla is None else heads
    make = partial(torch.empty, dtype=DTYPES[recipe.precision], device=device, requires_grad=True)
    q, k = make(1, positions, heads, call.width), make(1, positions, key_heads, call.width)
    v = make(1, positions, key_heads, call.value_width)
    documents = torch.zeros(1, positions, dtype=torch.int64, device=device) if recipe.document_mask else None
    window = min(shape.window, positions - 1) if shape.window < recipe.sequence else 0
    return q, k, v, causal_mask(positions, positions, window=window, documents=documents, device=device)


def attention_kernel(plan: Plan, device: torch.device) -> str:
    """Which kernel computes a training step's attention on this machine, as `flash`; see kernels.attention.backend."""
    layout = plan.layout
    if layout.kernels == "reference":
        return "reference"
    q, k, v, mask = _attended(plan, device)
    if layout.cp > 1:
        return f"{layout.context} of {'flash' if can_fuse(q, k) else 'plain'} parts"
    return backend(q, k, v, mask, scale=q.shape[-1] ** -0.5, dropout=plan.recipe.dropout)


def kernel_notes(plan: Plan, device: torch.device, compiled: bool) -> list[str]:
    """Which implementation runs what, and why. On a CPU only what is slower than it may be."""
    if plan.layout.kernels == "reference":
        return ["layout.kernels=reference is plain code, for comparison: it is slower and keeps more activations"]
    if device.type == "cpu" and plan.layout.kernels != "triton":
        return _loop_notes(plan, device)
    library = [] if plan.layout.kernels == "triton" else attention_notes(plan, device)
    names = ["loss_rows", *([] if compiled else block_operations(plan))]
    names = [name for name in names if name != "attention" or not library]
    narrow = (plan.recipe.optimizer_states, plan.recipe.master_weights) != ("fp32", "fp32")
    names += ["narrow_adamw"] if narrow else []
    dtypes = {"merge": torch.float32, "narrow_adamw": reduce_dtype(plan.recipe)}
    features = {} if compiled else {"attention": _untold(plan, device)}
    made = chooser.summarize([
        chooser.choice(
            name, device, dtypes.get(name, DTYPES[plan.recipe.precision]),
            prefer="auto" if name == "merge" else plan.layout.kernels, feature=features.get(name, ""),
        )
        for name in names
    ])  # fmt: skip
    return [f"kernels: {made}" + ("; the compiler fuses the rest" if compiled else ""), *library]


def attention_notes(plan: Plan, device: torch.device) -> list[str]:
    """Which library attends in 16 bits on a GPU, and why it is that one."""
    layout, dtype = plan.layout, DTYPES[plan.recipe.precision]
    if chooser.unavailable(device) == "no CUDA device" or dtype not in chooser.NARROW:
        return []
    if layout.cp > 1:
        return [f"attention: {layout.context} of flash parts (context parallelism)"]
    group = 1 if plan.model.mla else plan.model.heads // plan.model.kv_heads
    choice = gpu_attention.choose(device, dtype, attention_call(plan), group)
    version = f"; flash-attn-4 {compat.flash_4_version()}" if choice.kernel == "flash-4" else ""
    return [f"attention: {choice.kernel} ({choice.reason}{version})"]


def _untold(plan: Plan, device: torch.device) -> str:
    """Why Triton's kernel cannot be this plan's attention; empty = it can."""
    return (
        "context parallelism" if plan.layout.cp > 1 else triton_obstacle(*_attended(plan, device), plan.recipe.dropout)
    )


def _loop_notes(plan: Plan, device: torch.device) -> list[str]:
    """What a CPU without a C compiler is slower in."""
    q, k, v, _ = _attended(plan, device)
    wanted = plan.layout.cp == 1 and not plan.recipe.dropout and wants_loops(q, k, v)
    if not wanted or training_library.is_compiled():
        return []
    return [
        "attention takes 2 to 3 times as long as in compiled loops: no C compiler with OpenMP is here (gcc, or clang "
        "and libomp)"
    ]


def product_notes(plan: Plan, device: torch.device, compiled: bool) -> list[str]:
    """What makes products of 8 bits slower than those of 16 bit."""
    if plan.recipe.products == SAME:
        return []
    if why := fp8.missing(device) if device.type == "cpu" else "":
        return [f"{why}: fp8 products are rounded as a GPU does and multiplied in fp32, slower than bf16"]
    if compiled:
        return []
    return [
        f"recipe.products={plan.recipe.products} rounds in several passes over memory in eager mode, slower than bf16 "
        "for small micro-batches: layout.compile=on makes two of them"
    ]


def block_operations(plan: Plan) -> list[str]:
    """Operations of chooser.RULES that blocks of this model have."""
    shape = plan.model
    found = ["layer_norm"] if shape.norm == "layernorm" else ["rms_norm", "add_rms_norm"]
    found.append("swiglu" if shape.mlp == "swiglu" else "gelu")
    found += ["rope"] if shape.positions == "rope" else []
    found += ["permute", "grouped"] if shape.moe else []
    found += ["restore"] if holds_codes(shape) else []
    return [*found, *(["merge"] if plan.layout.cp > 1 else []), "attention"]


def title(device: torch.device) -> str:
    """For people: `CPU, 2 threads` or the GPU's name."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"CPU, {threads} thread{'s' if threads > 1 else ''}"


def memory(device: torch.device) -> MemoryUse:
    """What is in use, as MemoryUse says."""
    if device.type == "cuda":
        return MemoryUse(torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device))
    peak = resident_peak_bytes()
    statm = Path("/proc/self/statm")
    now = int(statm.read_text().split()[1]) * resource.getpagesize() if statm.exists() else peak
    return MemoryUse(now, max(now, peak))


def resident_peak_bytes() -> int:
    """The most memory that this process ever held: not `ru_maxrss`, which on Linux begins at its parent's."""
    status = Path("/proc/self/status")
    if status.exists() and (found := re.search(r"VmHWM:\s+(\d+) kB", status.read_text())):
        return int(found[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def peak_bytes(device: torch.device) -> int:
    """The most that live tensors took (GPU), or that the process held (CPU)."""
    use = memory(device)
    return use.allocated_bytes if device.type == "cuda" else use.reserved_bytes


def known_device(device: torch.device) -> Device | None:
    """The preset of this GPU, if there is one."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    return match_device(properties.name, properties.total_memory)


def match_device(reported: str, memory_bytes: int = 0) -> Device | None:
    """The preset whose chip a driver's name holds ("NVIDIA A100-SXM4-80GB"), nearest in form and memory size.

    None where that size is another (a slice of a GPU, a laptop's) or the name says that the chip runs slower. Without
    `memory_bytes` the size that stands in the name counts; without one, None where that chip has several in that form.
    """
    words = set(reported.lower().replace("-", " ").split())
    if not memory_bytes and (sized := re.search(r"\b(\d+)gb?\b", reported.lower())):
        memory_bytes = int(sized[1]) * GIB
    found = []
    for preset in map(device_preset, device_names()):
        chip = [part for part in preset.name.lower().split("-") if part not in FORMS]
        off = abs(preset.memory_bytes - memory_bytes) if memory_bytes else 0
        if words.issuperset(chip) and off < MEMORY_TOLERANCE * preset.memory_bytes and not words & SLOWER:
            same_form = ("pcie" in words) == ("pcie" in preset.name.lower())
            found.append((not same_form, off, preset))
    nearest = [entry for entry in found if entry[:2] == min(found, key=lambda entry: entry[:2])[:2]]
    return nearest[0][2] if nearest and (memory_bytes or len(nearest) == 1) else None


def cluster_of(plan: Plan, device: Device | None, machines: int) -> Cluster:
    """The plan's cluster; where it names no device, the ranks of its layout on devices of this kind, spread evenly over
    `machines`. None = it is not known, or no GPU."""
    if device is None or plan.cluster.device != device_preset("local"):
        return plan.cluster
    return Cluster(device=device, devices_per_node=max(1, plan.layout.world // machines), nodes=machines)


def peak_flop_per_s(device: torch.device, precision: str, plan_device: Device) -> float | None:
    """What MFU is measured against: the plan's device if it has a peak, else the preset of this GPU; None = unknown."""
    if precision == "fp32":
        return None
    preset = plan_device if plan_device.half_flop_per_s else known_device(device)
    if preset is None or preset.without(precision):
        return None
    return preset.half_flop_per_s or None
