"""The device of a run: which one, its memory, its peak rate, and the kernels that it takes."""

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
from meshwright.compat.cpu import keep_few_products
from meshwright.kernels import chooser
from meshwright.kernels.attention import gpu
from meshwright.kernels.attention.attend import Mask, backend, causal_mask, triton_obstacle, wants_loops
from meshwright.kernels.attention.partial import can_fuse
from meshwright.kernels.c import training_rows
from meshwright.kernels.linear import fp8
from meshwright.kernels.linear.linear import SAME
from meshwright.spec import Plan
from meshwright.spec.errors import PlanError
from meshwright.spec.layout.cluster import Cluster, Device
from meshwright.spec.plan.execution import LEAST_POSITIONS, attention_call
from meshwright.spec.presets import device as device_preset
from meshwright.spec.presets import device_names
from meshwright.spec.rules.passes import holds_codes, leaves_compiler_out
from meshwright.spec.units import GIB
from meshwright.training.optimizer.precision import DTYPES, reduce_dtype

MEMORY_TOLERANCE = 0.12
"""Share of the memory that drivers reserve, also for error correction. At most 8 % was seen (L40S)."""
FORMS = frozenset({"sxm", "pcie", "16", "32", "40", "80", "141"})
"""Parts of a preset's name that drivers spell differently: form and memory."""
SLOWER = frozenset({"nvl", "laptop", "d", "ti"})
"""Words in a name that mean other peak rates: H100 NVL, RTX 4090 Laptop GPU, RTX 4090 D, RTX 3090 Ti."""
QUERIED_POSITIONS = LEAST_POSITIONS
"""Positions with which the attention kernel is queried. No kernel's choice changes beyond them."""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Memory in bytes. GPU: peaks of live tensors and of the allocator. CPU: resident now, and its peak."""

    allocated_bytes: int
    reserved_bytes: int


def pick_device() -> torch.device:
    """Return the GPU of this process (the first by default), else the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def prepare(
    device: torch.device, precision: str, *, tf32: bool = False, deterministic: bool = False, products: str = "same"
) -> None:  # fmt: skip
    """Apply process-wide settings for training on a device.

    `deterministic` only ever switches on, since a program may have done so itself. cuBLAS also needs the variable
    CUBLAS_WORKSPACE_CONFIG, which the command line sets. Raises PlanError when the device lacks bf16 or fp8 products.
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
    """Return the plan as it repeats its bits fastest. A deterministic plan on a GPU compiles no blocks by itself.

    Compiled blocks would repeat their bits too, because Inductor then chooses kernels without trying them. That costs
    what compilation gains, while the kernels of this package add in one order anyway (kernels/triton).
    """
    if plan.layout.compile != "auto" or device.type != "cuda" or not leaves_compiler_out(plan.recipe):
        return plan
    return replace(plan, layout=replace(plan.layout, compile="off"))


def deterministic_notes(plan: Plan, device: torch.device, compiled: bool) -> list[str]:
    """Return what determinism costs on a GPU, as sentences."""
    if not plan.recipe.deterministic or device.type != "cuda":
        return []
    blocks = "compiled blocks take kernels that were not tried" if compiled else "blocks run uncompiled"
    return [
        "recipe.deterministic=true costs speed: attention's backward pass has one program for each document and head, "
        f"in place of one for each block of keys; {blocks} (docs/training.md)"
    ]


def _attention_inputs(plan: Plan, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Mask]:
    """Return q, k, v and the mask of a row, as attention of a training step gets them on one rank."""
    shape, layout, recipe, call = plan.model, plan.layout, plan.recipe, attention_call(plan)
    positions, heads = min(recipe.sequence, QUERIED_POSITIONS), shape.heads // layout.tp
    key_heads = max(1, shape.kv_heads // layout.tp) if shape.mla is None else heads
    make = partial(torch.empty, dtype=DTYPES[recipe.precision], device=device, requires_grad=True)
    q, k = make(1, positions, heads, call.width), make(1, positions, key_heads, call.width)
    v = make(1, positions, key_heads, call.value_width)
    documents = torch.zeros(1, positions, dtype=torch.int64, device=device) if recipe.document_mask else None
    window = min(shape.window, positions - 1) if shape.window < recipe.sequence else 0
    return q, k, v, causal_mask(positions, positions, window=window, documents=documents, device=device)


def attention_kernel(plan: Plan, device: torch.device) -> str:
    """Return the kernel of a training step's attention on this machine, such as `flash` (kernels.attention.backend)."""
    layout = plan.layout
    if layout.kernels == "reference":
        return "reference"
    q, k, v, mask = _attention_inputs(plan, device)
    if layout.cp > 1:
        fuses = not plan.recipe.dropout and can_fuse(q, k)
        return f"{layout.context} of {'flash' if fuses else 'plain'} parts"
    return backend(q, k, v, mask, scale=q.shape[-1] ** -0.5, dropout=plan.recipe.dropout)


def kernel_notes(plan: Plan, device: torch.device, compiled: bool) -> list[str]:
    """Return which implementation runs what and why. On a CPU: only what is slower than it could be."""
    if plan.layout.kernels == "reference":
        return ["layout.kernels=reference is plain code, for comparison: it is slower and keeps more activations"]
    if device.type == "cpu" and plan.layout.kernels != "triton":
        return _loop_notes(plan, device)
    library = [] if plan.layout.kernels == "triton" and not plan.recipe.dropout else attention_notes(plan, device)
    names = ["loss_rows", *([] if compiled else block_operations(plan))]
    names = [name for name in names if name != "attention" or not library]
    narrow = (plan.recipe.optimizer_states, plan.recipe.master_weights) != ("fp32", "fp32")
    names += ["narrow_adamw"] if narrow else []
    dtypes = {"merge": torch.float32, "narrow_adamw": reduce_dtype(plan.recipe)}
    features = {} if compiled else {"attention": _triton_obstacle(plan, device)}
    kernels = chooser.summarize([
        chooser.choice(
            name, device, dtypes.get(name, DTYPES[plan.recipe.precision]),
            prefer="auto" if name == "merge" else plan.layout.kernels, feature=features.get(name, ""),
        )
        for name in names
    ])  # fmt: skip
    return [f"kernels: {kernels}" + ("; the compiler fuses the rest" if compiled else ""), *library]


def attention_notes(plan: Plan, device: torch.device) -> list[str]:
    """Return which library computes 16-bit attention on a GPU, and why."""
    layout, dtype = plan.layout, DTYPES[plan.recipe.precision]
    if plan.recipe.dropout:
        return [
            "attention: blockwise in fp32, much slower than fused kernels, so that every layout draws the same masks "
            f"(recipe.dropout={plan.recipe.dropout})"
        ]
    if chooser.why_unavailable(device) == "no CUDA device" or dtype not in chooser.NARROW:
        return []
    if layout.cp > 1:
        return [f"attention: {layout.context} of flash parts (context parallelism)"]
    group = 1 if plan.model.mla else plan.model.heads // plan.model.kv_heads
    choice = gpu.choose(device, dtype, attention_call(plan), group)
    version = f"; flash-attn-4 {compat.flash_4_version()}" if choice.kernel == "flash-4" else ""
    return [f"attention: {choice.kernel} ({choice.reason}{version})"]


def _triton_obstacle(plan: Plan, device: torch.device) -> str:
    """Return why Triton's kernel cannot compute this plan's attention. Empty = it can."""
    if plan.layout.cp > 1:
        return "context parallelism"
    return triton_obstacle(*_attention_inputs(plan, device), plan.recipe.dropout)


def _loop_notes(plan: Plan, device: torch.device) -> list[str]:
    """Return what is slower on a CPU without a C compiler."""
    q, k, v, _ = _attention_inputs(plan, device)
    wanted = plan.layout.cp == 1 and not plan.recipe.dropout and wants_loops(q, k, v)
    if not wanted or training_rows.is_compiled():
        return []
    return [
        "attention takes 2 to 3 times as long as in compiled loops: no C compiler with OpenMP is here (gcc, or clang "
        "and libomp)"
    ]


def product_notes(plan: Plan, device: torch.device, compiled: bool) -> list[str]:
    """Return why 8-bit products are slower than 16-bit ones here."""
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
    """Return the operations of chooser.RULES in the blocks of this model."""
    shape = plan.model
    operations = ["layer_norm"] if shape.norm == "layernorm" else ["rms_norm", "add_rms_norm"]
    operations.append("swiglu" if shape.mlp == "swiglu" else "gelu")
    operations += ["rope"] if shape.positions == "rope" else []
    operations += ["permute", "grouped"] if shape.moe else []
    operations += ["restore"] if holds_codes(shape) else []
    return [*operations, *(["merge"] if plan.layout.cp > 1 else []), "attention"]


def title(device: torch.device) -> str:
    """Return a name for people: `CPU, 2 threads` or the GPU's name."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"CPU, {threads} thread{'s' if threads > 1 else ''}"


def memory(device: torch.device) -> MemoryUse:
    """Return the memory in use."""
    if device.type == "cuda":
        return MemoryUse(torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device))
    peak = resident_peak_bytes()
    statm = Path("/proc/self/statm")
    now = int(statm.read_text().split()[1]) * resource.getpagesize() if statm.exists() else peak
    return MemoryUse(now, max(now, peak))


def resident_peak_bytes() -> int:
    """Return the peak resident memory of this process.

    On Linux `ru_maxrss` starts at the parent's, so it is not used.
    """
    status = Path("/proc/self/status")
    if status.exists() and (match := re.search(r"VmHWM:\s+(\d+) kB", status.read_text())):
        return int(match[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def peak_bytes(device: torch.device) -> int:
    """Return the peak of live tensors (GPU), or of the process (CPU)."""
    use = memory(device)
    return use.allocated_bytes if device.type == "cuda" else use.reserved_bytes


def known_device(device: torch.device) -> Device | None:
    """Return the preset of this GPU. None = there is none."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    return match_device(properties.name, properties.total_memory)


def match_device(reported: str, memory_bytes: int = 0) -> Device | None:
    """Return the preset whose chip a driver's name contains ("NVIDIA A100-SXM4-80GB"), nearest in form and memory.

    None when the memory differs (a slice of a GPU, a laptop's) or the name says that the chip is slower. Without
    `memory_bytes` the size in the name counts; without that, None when the chip has several sizes in its form.
    """
    # One chip has several presets, by form and memory size.
    words = set(reported.lower().replace("-", " ").split())
    if not memory_bytes and (sized := re.search(r"\b(\d+)gb?\b", reported.lower())):
        memory_bytes = int(sized[1]) * GIB
    candidates = []
    for preset in map(device_preset, device_names()):
        chip = [part for part in preset.name.lower().split("-") if part not in FORMS]
        difference_bytes = abs(preset.memory_bytes - memory_bytes) if memory_bytes else 0
        if words.issuperset(chip) and difference_bytes < MEMORY_TOLERANCE * preset.memory_bytes and not words & SLOWER:
            same_form = ("pcie" in words) == ("pcie" in preset.name.lower())
            candidates.append((not same_form, difference_bytes, preset))
    nearest = [entry for entry in candidates if entry[:2] == min(candidates, key=lambda entry: entry[:2])[:2]]
    return nearest[0][2] if nearest and (memory_bytes or len(nearest) == 1) else None


def cluster_of(plan: Plan, device: Device | None, machines: int) -> Cluster:
    """Return the plan's cluster, or one of this machine's devices when the plan names none.

    The ranks of the layout are spread evenly over `machines`. `device` None = unknown, or no GPU.
    """
    if device is None or plan.cluster.device != device_preset("local"):
        return plan.cluster
    return Cluster(device=device, devices_per_node=max(1, plan.layout.world // machines), nodes=machines)


def peak_flop_per_s(device: torch.device, precision: str, plan_device: Device) -> float | None:
    """Return the peak rate that MFU refers to: the plan's device, else this GPU's preset. None = unknown."""
    if precision == "fp32":
        return None
    preset = plan_device if plan_device.half_flop_per_s else known_device(device)
    if preset is None or preset.without(precision):
        return None
    return preset.half_flop_per_s or None
