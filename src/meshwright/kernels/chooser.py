"""Choice of implementation for each operation: torch's, or a Triton kernel of this package.

Chosen once for each (operation, device, dtype, feature), with the reason, which training prints. An installed Triton
needs a driver, and a driver a C compiler. All three are checked, and a kernel is tried on a few rows before it is used
(triton/trials.py). None of this changes what a CPU runs.

The device is that of the tensors, unless a dry run simulates another one. A build of torch without CUDA has no
gradients of CUDA tensors, not even of fake ones (2.13). A dry run's tensors are therefore fake CPU tensors, and whoever
chooses between kernels asks `device_kind`.
"""

import importlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from meshwright.compat import torch_compile

PREFERENCES = ("auto", "eager", "triton")
"""auto: Triton where it is better. eager: torch's own. triton: wherever it can run."""
LEAST = (8, 0)
"""Lowest compute capability for which the kernels are compiled and their resources checked."""
NARROW = (torch.bfloat16, torch.float16)
FLOATS = (torch.float32, *NARROW)
_simulated: ContextVar[str] = ContextVar("simulated", default="")
"""Simulated kind. CPU tensors run their backward pass on the calling thread, in its context."""


def device_kind(x: Tensor) -> str:
    """Return the kind of device, such as `cpu` or `cuda`, whose kernels compute with x."""
    return simulated_kind() or x.device.type


def simulated_kind() -> str:
    """Return the kind of device that CPU tensors stand for. Empty = they stand for themselves."""
    return str(_simulated_now())


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch has no annotations there
def _simulated_now() -> str:
    """Return a constant of compiled code: what a dry run compiles, nothing else runs."""
    return _simulated.get()


@contextmanager
def simulate_device(kind: str) -> Iterator[None]:
    """Choose kernels as on such a device, inside the context."""
    token = _simulated.set(kind)
    try:
        yield
    finally:
        _simulated.reset(token)


@dataclass(frozen=True, slots=True)
class Rule:
    """Default for an operation: whether `auto` takes its Triton kernel, why, and the dtypes that it supports."""

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
    "permute": Rule(True, "copies of rows are gathered and summed in one pass"),
    "grouped": Rule(True, "one kernel for all experts where torch has a loop that waits", NARROW),
    "adamw": Rule(True, "gradients, weights and moments of all parameters are read once and written once"),
    "square_sums": Rule(True, "gradients of all parameters in one kernel"),
    "narrow_adamw": Rule(True, "moments are read, updated and rounded in one pass"),
    "packed_product": Rule(True, "codes become numbers inside of the product: few rows wait for memory alone", NARROW),
    "int8_product": Rule(True, "rows are rounded in one kernel; scales and outliers are applied behind the sum"),
    "narrow": Rule(True, "rows and columns are rounded to 8 bits without a further copy"),
    "restore": Rule(True, "4-bit codes are read once and the matrix written once"),
    "layer_norm": Rule(False, "torch's own is one kernel a pass already"),
    "gelu": Rule(False, "torch's own is one kernel a pass already"),
    "paged_attention": Rule(True, "rows read blocks where they lie, a run of keys each"),
    "rotate_and_store": Rule(True, "norms, rotation and the write into the cache in one kernel"),
    "likeliest": Rule(True, "a token and its log-probability in one pass, for one copy to the host"),
    "attention": Rule(False, "torch's flash kernel is faster"),
}
"""Operations that have a Triton kernel."""


@dataclass(frozen=True, slots=True)
class Implementation:
    """The implementation that runs an operation, and why."""

    operation: str
    by: str
    """triton or torch."""
    reason: str


_choices: dict[tuple[str, str, torch.dtype, str, str], Implementation] = {}


def uses_triton(operation: str, x: Tensor, *, prefer: str = "auto", feature: str = "") -> bool:
    """Return whether `operation` on x runs the Triton kernel.

    Never in compiled code, which the compiler fuses, nor in a dry run, whose tensors have no values.

    Args:
        feature: Why it cannot run here, in words for a reader. Empty = it can.
    """
    if torch.compiler.is_compiling() or (x.device.type == "cpu" and prefer != "triton") or simulated_kind():
        return False
    return choice(operation, x.device, x.dtype, prefer=prefer, feature=feature).by == "triton"


def choice(
    operation: str, device: torch.device, dtype: torch.dtype, *, prefer: str = "auto", feature: str = ""
) -> Implementation:
    """Return the implementation of an operation with the reason. The answer stays for the whole process."""
    key = (operation, str(device), dtype, prefer, feature)
    if key not in _choices:
        _choices[key] = _choose(operation, device, dtype, prefer, feature)
    return _choices[key]


def _choose(operation: str, device: torch.device, dtype: torch.dtype, prefer: str, feature: str) -> Implementation:
    rule = RULES[operation]
    if prefer == "eager":
        return Implementation(operation, "torch", "layout.kernels=eager")
    missing = why_unavailable(device)
    if missing:
        return Implementation(operation, "torch", missing)
    if dtype not in rule.dtypes:
        return Implementation(operation, "torch", f"the kernel takes no {dtype_name(dtype)}")
    if feature:
        return Implementation(operation, "torch", feature)
    if prefer == "auto" and not rule.auto:
        return Implementation(operation, "torch", rule.why)
    from meshwright.kernels.triton import trials

    # A block in progress may have hooks and modes, which are local to this thread.
    with ThreadPoolExecutor(1) as pool:
        problem = pool.submit(trials.problem, operation, device, dtype).result()
    if problem:
        return Implementation(operation, "torch", problem)
    return Implementation(operation, "triton", f"{architecture(device)}, {dtype_name(dtype)}: {rule.why}")


@cache
def why_unavailable(device: torch.device) -> str:
    """Return why no Triton kernel can run on a device, or an empty string."""
    if device.type == "cpu":
        return "" if _is_interpreting() else "a CPU"
    if device.type != "cuda" or not torch.cuda.is_available():
        return "no CUDA device"
    if torch.version.hip is not None:
        return "the kernels are not tested on AMD"
    if torch.cuda.get_device_capability(device) < LEAST:
        return f"{architecture(device)} is below sm_{LEAST[0]}{LEAST[1]}"
    # Checked in advance: Triton needs a C compiler only at the first launch, in the middle of a run.
    tool = torch_compile.compile_tool_missing("cuda")
    return f"{tool} is missing" if tool else _driver_problem()


def _driver_problem() -> str:
    """Return what is wrong with Triton's driver. Without a driver Triton would only fail at the first launch."""
    try:
        target = importlib.import_module("triton").runtime.driver.active.get_current_target()
    except Exception as error:  # drivers fail in many ways
        return f"Triton finds no driver ({error})"
    return "" if target.backend == "cuda" else f"Triton's driver is for {target.backend}"


def _is_interpreting() -> bool:
    """Return whether kernels run in Triton's interpreter (TRITON_INTERPRET=1)."""
    try:
        return bool(importlib.import_module("triton.knobs").runtime.interpret)
    except (ImportError, AttributeError):
        return False


def architecture(device: torch.device) -> str:
    """Return the architecture of a device, such as sm_90."""
    if device.type != "cuda":
        return "interpreter"
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def dtype_name(dtype: torch.dtype) -> str:
    """Return the short name of a dtype, such as bf16, fp16 or fp32."""
    return str(dtype).removeprefix("torch.").replace("bfloat", "bf").replace("float", "fp")


def summarize(choices: list[Implementation]) -> str:
    """Describe choices in one line: what Triton runs, then what torch runs, grouped by reason."""
    groups: dict[tuple[str, str], list[str]] = {}
    for implementation in choices:
        reason = implementation.reason.split(":")[0]
        groups.setdefault((implementation.by, reason), []).append(implementation.operation)
    ordered = sorted(groups.items(), key=lambda entry: entry[0][0] != "triton")
    return "; ".join(f"{', '.join(names)}: {how} ({why})" for (how, why), names in ordered)
