"""NeMo: a Python configuration that starts from a recipe of Megatron-Bridge, and trains on Megatron-Core."""

import re
from collections.abc import Sequence
from dataclasses import replace

from meshwright.planner.cost.stack import Stack
from meshwright.spec import ModelShape, presets
from meshwright.spec.errors import PlanError
from meshwright.spec.plan.plan import Plan
from meshwright.stacks.declaration.option import ConfigFile, Facts, Option
from meshwright.stacks.declaration.software import LaunchCommand, TrainingSoftware
from meshwright.stacks.text.option_text import Called, Entry
from meshwright.stacks.text.python_text import NAMED
from meshwright.stacks.trainers import hugging_face as hf
from meshwright.stacks.trainers import megatron_lm as megatron
from meshwright.stacks.trainers import nemo_yaml

RECIPES = {
    "llama-3.1-8b": ("llama", "llama31_8b"), "llama-3.1-70b": ("llama", "llama31_70b"),
    "llama-3.1-405b": ("llama", "llama31_405b"), "llama-3.2-1b": ("llama", "llama32_1b"),
    "llama-3.2-3b": ("llama", "llama32_3b"), "llama-2-7b": ("llama", "llama2_7b"),
    "qwen2.5-0.5b": ("qwen", "qwen25_500m"), "qwen2.5-1.5b": ("qwen", "qwen25_1p5b"),
    "qwen2.5-7b": ("qwen", "qwen25_7b"), "qwen2.5-14b": ("qwen", "qwen25_14b"), "qwen2.5-32b": ("qwen", "qwen25_32b"),
    "qwen2.5-72b": ("qwen", "qwen25_72b"), "qwen3-0.6b": ("qwen", "qwen3_600m"), "qwen3-1.7b": ("qwen", "qwen3_1p7b"),
    "qwen3-4b": ("qwen", "qwen3_4b"), "qwen3-8b": ("qwen", "qwen3_8b"), "qwen3-14b": ("qwen", "qwen3_14b"),
    "qwen3-32b": ("qwen", "qwen3_32b"), "qwen3-30b-a3b": ("qwen", "qwen3_30b_a3b"),
    "qwen3-235b-a22b": ("qwen", "qwen3_235b_a22b"),
}  # fmt: skip
"""Preset -> (module, start of the recipe's name): megatron/bridge/recipes."""
ENDING = "_pretrain_config"
NEEDED = {
    "tp": "model.tensor_model_parallel_size", "pp": "model.pipeline_model_parallel_size",
    "cp": "model.context_parallel_size", "micro_batch": "train.micro_batch_size",
    "global_batch": "train.global_batch_size", "sequence": "model.seq_length",
}  # fmt: skip
"""Facts that a file must state, since a recipe's own values are not read."""
OPTIONS = (
    Option(key="model.tensor_model_parallel_size", fact="tp", meaning="ranks that share every matrix"),
    Option(key="model.sequence_parallel", fact="sp", meaning="norms share the sequence among them"),
    Option(key="model.pipeline_model_parallel_size", fact="pp", meaning="ranks that share the layers"),
    Option(key="model.virtual_pipeline_model_parallel_size", fact="stages_of_rank",
           meaning="interleaved schedule: stages of a rank"),
    Option(key="model.microbatch_group_size_per_vp_stage", fact="round",
           meaning="micro-batches that a stage takes in a row"),
    Option(key="model.pipeline_dtype", fact="pipeline_dtype", meaning="of what stages send"),
    Option(key="model.context_parallel_size", fact="cp", meaning="ranks that share every sequence"),
    Option(key="model.expert_model_parallel_size", fact="ep", default=1, quiet=True,
           meaning="ranks that share the experts"),
    Option(key="model.expert_tensor_parallel_size", fact="expert_tp", meaning="an expert is whole on its rank"),
    Option(key="model.recompute_granularity", fact="granularity", meaning="what the backward pass makes again"),
    Option(key="model.recompute_modules", fact="recompute_modules", meaning="of a layer: the attention core"),
    Option(key="model.recompute_method", fact="recompute_method", meaning="whole layers, the first of each stage"),
    Option(key="model.recompute_num_layers", fact="recompute_number", meaning="how many of them, or layers of a unit"),
    Option(key="model.seq_length", fact="sequence", meaning="tokens of a sequence"),
    Option(key="dataset.seq_length", fact="data_sequence", meaning="the same", also=("dataset.sequence_length",)),
    Option(key="train.micro_batch_size", fact="micro_batch", meaning="sequences of a micro-batch on a rank"),
    Option(key="train.global_batch_size", fact="global_batch", meaning="sequences of a step, over all ranks"),
    Option(key="train.train_iters", fact="steps", meaning="optimizer steps: yours to choose"),
    Option(key="optimizer.lr", fact="learning_rate", meaning="learning rate: yours to choose"),
    Option(key="ddp.use_distributed_optimizer", fact="sharded", default=True,
           meaning="ZeRO-1: optimizer states shared out"),
    Option(key="ddp.overlap_grad_reduce", fact="overlap_reduce", default=True,
           meaning="gradients are summed beside the backward pass"),
    Option(key="ddp.overlap_param_gather", fact="overlap_gather", default=True,
           meaning="parameters are gathered beside the forward pass"),
    Option(key="mixed_precision.grad_reduce_in_fp32", fact="wide_reduction", default=True,
           also=("ddp.grad_reduce_in_fp32",), meaning="gradients travel in 16 bits"),
    Option(key="comm_overlap.tp_comm_overlap", fact="tp_overlap", default=False,
           meaning="exchanges run beside products, as counted"),
    Option(key="mixed_precision", fact="mixed", meaning="products in bfloat16"),
)  # fmt: skip
IGNORED = (
    "comm_overlap", "tokenizer*", "dataset*", "checkpoint*", "logger*", "scheduler*", "validation*", "profiling*",
    "rng*", "rerun_*", "dist*", "train.*", "optimizer.adam_*", "optimizer.weight_decay", "optimizer.min_lr",
    "optimizer.clip_grad", "model.pipeline_model_parallel_layout_note", "model.transformer_impl", "model.moe_router_*",
    "model.moe_token_dispatcher_type", "model.moe_grouped_gemm", "model.moe_permute_fusion", "model.attention_backend",
    "model.cross_entropy_*", "ddp.check_for_nan_in_grad", "ddp.average_in_collective", "ddp.data_parallel_*",
    "model.apply_rope_fusion", "model.gradient_accumulation_fusion", "model.make_vocab_size_divisible_by", "model",
)  # fmt: skip
REFUSED = {
    "ddp.use_megatron_fsdp": "shards with Megatron-FSDP",
    "dist.use_megatron_fsdp": "shards with Megatron-FSDP",
    "model.pipeline_model_parallel_layout": "deals layers to stages by hand",
    "model.num_layers_in_first_pipeline_stage": "deals layers to stages by hand",
    "model.num_layers_in_last_pipeline_stage": "deals layers to stages by hand",
    "model.account_for_embedding_in_pipeline_split": "counts the embedding as a layer of its stage",
    "model.account_for_loss_in_pipeline_split": "counts the loss as a layer of its stage",
    "model.mtp_num_layers": "adds layers that predict more tokens",
    "peft": "trains adapters instead of all weights: ask plan --tune lora",
}
BOUNDED = {
    "model.fine_grained_activation_offloading": f"keeps activations {hf.ON_HOST}",
    "model.cpu_offloading": f"keeps activations {hf.ON_HOST}",
    "model.cuda_graph_impl": "replays launches, which takes less time",
    "optimizer.use_precision_aware_optimizer": "keeps optimizer states in fewer bits, which needs less memory",
    "optimizer.optimizer_cpu_offload": f"keeps optimizer states {hf.ON_HOST}",
}


RECIPE_2 = ConfigFile(
    name="recipe.py",
    form="python",
    options=(
        Option(key="trainer.num_nodes", fact="nodes", meaning="nodes"),
        Option(key="trainer.tensor_parallelism", fact="tp", meaning="ranks that share every matrix"),
        Option(key="trainer.sequence_parallelism", fact="sp", meaning="norms share the sequence among them"),
        Option(key="trainer.pipeline_parallelism", fact="pp", meaning="ranks that share the layers"),
        Option(key="trainer.virtual_pipeline_parallelism", fact="stages_of_rank", meaning="stages of a rank"),
        Option(key="trainer.context_parallelism", fact="cp", meaning="ranks that share every sequence"),
        Option(key="trainer.expert_parallelism", fact="ep", default=1, meaning="ranks that share the experts"),
        Option(key="data.seq_length", fact="sequence", meaning="tokens of a sequence"),
        Option(key="data.global_batch_size", fact="global_batch", meaning="sequences of a step, over all ranks"),
        Option(key="data.micro_batch_size", fact="micro_batch", meaning="sequences of a micro-batch on a rank"),
        Option(key="ddp.use_distributed_optimizer", fact="sharded", default=True, meaning="ZeRO-1"),
        Option(key="ddp.overlap_grad_reduce", fact="overlap_reduce", default=True, meaning="beside the backward pass"),
        Option(key="ddp.grad_reduce_in_fp32", fact="wide_reduction", default=True, meaning="gradients travel in fp32"),
    ),
    ignored=("trainer*", "model", "data", "log*", "optim*", "resume*", "data.*"),
    refused={"peft": "trains adapters instead of all weights: ask plan --tune lora"},
    title="recipe of NeMo 2: nemo/collections/llm/recipes",
)  # fmt: skip
"""Defaults of its DistributedDataParallelConfig. The number of nodes is an argument that the user gives."""


def _stack(facts: Facts) -> Stack:
    stack = megatron.stack_of(facts)
    if facts.get("writes_scores"):
        stack = replace(stack, attention="fused-softmax")
    return replace(stack, gradient_exchange_bytes=4.0 if facts.get("wide_reduction", False) else 2.0)


def _facts(plan: Plan) -> Facts:
    layout, name = plan.layout, plan.model.name
    if name not in RECIPES:
        raise PlanError(f"nemo has no recipe of {name} here: take one of {', '.join(RECIPES)}")
    full, selective = layout.recompute == "full", layout.recompute == "selective"
    return {
        **megatron.layout_facts(plan),
        "recipe": RECIPES[name], "data_sequence": plan.recipe.sequence, "wide_reduction": False, "mixed": None,
        "pipeline_dtype": Called(name="torch.bfloat16") if layout.pp > 1 else None,
        "granularity": None if layout.recompute == "none" else layout.recompute,
        "recompute_modules": [megatron.MODULES] if selective else None,
        "recompute_method": ("block" if layout.recompute_layers else "uniform") if full else None,
        "recompute_number": (layout.recompute_layers or 1) if full else None,
    }  # fmt: skip


def _resolve(facts: Facts) -> Facts:
    if nemo_yaml.MARK in facts:
        return nemo_yaml.resolve(facts)
    for fact, key in NEEDED.items():
        if facts.get(fact) is None:
            raise PlanError(f"{key} is not stated, and the recipe's own value is not read: state it in the file")
    if "fp8" in str(facts.get("mixed", "")) or "fp4" in str(facts.get("mixed", "")):
        raise PlanError(f"mixed_precision={facts['mixed']} is not counted here: take bf16_mixed")
    modules = facts.get("recompute_modules")
    joined = ",".join(modules) if isinstance(modules, list) else modules
    return {**megatron.resolve({**facts, "recompute_modules": joined}), "precision": "bf16"}


def noticed(entries: Sequence[Entry]) -> Facts:
    """Return the recipe that the file starts from, by its name."""
    called = [entry.value.name for entry in entries if entry.key == "=" and isinstance(entry.value, Called)]
    recipe = next((known for known in RECIPES.values() for name in called if name.startswith(f"{known[1]}_")), None)
    module = next((str(entry.value) for entry in entries if entry.key == NAMED), "")
    if sized := re.fullmatch(r"([a-z]+)(\d?)(\d?)_(?:nemotron_)?([\dxp]+b|\d00m)(?:_\w*)?", module):
        number = ".".join(filter(None, sized.group(2, 3)))
        dash = "" if sized[1] == "qwen" or not number else "-"
        size = f"0.{sized[4][0]}b" if sized[4].endswith("m") else sized[4].replace("p", ".")
        return {"hub": f"{sized[1]}{dash}{number}-{size}"} | ({"recipe": recipe} if recipe else {})
    imported = ",".join(str(entry.value) for entry in entries if entry.key == "import")
    sizes = re.search(r"\b(Llama|Qwen|Mixtral|Gemma)(\d?)(\d?)Config(\d\w*)", imported)
    named = {}
    if sizes:
        family, version = sizes[1].lower(), ".".join(filter(None, sizes.group(2, 3)))
        dash = "-" * (version != "" and family != "qwen")
        named = {"hub": f"{family}{dash}{version}-{sizes[4].lower()}"}
    return named | ({"recipe": recipe} if recipe else {})


def shape_named(facts: Facts) -> ModelShape | None:
    """Return the model of a recipe."""
    return next((presets.model(name) for name, known in RECIPES.items() if known == facts.get("recipe")), None)


def head(facts: Facts) -> str:
    """Return the lines above the settings."""
    module, start = facts["recipe"]
    return (
        "import torch  # noqa: F401\n"
        f"from megatron.bridge.recipes.{module} import {start}{ENDING}\n"
        "from megatron.bridge.training.comm_overlap import CommOverlapConfig\n"
        "from megatron.bridge.training.config import ConfigContainer\n"
        "from megatron.bridge.training.gpt_step import forward_step\n"
        "from megatron.bridge.training.mixed_precision import bf16_mixed\n"
        "from megatron.bridge.training.pretrain import pretrain\n\n\n"
        "def planned() -> ConfigContainer:\n"
        f'    """{facts["model"]}, as meshwright planned it; data and tokenizer are the recipe\'s."""\n'
        f"    config = {start}{ENDING}()\n"
        "    config.mixed_precision = bf16_mixed()\n"
        "    config.comm_overlap = CommOverlapConfig(tp_comm_overlap=False)\n"
        "    config.model.pipeline_model_parallel_layout = None\n"
        "    config.model.recompute_granularity = None\n"
        "    config.model.virtual_pipeline_model_parallel_size = None\n"
    )


def _launch(plan: Plan) -> LaunchCommand:
    return LaunchCommand(
        before=("export CUDA_DEVICE_MAX_CONNECTIONS=1",),
        command='torchrun $TORCHRUN "$HERE/nemo_plan.py"',
        yours=("config.dataset (the recipe has mock data)", "config.tokenizer", "learning rate and its schedule"),
    )


NEMO = TrainingSoftware(
    word="nemo",
    title="NeMo's Megatron-Bridge 0.6",
    stack=_stack,
    offered=megatron.MEGATRON_LM.offered,
    reasons=megatron.MEGATRON_LM.reasons,
    split_refusal=megatron.split_refusal,
    pipeline_refusal=megatron.pipeline_refusal,
    full_rounds=True,
    files=(
        ConfigFile(
            name="nemo_plan.py", form="python", options=OPTIONS, ignored=IGNORED, refused=REFUSED, bounded=BOUNDED,
            head=head,
            title="configuration for NeMo's Megatron-Bridge 0.6",
            tail='    return config\n\n\nif __name__ == "__main__":\n    pretrain(planned(), forward_step)\n',
        ),
    ),
    also_read=(RECIPE_2, nemo_yaml.YAML),
    facts=_facts,
    resolve=_resolve,
    noticed=noticed,
    shape=shape_named,
    launch=_launch,
    measured=("Megatron-Bridge", "MLPerf", "NeMo 24.07", "NeMo long sequence"),
    unknown=("Embedding rows that make_vocab_size_divisible_by adds are not counted, nor are CUDA graphs.",),
    axes={
        "tp": "model.tensor_model_parallel_size", "pp": "model.pipeline_model_parallel_size",
        "cp": "model.context_parallel_size", "ep": "model.expert_model_parallel_size",
        "vp": "model.virtual_pipeline_model_parallel_size", "sp": "model.sequence_parallel",
        "micro_batch": "train.micro_batch_size", "zero": "ddp.use_distributed_optimizer",
        "recompute": "model.recompute_granularity", "recompute_layers": "model.recompute_num_layers",
    },
)  # fmt: skip
