"""`tune --from-trl`: flags of TRL's `sft` and `dpo` scripts as keys of a plan, by one table that docs/tuning.md shows.

Names and defaults are those of TRL 1.16 and transformers' TrainingArguments.
"""

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from meshwright.spec.errors import PlanError
from meshwright.stacks.trainers.hugging_face import BY_DEFAULT, MATRICES

Flags = Mapping[str, str]
"""Flag without dashes -> its words, joined by commas. A flag alone is `true`."""
ADAPTERS = ("model.lora.rank=16", "model.lora.alpha=32", "model.lora.dropout=0.05", f"model.lora.targets={BY_DEFAULT}")
"""Adapters of TRL's ModelConfig, on the matrices that PEFT takes by default."""
TRL_BATCH, TRL_ACCUMULATION = "8", "1"
"""TRL's defaults, where only one of both flags is given."""


def is_true(word: str) -> bool:
    """Return whether a flag is switched on."""
    return word.lower() in ("true", "1", "yes", "y")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrlFlag:
    """A flag, and what it means here."""

    names: tuple[str, ...]
    keys: str
    """Words for the page's table."""
    write: Callable[[str, Flags, int], list[str]]
    """(word of the flag, all flags, processes) -> KEY=VALUE words."""


def _flag(names: str, key: str, write: Callable[[str], str] = str) -> TrlFlag:
    """Return a flag that is one key here. An empty word of `write` leaves the key out."""

    def words(word: str, flags: Flags, processes: int) -> list[str]:
        return [f"{key}={written}"] if (written := write(word)) else []

    return TrlFlag(names=tuple(names.split()), keys=f"`{key}`", write=words)


def _batch(word: str, flags: Flags, processes: int) -> list[str]:
    rows = int(flags.get("per_device_train_batch_size", TRL_BATCH))
    accumulated = int(flags.get("gradient_accumulation_steps", TRL_ACCUMULATION))
    return [f"layout.micro_batch={rows}", f"recipe.global_batch={rows * accumulated * processes}"]


def _epochs(word: str, flags: Flags, processes: int) -> list[str]:
    # As in TRL, steps above 0 replace epochs, whichever stands first.
    return [] if int(flags.get("max_steps", -1)) > 0 else [f"recipe.epochs={float(word):g}"]


def _data(word: str) -> str:
    is_here = Path(word).expanduser().exists() or Path(word).suffix in (".jsonl", ".json", ".parquet")
    return word if is_here else f"hub:{word}"


def _evaluate(word: str, flags: Flags, processes: int) -> list[str]:
    return ["recipe.eval_every=0"] if word == "no" else []


def _save(word: str, flags: Flags, processes: int) -> list[str]:
    return ["recipe.checkpoint_every=0"] if word == "no" else []


def _base(bits: str) -> Callable[[str, Flags, int], list[str]]:
    def write(word: str, flags: Flags, processes: int) -> list[str]:
        nested = "-double" if bits == "nf4" and is_true(flags.get("use_bnb_nested_quant", "false")) else ""
        return [f"model.lora.base={bits}{nested}"] if is_true(word) else []

    return write


def _targets(word: str) -> str:
    names = [name for name in word.split(",") if name]
    if names == ["all-linear"]:
        return "all"
    if unknown := [name for name in names if name not in MATRICES]:
        raise PlanError(f"--lora_target_modules {' '.join(unknown)}: take names of {', '.join(MATRICES)}")
    return ",".join(dict.fromkeys(MATRICES[name] for name in names))


def _nothing(word: str, flags: Flags, processes: int) -> list[str]:
    return []


def _on(text: str) -> Callable[[str], str]:
    return lambda word: text if is_true(word) else ""


FLAGS = (
    _flag("model_name_or_path", "model"),
    _flag("dataset_name", "data", _data),
    _flag("output_dir", "run"),
    _flag("learning_rate", "recipe.learning_rate"),
    TrlFlag(names=("num_train_epochs",), keys="`recipe.epochs`, unless `max_steps` is above 0", write=_epochs),
    _flag("max_steps", "recipe.steps", lambda word: word if int(word) > 0 else ""),
    TrlFlag(
        names=("per_device_train_batch_size", "gradient_accumulation_steps"),
        keys="`layout.micro_batch`, and `recipe.global_batch` = both times the processes", write=_batch,
    ),
    _flag("gradient_checkpointing", "layout.recompute", lambda word: "full" if is_true(word) else "none"),
    _flag("eval_steps", "recipe.eval_every", lambda word: f"{int(word)}"),
    TrlFlag(names=("eval_strategy",), keys="`no` is `recipe.eval_every=0`", write=_evaluate),
    _flag("max_length max_seq_length", "recipe.sequence"),
    _flag("lr_scheduler_type", "recipe.lr_scheduler_type"),
    _flag("warmup_steps", "recipe.warmup_steps", lambda word: f"{int(word)}"),
    _flag("weight_decay", "recipe.weight_decay"),
    _flag("max_grad_norm", "recipe.clip"),
    _flag("adam_beta1", "recipe.beta1"),
    _flag("adam_beta2", "recipe.beta2"),
    _flag("adam_epsilon", "recipe.epsilon"),
    _flag("bf16", "recipe.precision", _on("bf16")),
    _flag("fp16", "recipe.precision", _on("fp16")),
    _flag("seed", "recipe.seed"),
    _flag("logging_steps", "recipe.log_every"),
    _flag("save_steps", "recipe.checkpoint_every"),
    TrlFlag(names=("save_strategy",), keys="`no` is `recipe.checkpoint_every=0`", write=_save),
    _flag("save_total_limit", "recipe.keep_last"),
    _flag("assistant_only_loss", "data.train_on", _on("assistant")),
    TrlFlag(
        names=("use_peft",), keys="`model.lora` with TRL's rank 16, alpha 32 and dropout 0.05, on PEFT's `q,v`",
        write=lambda word, flags, processes: list(ADAPTERS) if is_true(word) else [],
    ),
    _flag("lora_r", "model.lora.rank"),
    _flag("lora_alpha", "model.lora.alpha"),
    _flag("lora_dropout", "model.lora.dropout"),
    _flag("lora_target_modules", "model.lora.targets", _targets),
    _flag("use_rslora", "model.lora.rslora", _on("true")),
    _flag("use_dora", "model.lora.dora", _on("true")),
    TrlFlag(
        names=("load_in_4bit", "use_bnb_nested_quant"), keys="`model.lora.base=nf4`, or `nf4-double`",
        write=lambda word, flags, processes: _base("nf4")(flags.get("load_in_4bit", "false"), flags, processes),
    ),
    TrlFlag(names=("load_in_8bit",), keys="`model.lora.base=llm-int8`", write=_base("llm-int8")),
    _flag("beta", "recipe.preference_beta"),
    _flag("loss_type", "recipe.loss_type"),
    _flag("label_smoothing", "recipe.preference_smoothing"),
    TrlFlag(
        names=(
            "packing", "packing_strategy", "padding_free", "eval_packing", "dataset_num_proc", "do_train", "do_eval",
            "dataset_train_split", "dataset_test_split", "attn_implementation", "torch_dtype", "dtype", "tf32",
            "dataloader_num_workers", "ddp_find_unused_parameters", "logging_strategy", "overwrite_output_dir",
            "remove_unused_columns", "logging_first_step", "per_device_eval_batch_size", "lora_task_type",
            "bnb_4bit_quant_type", "run_name", "report_to",
        ),
        keys="nothing: rows are always packed, and a run chooses the rest by itself", write=_nothing,
    ),
)  # fmt: skip
"""In the order of the page."""
BY_NAME = {name: flag for flag in FLAGS for name in flag.names}


def read_flags(text: str) -> dict[str, str]:
    """Return the flags of a command line of TRL. What comes before the first flag is its program."""
    try:
        tokens = shlex.split(text.replace("\\\n", " "))
    except ValueError as error:
        raise PlanError(f"--from-trl cannot be split into words: {str(error).lower()}") from None
    flags: dict[str, list[str]] = {}
    last: list[str] = []
    for token in tokens:
        if token.startswith("--"):
            name, equals, word = token[2:].partition("=")
            last = flags[name.replace("-", "_")] = [word] if equals else []
        else:
            last.append(token)
    return {name: ",".join(words) or "true" for name, words in flags.items()}


def plan_words(text: str, processes: int) -> list[str]:
    """Return the KEY=VALUE words of a command line of TRL. Raises PlanError that names unknown and unreadable flags."""
    flags = read_flags(text)
    if not flags:
        raise PlanError("--from-trl has no flags: give those of TRL's script, as '--learning_rate 2e-5'")
    if unknown := [name for name in flags if name not in BY_NAME]:
        listed = ", ".join(_with_nearest(name) for name in unknown)
        raise PlanError(f"--from-trl does not know {listed}: leave them out, and give keys of the plan as well")
    words: dict[str, str] = {}
    # What --use_peft stands for comes first, so that flags of adapters change it.
    for name, word in sorted(flags.items(), key=lambda flag: flag[0] != "use_peft"):
        try:
            written = BY_NAME[name].write(word, flags, processes)
        except ValueError:
            raise PlanError(f"--from-trl has --{name} {word}, which is no number: correct it") from None
        for pair in written:
            words[pair.partition("=")[0]] = pair
    if any(word.startswith("model.lora") for word in words) and not is_true(flags.get("use_peft", "false")):
        raise PlanError("--from-trl has flags of adapters, which TRL ignores without --use_peft: add it")
    return list(words.values())


def _with_nearest(name: str) -> str:
    near = get_close_matches(name, BY_NAME, 1)
    return f"--{name} (nearest: --{near[0]})" if near else f"--{name}"
