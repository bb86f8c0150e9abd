"""What Megatron-Bridge's recipes for its published figures set, and its tables do not print.

From the repository at the tags of the releases (NVIDIA-NeMo/Megatron-Bridge, scripts/performance/configs of v0.2.0 to
v0.5.0, src/megatron/bridge/perf_recipes of v0.6.0): the dispatcher of tokens to experts, exchanges behind another
micro-batch (`moe_a2a_overlap`), one CUDA graph for a whole step (`cuda_graph_impl="full_iteration"`) with experts whose
activation and rounding are part of their products (`cutedsl_fused_grouped_mlp`).
"""

import re
from dataclasses import replace

from meshwright.planner.cost.stack import Stack

WHOLE_GRAPH = (
    (r"gb[23]00", r"deepseek-?v3|qwen3|gpt.?oss"),
    (r"b300", r"qwen3.?30b"),
)
"""Since 26.06 in MXFP8: devices, and models whose step is one graph, with fused experts and hidden exchanges."""
OVERLAPPED = (("26.04.01", "99", r"b200", r"deepseek-?v3"),)
"""First and last release, device, model: other recipes with hidden exchanges, whose attention and router are graphs.
Recipes that set it without graphs (Qwen3 on H100 to 26.02.01, on B200 in 25.11) show no gain: the host is not ahead."""
COUNTED_ON_HOST = (
    ("25.09", "26.04.01", r"gb300", r"gpt.?oss"),
    ("25.09", "25.11", r"gb200", r"gpt.?oss"),
    ("26.02", "26.02", r"b300", r"gpt.?oss"),
    ("26.02", "99", r"h100", r"gpt.?oss"),
    ("25.09", "25.11", r"b200|h100", r""),
    ("26.02", "26.04.01", r"b200", r"qwen3.?235b"),
    ("26.02", "26.02", r"b200", r"qwen3.?30b"),
)
"""As above: tokens travel by torch's all-to-all, for which the host reads how many go where."""
COUNTS_S = 1.25e-3
"""Of the host for that, in each pass through a layer. Fitted to rows of GPT-OSS with two experts a rank, where next to
nothing else is launched; few other models have such rows."""


def as_run(stack: Stack, columns: dict[str, str]) -> Stack:
    """The software of a row of Megatron-Bridge as its recipe sets it."""
    found = re.search(r"(\d\d\.\d\d(\.\d\d)?) NeMo Container", columns["source"])
    if not found:
        return stack
    release, device, model = found[1], columns["gpu"].lower(), columns["model"].lower().replace("_", "-")
    narrow = columns.get("precision", "").lower() in ("mxfp8", "fp8-mx")
    if release >= "26.06" and narrow and any(_is(device, model, *one) for one in WHOLE_GRAPH):
        return replace(stack, host_s=0.0, expert_launch_s=0.0, fused_experts=True, hides_experts=1.0)

    def among(recipes: tuple[tuple[str, str, str, str], ...]) -> bool:
        return any(first <= release <= last and _is(device, model, *one) for first, last, *one in recipes)

    if among(COUNTED_ON_HOST):
        return replace(stack, counts_s=COUNTS_S, routes_once=False)
    return replace(stack, hides_experts=1.0) if among(OVERLAPPED) else stack


def _is(device: str, model: str, devices: str, models: str) -> bool:
    return bool(re.search(rf"(^|[^g])({devices})" if devices.startswith("b") else devices, device)) and bool(
        re.search(models, model)
    )
