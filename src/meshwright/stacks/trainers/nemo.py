"""NeMo: a Python configuration that starts from a recipe of Megatron-Bridge, and trains on Megatron-Core."""

import re
from collections.abc import Sequence
from dataclasses import replace

from meshwright.planner.cost.stack import Stack
from meshwright.spec import ModelShape, presets
from meshwright.spec.errors import PlanError
from meshwright.spec.plan.plan import Plan
from meshwright.stacks.declaration.option import Called, ConfigFile, Entry, Facts, Option, UncountedOption
from meshwright.stacks.declaration.script_text import NAMED
from meshwright.stacks.declaration.software import LaunchCommand, TrainingSoftware
from meshwright.stacks.trainers import hugging_face as hf
from meshwright.stacks.trainers import megatron_lm as megatron
from meshwright.stacks.trainers.megatron_lm import model_of

PRECISION_FACT = "trainer_precision"
"""Fact that every file of NeMo 1 states, and no other."""
GATED = ("swiglu", "fast-swiglu")
NORMS = {"rmsnorm": "rmsnorm", **dict.fromkeys(("layernorm", "layernorm1p", "low_precision_layernorm"), "layernorm")}
SHARDED = ("distributed_fused_adam", "mcore_distributed_optim")
"""Names of its optimizers with sharded states: AdamW, as `fused_adam` and `adamw` without sharding."""
WHOLE = ("fused_adam", "adamw", "adam", "megatron_fused_adam")
PRECISIONS = {"bf16": "bf16", "bf16-mixed": "bf16", "16": "fp16", "16-mixed": "fp16", "32": "fp32", "32-true": "fp32"}
NEMO_1 = ConfigFile(
    name="megatron_gpt_config.yaml",
    form="yaml",
    options=(
        Option(key="trainer.num_nodes", fact="node_word", meaning="nodes"),
        Option(key="trainer.devices", fact="node_devices", meaning="GPUs of a node"),
        Option(key="trainer.precision", fact=PRECISION_FACT, default="32", meaning="of products"),
        Option(key="trainer.max_steps", fact="steps", meaning="optimizer steps: yours to choose"),
        Option(key="model.micro_batch_size", fact="micro_batch", meaning="sequences of a micro-batch on a rank"),
        Option(key="model.global_batch_size", fact="global_batch", meaning="sequences of a step, over all ranks"),
        Option(key="model.tensor_model_parallel_size", fact="tp", default=1, meaning="ranks that share every matrix"),
        Option(key="model.pipeline_model_parallel_size", fact="pp", default=1, meaning="ranks that share the layers"),
        Option(key="model.virtual_pipeline_model_parallel_size", fact="stages_of_rank", meaning="stages of a rank"),
        Option(key="model.context_parallel_size", fact="cp", default=1, meaning="ranks that share every sequence"),
        Option(key="model.expert_model_parallel_size", fact="ep", default=1, meaning="ranks that share the experts"),
        Option(key="model.sequence_parallel", fact="sp", default=False, meaning="norms share the sequence"),
        Option(key="model.encoder_seq_length", fact="sequence", meaning="tokens of a sequence",
               also=("model.data.seq_length", "model.data.train_ds.max_seq_length")),
        Option(key="model.max_position_embeddings", fact="max_positions", meaning="longest sequence"),
        Option(key="model.num_layers", fact="layers", meaning="transformer blocks"),
        Option(key="model.hidden_size", fact="hidden", meaning="width of the residual stream"),
        Option(key="model.ffn_hidden_size", fact="ffn", meaning="inner width of the dense MLP"),
        Option(key="model.num_attention_heads", fact="heads", meaning="query heads"),
        Option(key="model.num_query_groups", fact="key_heads", meaning="key heads"),
        Option(key="model.kv_channels", fact="head_dim", meaning="width of a head"),
        Option(key="model.normalization", fact="norm_word", default="layernorm1p", meaning="kind of norms"),
        Option(key="model.layernorm_epsilon", fact="norm_eps", meaning="added to the variance in norms"),
        Option(key="model.bias", fact="biases", default=True, meaning="biases of matrices"),
        Option(key="model.qkv_bias", fact="only_qkv_bias", default=False, meaning="of queries, keys and values"),
        Option(key="model.mcore_gpt", fact="core", default=False, meaning="Megatron-Core's layers"),
        Option(key="model.transformer_engine", fact="engine", default=False, meaning="Transformer Engine's layers"),
        Option(key="model.use_flash_attention", fact="flash", default=False, meaning="kernel of attention"),
        Option(key="model.activation", fact="activation", default="gelu", meaning="of the MLP"),
        Option(key="model.position_embedding_type", fact="positions", default="learned_absolute",
               words={"rope": "rope", "learned": "learned_absolute"}, meaning="how positions enter"),
        Option(key="model.rotary_base", fact="rotary_base", meaning="base of the rotary frequencies"),
        Option(key="model.share_embeddings_and_output_weights", fact="shared", default=True,
               meaning="head and embedding are one matrix"),
        Option(key="model.override_vocab_size", fact="vocab", meaning="rows of the embedding"),
        Option(key="model.tokenizer.type", fact="tokenizer_kind", meaning="whose vocabulary it is"),
        Option(key="model.tokenizer.model", fact="tokenizer", meaning="a file or a folder"),
        Option(key="model.hidden_dropout", fact="hidden_dropout", default=0.1, meaning="masks are drawn and kept"),
        Option(key="model.activations_checkpoint_granularity", fact="granularity", meaning="what is made again"),
        Option(key="model.activations_checkpoint_method", fact="recompute_method", meaning="whole layers"),
        Option(key="model.activations_checkpoint_num_layers", fact="recompute_number", meaning="how many of them"),
        Option(key="model.ub_tp_comm_overlap", fact="tp_overlap", default=False,
           meaning="exchanges overlap with products"),
        Option(key="model.fp8", fact="fp8", default=False, meaning="products of layers in 8 bits"),
        Option(key="model.optim.name", fact="optimizer_name", default="fused_adam", meaning="AdamW"),
        Option(key="model.optim.grad_sync_dtype", fact="travels", meaning="what gradients travel as"),
    ),
    ignored=(
        "name", "trainer*", "exp_manager*", "inference*", "hydra*", "defaults", "cluster_type", "run*", "data*",
        "restore_from_path", "model",
        *(f"model.{name}" for name in (
            "rampup_batch_size", "ffn_dropout", "apply_query_key_layer_scaling", "do_layer_norm_*",
            "make_vocab_size_divisible_by", "pre_process", "post_process", "persist_layer_norm", "rotary_percentage",
            "normalize_attention_scores", "attention_type", "transformer_block_type", "overlap_p2p_comm",
            "batch_p2p_comm", "tokenizer.*", "native_amp_*", "hysteresis", "grad_allreduce_*", "grad_div_ar_fusion",
            "gradient_accumulation_fusion", "bias_dropout_add_fusion", "bias_activation_fusion",
            "masked_softmax_fusion", "get_attention_mask_from_fusion", "seed", "resume_from_checkpoint",
            "use_cpu_initialization", "onnx_safe", "apex_transformer_log_level", "gradient_as_bucket_view",
            "sync_batch_comm", "nccl_communicator_config_path", "fsdp_*", "fp8_*", "reduce_amax", "use_emha",
            "ub_tp_comm_overlap_cfg", "data.*", "nsys_profile.*", "optim.*", "gc_interval", "restore_*",
            "apply_rope_fusion", "precision", "nemo_path", "validation_*", "init_method_std", "use_scaled_init_method",
            "seq_len_interpolation_factor",
        )),
    ),
    refused={
        "model.peft.peft_scheme": "trains adapters",
        "model.virtual_prompt_style": "trains prompts or adapters of its own in place of weights",
        "model.mcore_customization_config.parallel_attention": "has blocks whose halves stand side by side",
        "model.num_moe_experts": "has experts",
        "model.fsdp": "shards with FSDP",
        "model.num_micro_batches_with_partial_activation_checkpoints": "makes some micro-batches again",
        "model.activations_checkpoint_layers_per_pipeline": "makes other layers again on each stage",
        "model.headscale": "scales heads",
        **dict.fromkeys(
            ("model.retro", "model.retro.retro_project_dir", "model.dec_num_layers", "model.enc_num_layers",
             "model.language_model.pretrained_model_name", "model.add_pooler", "model.bert_binary_head"),
            "is of another model than GPT",
        ),
        **dict.fromkeys(("model.mm_cfg", "model.mm_cfg.llm.from_pretrained", "model.vision", "model.image_size",
                         "model.img_h", "model.vision_pretraining_type", "model.first_stage_config"),
                        "is of a model of images"),
        "model.reward_model_type": "trains a model that rewards answers",
    },
    bounded={
        "model.cpu_offloading": f"keeps activations {hf.ON_HOST}",
        "model.enable_cuda_graph": "replays launches, which takes less time",
    },
    unread=(
        UncountedOption(key="model.attention_dropout", counted=0.0, absent=0.1, effect="draws masks in attention"),
        UncountedOption(key="model.megatron_amp_O2", counted=True, absent=False,
                        effect="holds weights in fp32, and casts them for each product"),
    ),
    marks=("model.tensor_model_parallel_size", "model.megatron_amp_O2"),
    title="configuration of NeMo 1 for megatron_gpt_pretraining.py",
)  # fmt: skip


def resolve_nemo_1(facts: Facts) -> Facts:
    """Return common facts from Megatron-Core's own. Raises PlanError for anything beyond GPT as counted."""
    precision, norm = str(facts[PRECISION_FACT]).lower(), str(facts["norm_word"]).lower()
    optimizer, activation = str(facts["optimizer_name"]), str(facts["activation"])
    for key, word, counted in (
        ("trainer.precision", precision, PRECISIONS), ("model.normalization", norm, NORMS),
        ("model.optim.name", optimizer, (*SHARDED, *WHOLE)), ("model.activation", activation, (*GATED, "gelu")),
    ):  # fmt: skip
        if word not in counted:
            raise PlanError(f"{key}={word} is not counted: take one of {', '.join(counted)}")
    shape = {
        "norm": NORMS[norm], "gated": activation in GATED, "untied": not facts["shared"],
        "no_bias": not facts["biases"],
        "grouped": facts.get("key_heads") is not None, "sharded": optimizer in SHARDED,
        "narrow": "hybrid" if facts["fp8"] else None,
        "writes_scores": not (facts["core"] or facts["engine"] or facts["flash"]),
        "wide_reduction": "16" not in str(facts.get("travels")),
    }  # fmt: skip
    return {**model_of(megatron.resolve({**facts, **shape})), "precision": PRECISIONS[precision]}


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
           meaning="gradients are summed during the backward pass"),
    Option(key="ddp.overlap_param_gather", fact="overlap_gather", default=True,
           meaning="parameters are gathered during the forward pass"),
    Option(key="mixed_precision.grad_reduce_in_fp32", fact="wide_reduction", default=True,
           also=("ddp.grad_reduce_in_fp32",), meaning="gradients travel in 16 bits"),
    Option(key="comm_overlap.tp_comm_overlap", fact="tp_overlap", default=False,
           meaning="exchanges overlap with products, as counted"),
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


NEMO_2 = ConfigFile(
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
        Option(key="ddp.overlap_grad_reduce", fact="overlap_reduce", default=True, meaning="during the backward pass"),
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
    """Return what a file states of a plan, None for what the recipe decides. Raises PlanError without a recipe."""
    layout, name = plan.layout, plan.model.name
    if name not in RECIPES:
        raise PlanError(f"nemo has no recipe of {name} here: take one of {', '.join(RECIPES)}")
    recomputes_all = layout.recompute == "full"
    return {
        **megatron.layout_facts(plan),
        "recipe": RECIPES[name], "data_sequence": plan.recipe.sequence, "wide_reduction": False, "mixed": None,
        "pipeline_dtype": Called(name="torch.bfloat16") if layout.pp > 1 else None,
        "granularity": None if layout.recompute == "none" else layout.recompute,
        "recompute_modules": [megatron.MODULES] if layout.recompute == "selective" else None,
        "recompute_method": ("block" if layout.recompute_layers else "uniform") if recomputes_all else None,
        "recompute_number": (layout.recompute_layers or 1) if recomputes_all else None,
    }  # fmt: skip


def _resolve(facts: Facts) -> Facts:
    if PRECISION_FACT in facts:
        return resolve_nemo_1(facts)
    # The recipe's values are in Megatron-Bridge's code, which is not run.
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
    recipe = next(
        (
            named_recipe
            for named_recipe in RECIPES.values()
            for name in called
            if name.startswith(f"{named_recipe[1]}_")
        ),
        None,
    )
    module = next((str(entry.value) for entry in entries if entry.key == NAMED), "")
    if sized := re.fullmatch(r"([a-z]+)(\d?)(\d?)_(?:nemotron_)?([\dxp]+b|\d00m)(?:_\w*)?", module):
        number = ".".join(filter(None, sized.group(2, 3)))
        dash = "" if sized[1] == "qwen" or not number else "-"
        size = f"0.{sized[4][0]}b" if sized[4].endswith("m") else sized[4].replace("p", ".")
        return {"hub": f"{sized[1]}{dash}{number}-{size}"} | ({"recipe": recipe} if recipe else {})
    imported = ",".join(str(entry.value) for entry in entries if entry.key == "import")
    # Classes such as Llama31Config8B name the model where no recipe does.
    sizes = re.search(r"\b(Llama|Qwen|Mixtral|Gemma)(\d?)(\d?)Config(\d\w*)", imported)
    hub_fact = {}
    if sizes:
        family, version = sizes[1].lower(), ".".join(filter(None, sizes.group(2, 3)))
        # Presets are called llama-3.1-8b, but qwen2.5-7b.
        dash = "-" * (version != "" and family != "qwen")
        hub_fact = {"hub": f"{family}{dash}{version}-{sizes[4].lower()}"}
    return hub_fact | ({"recipe": recipe} if recipe else {})


def shape_named(facts: Facts) -> ModelShape | None:
    """Return the model of a recipe."""
    return next((presets.model(name) for name, recipe in RECIPES.items() if recipe == facts.get("recipe")), None)


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
    also_read=(NEMO_2, NEMO_1),
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
