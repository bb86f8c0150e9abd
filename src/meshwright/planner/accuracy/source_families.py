"""Families of sources and the clusters they were measured on: the lines of accuracy tables and calibrations."""

import re

from meshwright.planner.accuracy.published import PublishedRow

FAMILIES = (
    (r"ground_truth_single", "vTrain single node"), (r"ground_truth_multi", "vTrain multi node"),
    (r"Aleph-Alpha", "Aleph Alpha"), (r"llm-foundry", "llm-foundry"),
    (r"Ultra-Scale Playbook benchmarks_interactive", "Ultra-Scale grid"), (r"Ultra-Scale", "Ultra-Scale curves"),
    (r"Megatron-Bridge", "Megatron-Bridge"), (r"NeMo.*long_sequence", "NeMo long sequence"),
    (r"NVIDIA/NeMo", "NeMo 24.07"),
    (r"examples/llama/README", "Megatron-LM llama README"), (r"model_table", "Megatron-Core 0.8 table"),
    (r"Narayanan", "Megatron 2021 table 1"), (r"Korthikanti.*Fig", "Korthikanti 2022 figures"),
    (r"Korthikanti", "Korthikanti 2022 table 5"), (r"Llama 3 Herd", "Llama 3 table 4"), (r"torchtitan", "torchtitan"),
    (r"fms-fsdp", "fms-fsdp"), (r"Primus", "Primus"), (r"maxtext", "MaxText"), (r"DeepSeek-V3", "DeepSeek-V3 report"),
    (r"mlcommons/training_results", "MLPerf"),
    (r"PaLM", "PaLM"), (r"litgpt", "litgpt"), (r"torchtune", "torchtune"), (r"Liger", "Liger kernels"),
)  # fmt: skip
"""(pattern in the column `source`, family). The first match counts. A source without one is its own family."""


def family_of(source: str) -> str:
    """Return the family of a source."""
    return next((name for pattern, name in FAMILIES if re.search(pattern, source)), source)


def cluster_of(row: PublishedRow) -> str:
    """Name the machine and software of a row: one publisher's runs on one kind of device."""
    return f"{family_of(row.source)}, {row.plan.cluster.device.name}"
