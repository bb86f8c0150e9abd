"""NeMo 1: the YAML of megatron_gpt_pretraining.py and of its fine-tuning, over Megatron-Core. Read only.

Defaults: examples/nlp/language_modeling/conf/megatron_gpt_config.yaml.
"""

from meshwright.spec.errors import PlanError
from meshwright.stacks.declaration.option import ConfigFile, Facts, Option, UncountedOption
from meshwright.stacks.trainers import hugging_face as hf
from meshwright.stacks.trainers import megatron_lm as megatron
from meshwright.stacks.trainers.megatron_models import model_of

MARK = "trainer_precision"
"""Fact that every such file states."""
GATED = ("swiglu", "fast-swiglu")
NORMS = {"rmsnorm": "rmsnorm", **dict.fromkeys(("layernorm", "layernorm1p", "low_precision_layernorm"), "layernorm")}
SHARDED = ("distributed_fused_adam", "mcore_distributed_optim")
"""Names of its optimizers with sharded states: AdamW, as `fused_adam` and `adamw` without sharding."""
WHOLE = ("fused_adam", "adamw", "adam", "megatron_fused_adam")
PRECISIONS = {"bf16": "bf16", "bf16-mixed": "bf16", "16": "fp16", "16-mixed": "fp16", "32": "fp32", "32-true": "fp32"}
YAML = ConfigFile(
    name="megatron_gpt_config.yaml",
    form="yaml",
    options=(
        Option(key="trainer.num_nodes", fact="node_word", meaning="nodes"),
        Option(key="trainer.devices", fact="node_devices", meaning="GPUs of a node"),
        Option(key="trainer.precision", fact=MARK, default="32", meaning="of products"),
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
        Option(key="model.ub_tp_comm_overlap", fact="tp_overlap", default=False, meaning="exchanges beside products"),
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


def resolve(facts: Facts) -> Facts:
    """Return common facts from Megatron-Core's own. Raises PlanError for anything beyond GPT as counted."""
    precision, norm = str(facts[MARK]).lower(), str(facts["norm_word"]).lower()
    optimizer, activation = str(facts["optimizer_name"]), str(facts["activation"])
    for key, word, known in (
        ("trainer.precision", precision, PRECISIONS), ("model.normalization", norm, NORMS),
        ("model.optim.name", optimizer, (*SHARDED, *WHOLE)), ("model.activation", activation, (*GATED, "gelu")),
    ):  # fmt: skip
        if word not in known:
            raise PlanError(f"{key}={word} is not counted: take one of {', '.join(known)}")
    shape = {
        "norm": NORMS[norm], "gated": activation in GATED, "untied": not facts["shared"],
        "no_bias": not facts["biases"],
        "grouped": facts.get("key_heads") is not None, "sharded": optimizer in SHARDED,
        "narrow": "hybrid" if facts["fp8"] else None,
        "writes_scores": not (facts["core"] or facts["engine"] or facts["flash"]),
        "wide_reduction": "16" not in str(facts.get("travels")),
    }  # fmt: skip
    return {**model_of(megatron.resolve({**facts, **shape})), "precision": PRECISIONS[precision]}
