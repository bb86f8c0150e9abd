"""Options of a training software: the key, the fact of a plan that it states, its words and its meaning.

Entries are options as read from a file, settings as written to it.

One table serves for writing and reading, so the two cannot disagree.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any, Literal

from meshwright.spec.errors import PlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Option that was read."""

    key: str
    """Key, dotted where files nest."""
    value: Any
    line: int
    """Line number from 1. 0 = unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Option to write, with its meaning next to it."""

    key: str
    value: Any
    meaning: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Called:
    """Name or call as the value of an option in Python: `SelectiveAC.Config()`."""

    name: str


def nest(settings: Iterable[Setting]) -> dict[str, Any]:
    """Return dotted keys as nested mappings in their order, with each setting at its last name."""
    tree: dict[str, Any] = {}
    for setting in settings:
        *folders, last = setting.key.split(".")
        branch = tree
        for name in folders:
            branch = branch.setdefault(name, {})
        branch[last] = setting
    return tree


def flatten(value: Any, key: str = "") -> Iterable[tuple[str, Any]]:
    """Yield (dotted key, value) of everything that is not a mapping with entries."""
    # An empty mapping is a value: it may switch an option off.
    if isinstance(value, Mapping) and (value or not key):
        for name, inner in value.items():
            yield from flatten(inner, f"{key}.{name}" if key else str(name))
    else:
        yield key, value


Facts = dict[str, Any]
"""Facts of a plan by name: degrees, sizes and batch (declaration/plan_facts.py), and facts of a single software."""
COUNTED = frozenset({
    "accumulation", "cp", "cp_size", "devices", "dp", "dp_replicate", "dp_shard", "ep", "expert_tp", "ffn",
    "global_batch", "head_dim", "heads", "hidden", "key_heads", "kv_heads", "layers", "local_batch", "lora_rank",
    "max_positions",
    "micro_batch", "mla_kv_rank", "mla_nope_dim", "mla_q_rank", "mla_rope_dim", "mla_v_dim", "moe_experts", "moe_ffn",
    "moe_groups", "moe_shared_width", "moe_top_groups", "moe_top_k", "nodes", "pipeline_micro_batch", "pipeline_times",
    "pp", "recompute_number", "replicas", "round", "sequence", "shards", "stage_depth", "stage_layers",
    "stages_of_rank", "rank_tokens", "step_tokens", "tp", "tp_size", "vocab", "vp", "zero", "zero_stage",
})  # fmt: skip
"""Facts that are whole numbers. With -1, `auto` or nothing the software chooses."""
MEASURED = frozenset({"moe_routed_scale", "norm_eps", "per_device", "rope_theta", "rotary_base", "stretch"})
"""Facts that are real numbers."""
ASKED = frozenset({
    "accumulation", "devices", "global_batch", "local_batch", "micro_batch", "nodes", "sequence",
    "steps",
})  # fmt: skip
"""Facts that the user may pass in addition to a file."""
OUTSIDE = "$"
"""First character of a value that a script takes from outside: an argument, or a variable that it does not set."""
Form = Literal["yaml", "json", "toml", "shell", "python"]


def _lower_text(value: Any) -> str:
    return (value.name if isinstance(value, Called) else str(value)).lower().removesuffix("()")


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """Option of a configuration file or a command line."""

    key: str
    """Key as the software writes it, dotted where files nest, or `--tp` in a shell."""
    fact: str
    """Fact that the option states."""
    meaning: str
    """Short explanation for people."""
    words: Mapping[Any, Any] | None = None
    """Word of the software for each value of the fact. None = the fact's own values."""
    default: Any = None
    """Value that the software takes if the option is absent. None = unknown."""
    also: tuple[str, ...] = ()
    """Other keys that are read, as older or newer versions write it."""
    quiet: bool = False
    """Omitted from files while it has its default."""

    def setting(self, facts: Facts) -> Setting | None:
        """Return the line to write, or None if there is nothing to write."""
        if self.fact not in facts or facts[self.fact] is None:
            return None
        stated = facts[self.fact]
        stated = stated if self.words is None else self.words[stated]
        if stated is None or (self.quiet and stated == self.default):
            return None
        return Setting(key=self.key, value=stated, meaning=self.meaning)

    def read(self, entry: Entry) -> Any:
        """Return the value of the fact. Raises PlanError for an unknown word, or a count that is not a whole number."""
        if self.words is None:
            return self._number(entry) if self.fact in COUNTED | MEASURED else entry.value
        # First with the type, since 1 == True in Python, then by the text alone.
        for fact, word in self.words.items():
            if word == entry.value and type(word) is type(entry.value):
                return fact
        for fact, word in self.words.items():
            if _lower_text(word) == _lower_text(entry.value):
                return fact
        choices = ", ".join(getattr(word, "name", str(word)) for word in self.words.values() if word is not None)
        raise PlanError(
            f"line {entry.line}: {self.key}={_lower_text(entry.value)} is not understood: take one of {choices}"
        )

    def _number(self, entry: Entry) -> Any:
        stated, is_count = entry.value, self.fact in COUNTED
        if isinstance(stated, Called) and stated.name.isidentifier():
            stated = f"{OUTSIDE}{stated.name}"  # an argument of the function that makes the configuration
        # The trainer chooses: the fact stays open, and common rules fill it in.
        if stated in (None, "auto"):
            return None
        if str(stated).startswith(OUTSIDE):
            if self.fact in ASKED:
                return stated
            raise PlanError(f"line {entry.line}: {self.key}={stated} is set outside the file, and decides the answer")
        # A boolean is an int in Python, and `layers: true` must not mean one layer.
        number = isinstance(stated, int | float) and not isinstance(stated, bool) and isfinite(stated)
        # Files write whole numbers as 8.0 or 1e3 as well.
        if number and (not is_count or stated == int(stated)):
            return int(stated) if is_count else stated
        raise PlanError(
            f"line {entry.line}: {self.key}={_lower_text(stated)} must be a {'whole ' if is_count else ''}number"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class UncountedOption:
    """Option that changes memory or time and is counted for a single value only."""

    key: str
    counted: Any
    """Value that is counted."""
    absent: Any
    """Value that the software takes if the option is absent."""
    effect: str
    """Effect of any other value: the end of a sentence that begins with the option."""

    def note(self, value: Any) -> str:
        """Return a sentence about a file with this value, or an empty string for the counted value."""
        # The same value is a boolean in YAML and a word in a shell script.
        if value == self.counted or str(value).lower() == str(self.counted).lower():
            return ""
        return f"{self.key}={str(value).lower()} {self.effect}: not counted."


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFile:
    """Configuration file or command line that a software reads."""

    name: str
    """File name under which it is written."""
    form: Form
    options: tuple[Option, ...]
    fixed: Mapping[str, tuple[Any, str]] = None  # type: ignore[assignment]  # an empty mapping cannot be a default
    """Key -> (value, meaning) that is always written and right for every plan."""
    ignored: tuple[str, ...] = ()
    """Keys that change neither memory nor time. A trailing * stands for any ending."""
    refused: Mapping[str, str] = None  # type: ignore[assignment]  # the same
    """Keys that matter but are not counted, with their effect: refused when they are on."""
    bounded: Mapping[str, str] = None  # type: ignore[assignment]  # the same
    """Keys that save memory or time uncounted, with their effect.

    When one is on, it is named and the figures are a bound.
    """
    unread: tuple[UncountedOption, ...] = ()
    """Options that are named in the answer unless they have their counted value."""
    marks: tuple[str, ...] = ()
    """Keys of which every such file has at least one.

    They tell it from files with similar keys. Empty = no such key.
    """
    title: str = ""
    """Description of the file for its first line."""
    head: Callable[[Facts], str] | None = None
    """Text above the statements of a Python file."""
    tail: str = ""
    """Text below them."""

    def __post_init__(self) -> None:
        for field in ("fixed", "refused", "bounded"):
            if getattr(self, field) is None:
                object.__setattr__(self, field, {})

    def option(self, key: str) -> Option | None:
        """Return the option with this key, or None."""
        return next((option for option in self.options if key == option.key or key in option.also), None)

    def ignores(self, key: str) -> bool:
        """Return True if the key is known not to matter."""
        return any(
            key == pattern or (pattern.endswith("*") and key.startswith(pattern[:-1])) for pattern in self.ignored
        )

    def knows(self, key: str) -> bool:
        """Return True if the key is in any list of the file."""
        is_listed = key in self.fixed or key in self.refused or key in self.bounded
        return is_listed or self.option(key) is not None or self.ignores(key)

    def settings(self, facts: Facts) -> list[Setting]:
        """Return all lines to write for a plan."""
        settings = [setting for option in self.options if (setting := option.setting(facts))]
        fixed = [Setting(key=key, value=value, meaning=meaning) for key, (value, meaning) in self.fixed.items()]
        return settings + fixed


def as_shell(file: ConfigFile) -> ConfigFile:
    """Return the same options as arguments of a command: `key: value` of YAML becomes `--key value`."""

    def flags(keys: Mapping[str, Any]) -> dict[str, Any]:
        return {f"--{key}": value for key, value in keys.items()}

    options = (
        replace(option, key=f"--{option.key}", also=tuple(f"--{key}" for key in option.also)) for option in file.options
    )
    return replace(
        # Fixed values are for written files, and files of this form are only read.
        file, form="shell", options=tuple(options), marks=tuple(f"--{key}" for key in file.marks), fixed={},
        ignored=tuple(f"--{key}" for key in file.ignored),
        refused=flags(file.refused), bounded=flags(file.bounded),
        unread=tuple(replace(option, key=f"--{option.key}") for option in file.unread),
    )  # fmt: skip
