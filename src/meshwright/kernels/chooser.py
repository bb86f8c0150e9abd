"""Which implementation of an operation runs: torch's, or a Triton kernel of this package.

Chosen once for each (operation, device, dtype, feature), with the reason, which training prints. An installed Triton is
no driver, and a driver no C compiler: all three are asked, and a kernel is tried on a few rows before it is taken
(triton/trials.py). What the CPU runs is never changed by this.
"""

import importlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from meshwright.compat import torch_compile
from meshwright.kernels.target import acts

PREFERENCES = ("auto", "eager", "triton")
"""auto: Triton where it is the better one; eager: torch's own; triton: wherever it can run."""
LEAST = (8, 0)
"""Compute capability from which on the kernels are compiled and their resources checked."""
NARROW = (torch.bfloat16, torch.float16)
FLOATS = (torch.float32, *NARROW)


@dataclass(frozen=True, slots=True)
class Rule:
    """Of an operation: whether `auto` takes its Triton kernel, why, and the dtypes that the kernel is for."""

    auto: bool
    why: str
    dtypes: tuple[torch.dtype, ...] = FLOATS


RULES = {
    "loss_rows": Rule(True, "loss and gradient in one kernel, in place of the logits"),
    "rms_norm": Rule(True, "one kernel a pass; gradients of the weight summed in a fixed order"),
    "add_rms_norm": Rule(True, "sum and norm in one pass"),
    "swiglu": Rule(True, "one pass; the backward pass makes silu again"),
    "rope": Rule(True, "queries and keys in one kernel, in place"),
    "merge": Rule(True, "one pass over the result for each part"),
    "permute": Rule(True, "copies of rows are gathered and summed in one pass", (*FLOATS,)),
    "grouped": Rule(True, "one kernel for all experts where torch has a loop that waits", NARROW),
    "adamw": Rule(True, "gradients, weights and moments of all parameters are read once and written once"),
    "square_sums": Rule(True, "gradients of all parameters in one kernel"),
    "narrow_adamw": Rule(True, "moments are read, updated and rounded in one pass"),
    "packed_product": Rule(True, "codes become numbers inside of the product: few rows wait for memory alone", NARROW),
    "int8_product": Rule(True, "rows are rounded in one kernel; scales and outliers are applied behind the sum"),
    "narrow": Rule(True, "rows and columns are rounded to 8 bits with no copy beside them"),
    "restore": Rule(True, "4-bit codes are read once and the matrix written once"),
    "layer_norm": Rule(False, "torch's own is one kernel a pass already"),
    "gelu": Rule(False, "torch's own is one kernel a pass already"),
    "paged_attention": Rule(True, "rows read blocks where they lie, a run of keys each"),
    "turn_and_keep": Rule(True, "norms, rotation and the write into the cache in one kernel"),
    "likeliest": Rule(True, "a token and its log-probability in one pass, for one copy to the host"),
    "attention": Rule(False, "torch's flash kernel is faster"),
}
"""Operations that have a Triton kernel."""


@dataclass(frozen=True, slots=True)
class Implementation:
    """What runs an operation, and why."""

    operation: str
    by: str
    """triton or torch."""
    reason: str


_made: dict[tuple[str, str, torch.dtype, str, str], Implementation] = {}


def uses_triton(operation: str, x: Tensor, *, prefer: str = "auto", feature: str = "") -> bool:
    """Whether `operation` on x runs the Triton kernel. Not in compiled code, which the compiler fuses; nor in a dry
    run, whose tensors have no values. `feature`: why it cannot here, as a reader would say it; empty = it can."""
    if torch.compiler.is_compiling() or (x.device.type == "cpu" and prefer != "triton") or acts():
        return False
    return choice(operation, x.device, x.dtype, prefer=prefer, feature=feature).by == "triton"


def choice(
    operation: str, device: torch.device, dtype: torch.dtype, *, prefer: str = "auto", feature: str = ""
) -> Implementation:
    """The implementation of an operation, and the reason; the same answer for the rest of the process."""
    key = (operation, str(device), dtype, prefer, feature)
    if key not in _made:
        _made[key] = _choose(operation, device, dtype, prefer, feature)
    return _made[key]


def _choose(operation: str, device: torch.device, dtype: torch.dtype, prefer: str, feature: str) -> Implementation:
    rule = RULES[operation]
    if prefer == "eager":
        return Implementation(operation, "torch", "layout.kernels=eager")
    missing = unavailable(device)
    if missing:
        return Implementation(operation, "torch", missing)
    if dtype not in rule.dtypes:
        return Implementation(operation, "torch", f"the kernel takes no {named(dtype)}")
    if feature:
        return Implementation(operation, "torch", feature)
    if prefer == "auto" and not rule.auto:
        return Implementation(operation, "torch", rule.why)
    from meshwright.kernels.triton import trials

    with ThreadPoolExecutor(1) as apart:  # a block under way may have hooks and modes, which are this thread's alone
        wrong = apart.submit(trials.problem, operation, device, dtype).result()
    if wrong:
        return Implementation(operation, "torch", wrong)
    return Implementation(operation, "triton", f"{architecture(device)}, {named(dtype)}: {rule.why}")


@cache
def unavailable(device: torch.device) -> str:
    """Why no Triton kernel can run on a device; empty where one can."""
    if device.type == "cpu":
        return "" if _interprets() else "a CPU"
    if device.type != "cuda" or not torch.cuda.is_available():
        return "no CUDA device"
    if torch.version.hip is not None:
        return "the kernels are not tested on AMD"
    if torch.cuda.get_device_capability(device) < LEAST:
        return f"{architecture(device)} is below sm_{LEAST[0]}{LEAST[1]}"
    tool = torch_compile.compile_tool_missing("cuda")
    return f"{tool} is missing" if tool else _without_driver()


def _without_driver() -> str:
    """Triton may be installed and find no driver: it then fails at the first launch only."""
    try:
        target = importlib.import_module("triton").runtime.driver.active.get_current_target()
    except Exception as error:  # drivers fail in many ways
        return f"Triton finds no driver ({error})"
    return "" if target.backend == "cuda" else f"Triton's driver is for {target.backend}"


def _interprets() -> bool:
    """Whether kernels run in Triton's interpreter (TRITON_INTERPRET=1)."""
    try:
        return bool(importlib.import_module("triton.knobs").runtime.interpret)
    except (ImportError, AttributeError):
        return False


def architecture(device: torch.device) -> str:
    """As sm_90."""
    if device.type != "cuda":
        return "interpreter"
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def named(dtype: torch.dtype) -> str:
    """bf16, fp16, fp32 ..."""
    return str(dtype).removeprefix("torch.").replace("bfloat", "bf").replace("float", "fp")


def said(choices: list[Implementation]) -> str:
    """One line: what Triton runs, then what torch does, each group with its reason."""
    groups: dict[tuple[str, str], list[str]] = {}
    for one in choices:
        reason = one.reason.split(":")[0]
        groups.setdefault((one.by, reason), []).append(one.operation)
    ordered = sorted(groups.items(), key=lambda entry: entry[0][0] != "triton")
    return "; ".join(f"{', '.join(names)}: {how} ({why})" for (how, why), names in ordered)
