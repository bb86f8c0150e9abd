"""Words, keywords and plans as one Plan: all that a command line or a call in Python may give.

Also amounts as people write them (15T tokens, 30 days), and the defaults of `tune` and `plan --tune`.
"""

import json
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import asdict, is_dataclass, replace
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any

from meshwright import planfile
from meshwright.planfile.reading import MUST_SAY, FolderModel
from meshwright.spec import Plan, presets
from meshwright.spec.errors import ArgumentError, HubError, PlanError, argument
from meshwright.spec.hub_names import looks_like_hub_name
from meshwright.spec.model.shape import ModelShape

TEXTS = (".jsonl", ".parquet", ".txt")
"""Endings of files of training text. A plan is YAML, which includes .json."""
Section = str | Sequence[str] | Mapping[str, Any] | None
"""Part of a plan: `sequence=4096,precision=bf16`, such words one by one, or {"sequence": 4096}."""
SCALES = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
"""Letters behind a number of tokens."""
SECONDS_OF_UNIT = {"d": 86_400.0, "h": 3600.0, "min": 60.0, "w": 604_800.0}
MOST_S = 1e10
"""Longest time that is accepted, some 300 years."""
MODEL_KEYS = ("model", "teacher")
"""Keys of a plan that may name a folder of weights."""
SAMPLES_WORD = "data.form=samples"
TUNED_RANK = 16
"""Rank of adapters."""
QLORA_BASE = "nf4-double"
"""Format of frozen matrices when `plan` is asked for qlora (arXiv:2305.14314)."""
TUNING_DEFAULTS: Mapping[str, str] = {
    "recipe.epochs": "3",
    "recipe.sequence": "1024",
    "recipe.global_batch": "16",
    "recipe.learning_rate": "2e-5",
    "recipe.weight_decay": "0",
}
"""Defaults for all weights. TRL's SFTConfig has the same, except for a batch of 8 and a linear decay to 0."""
ADAPTER_FACTOR = 10
"""Factor on learning rates when only adapters are trained (Thinking Machines 2025, "LoRA Without Regret")."""
PREFERENCE_DEFAULTS: Mapping[str, str] = {
    **TUNING_DEFAULTS,
    "recipe.objective": "dpo",
    "recipe.epochs": "1",
    "recipe.sequence": "2048",
    "recipe.learning_rate": "1e-6",
}
"""Defaults for files of chosen and rejected answers, two of which share a row. TRL's DPOConfig has this rate."""
OBJECTIVE_RATES = {"orpo": "8e-6"}
"""Learning rates of objectives with one of their own (arXiv:2403.07691, appendix C)."""
SHARDED_DEFAULTS: Mapping[str, str] = {"layout.dp_shard": "auto", "layout.zero": "1"}
"""Defaults on several processes without a given layout. Each reads other rows, and they share the optimizer's states.

That sends as much as if each held all states.
"""
REPLACED_BY = {"recipe.epochs": ("recipe.steps", "recipe.tokens")}
"""Default -> keys that replace it."""


def read_plan(
    words: Sequence[Any], keys: Mapping[str, Any], *, processes: int | None = 1, notes: list[str] | None = None
) -> tuple[Plan, str]:
    """Return (plan, resume) of a plan file or a plan, changed by KEY=VALUE words and then by keywords.

    A keyword is a key of a plan file: run="runs/a", recipe={"steps": 5}. `processes`: number that a degree `auto`
    divides, None = the devices of the plan's cluster. `notes` take what was read under another tool's name, None =
    warnings do. Raises PlanError, as on the command line.
    """
    for key in MUST_SAY:
        if isinstance(keys.get(key), Real):
            raise ArgumentError(key, keys[key], "must be text or a path")
    sorted_words = [(word, plan_of(word)) for word in words]
    path, overrides, resume = sort_words([str(word) for word, plan in sorted_words if plan is None])
    _download([*overrides, *(word for key in MODEL_KEYS if key in keys for word in words_of(key, keys[key]))])
    plans = [plan for _, plan in sorted_words if plan is not None]
    if len(plans) > 1 or (plans and path is not None):
        raise PlanError("two plans: give one, and changes as KEY=VALUE")
    # In this order later words win: the plan first, then overrides, then keywords.
    base = base_words(plans[0]) if plans else []
    changes = [*base, *overrides, *(word for key, value in keys.items() for word in words_of(key, value))]

    def read(number: int) -> Plan:
        return planfile.read(path, changes, read_folder=read_folder, notes=notes, processes=number)

    if processes is not None:
        return read(processes), resume
    # The cluster may come from the file itself, so a degree `auto` is known only after a first reading.
    plan = read(1)
    return (read(plan.cluster.devices) if plan.cluster.devices > 1 else plan), resume


def is_hub_name(model: str) -> bool:
    """Return if this is `ORG/NAME`, and neither an existing path nor a preset."""
    if not looks_like_hub_name(model) or Path(model).exists():
        return False
    try:
        presets.published(model)
    except PlanError:
        return True
    return False


def _download(words: Sequence[str]) -> None:
    """Bring models of the hub that words name into its cache, where the plan is read from. Raises ArgumentError."""
    for key, _, name in (word.partition("=") for word in words):
        if key in MODEL_KEYS and is_hub_name(name):
            from meshwright.formats.hub.download import local_folder

            local_folder(name)


def sort_words(words: Sequence[str]) -> tuple[Path | None, list[str], str]:
    """Return (plan file, KEY=VALUE overrides, resume) from the words of a command line, in any order."""
    files = [word for word in words if "=" not in word]
    pairs = [word for word in words if "=" in word]
    if texts := [file for file in files if Path(file).suffix in TEXTS]:
        raise PlanError(f"{texts[0]} is not a plan: give text and conversations as {argument('data', texts[0])}")
    if len(files) > 1:
        raise PlanError(f"two plan files, {files[0]} and {files[1]}: give one, and changes as KEY=VALUE")
    resume = [pair.partition("=")[2] for pair in pairs if pair.startswith("resume=")]
    overrides = [pair for pair in pairs if not pair.startswith("resume=")]
    if resume and not resume[-1]:
        raise PlanError("resume= is empty: give resume=auto, resume=no or the path of a checkpoint")
    return (Path(files[0]) if files else None), overrides, resume[-1] if resume else "no"


def read_folder(folder: Path) -> FolderModel:
    """Read a Hugging Face directory or a run.

    Raises HubError or PlanError for a folder that is neither, that is damaged, or that cannot be trained, except for
    models that can only be planned.
    """
    from meshwright.formats.hub.config import CONFIG, read_config
    from meshwright.formats.quantized.detection import quantization
    from meshwright.store.run_folder import RunFolder

    # Cheapest first: only a folder of quantized weights needs torch.
    if (folder / "plan.yaml").is_file():
        return FolderModel(shape=RunFolder.open(folder).plan.model.base)
    if planned := _planned(folder / "config.json", folder.resolve().name, strictly=False):
        return FolderModel(shape=planned)
    if (folder / CONFIG).is_file() and not quantization(folder):
        return FolderModel(shape=read_config(folder)[1])
    from meshwright.store.model_weights import open_weights  # imports torch, which the reader of codes needs

    opened = open_weights(folder)
    return FolderModel(shape=opened.hub.shape, codes=opened.base, refusal=opened.refusal)


def read_to_plan(config: Path, name: str) -> Callable[[Path], FolderModel]:
    """Return a reader like `read_folder` that reads this config strictly, and calls the model `name`.

    Strictly, since an unknown key could change the answer.
    """

    def read(folder: Path) -> FolderModel:
        if folder != config.parent or not config.is_file():
            return read_folder(folder)
        shape = _planned(config, name, strictly=True)
        folder_model = FolderModel(shape=shape) if shape and shape.plan_only else None
        if folder_model is None and config.name == "config.json" and not (folder / "plan.yaml").is_file():
            folder_model = read_folder(folder)
        assert shape is not None
        return replace(folder_model or FolderModel(shape=shape), shape=replace(shape, name=name))

    return read


def _planned(config: Path, name: str, *, strictly: bool) -> ModelShape | None:
    """Return the shape, or None if the engine trains the family and nothing has to be read strictly."""
    from meshwright.formats.hub.config import QUANTIZATION, read_json
    from meshwright.formats.hub.planned_families import is_planned, planned_shape

    config_entries = read_json(config)
    if config_entries is None or not (strictly or is_planned(config_entries)):
        return None
    if config.name == "config.json":  # the reader of the folder checks its codes
        config_entries = {key: value for key, value in config_entries.items() if key != QUANTIZATION}
    try:
        return replace(planned_shape(config_entries), name=name)
    except HubError as error:
        raise HubError(str(error).replace("config.json", str(config), 1)) from error


def words_of(key: str, setting: Any) -> list[str]:
    """Return the KEY=VALUE words of a keyword. A mapping or a dataclass gives a word per key, at any depth."""
    if is_dataclass(setting) and not isinstance(setting, type):
        setting = asdict(setting)
    if isinstance(setting, Mapping):
        return [word for name, entry in setting.items() for word in words_of(f"{key}.{name}", entry)]
    if isinstance(setting, bool):
        return [f"{key}={str(setting).lower()}"]
    # A list is one setting, and KEY=VALUE has no other way to write it than JSON, which is YAML.
    if isinstance(setting, list | tuple):
        return [f"{key}={json.dumps(setting, default=asdict)}"]
    return [f"{key}={'' if setting is None else setting}"]


def section_words(section: Any) -> list[str]:
    """Return the KEY=VALUE words of a part of a plan, without the name of the part."""
    if section is None:
        return []
    if isinstance(section, str):
        return [section]
    if isinstance(section, Mapping) or is_dataclass(section):
        return [word.removeprefix("x.") for word in words_of("x", section)]
    return [str(word) for word in section]


def plan_of(word: Any) -> Plan | None:
    """Return the plan that a word is, or is an answer about. None = neither."""
    candidate = word if isinstance(word, Plan) else getattr(word, "plan", None)
    return candidate if isinstance(candidate, Plan) else None


def base_words(plan: Plan) -> list[str]:
    """Return the words that rebuild a plan, one per section."""
    sections = planfile.dump(plan)
    write = partial(json.dumps, ensure_ascii=False)
    return [f"{key}={write(setting) if isinstance(setting, dict) else setting}" for key, setting in sections.items()]


def tokens_of(amount: str | float | None, name: str = "tokens") -> float:
    """Return the number of 15T, 300B or a plain number; None gives 0. Raises ArgumentError for anything else."""
    if amount is None:
        return 0.0
    text = str(amount)
    scale = SCALES.get(text[-1:].upper(), 1.0)
    try:
        number = float(text[:-1] if scale > 1 else text) * scale
    except ValueError:
        number = -1.0
    if not 1 <= number < 1e18:
        raise ArgumentError(name, amount, "must be a number of 1 or more and below 10**18, as 15T or 300B")
    return number


def tokens_word(tokens: float) -> str:
    """Return the shortest word that `tokens_of` reads as this number: 1T, 1.5B, 1234567."""
    # 17 digits reproduce every double, so at least the plain number reads back as the same.
    words = [f"{tokens:.17g}", *(f"{tokens / scale:.9g}{letter}" for letter, scale in SCALES.items())]
    return min((word for word in words if float(word.rstrip("KMBT")) >= 0.1 and tokens_of(word) == tokens), key=len)


def seconds_of(amount: str | float | None, name: str = "deadline") -> float:
    """Return the seconds of 30d, 2w, 12h, 90min, or a number of days; None gives infinity.

    Raises ArgumentError for anything else.
    """
    if amount is None:
        return float("inf")
    text = str(amount).strip().lower()
    unit = next((unit for unit in sorted(SECONDS_OF_UNIT, key=len, reverse=True) if text.endswith(unit)), "")
    try:
        number = float(text.removesuffix(unit)) * SECONDS_OF_UNIT[unit or "d"]
    except ValueError:
        number = -1.0
    if not 0 < number < MOST_S:
        raise ArgumentError(name, amount, "must be a time above 0, as 30d, 2w, 12h or 90min")
    return number


def defaults_of(defaults: Mapping[str, str], keys: Container[str]) -> dict[str, str]:
    """Return the defaults for which nothing is given."""
    taken = {key: value for key, value in defaults.items() if key not in keys}
    return {key: value for key, value in taken.items() if not any(other in keys for other in REPLACED_BY.get(key, ()))}


def rate_of_adapters(rate: str) -> str:
    """Return the learning rate of adapters, for that of all weights."""
    return f"{ADAPTER_FACTOR * float(rate):g}"
