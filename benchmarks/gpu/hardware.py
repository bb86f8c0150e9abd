"""Which machine this is: what a reader must know to compare figures."""

import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

FIELDS = {
    "driver": "driver_version", "power_limit_w": "power.limit", "default_power_limit_w": "power.default_limit",
    "sm_clock_mhz": "clocks.sm", "most_sm_clock_mhz": "clocks.max.sm", "memory_clock_mhz": "clocks.mem",
    "temperature_c": "temperature.gpu",
}  # fmt: skip
"""What nvidia-smi is asked for."""
WORDS = r"\b(nvidia|geforce|graphics|gpu|tesla)\b"
"""Of a reported name, which say nothing."""
ROOT = Path(__file__).resolve().parents[2]


def normalised(reported: str) -> str:
    """A name for files: "NVIDIA H100 80GB HBM3" -> h100-80gb-hbm3."""
    plain = re.sub(WORDS, " ", reported.lower())
    return re.sub(r"[^a-z0-9]+", "-", plain).strip("-") or "unknown"


def smi(gpu: str) -> dict[str, str]:
    """Driver, clocks and power of a GPU now, as nvidia-smi prints them; empty where there is none. `gpu`: its UUID, or
    its index, which is another than CUDA's where some GPUs are hidden."""
    command = [
        "nvidia-smi",
        f"--query-gpu={','.join(FIELDS.values())}",
        "--format=csv,noheader,nounits",
        f"--id={gpu}",
    ]
    try:
        finished = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    values = [value.strip() for value in finished.stdout.strip().split(",")]
    return dict(zip(FIELDS, values, strict=True)) if len(values) == len(FIELDS) else {}


def _commit() -> str:
    try:
        command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _version(package: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def described(device: torch.device) -> dict[str, Any]:
    """For JSON: device, versions, and what it looks like under load, for which call it after some."""
    packages = ("torch", "triton", "transformers", "liger_kernel")
    machine: dict[str, Any] = {
        "device": device.type, "name": platform.processor() or platform.machine(), "commit": _commit(),
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in packages},
    }  # fmt: skip
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        gpu = f"GPU-{properties.uuid}" if hasattr(properties, "uuid") else str(device.index or 0)
        machine |= {
            "name": properties.name, "memory_bytes": properties.total_memory, "cache_bytes": properties.L2_cache_size,
            "processors": properties.multi_processor_count, "capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(), "under_load": smi(gpu),
        }  # fmt: skip
    machine["hardware"] = normalised(machine["name"]) if device.type == "cuda" else "cpu"
    return machine


def command() -> str:
    """As it was typed."""
    return " ".join(["python -m benchmarks.gpu", *sys.argv[1:]])
