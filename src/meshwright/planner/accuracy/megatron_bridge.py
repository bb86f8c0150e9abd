"""Settings of Megatron-Bridge's recipes for its published figures that its tables do not print.

From the repository at the tags of the releases (NVIDIA-NeMo/Megatron-Bridge, scripts/performance/configs of v0.2.0 to
v0.5.0, src/megatron/bridge/perf_recipes of v0.6.0). The settings are:

- the dispatcher of tokens to experts,
- exchanges hidden behind another micro-batch (`moe_a2a_overlap`),
- one CUDA graph for a whole step (`cuda_graph_impl="full_iteration"`), with experts whose activation and rounding are
  part of their products (`cutedsl_fused_grouped_mlp`).
"""

import re
from dataclasses import replace

from meshwright.planner.cost.stack import Stack

WHOLE_GRAPH = (
    (r"gb[23]00", r"deepseek-?v3|qwen3|gpt.?oss"),
    (r"b300", r"qwen3.?30b"),
)
"""(devices, models) whose step is one graph with fused experts and hidden exchanges, since 26.06 in MXFP8."""
OVERLAPPED = (("26.04.01", "99", r"b200", r"deepseek-?v3"),)
"""(first release, last release, device, model) of other recipes with hidden exchanges.
Their attention and router are graphs. Recipes that overlap without graphs (Qwen3 on H100 to 26.02.01, on B200 in 25.11)
show no gain: the host is not ahead.
"""
COUNTED_ON_HOST = (
    ("25.09", "26.04.01", r"gb300", r"gpt.?oss"),
    ("25.09", "25.11", r"gb200", r"gpt.?oss"),
    ("26.02", "26.02", r"b300", r"gpt.?oss"),
    ("26.02", "99", r"h100", r"gpt.?oss"),
    ("25.09", "25.11", r"b200|h100", r""),
    ("26.02", "26.04.01", r"b200", r"qwen3.?235b"),
    ("26.02", "26.02", r"b200", r"qwen3.?30b"),
)
"""(first release, last release, device, model) of recipes whose tokens travel by torch's all-to-all.
The host then reads how many go where.
"""
COUNTS_S = 1.25e-3
"""Time of the host for that, in each pass through a layer.
Fitted to rows of GPT-OSS with two experts a rank, which launch little else. Few other models have such rows.
"""


def as_recipe_ran(stack: Stack, columns: dict[str, str]) -> Stack:
    """Return the software of a row of Megatron-Bridge with the settings of its recipe."""
    container = re.search(r"(\d\d\.\d\d(\.\d\d)?) NeMo Container", columns["source"])
    if not container:
        return stack
    release, device, model = container[1], columns["gpu"].lower(), columns["model"].lower().replace("_", "-")
    narrow = columns.get("precision", "").lower() in ("mxfp8", "fp8-mx")
    if release >= "26.06" and narrow and any(_matches(device, model, *patterns) for patterns in WHOLE_GRAPH):
        return replace(stack, host_s=0.0, expert_launch_s=0.0, fused_experts=True, hides_experts=1.0)

    def is_among(recipes: tuple[tuple[str, str, str, str], ...]) -> bool:
        return any(
            first <= release <= last and _matches(device, model, *patterns) for first, last, *patterns in recipes
        )

    if is_among(COUNTED_ON_HOST):
        return replace(stack, counts_s=COUNTS_S, routes_once=False)
    return replace(stack, hides_experts=1.0) if is_among(OVERLAPPED) else stack


def _matches(device: str, model: str, devices: str, models: str) -> bool:
    return bool(re.search(rf"(^|[^g])({devices})" if devices.startswith("b") else devices, device)) and bool(
        re.search(models, model)
    )
