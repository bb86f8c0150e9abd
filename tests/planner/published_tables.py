"""Where the published tables lie that are no part of the repository, and rows made up for tests."""

import csv
import os
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
COLUMNS = (
    "id", "source", "certainty", "framework", "model", "params_b", "layers", "hidden", "heads", "kv_heads", "ffn",
    "vocab", "seq_len", "gpu", "n_gpus", "micro_batch", "global_batch_seqs", "grad_acc", "tp", "sp", "pp", "vpp", "cp",
    "dp", "ep", "zero_stage", "recompute", "precision", "attn_kernel", "schedule", "compile", "step_time_s",
    "tok_s_gpu", "tflops_gpu", "mfu_pct", "hfu_pct", "peak_mem_gb", "mem_unit", "status", "flops_convention", "notes",
)  # fmt: skip


def table(name: str) -> Path:
    """A published table: in MESHWRIGHT_PUBLISHED, else in shared/published beside the checkout; else a skip."""
    places = (os.environ.get("MESHWRIGHT_PUBLISHED"), ROOT.parent / "shared" / "published")
    for folder in places:
        if folder and (Path(folder) / name).is_file():
            return Path(folder) / name
    pytest.skip(f"{name} is not here: set MESHWRIGHT_PUBLISHED to the folder of published tables")


def run(**columns: object) -> dict[str, str]:
    """A readable row of a run of a small GPT on 8 A100; any column can be given."""
    plain: dict[str, object] = {
        "source": "made up", "framework": "Megatron-DeepSpeed", "model": "gpt", "layers": 16, "hidden": 1024,
        "heads": 16, "ffn": 4096, "vocab": 51200, "seq_len": 1024, "gpu": "A100-SXM", "n_gpus": 8, "micro_batch": 2,
        "global_batch_seqs": 64, "tp": 1, "pp": 1, "cp": 1, "vpp": 1, "zero_stage": 0, "recompute": "none",
        "precision": "fp16", "attn_kernel": "fused softmax", "status": "ok",
    }  # fmt: skip
    return {name: "" for name in COLUMNS} | {name: str(value) for name, value in {**plain, **columns}.items()}


def write(path: Path, rows: Iterable[dict[str, str]]) -> Path:
    """A table of rows."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    return path
