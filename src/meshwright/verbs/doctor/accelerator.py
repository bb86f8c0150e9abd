"""GPU checks: driver, torch build, NCCL, requirements of torch.compile."""

import shutil
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist

from meshwright.kernels.c import training_rows
from meshwright.training.device import known_device
from meshwright.verbs.doctor.findings import Finding, failure, ok, skipped, warning


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """GPU support of torch and the system."""

    cuda: str | None
    """CUDA version that torch was built for. None = a CPU build."""
    available: bool
    driver: str
    """Version of the driver. Empty = none is loaded."""
    reason: str = ""
    """Reason that torch gives for not using a GPU."""
    names: tuple[str, ...] = ()


def read_build(driver: Path = Path("/proc/driver/nvidia/version")) -> Build:
    """Read the GPU support of this machine."""
    text = driver.read_text().split("Kernel Module")[-1].split() if driver.is_file() else []
    version = next((word for word in text if word[:1].isdigit()), "loaded" if text else "")
    available, reason = torch.cuda.is_available(), ""
    if version and torch.version.cuda and not available:
        try:
            torch.cuda.init()
        except (RuntimeError, AssertionError) as error:
            reason = str(error).splitlines()[0][:200]
    names = tuple(torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())) if available else ()
    return Build(cuda=torch.version.cuda, available=available, driver=version, reason=reason, names=names)


def check_gpus(build: Build) -> Finding:
    """Check that torch can use the GPUs of this machine."""
    if build.available:
        names = ", ".join(sorted(set(build.names)))
        summary = f"{len(build.names)} x {names}, driver {build.driver or 'unknown'}, CUDA {build.cuda}"
        if len(set(build.names)) > 1:
            return warning("GPUs", summary, "train on equal GPUs: each step waits for the slowest")
        return ok("GPUs", summary, count=len(build.names))
    if not build.driver:
        return ok("GPUs", "none: the CPU is used", count=0)
    if build.cuda is None:
        return failure(
            "GPUs", f"driver {build.driver} is loaded, and torch is a CPU build",
            "install a CUDA build of torch: https://pytorch.org/get-started/locally",
        )  # fmt: skip
    return failure(
        "GPUs", f"torch (CUDA {build.cuda}) cannot use driver {build.driver}: {build.reason or 'no reason given'}",
        "update the driver, or install a torch that is built for an older CUDA",
    )  # fmt: skip


def check_libraries(gpu: bool, nccl: bool | None = None, gloo: bool | None = None) -> Finding:
    """Check the libraries through which ranks communicate."""
    gloo = dist.is_available() and dist.is_gloo_available() if gloo is None else gloo
    nccl = dist.is_available() and dist.is_nccl_available() if nccl is None else nccl
    if not gloo:
        return failure("communication", "this torch has no Gloo", "install an official build of torch")
    if gpu and not nccl:
        return failure("communication", "this torch has no NCCL", "install an official CUDA build of torch, on Linux")
    version = ".".join(map(str, torch.cuda.nccl.version())) if gpu else ""
    return ok("communication", f"Gloo{f' and NCCL {version}' if gpu else ''}")


def check_compiler(
    gpu: bool, triton: bool | None = None, compilers: tuple[str, ...] | None = None, loops: bool | None = None
) -> Finding:
    """Check for a C compiler: for torch.compile with Triton on a GPU, for OpenMP loops on a CPU."""
    installed = (
        tuple(name for name in ("cc", "gcc", "clang", "g++") if shutil.which(name)) if compilers is None else compilers
    )
    if not gpu:
        return _check_loops(installed, training_rows.is_compiled() if loops is None else loops)
    triton = find_spec("triton") is not None if triton is None else triton
    missing = [*([] if installed else ["a C compiler"]), *([] if triton else ["Triton"])]
    if not missing:
        return ok("compiler", f"{installed[0]}, Triton")
    return warning(
        "compiler",
        f"torch.compile lacks {' and '.join(missing)}: training runs uncompiled, slower by a fifth to a third",
        "apt-get install gcc; pip install triton (official CUDA builds of torch bring it)",
    )  # fmt: skip


def _check_loops(compilers: tuple[str, ...], compiled: bool) -> Finding:
    if compiled:
        return ok("compiler", f"{compilers[0] if compilers else 'there'}: compiles the loops of training")
    reason = f"{compilers[0]} does not compile the loops of training (OpenMP)" if compilers else "no C compiler"
    return warning(
        "compiler", f"{reason}: attention of a step takes 2 to 3 times as long",
        "install gcc, or clang with OpenMP (apt-get install gcc)",
    )  # fmt: skip


def check_preset(gpu: bool) -> Finding:
    """Check that the figures of this GPU are known to plans."""
    if not gpu:
        return skipped("device preset", "no GPU")
    preset = known_device(torch.device("cuda", torch.cuda.current_device()))
    if preset is None:
        return warning(
            "device preset", f"no figures of {torch.cuda.get_device_name()} are known",
            "meshwright calibrate --out here.toml measures them for plan and MFU",
        )  # fmt: skip
    return ok("device preset", preset.name)
