"""torchtitan: Python configurations of 0.3, and the TOML files of 0.1 and 0.2, which published rows are of."""

import re
from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from typing import Any

from meshwright.planner.accuracy.published_stacks import TORCHTITAN_2025
from meshwright.planner.cost.stack import Stack
from meshwright.spec import presets
from meshwright.spec.errors import PlanError
from meshwright.spec.layout.layout import Layout
from meshwright.spec.model.shape import ModelShape
from meshwright.spec.plan.plan import Plan
from meshwright.stacks.declaration.option import Called, ConfigFile, Entry, Facts, Option, UncountedOption
from meshwright.stacks.declaration.software import LaunchCommand, TrainingSoftware
from meshwright.stacks.trainers.hugging_face import ON_HOST

MODELS = {
    "llama-3.2-1b": ("llama3", "1B"), "llama-3.2-3b": ("llama3", "3B"), "llama-3.1-8b": ("llama3", "8B"),
    "llama-3.1-70b": ("llama3", "70B"), "llama-3.1-405b": ("llama3", "405B"), "qwen3-0.6b": ("qwen3", "0.6B"),
    "qwen3-1.7b": ("qwen3", "1.7B"), "qwen3-4b": ("qwen3", "4B"), "qwen3-8b": ("qwen3", "8B"),
    "qwen3-14b": ("qwen3", "14B"), "qwen3-32b": ("qwen3", "32B"), "qwen3-30b-a3b": ("qwen3", "30B-A3B"),
    "qwen3-235b-a22b": ("qwen3", "235B-A22B"), "deepseek-v3": ("deepseek_v3", "671B"),
}  # fmt: skip
"""Preset -> (module, flavor): torchtitan/models/*/__init__.py."""
READ = {**MODELS, "gpt-oss-20b": ("gpt_oss", "20b"), "gpt-oss-120b": ("gpt_oss", "120b")}
"""Models that are read, but not written."""
MODULES = tuple(dict.fromkeys(module for module, _ in READ.values()))
STARTED = {"llama3": "llama3_8b", "qwen3": "qwen3_0_6b", "deepseek_v3": "deepseek_v3_671b"}
"""Module -> function of its registry that the written configuration starts from."""
DEBUG: dict[Any, dict[str, Any]] = {
    ("llama3", "debugmodel"): {
        "family": "llama", "vocab": 2048, "layers": 6, "hidden": 256, "heads": 16, "ffn": 768, "max_positions": 131072,
        "norm_eps": 1e-5, "rope_theta": 500000.0,
    },
    ("qwen3", "debugmodel"): {
        "family": "qwen3", "vocab": 2048, "layers": 8, "hidden": 256, "heads": 16, "kv_heads": 8, "head_dim": 128,
        "ffn": 3072, "max_positions": 4096, "norm_eps": 1e-6, "rope_theta": 1000000.0, "qk_norm": True, "tied": True,
    },
}  # fmt: skip
"""Small models for tests without a preset: torchtitan/models/*/__init__.py (b5bcd76c)."""
STATED = ("training.seq_len", "training.local_batch_size", "activation_checkpoint",
          *(f"parallelism.{name}_parallel_degree" for name in ("tensor", "context", "pipeline")))  # fmt: skip
"""Keys that a Python configuration must state if it starts from a registry function, whose values are not read."""


def shape_named(facts: Facts) -> ModelShape | None:
    """Return the model of a module and flavor, or of the function that a Python configuration starts from."""
    module_flavor_of_file = facts.get("titan_module"), str(facts.get("titan_flavor", ""))
    if module_flavor_of_file in DEBUG:
        return presets.shape_of(
            {"name": f"{module_flavor_of_file[0]}-{module_flavor_of_file[1]}", **DEBUG[module_flavor_of_file]}
        )
    return next(
        (presets.model(preset) for preset, module_flavor in READ.items() if module_flavor == module_flavor_of_file),
        None,
    )


def registry_facts(called: str) -> Facts:
    """Return module and flavor that a registry name means: `llama3_8b`, or `model_registry('8B')`."""
    match = re.match(rf"({'|'.join(MODULES)})_(\w+?)(_.*)?$", called)
    if not match:
        return {}
    flavor = match[2].replace("_", ".")
    names = {other.lower(): other for module, other in (*READ.values(), *DEBUG) if module == match[1]}
    tried = next((name for name in (f"{match[2]}{match[3] or ''}".replace("_", "."), flavor) if name in names), "")
    return {"titan_module": match[1], "titan_flavor": names[tried]} if tried else {}


def noticed(entries: Sequence[Entry]) -> Facts:
    """Return the model, by flavor or by a function of the registry, and converters to 8-bit products, if any."""
    values = {entry.key: entry.value for entry in entries}
    facts: Facts = {}
    if values.get("model.name") and values.get("model.flavor"):
        facts["hub"] = f"{values['model.name']}-{values['model.flavor']}"
    for entry in entries:
        if entry.key == "import":
            module = re.search(r"models\.(\w+)", str(entry.value))
            facts |= {"titan_module": module[1]} if module and module[1] in MODULES else {}
        elif isinstance(entry.value, Called) and (flavor := re.match(r"model_registry\('([^']+)'\)", entry.value.name)):
            facts["titan_flavor"] = flavor[1]
        if entry.key == "import":
            continue
        if "Float8Linear" in str(entry.value):
            facts["converters"] = ("float8",)
        elif other := re.search(r"(MXFP8|NVFP4|Float8Grouped)\w*", str(entry.value)):
            raise PlanError(f"line {entry.line}: {other[0]} makes products that are not counted: take bf16 or float8")
        elif entry.key in ("=", "def"):
            named = entry.value.name if isinstance(entry.value, Called) else str(entry.value)
            facts = {**registry_facts(named), **facts}
            if entry.key == "=" and registry_facts(named):
                _check_stated(named, {other.key for other in entries})
    return facts


def _check_stated(started: str, keys: set[str]) -> None:
    for key in STATED:
        if key not in keys:
            raise PlanError(f"{key} is not stated, and what {started} has is not read: state it in the file")


SCHEDULES = {"1f1b": "1F1B", "afab": "GPipe", "interleaved": "Interleaved1F1B"}
ENDS = 2
"""Layers that both ends count as: pipeline_parallel_first_stage_less_layers and last, 1 each."""
CHECKPOINTS = {
    "none": Called(name="None"),
    "selective": Called(name="SelectiveAC.Config()"),
    "full": Called(name="FullAC.Config()"),
}
EAGER: dict[str, Any] = {"passes": 1.75, "norm_passes": 10.0, "rope_passes": 5.0}
"""Overheads of published rows without compilation (planner/accuracy/published_stacks.py)."""

SHARED = (
    Option(key="training.seq_len", fact="sequence", meaning="tokens of a sequence", default=2048,
           also=("training.max_context_length",)),
    Option(key="training.num_tokens_per_microbatch_per_dp_rank", fact="rank_tokens",
           meaning="tokens of a data-parallel rank per pass"),
    Option(key="training.num_tokens_per_train_step", fact="step_tokens", meaning="tokens of a step, over all ranks"),
    Option(key="parallelism.num_pp_microbatches", fact="pipeline_times", meaning="micro-batches of the pipeline"),
    Option(key="training.local_batch_size", fact="local_batch", meaning="sequences of a data-parallel rank per pass",
           default=8, also=("training.batch_size",)),
    Option(key="training.global_batch_size", fact="global_batch", default=-1,
           meaning="sequences of a step, over all ranks and accumulation"),
    Option(key="training.steps", fact="steps", meaning="optimizer steps: yours to choose"),
    Option(key="parallelism.data_parallel_replicate_degree", fact="dp_replicate", default=1,
           meaning="replicas that each hold all shards (HSDP)",
           also=("training.data_parallel_replicate_degree", "experimental.data_parallel_replicate_degree")),
    Option(key="parallelism.data_parallel_shard_degree", fact="dp_shard", default=-1,
           meaning="ranks that share parameters, gradients and optimizer (FSDP2)",
           also=("training.data_parallel_shard_degree", "training.data_parallel_degree")),
    Option(key="parallelism.tensor_parallel_degree", fact="tp", default=1,
           meaning="ranks that share every matrix, with sequence parallelism",
           also=("training.tensor_parallel_degree",)),
    Option(key="parallelism.context_parallel_degree", fact="cp", default=1,
           meaning="ranks that share every sequence", also=("experimental.context_parallel_degree",)),
    Option(key="parallelism.expert_parallel_degree", fact="ep", default=1, quiet=True,
           meaning="ranks that share the experts"),
    Option(key="parallelism.pipeline_parallel_degree", fact="pp", default=1, meaning="ranks that share the layers",
           also=("experimental.pipeline_parallel_degree",)),
    Option(key="parallelism.pipeline_parallel_schedule", fact="pipeline_schedule", words=SCHEDULES, default="1F1B",
           meaning="order of forward and backward passes", also=("experimental.pipeline_parallel_schedule",)),
    Option(key="parallelism.pipeline_parallel_layers_per_stage", fact="stage_layers",
           meaning="layers of a stage, the embedding and the head counted as one each"),
    Option(key="parallelism.pipeline_parallel_microbatch_size", fact="pipeline_micro_batch", default=1,
           meaning="sequences of a micro-batch of the pipeline"),
    Option(key="parallelism.fsdp_reshard_after_forward", fact="resharded", default="default",
           also=("training.fsdp_reshard_after_forward",), meaning="parameters are freed after the forward pass"),
    Option(key="parallelism.enable_sequence_parallel", fact="shares_sequence", default=True,
           meaning="norms share the sequence among tensor-parallel ranks"),
    Option(key="training.mixed_precision_param", fact="product_dtype", words={"bf16": "bfloat16"}, default="bfloat16",
           meaning="of products under FSDP"),
    Option(key="compile.enable", fact="compiled", default=False, also=("training.compile",),
           meaning="torch.compile of blocks and loss: what the prediction is of"),
)  # fmt: skip
TOML = (
    Option(key="model.converters", fact="converters", meaning="float8: products of blocks in 8 bits"),
    Option(key="training.enable_float8_linear", fact="float8_before", quiet=True, default=False,
           meaning="the same, before October 2024"),
    Option(key="model.name", fact="titan_module", meaning="family of the model"),
    Option(key="model.flavor", fact="titan_flavor", meaning="its size"),
    Option(key="optimizer.lr", fact="learning_rate", meaning="learning rate: yours to choose"),
    *SHARED,
    Option(key="activation_checkpoint.mode", fact="recompute", default="selective",
           meaning="what the backward pass makes again"),
    Option(key="activation_checkpoint.selective_ac_option", fact="selective", default="2", quiet=True,
           meaning="op: all but every second matrix product"),
)  # fmt: skip
PYTHON = (
    *(replace(option, quiet=False) for option in SHARED),  # the configuration it starts from may differ
    Option(key="activation_checkpoint", fact="recompute", words=CHECKPOINTS,
           meaning="what the backward pass makes again"),
)  # fmt: skip
IGNORED = (
    "model_spec", "model_spec.*",
    "job.*", "profiling.*", "profiler*", "metrics*", "optimizer*", "lr_scheduler*", "checkpoint",
    "checkpoint.*",
    "validation*", "validator*", "comm.*", "fault_tolerance.*", "dataloader*", "tokenizer*", "hf_assets_path",
    "training.dataset*", "training.steps", "training.max_norm", "training.gc_*", "training.warmup_steps",
    "training.seed", "training.deterministic", "training.debug*", "debug*", "model.hf_assets_path",
    "model.tokenizer_path",
    "model.norm_type", "experimental.custom_*", "compile", "compile.components", "compile.backend",
    "quantize.*", "float8.*", "parallelism.context_parallel_rotate_method",
    "experimental.context_parallel_rotate_method",
    "parallelism.context_parallel_load_balancer", "loss*", "training",
    "parallelism", "experimental.pipeline_parallel_split_points", "parallelism.expert_tensor_parallel_degree",
    "parallelism.spmd_backend", "training.disable_cuda_graphs", "activation_checkpoint.per_op_*",
    "activation_checkpoint.force_*", "activation_checkpoint.early_stop", "memory_estimation.*",
    "model.print_after_conversion",
    "training.mixed_precision_reduce",
)  # fmt: skip
BESIDE = "overlaps exchanges of tensor parallelism with products, which is faster"
UNREAD = tuple(
    UncountedOption(key=f"{table}.enable_async_tensor_parallel", counted=False, absent=False, effect=BESIDE)
    for table in ("experimental", "parallelism", "compile")
)
BOUNDED = {
    "training.enable_cpu_offload": f"keeps parameters, gradients and optimizer states {ON_HOST}",
    "optimizer.early_step_in_backward": "frees gradients before the step, which needs less memory",
}
REFUSED = {
    "training.img_size": "is of a model of images",
    "encoder.t5_encoder": "is of a model of images",
    "parallelism.module_fqns_per_model_part": "deals layers to stages by hand",
    "parallelism.pipeline_parallel_schedule_csv": "takes the schedule from another file",
}


def _stack(facts: Facts) -> Stack:
    stack = TORCHTITAN_2025 if facts.get("compiled", True) else replace(TORCHTITAN_2025, **EAGER)
    # Float8 products read numbers of one byte; all else stays in bf16.
    return replace(stack, product_bytes=1.0) if converters(facts) else stack


def converters(facts: Facts) -> list[str]:
    """Return the names of converters. Raises PlanError for one whose products are not counted."""
    listed = facts.get("converters") or (("float8",) if facts.get("float8_before") is True else ())
    names = listed.split(",") if isinstance(listed, str) else [str(converter) for converter in listed]
    stripped = [name.strip() for name in names if name.strip()]
    for name in stripped:
        if "float8" not in name or "grouped" in name:
            raise PlanError(
                f"model.converters={name} makes products that are not counted: take float8 of linear layers"
            )
    return stripped


def _split_refusal(shape: ModelShape, layout: Layout) -> str:
    if layout.dp_shard * layout.cp == 1 and layout.world > 1:
        return "torchtitan computes in bf16 under FSDP only: take dp_shard x cp of 2 or more"
    if layout.dp_shard * layout.cp > 1 and layout.zero != 3:
        return f"torchtitan shards with FSDP2, and layout.zero={layout.zero} is no stage of it: take layout.zero=3"
    if layout.tp > 1 and not layout.sp:
        return "torchtitan's tensor parallelism comes with sequence parallelism: take layout.sp=true"
    if layout.ep > 1 and layout.ep % (layout.cp * layout.tp):
        return f"torchtitan's expert parallelism takes whole groups of cp x tp = {layout.cp * layout.tp} ranks"
    if shape.moe and layout.tp > 1 and layout.ep == 1:
        return "torchtitan with experts and tensor parallelism is counted with expert parallelism only"
    return ""


def _pipeline_refusal(shape: ModelShape, layout: Layout) -> str:
    if layout.pp == 1:
        return ""
    stages = layout.pp * layout.vp
    depth = ceil((shape.layers + ENDS) / stages)
    # torchtitan takes the number of layers per stage. Rounded up, it may give fewer stages than the plan has.
    if ceil((shape.layers + ENDS) / depth) != stages:
        return f"torchtitan cuts {shape.layers} layers and both ends into stages of {depth}, which are not {stages}"
    return ""


def _facts(plan: Plan) -> Facts:
    layout, name = plan.layout, plan.model.name
    if name not in MODELS:
        raise PlanError(f"torchtitan has no configuration of {name}: take one of {', '.join(MODELS)}")
    module, flavor = MODELS[name]
    micro, piped = layout.micro_batch_of(plan.recipe.global_batch), layout.pp > 1
    times = layout.micro_batches(plan.recipe.global_batch)
    return {
        "titan_module": module, "titan_flavor": flavor, "compiled": True,
        "local_batch": micro * times if piped else micro,
        "pipeline_schedule": layout.schedule if piped else None,
        "stage_layers": ceil((plan.model.layers + ENDS) / (layout.pp * layout.vp)) if piped else None,
        "pipeline_micro_batch": micro if piped else None,
        "selective": "op",
    }  # fmt: skip


def _resolve(facts: Facts) -> Facts:
    resolved = {**facts, **_by_tokens(facts)}
    if isinstance(resolved.get("recompute"), str) and resolved["recompute"] not in CHECKPOINTS:
        raise PlanError(
            f"activation_checkpoint.mode={resolved['recompute']} is not counted: take none, selective or full"
        )
    converters(resolved)
    piped, reshards = (resolved.get("pp") or 1) > 1, resolved.get("resharded", "default")
    # torchtitan's default keeps gathered weights under a pipeline and frees them otherwise; only that is counted.
    if reshards not in ("default", "never" if piped else "always"):
        raise PlanError(
            f"fsdp_reshard_after_forward={reshards} {'with' if piped else 'without'} a pipeline is not counted"
        )
    if resolved.get("recompute") == "selective":
        resolved |= _selective(resolved)
    resolved["sp"] = (resolved.get("tp") or 1) > 1 and bool(resolved.get("shares_sequence", True))
    local, batch = resolved.pop("local_batch", 8), resolved.get("global_batch", -1)
    # Without a pipeline the local batch runs at once, and a pipeline cuts it into micro-batches.
    resolved["micro_batch"] = resolved.get("pipeline_micro_batch", 1) if piped else local
    if not isinstance(batch, int) or batch < 1:
        resolved["global_batch"], resolved["local_batch"] = None, local
    if not piped:
        return {**resolved, "zero": 3}
    schedule = resolved.get("pipeline_schedule", "1f1b")
    return {**resolved, "zero": 3, "pipeline_batch": local, "schedule": schedule, "vp": _virtual(resolved, schedule)}


def _by_tokens(facts: Facts) -> Facts:
    """Return the batch from tokens, as configurations since August 2026 state it."""
    tokens, length = facts.get("rank_tokens"), facts.get("sequence") or 2048
    if not tokens:
        return {}
    micro, rest = divmod(tokens, length)
    if rest or not micro:
        raise PlanError(f"{tokens:,} tokens of a micro-batch are no whole sequences of {length:,}")
    piped = (facts.get("pp") or 1) > 1
    local = micro * (facts.get("pipeline_times") or 1) if piped else micro
    step = facts.get("step_tokens") or -1
    return {"local_batch": local, "pipeline_micro_batch": micro, "global_batch": step // length if step > 0 else -1}


def _selective(facts: Facts) -> Facts:
    """Return the policy per operation for `op`. A number means that every so many layers are recomputed whole."""
    option = str(facts.get("selective", "op"))
    if option == "op":
        return {}
    if not option.isdecimal() or int(option) < 1 or (facts.get("pp") or 1) > 1:
        raise PlanError(f"activation_checkpoint.selective_ac_option={option} is not counted here: take op")
    every = int(option)
    return {"recompute": "full", "recompute_layers": int(facts.get("layers") or 0) // every if every > 1 else 0}


def _virtual(facts: Facts, schedule: str) -> int:
    """Return the stages per rank, from the layers of a stage. Schedules that need several default to 2."""
    depth, layers = facts.get("stage_layers"), facts.get("layers")
    if depth and layers:
        return max(1, ceil((int(layers) + ENDS) / int(depth)) // int(facts["pp"]))
    return 2 if schedule == "interleaved" else 1


def head(facts: Facts) -> str:
    """Return the lines above the settings of the Python file."""
    module = facts["titan_module"]
    return (
        "from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC  # noqa: F401\n"
        f"from torchtitan.models.{module} import model_registry\n"
        f"from torchtitan.models.{module}.config_registry import {STARTED[module]}\n"
        "from torchtitan.trainer import Trainer\n\n\n"
        "def planned() -> Trainer.Config:\n"
        f'    """{facts["model"]}, as meshwright planned it."""\n'
        f"    config = {STARTED[module]}()\n"
        f'    config.model_spec = model_registry("{facts["titan_flavor"]}")\n'
    )


def _launch(plan: Plan) -> LaunchCommand:
    run = "-m torchtitan.train --module torchtitan_plan --config planned"
    return LaunchCommand(
        before=('export PYTORCH_ALLOC_CONF="expandable_segments:True"',
                'export PYTHONPATH="$HERE${PYTHONPATH:+:$PYTHONPATH}"',
                "# of 0.1 and 0.2: -m torchtitan.train --job.config_file torchtitan.toml"),
        command=f"torchrun $TORCHRUN {run}",
        yours=("hf_assets_path (tokenizer), dataset and learning rate",),
    )  # fmt: skip


AXES: dict[str, Any] = {
    "micro_batch": "training.local_batch_size", "tp": "parallelism.tensor_parallel_degree",
    "cp": "parallelism.context_parallel_degree", "pp": "parallelism.pipeline_parallel_degree",
    "ep": "parallelism.expert_parallel_degree", "dp_shard": "parallelism.data_parallel_shard_degree",
    "dp_replicate": "parallelism.data_parallel_replicate_degree", "recompute": "activation_checkpoint.mode",
    "schedule": "parallelism.pipeline_parallel_schedule", "vp": "parallelism.pipeline_parallel_layers_per_stage",
}  # fmt: skip
TORCHTITAN = TrainingSoftware(
    word="torchtitan",
    title="torchtitan 0.3 (Python) and 0.2 (TOML)",
    stack=_stack,
    offered={
        "zero": (0, 3), "schedule": tuple(SCHEDULES), "recompute": ("none", "selective", "full"), "offload": ("off",),
        "cuda_graphs": ("auto", "off"), "recompute_layers": (0,),
    },
    reasons={
        "zero": "FSDP2 shards all or nothing", "recompute": "activation_checkpoint.mode",
        "schedule": "torch.distributed.pipelining",
    },
    split_refusal=_split_refusal,
    pipeline_refusal=_pipeline_refusal,
    files=(
        ConfigFile(
            name="torchtitan_plan.py",
            form="python",
            options=PYTHON,
            ignored=IGNORED, refused=REFUSED, bounded=BOUNDED, unread=UNREAD,
            title="configuration for torchtitan 0.3",
            head=head,
            tail="    return config\n",
        ),
        ConfigFile(
            name="torchtitan.toml",
            form="toml",
            options=TOML,
            ignored=IGNORED, refused=REFUSED, bounded=BOUNDED, unread=UNREAD,
            title="configuration for torchtitan 0.1 and 0.2",
        ),
    ),
    facts=_facts,
    resolve=_resolve,
    noticed=noticed,
    shape=shape_named,
    launch=_launch,
    measured=("torchtitan",),
    unknown=(
        "The published rows are of torchtitan 0.1 and 0.2. Loss in chunks and CUDA graphs of 0.3 are not counted, and "
        "make it need less.",
        "Ring attention (context parallelism) is counted too fast by up to a quarter.",
    ),
    axes=AXES,
)  # fmt: skip
