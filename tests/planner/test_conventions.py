"""Every source's own MFU, HFU and TFLOP/s follow from its tokens/s or step time: conventions first, then errors."""

from collections import defaultdict

import pytest

from meshwright.planner.accuracy.flop_conventions import BAR, Figure, convention_of, figures
from meshwright.planner.accuracy.published import PublishedRow, read
from tests.planner.published_tables import run, table

LLAMA = {
    "8b": {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336},
    "70b": {"layers": 80, "hidden": 8192, "heads": 64, "kv_heads": 8, "ffn": 28672},
}
FOUNDRY = {"framework": "llm-foundry/Composer FSDP1", "vocab": 50368, "seq_len": 2048, "zero_stage": 3}
BRIDGE = {"framework": "Megatron-Bridge/Megatron-Core", "vocab": 128256, "seq_len": 8192, "zero_stage": 1}
NEMO = {"framework": "NeMo/Megatron-Core", "gpu": "DGX-H100", "precision": "FP8"}
KORTHIKANTI = {"framework": "Megatron-LM 2022", "tp": 8, "sp": 1, "recompute": "selective + SP", "micro_batch": 1}

FACTS = {
    # mosaicml/llm-foundry scripts/train/benchmarking/README.md (Apache-2.0)
    "llm-foundry 70B, 512 H100": (
        {**FOUNDRY, "model": "mpt-70b", "layers": 80, "hidden": 8192, "heads": 64, "ffn": 32768, "gpu": "h100_80gb",
         "n_gpus": 512, "micro_batch": 8, "global_batch_seqs": 4096, "recompute": "full", "tok_s_gpu": 1007},
        {"mfu_pct": 41.25, "hfu_pct": 55.0, "tflops_gpu": 408},
    ),
    "llm-foundry 1B, 8 H100": (
        {**FOUNDRY, "model": "mpt-1b", "layers": 24, "hidden": 2048, "heads": 16, "ffn": 8192, "gpu": "h100_80gb",
         "n_gpus": 8, "micro_batch": 14, "global_batch_seqs": 112, "tok_s_gpu": 45455},
        {"mfu_pct": 41.82, "hfu_pct": 41.82},
    ),
    # NVIDIA/NeMo docs/source/performance/performance_summary.md, 24.07 (Apache-2.0)
    "NeMo 175B": (
        {**NEMO, "source": "NVIDIA/NeMo", "model": "GPT3-175B", "layers": 96, "hidden": 12288, "heads": 96,
         "ffn": 49152, "seq_len": 2048, "n_gpus": 128, "micro_batch": 1, "global_batch_seqs": 256, "tp": 4, "pp": 8,
         "vpp": 6, "tok_s_gpu": 716},
        {"tflops_gpu": 771},
    ),
    "NeMo Llama-3-70B": (
        {**NEMO, **LLAMA["70b"], "source": "NVIDIA/NeMo", "model": "LLAMA3-70B", "vocab": 128256, "seq_len": 8192,
         "n_gpus": 64, "micro_batch": 1, "global_batch_seqs": 128, "tp": 4, "pp": 4, "vpp": 5, "tok_s_gpu": 1524},
        {"tflops_gpu": 734},
    ),
    # NVIDIA/Megatron-LM examples/llama/README.md
    "Megatron-LM Llama-3-8B": (
        {**NEMO, **LLAMA["8b"], "source": "NVIDIA/Megatron-LM examples/llama/README.md", "model": "LLAMA3-8B",
         "vocab": 128256, "seq_len": 8192, "n_gpus": 8, "micro_batch": 1, "global_batch_seqs": 128, "cp": 2,
         "tok_s_gpu": 13812},
        {"tflops_gpu": 800},
    ),
    # NVIDIA-NeMo/Megatron-Bridge docs/performance-summary-archive.md (Apache-2.0)
    "Megatron-Bridge Llama-3-70B": (
        {**BRIDGE, **LLAMA["70b"], "model": "LLAMA3_70B", "gpu": "DGX-GB300", "n_gpus": 64, "global_batch_seqs": 256,
         "precision": "FP8", "tok_s_gpu": 5243},
        {"tflops_gpu": 2353},
    ),
    # Korthikanti et al. 2022 (arXiv:2205.05198), table 5
    "Korthikanti 175B": (
        {**KORTHIKANTI, "model": "gpt-175B", "layers": 96, "hidden": 12288, "heads": 96, "ffn": 49152, "seq_len": 2048,
         "n_gpus": 64, "global_batch_seqs": 64, "pp": 8, "vpp": 3, "step_time_s": 13.75},
        {"mfu_pct": 51.4, "hfu_pct": 52.8},
    ),
    "Korthikanti 1T": (
        {**KORTHIKANTI, "model": "gpt-1T", "layers": 128, "hidden": 25600, "heads": 160, "ffn": 102400,
         "seq_len": 2048, "n_gpus": 512, "global_batch_seqs": 512, "pp": 64, "step_time_s": 71.49},
        {"mfu_pct": 56.3, "hfu_pct": 57.0},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FACTS)
def test_printed_figures_follow_from_the_speed(name: str) -> None:
    columns, printed = FACTS[name]
    recomputed = figures(run(**columns, **printed))
    assert len(recomputed) == len(printed)
    assert [figure for figure in recomputed if not figure.agrees] == []


def test_a_wrong_figure_does_not_agree() -> None:
    columns, _ = FACTS["Korthikanti 175B"]
    assert not figures(run(**columns, mfu_pct=51.9))[0].agrees
    assert Figure(kind="mfu", printed=50.0, again=50.3, rounding=0.0).error == pytest.approx(0.006)


ALL_BUT = {
    ("nanotron", "mfu"): 0.99, ("Aleph Alpha", "mfu"): 0.99, ("llm-foundry", "mfu"): 1.0, ("llm-foundry", "hfu"): 1.0,
    ("NeMo 24.07", "tflops"): 1.0, ("Megatron-Bridge", "tflops"): 0.9, ("Korthikanti 2022", "mfu"): 1.0,
    ("Korthikanti 2022", "hfu"): 1.0,
}  # fmt: skip
"""Share of the rows that agree. Left out: fine-tuning rows, whose token count is another, and of Megatron-Bridge what
is no Llama (experts, a second head) and release 26.04.01, which prints rounded tokens/s."""


def test_six_sources_agree_row_by_row() -> None:
    agree: dict[tuple[str, str], list[bool]] = defaultdict(list)
    median: dict[str, list[float]] = defaultdict(list)
    for row in read(table("training_throughput.csv")):
        if not isinstance(row, PublishedRow) or "SFT" in row.columns["model"]:
            continue
        convention = convention_of(row.columns)
        if convention is None:
            continue
        if convention.name == "Megatron-Bridge" and (
            "LLAMA" not in row.columns["model"] or "26.04.01" in row.source or "SFT" in row.source
        ):
            continue
        for figure in figures(row.columns):
            agree[convention.name, figure.kind].append(figure.agrees)
            median[convention.name].append(abs(figure.error))
    shares = {key: sum(agree[key]) / len(agree[key]) for key in ALL_BUT}
    assert {key: share for key, share in shares.items() if share < ALL_BUT[key]} == {}
    for name in {name for name, _ in ALL_BUT}:
        assert sorted(median[name])[len(median[name]) // 2] < BAR
