"""LLaMA-Factory: the YAML or the arguments of `llamafactory-cli train`, over transformers' Trainer. Read only.

Defaults: finetuning_args.py, model_args.py and data_args.py of its hparams.
"""

from dataclasses import replace

from meshwright.stacks.declaration.option import ConfigFile, Option, UncountedOption, as_shell
from meshwright.stacks.trainers import hugging_face as hf
from meshwright.stacks.trainers import peft_adapters as adapters

SMALLER = "keeps smaller states than AdamW's two of fp32, which needs less memory"
YAML = ConfigFile(
    name="train.yaml",
    form="yaml",
    options=(
        Option(key="model_name_or_path", fact="hub", meaning="model, by its name on the hub or its folder"),
        Option(key="cutoff_len", fact="sequence", default=2048, meaning="tokens of a sequence"),
        *(option for option in hf.TRAINER if option.key != "attn_implementation"),
        Option(key="flash_attn", fact="flash_word", meaning="kernel of attention"),
        Option(key="optim", fact="optimizer", meaning="AdamW with two states"),
        Option(key="do_train", fact="trains", default=False, meaning="else it evaluates, or writes a model"),
        Option(key="pref_loss", fact="pair_loss", meaning="of pairs of answers, where the stage is dpo"),
        Option(key="stage", fact="stage", meaning="loss over the next token"),
        Option(key="finetuning_type", fact="adapter", default="lora", meaning="adapters, or all weights"),
        Option(key="lora_rank", fact="lora_rank", default=8, meaning="rank of adapters"),
        *(replace(option, default="all") if option.fact == "lora_targets" else option
          for option in adapters.FULL_OPTIONS if not option.fact.startswith("base")),
        Option(key="quantization_bit", fact="base_bits", meaning="bits of frozen matrices"),
        Option(key="double_quantization", fact="nested", default=True, meaning="scales of 4 bits are codes too"),
        Option(key="disable_gradient_checkpointing", fact="checkpointing", words={True: False, False: True},
               default=False, meaning="the backward pass makes no blocks again"),
        Option(key="deepspeed", fact="deepspeed_file", meaning="file of DeepSpeed"),
    ),
    ignored=(
        *(key for key in hf.TRAINER_IGNORED if not key.startswith(("activation_", "packing"))),
        "dataset", "template", "max_samples", "plot_loss", "overwrite_cache", "resume_from_checkpoint", "val_size",
        "lora_model_dir", "adapter_name_or_path", "pref_beta", "pref_ftx",
        "simpo_gamma", "use_fast_tokenizer", "tokenized_path", "mask_history",
        "train_on_prompt", "quantization_type", "quantization_method", "neat_packing", "ray_*", "resources_per_worker",
        "placement_strategy", "num_workers", "loraplus_*", "pissa_*", "create_new_adapter", "mix_strategy",
        "media_dir", "image_*", "video_*", "enable_thinking", "rope_scaling_note", "low_cpu_mem_usage", "swanlab_*",
        "gradient_checkpointing",
        "use_swanlab", "upcast_*", "lora_bias_trainable", "use_rslora", "freeze_*", "ddp_*", "galore_*", "apollo_*",
    ),
    refused={
        "use_llama_pro": "trains added blocks only", "shift_attn": "attends within shifted groups",
        "mixture_of_depths": "skips blocks by token", "use_ref_model": "holds a second model",
        "use_kt": "computes experts on the host",
    },
    bounded={
        **{key: SMALLER for key in ("use_galore", "use_apollo", "use_badam", "use_adam_mini", "use_muon")},
        "pure_bf16": "holds weights and states in 16 bits, which needs less memory",
        "enable_liger_kernel": hf.OTHER_KERNEL, "use_unsloth": hf.OTHER_KERNEL,
        "use_unsloth_gc": f"keeps inputs of blocks {hf.ON_HOST}",
        "fp8": "makes products of 8 bits, which takes less time",
        "torch_compile": "compiles the model, which takes less time",
    },
    unread=(
        UncountedOption(key="packing", counted=True, absent=False,
                        effect="pads short texts, so that fewer tokens are trained on"),
    ),
    marks=("finetuning_type", "cutoff_len", "template", "stage"),
    title="configuration for llamafactory-cli train",
)  # fmt: skip
LLAMA_FACTORY = (YAML, as_shell(YAML))
