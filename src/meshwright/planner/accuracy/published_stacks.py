"""Software with which published measurements were made. `plan --for` uses some of them (stacks/trainers).

Settings of Megatron-Bridge's recipes that its tables do not print come from the repository at the tags of the releases
(NVIDIA-NeMo/Megatron-Bridge, scripts/performance/configs of v0.2.0 to v0.5.0, src/megatron/bridge/perf_recipes of
v0.6.0). The settings are:

- the dispatcher of tokens to experts,
- exchanges hidden behind another micro-batch (`moe_a2a_overlap`),
- one CUDA graph for a whole step (`cuda_graph_impl="full_iteration"`), with experts whose activation and rounding are
  part of their products (`cutedsl_fused_grouped_mlp`).
"""

import re
from dataclasses import replace

from meshwright.planner.cost.stack import MESHWRIGHT, Stack
from meshwright.spec.layout.layout import Layout

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


MEGATRON_2022 = Stack(
    name="megatron-2022",
    attention="fused-softmax",
    dropout=True,
    gradient_bytes=4.0,
    hides_sends=0.5,
    source="Korthikanti et al. 2022, arXiv:2205.05198, section 4 and 6",
)
MEGATRON_DEEPSPEED = Stack(
    name="megatron-deepspeed",
    attention="fused-softmax",
    dropout=True,
    passes=1.5,
    host_s=7e-5,
    stalls=0.5,
    skew=0.3,
    hides_gradients=0.0,
    hides_sends=0.0,
    source="VIA-Research/vTrain: src/model (fused softmax up to 2048 keys, bias-GELU, bias-dropout-add), src/predictor",
)
ALEPH = Stack(
    name="aleph-alpha-scaling",
    passes=2.5,
    norm_passes=10.0,
    rope_passes=5.0,
    turns=4.0,
    column_inputs=(1, 2),
    skew=1.0,
    accumulates=True,
    host_s=1e-5,
    norm_kept=10.0,
    tensor_kept=4.0,
    regather=False,
    activation_kept=4.0,
    score_kept=5.0,
    logit_kept=12.0,
    logit_peak=20.0,
    logit_held=12.0,
    tensor_logit=6.0,
    vocab_parallel=False,
    gradient_bytes=2.0,
    outputs_kept=True,
    hides_gradients=0.0,
    hides_sends=0.0,
    source="Hagemann et al. 2023, arXiv:2311.05610; Aleph-Alpha/scaling core/nn, core/optimizer",
)
NANOTRON = Stack(
    name="nanotron",
    shares_sequence=True,
    passes=1.75,
    rope_passes=5.0,
    activation_kept=4.0,
    logit_kept=4.0,
    logit_peak=8.0,
    gradient_bytes=6.0,
    gradient_exchange_bytes=4.0,
    slack=1.18,
    reserve_bytes=0.28 * 2**30,
    reports="first",
    split="cost",
    host_s=7e-5,
    accumulates=True,
    hides_sends=0.0,
    send_s=0.002,
    hides_gradients=0.5,
    source="huggingface/nanotron scripts/scaling_benchmarks.py, models/llama.py, optim/gradient_accumulator.py (fp32 "
    "sums next to the 16-bit gradients), parallel/tensor_parallel/functional.py (the loss writes fp32 logits next to "
    "those it is given, keeps one), models/base.py (stages), helpers.py (rank 0 writes its peak); slack and reserve "
    "fitted to public rows, those of the second run",
)
NANOTRON_GATHERED = replace(
    NANOTRON,
    regather=False,
    logit_peak=12.0,
    slack=1.0,
    source="functional.py without tp_recompute_allgather: both column-split products keep their gathered input; a part "
    "of logit_peak fitted to public rows",
)
NANOTRON_GATHERED_PIPELINE = replace(
    NANOTRON,
    tensor_kept=2.0,
    source="the same with a pipeline, of which the public rows leave one gathered input of a layer, not two",
)
RUN_TWICE = {NANOTRON_GATHERED: NANOTRON, NANOTRON_GATHERED_PIPELINE: NANOTRON}
"""Software of a run that ran out of memory -> software of the second run."""
FSDP1 = Stack(
    name="fsdp1", passes=1.5, flash=1, source="mosaicml/llm-foundry scripts/train/benchmarking/README.md",
)  # fmt: skip
TORCHTITAN = Stack(
    name="torchtitan",
    merges="eager",
    shares_sequence=True,
    regather=False,
    selective="alternate",
    selective_repeats=0.5,
    activation_kept=4.0,
    logit_kept=8.0,
    logit_peak=14.0,
    tensor_logit=8.0,
    gradient_bytes=4.0,
    sharding="fully_shard",
    shard_bytes=4.0,
    outputs_kept=True,
    step_buffers=True,
    source="pytorch/torchtitan benchmarks/, torchtitan/parallelisms/parallelize_llama.py of December 2024; "
    "torch/distributed/pipelining/stage.py; torch/distributed/tensor/experimental/_attention.py",
)
TORCHTITAN_2025 = replace(
    TORCHTITAN, logit_kept=2.0, logit_peak=6.0, source="pytorch/torchtitan benchmarks/ of 2025: the loss is compiled"
)
MEGATRON_CORE = Stack(
    name="megatron-core",
    flash=3,
    hides_tensor=0.7,
    hides_with_sequence=True,
    gradient_exchange_bytes=2.0,
    activation_kept=0.0,
    gradient_bytes=4.0,
    logit_kept=4.0,
    logit_peak=8.0,
    routes_once=True,
    adds_expert_biases=True,
    expert_launch_s=6e-5,
    source="NVIDIA-NeMo/Megatron-Bridge docs/performance-summary.md, docs on communication overlap; tp_comm_overlap "
    "asks for sequence parallelism (NVIDIA/Megatron-LM megatron/training/arguments.py); expert_launch_s "
    "(some six launches of 10 us) fitted to its rows, and the same for 4 to 32 experts a rank",
)
MEGATRON_CORE_2024 = replace(MEGATRON_CORE, name="megatron-core-2024", flash=2)
"""Megatron-Core before cuDNN and Transformer Engine had an attention kernel for Hopper's asynchrony."""
HAI_LLM = replace(
    MEGATRON_CORE,
    name="hai-llm",
    expert_launch_s=0.0,
    hides_experts=1.0,
    dispatch_bytes=1.0,
    contention=20 / 112,
    kept_shares=(
        *(
            (name, 0.0)
            for name in (
                "attention norm output",
                "mlp norm output",
                "normed low ranks",
                "queries",
                "keys",
                "keys and values",
                "experts activation",
                "returned",
            )
        ),
        *((name, 1 / 2) for name in ("dispatched", "experts up", "shared up")),
        ("attention output", 12 / 16),
    ),
    source="DeepSeek-V3 report, arXiv:2412.19437, sections 3.2 and 3.3: exchanges behind another micro-batch, on "
    "20 of 132 multiprocessors; tokens to four nodes at most, in fp8 on the way there; norms, up-projections and "
    "SwiGLU made again; inputs of experts and of SwiGLU kept in fp8, attention's output in E5M6. Outputs of experts "
    "are taken to be weighted before the last product, so that none is kept",
)
"""Software of one published run. Its schedule is counted as DualPipe's V with the same ranks."""

BY_FRAMEWORK = (
    ("megatron-deepspeed", MEGATRON_DEEPSPEED),
    ("aleph", ALEPH),
    ("nanotron", NANOTRON),
    ("llm-foundry", FSDP1),
    ("fms-fsdp", FSDP1),
    ("torchtitan", TORCHTITAN),
    ("megatron-lm 202", MEGATRON_2022),
    ("megatron-bridge", MEGATRON_CORE),
    ("nemo 25", MEGATRON_CORE),
    ("hai-llm", HAI_LLM),
    ("megatron", MEGATRON_CORE_2024),
    ("meta in-house", MEGATRON_CORE_2024),
    ("nemo", MEGATRON_CORE_2024),
    ("meshwright", MESHWRIGHT),
)
"""(word of a row's framework, software). The first match counts."""


def run_of_sweep(layout: Layout, billions: float) -> Stack:
    """Return nanotron as it ran a layout of the Ultra-Scale sweep.

    The sweep was run twice, with settings or code that keep other tensors, and no row says in which run it was made.
    The sweep's script repeats pipelines of two stages and leaves out layouts without one. Public rows show that of the
    rest, layouts on many devices are of the second run.
    """
    wide = layout.world >= 512
    if billions >= 70 or layout.pp == 2:
        return NANOTRON
    if layout.pp == 1:
        return NANOTRON if wide and layout.tp <= 16 else NANOTRON_GATHERED
    return NANOTRON if wide or layout.tp > 16 else NANOTRON_GATHERED_PIPELINE


def _with_attention(stack: Stack, kernel: str, *, is_megatron: bool) -> Stack:
    """Return the stack with the attention that a row names."""
    if is_megatron and "unfused" in kernel:
        stack = replace(stack, attention="fused-softmax")  # not flash; scale, mask and softmax have been one since 2020
    elif "unfused" in kernel or kernel == "torch":  # asked first, since the word contains the next one
        stack = replace(stack, attention="unfused")
    elif "fused softmax" in kernel or kernel == "fused":
        stack = replace(stack, attention="fused-softmax")
    elif "flash" in kernel:
        stack = replace(stack, attention="flash")
    if "flash_attentionv1" in kernel:
        stack = replace(stack, core_kept=4.0)
    if "flash" in kernel and re.search(r"flash(_attention)?v?1", kernel):
        stack = replace(stack, flash=1)
    return stack


def stack_of(columns: dict[str, str]) -> tuple[Stack, dict[str, object]]:
    """Return the software of a published row, and the fields of the layout that follow from it."""
    framework = (columns.get("framework") or "").lower()
    stack = next((known for word, known in BY_FRAMEWORK if word in framework), None)
    if stack is None:
        raise ValueError(f"framework={columns.get('framework')!r} is not known")
    year = re.search(r"_(20\d\d)\d\d_", columns.get("source") or "")
    if stack is TORCHTITAN and year and int(year[1]) >= 2025 and (columns.get("compile") or "0") != "0":
        stack = TORCHTITAN_2025
    kernel = (columns.get("attn_kernel") or "").lower()
    stack = _with_attention(stack, kernel, is_megatron="megatron" in framework)
    precision = (columns.get("precision") or "").lower()
    if not precision:
        raise ValueError("precision is not given")
    if "fp8" in precision or "float8" in precision:
        stack = replace(stack, product_bytes=1.0)
    elif "fp4" in precision:
        stack = replace(stack, product_bytes=0.5)
    if stack.name == MEGATRON_CORE.name:
        stack = as_recipe_ran(stack, columns)
    if "TP_COMM_OVERLAP=False" in (columns.get("notes") or ""):
        stack = replace(stack, hides_tensor=0.0)
    if "rms" in kernel:
        stack = replace(stack, norm_passes=1.0, norm_kept=2.0)
    if columns.get("compile") == "0" and stack.name == "torchtitan":
        stack = replace(stack, passes=1.75, norm_passes=10.0, rope_passes=5.0)
    shared = stack.shares_sequence and not (columns.get("sp") or "").strip()
    return stack, {"sp": True} if shared and (columns.get("tp") or "1").strip() not in ("0", "1") else {}
