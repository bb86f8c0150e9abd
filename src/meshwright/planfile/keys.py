"""Keys of a plan file and of overrides: their names, their names in other tools, and the paths among their values.

Unknown keys get a suggestion. Relative paths start at the file's folder in a plan file, and at the current folder in a
Plan and on a command line. A plan file therefore names the same files from any current folder. A run's own plan.yaml
always names the run that contains it, even after the folder was moved or renamed.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

from meshwright.planfile.text import Node, parse_override
from meshwright.spec import presets
from meshwright.spec.plan.plan import CHAT_FORMATS, RANDOM, Plan
from meshwright.spec.presets import find_nearest

SHORTHAND = {
    "model": "preset", "teacher": "preset", "data": "path", "cluster": "preset", "cluster.device": "preset",
    "model.lora": "rank", "store": "url",
}  # fmt: skip
"""Section that may be a single word -> the key that the word sets."""
STARTS_FROM = ("model", "teacher", "cluster", "cluster.device")
"""Sections with the extra key `preset`: start from the preset and apply the other keys to it."""
INSTEAD = {"data.path": "mixture", "data.mixture": "path"}
"""Key -> the alternative key that it replaces. Setting one removes the other."""
LENGTHS = ("recipe.steps", "recipe.epochs", "recipe.tokens")
"""Keys for the length of a run. The last two are 0 when unused."""
MOVED = {"init": ("model", "init"), "teacher_init": ("teacher", "init")}
"""Field of Plan -> its section and key in a file: a ModelShape has no weights, but a model section does."""

SWITCH = {"true": "full", "false": "none"}
NAMES_ELSEWHERE: dict[str, dict[str, str]] = {
    "": {
        "model": "model_name_or_path", "teacher": "teacher_model_name_or_path teacher_model",
        "data": "dataset train_data", "run": "output_dir run_dir", "layout": "parallelism parallel",
        "recipe": "training",
    },
    "model": {
        "vocab": "vocab_size", "layers": "num_hidden_layers num_layers n_layer n_layers",
        "hidden": "hidden_size d_model n_embd dim", "heads": "num_attention_heads num_heads n_head n_heads",
        "kv_heads": "num_key_value_heads n_kv_heads num_query_groups", "ffn": "intermediate_size ffn_hidden_size d_ff",
        "max_positions": "max_position_embeddings block_size", "norm_eps": "rms_norm_eps layer_norm_epsilon",
        "window": "sliding_window", "tied": "tie_word_embeddings tie_embeddings",
    },
    "model.moe": {
        "experts": "num_experts num_local_experts n_routed_experts", "top_k": "num_experts_per_tok",
        "ffn": "moe_intermediate_size", "shared_experts": "n_shared_experts", "first_dense": "first_k_dense_replace",
        "normalize_top_k": "norm_topk_prob", "groups": "n_group", "top_groups": "topk_group",
        "routed_scale": "routed_scaling_factor",
    },
    "model.mla": {
        "q_rank": "q_lora_rank", "kv_rank": "kv_lora_rank", "nope_dim": "qk_nope_head_dim",
        "rope_dim": "qk_rope_head_dim", "v_dim": "v_head_dim",
    },
    "model.lora": {
        "rank": "r lora_r", "alpha": "lora_alpha", "dropout": "lora_dropout", "targets": "target_modules",
        "rslora": "use_rslora", "dora": "use_dora",
    },
    "model.rope_scaling": {
        "kind": "rope_type type", "original_positions": "original_max_position_embeddings",
        "low_frequency_factor": "low_freq_factor", "high_frequency_factor": "high_freq_factor",
    },
    "data": {
        "path": "dataset dataset_path train_path", "tokenizer": "tokenizer_path", "text_field": "text_column text_key",
        "validation": "validation_split val_split",
    },
    "recipe": {
        "epochs": "num_train_epochs num_epochs", "steps": "max_steps train_iters num_steps max_iters",
        "sequence": "seq_len seq_length max_seq_len sequence_length context_length",
        "global_batch": "global_batch_size", "learning_rate": "lr max_lr",
        "learning_rate_schedule": "lr_scheduler_type lr_schedule", "warmup_steps": "warmup_iters",
        "beta1": "adam_beta1", "beta2": "adam_beta2", "epsilon": "eps adam_epsilon",
        "clip": "grad_clip clip_grad max_grad_norm max_norm", "precision": "mixed_precision dtype",
        "eval_every": "eval_steps eval_interval", "checkpoint_every": "save_steps save_interval",
        "keep_last": "save_total_limit", "log_every": "logging_steps log_interval",
        "balance_loss": "aux_loss_coef router_aux_loss_coef", "objective": "loss_type pref_loss",
        "preference_beta": "dpo_beta pref_beta", "preference_smoothing": "label_smoothing dpo_label_smoothing",
        "distillation_temperature": "kd_temperature",
    },
    "layout": {
        "tp": "tp_size tensor_parallel_size tensor_parallel_degree tensor_model_parallel_size",
        "cp": "cp_size context_parallel_size context_parallel_degree",
        "pp": "pp_size pipeline_parallel_size pipeline_parallel_degree pipeline_model_parallel_size",
        "ep": "ep_size expert_parallel_size expert_parallel_degree expert_model_parallel_size",
        "dp_replicate": "dp_replicate_size data_parallel_replicate_degree",
        "dp_shard": "dp_shard_size fsdp_size data_parallel_shard_degree", "vp": "virtual_stages", "zero": "zero_stage",
        "sp": "sequence_parallel", "schedule": "pipeline_schedule pp_schedule",
        "micro_batch": "micro_batch_size per_device_train_batch_size",
        "recompute": "activation_checkpointing gradient_checkpointing recompute_activations",
        "recompute_layers": "recompute_num_layers", "compile": "torch_compile", "context_split": "zigzag",
    },
    "cluster": {
        "devices_per_node": "gpus_per_node", "nodes": "num_nodes nnodes", "device": "gpu",
    },
}  # fmt: skip
"""Section -> key -> its names in other tools."""
ALIASES = {
    section: {name: key for key, names in keys.items() for name in names.split()}
    for section, keys in NAMES_ELSEWHERE.items()
}
"""Section -> name used by other tools -> key. Aliases are read with a note."""
ALIASES["teacher"] = ALIASES["model"]
MODELS = ("model", "teacher")
"""Sections that describe a model: a preset, a folder, or sizes."""

WORDS = {
    "gradient_checkpointing": SWITCH,
    "activation_checkpointing": SWITCH,
    "recompute_activations": SWITCH,
    "torch_compile": {"true": "on", "false": "off"},
    "zigzag": {"true": "zigzag", "false": "chunks"},
    "lr_scheduler_type": {"constant_with_warmup": "constant", "warmup_stable_decay": "wsd"},
    "loss_type": {"sigmoid": "dpo"},
    "pref_loss": {"sigmoid": "dpo"},
    "mixed_precision": {"no": "fp32"},
    "dtype": {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"},
}
"""Alias -> values of the other tools -> Meshwright's values, where these differ too."""

RENAMED = {
    "recipe.min_learning_rate": "recipe.min_learning_rate_ratio",
    "recipe.schedule": "recipe.learning_rate_schedule",
}
"""Keys of earlier versions -> their names now. They are refused, since their names misled."""

NOT_A_KEY = {
    "gradient_accumulation_steps": "it follows from recipe.global_batch = layout.micro_batch x accumulation x dp",
    "accumulation": "it follows from recipe.global_batch = layout.micro_batch x accumulation x dp",
    "warmup_ratio": "give recipe.warmup_steps, a number of steps",
    "min_lr": "give recipe.min_learning_rate_ratio, the last rate as a share of recipe.learning_rate",
    "beta": "AdamW has recipe.beta1 and recipe.beta2, and preference tuning recipe.preference_beta",
    "attention_bias": "give model.qkv_bias and model.out_bias",
    "dp": "it is layout.dp_replicate (whole copies) x layout.dp_shard (ZeRO): give one of those",
    "dp_size": "it is layout.dp_replicate (whole copies) x layout.dp_shard (ZeRO): give one of those",
    "world_size": "it is the product of the degrees of layout",
    "resume": "it belongs to `meshwright train`, outside the plan",
}
"""Expected names without a key of their own -> what to do instead."""
OPTIONAL = LENGTHS[1:]
"""Lengths that are 0 when unused."""
PLAN_FILE = "plan.yaml"
"""File name of the plan in a run folder."""
DEFAULT_RUN = next(str(field.default) for field in fields(Plan) if field.name == "run")
PATH_KEYWORDS = {
    "data.path": ("stdlib",), "data.tokenizer": ("auto", "bytes"), "data.template": ("auto", *CHAT_FORMATS),
    "model.init": (RANDOM,), "teacher.init": (RANDOM,), "run": (),
}  # fmt: skip
DATA_PATHS = ("path", "tokenizer", "template")
PRESET_KEYS = ("model.preset", "teacher.preset")
"""Keys whose value is the name of a preset or a path."""
PATH_PREFIXES = {"data.path": ("hub:",), "data.tokenizer": ("bpe:",)}
"""Prefixes of values that are not paths, by key."""


@cache
def sections() -> dict[str, dict[str, Any]]:
    """Return {section: {key: type}}, read from the dataclasses. The section "" is the plan itself."""
    types: dict[str, dict[str, Any]] = {}
    _collect(Plan, "", types)
    for section in STARTS_FROM:
        types[section]["preset"] = str
    for key, (section, name) in MOVED.items():
        types[section][name] = types[""].pop(key)
    return types


def join(section: str, key: str) -> str:
    """Return the dotted name of a key."""
    return f"{section}.{key}" if section else key


def canonical_key(section: str, key: str) -> str:
    """Return the canonical name of a key: hyphens become underscores and aliases are resolved."""
    plain = key.replace("-", "_")
    if plain in sections()[section]:
        return plain
    return ALIASES.get(section, {}).get(plain, key)


def is_known(dotted: str) -> bool:
    """Return whether a dotted name, or an alias of it, is a key of a plan."""
    section, _, key = dotted.rpartition(".")
    return section in sections() and (canonical_key(section, key) in sections()[section] or dotted in sections())


def canonical_word(key: str, word: str) -> str:
    """Return the canonical word for a value written under an alias."""
    return WORDS.get(key.replace("-", "_"), {}).get(word.lower(), word)


def suggestion(section: str, key: str) -> str:
    """Explain an unknown key: its new name, why it has none, or the nearest known key."""
    plain = key.replace("-", "_").lower()
    # The surest advice first: a known renaming, a known absence, the same name elsewhere, then likeness.
    if join(section, plain) in RENAMED:
        return f"it is now {RENAMED[join(section, plain)]}"
    if plain in NOT_A_KEY:
        return NOT_A_KEY[plain]
    nearby = {name: join(section, name) for name in sections()[section]}
    nearby |= {alias: join(section, name) for alias, name in ALIASES.get(section, {}).items()}
    elsewhere = _names_by_key()
    if plain in elsewhere:
        return f"did you mean {elsewhere[plain]}?"
    close = [names[close_name] for names in (nearby, elsewhere) for close_name in find_nearest(plain, names, 1)]
    return f"the nearest known key is {close[0]}" if close else "no key is like it; `meshwright init` prints them"


@cache
def _names_by_key() -> dict[str, str]:
    """Return {key or alias: dotted name}. Among equal names, the section nearest to the top wins."""
    dotted: dict[str, str] = {}
    for section, keys in sorted(sections().items(), key=lambda entry: entry[0].count(".")):
        names = {name: name for name in keys if name != "preset"} | ALIASES.get(section, {})
        for name, key in names.items():
            dotted.setdefault(name, join(section, key))
    return dotted


def _collect(kind: Any, section: str, types: dict[str, dict[str, Any]]) -> None:
    types[section] = dict(get_type_hints(kind))
    for key, hint in types[section].items():
        part = part_of(hint)
        if part is not None:
            _collect(part, join(section, key), types)


def part_of(hint: Any) -> Any | None:
    """Return the dataclass inside a type such as `MoEShape | None` or `tuple[BatchStage, ...]`, or None."""
    inner = [arg for arg in get_args(hint) if arg not in (NoneType, Ellipsis)] if not is_dataclass(hint) else [hint]
    return inner[0] if len(inner) == 1 and is_dataclass(inner[0]) else None


def overridden_keys(override: str) -> set[str]:
    """Return the canonical dotted names of the keys that an override sets.

    `recipe.max-steps=5` and `recipe={steps: 5}` both set recipe.steps.
    """
    return set(_parse_settings(override))


def _parse_settings(override: str) -> dict[str, Any]:
    path, node = parse_override(override)
    section = ""
    for key in path:
        section = join(section, canonical_key(section, key) if section in sections() else key)
    return dict(_flatten(section, node))


def _flatten(name: str, node: Node) -> Iterator[tuple[str, Any]]:
    if not isinstance(node.value, dict):
        yield name, node.value
        return
    for key, child in node.value.items():
        yield from _flatten(join(name, canonical_key(name, key) if name in sections() else key), child)


def _lengths(override: str) -> set[str]:
    """Return the LENGTHS that an override sets. `recipe.epochs=0` sets none: it leaves the length to the others."""
    unused = {key for key, word in _parse_settings(override).items() if key in OPTIONAL and _is_zero(word)}
    return (overridden_keys(override) & set(LENGTHS)) - unused


def _is_zero(word: Any) -> bool:
    try:
        return float(word) == 0
    except (TypeError, ValueError):
        return False


def resolve_lengths(overrides: Sequence[str]) -> Sequence[str]:
    """Return the overrides plus those that reset the other LENGTHS: the last override of the length wins."""
    for override in reversed(overrides):
        if keys := _lengths(override):
            return [*overrides, *(f"{key}=0" for key in OPTIONAL if key not in keys)]
    return overrides


def note_ignored_lengths(overrides: Sequence[str]) -> Iterator[str]:
    """Yield a note for each override of the length that a later one replaces."""
    lengths = [(override, keys) for override in overrides if (keys := _lengths(override))]
    for override, keys in lengths[:-1]:
        last, taken = lengths[-1]
        if keys - taken:
            yield f"{override} is not taken: {last} says how long the run is, and comes later"


def resolve_paths(tree: Node, file: Path) -> Node:
    """Return the tree of a plan file with its relative paths rewritten for the current folder."""
    if not isinstance(tree.value, dict):
        return tree
    entries = dict(tree.value)
    # ".." and symbolic links mean what the file system says, not what the words say.
    folder = Path(os.path.realpath(file.parent))
    run = entries.get("run")
    is_named = run is not None and isinstance(run.value, str)
    origin = _find_origin(folder, run) if run is not None and is_named and file.name == PLAN_FILE else None
    base = origin or folder
    # The plan of a run may have been moved with its folder: the run is where the file is.
    if origin is not None and run is not None:
        entries["run"] = Node(_shorten(folder), run.where)
    elif run is None or is_named:
        entries["run"] = _rebase(run or Node(DEFAULT_RUN, ""), "run", base)
    for section, key in (("data", "path"), ("model", "preset"), ("teacher", "preset")):
        node = entries.get(section)
        if node is not None and isinstance(node.value, str):
            entries[section] = _rebase(node, f"{section}.{key}", base)
        elif node is not None and isinstance(node.value, dict):
            rebased = {k: _rebase_setting(v, f"{section}.{k}", base) for k, v in node.value.items()}
            entries[section] = Node(rebased, node.where)
    return Node(entries, tree.where)


def relocate_paths(document: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the document of `dump` with paths as they belong into a file in `folder`.

    A relative path stays relative when the file is in the current folder or above the path. Otherwise it becomes
    absolute.
    """
    current, folder = Path(os.path.realpath(Path.cwd())), Path(os.path.realpath(folder))
    if folder == current:
        return document

    def relocate(key: str, path: str) -> str:
        if not _is_path(key, path) or (key == "run" and path == DEFAULT_RUN):
            return path
        whole = Path(os.path.normpath(current / path))
        return _no_word(key, str(whole.relative_to(folder))) if folder in whole.parents else str(whole)

    data, model = dict(document["data"]), dict(document["model"])
    data |= {key: relocate(f"data.{key}", data[key]) for key in DATA_PATHS}
    data["mixture"] = [{**source, "path": relocate("data.path", source["path"])} for source in data["mixture"]]
    model |= {"init": relocate("model.init", model["init"])} if "init" in model else {}
    moved = {**document, "model": model, "data": data, "run": relocate("run", document["run"])}
    if "init" in (teacher := document.get("teacher") or {}):
        moved["teacher"] = {**teacher, "init": relocate("teacher.init", teacher["init"])}
    return moved


def absolute(plan: Plan) -> Plan:
    """Return the plan with absolute paths, so that equal locations compare equal."""
    return _change_paths(plan, lambda path: os.path.realpath(os.path.expanduser(path)))


def without_folders(plan: Plan) -> Plan:
    """Return the plan with only the last part of each path, for readers on other machines."""
    return _change_paths(plan, lambda path: Path(path).name or path)


def _change_paths(plan: Plan, change: Callable[[str], str]) -> Plan:
    def change_value(key: str, path: str) -> str:
        return change(path) if _is_name(key, path) else path

    paths: dict[str, Any] = {key: change_value(f"data.{key}", getattr(plan.data, key)) for key in DATA_PATHS}
    mixture = tuple(replace(source, path=change_value("data.path", source.path)) for source in plan.data.mixture)
    data = replace(plan.data, **paths, mixture=mixture)
    init, teacher = change_value("model.init", plan.init), change_value("teacher.init", plan.teacher_init)
    return replace(plan, data=data, run=change_value("run", plan.run), init=init, teacher_init=teacher)


def _shorten(path: Path) -> str:
    """Return a path relative to the current folder if it lies below it."""
    current = Path(os.path.realpath(Path.cwd()))
    return str(path.relative_to(current)) if current in path.parents else str(path)


def _rebase_setting(node: Node, key: str, base: Path) -> Node:
    """Apply `_rebase` to a value, and to the path of each source in data.mixture."""
    if key != "data.mixture" or not isinstance(node.value, list):
        return _rebase(node, key, base)
    sources = [
        Node({k: _rebase(v, f"data.{k}", base) for k, v in source.value.items()}, source.where)
        if isinstance(source.value, dict)
        else source
        for source in node.value
    ]
    return Node(sources, node.where)


def _rebase(node: Node, key: str, base: Path) -> Node:
    """Return a path of a file in `base` as it is named from the current folder. Other values stay unchanged."""
    path = node.value
    if not isinstance(path, str) or base == Path(os.path.realpath(Path.cwd())):
        return node
    if key in PRESET_KEYS:
        if not _is_folder(path, base):
            return node
        path = _shorten(Path(os.path.normpath(base / path)))
        return Node(path if "/" in path else f"./{path}", node.where)
    if not _is_path(key, path):
        return node
    return Node(_no_word(key, _shorten(Path(os.path.normpath(base / path)))), node.where)


def _no_word(key: str, path: str) -> str:
    """Prefix `./` to a path that would otherwise be read as a keyword."""
    return path if _is_name(key, path) else f"./{path}"


def _is_folder(value: str, base: Path) -> bool:
    """Return whether a model is a relative path: it looks like one, or is a folder there and no preset."""
    if not value or os.path.isabs(value) or value.startswith("~"):
        return False
    return "/" in value or value.startswith(".") or (value not in presets.model_names() and os.path.isdir(base / value))


def _is_name(key: str, setting: str) -> bool:
    """Return whether the value of a key names a file or folder."""
    return (
        key in PATH_KEYWORDS
        and bool(setting)
        and setting not in PATH_KEYWORDS[key]
        and "://" not in setting
        and not setting.startswith(PATH_PREFIXES.get(key, ("\0",)))
    )


def _is_path(key: str, value: str) -> bool:
    """Return whether the value of a key is a relative path."""
    return _is_name(key, value) and not os.path.isabs(value) and not value.startswith("~")


def _find_origin(folder: Path, run: Node) -> Path | None:
    """Return the folder to which a run's own plan refers, or None when the plan belongs to no run."""
    assert isinstance(run.value, str)
    named = os.path.normpath(run.value)
    if os.path.isabs(named) and Path(os.path.realpath(named)) == folder:
        return folder
    # A run creates its checkpoint folder before it writes its plan.
    if not (folder / "checkpoints").is_dir() and not (folder / "metrics.jsonl").is_file():
        return None
    tail = Path(named).parts
    if folder.parts[-len(tail) :] == tail:  # relative to where it was begun
        return Path(*folder.parts[: -len(tail)])
    return folder
