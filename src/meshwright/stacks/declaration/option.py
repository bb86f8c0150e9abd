"""One option of a training software: its name, the fact of a plan that it states, its words, its meaning.

Files are written and read by this one table, so that both cannot disagree.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any, Literal

from meshwright.spec.errors import PlanError
from meshwright.stacks.text.option_text import Called, Entry, Setting

Facts = dict[str, Any]
"""What a plan says, by name: degrees, sizes, batch (declaration/plan_facts.py), and what one software calls its own."""
COUNTED = frozenset({
    "accumulation", "cp", "cp_size", "devices", "dp", "dp_replicate", "dp_shard", "ep", "expert_tp", "ffn",
    "global_batch", "head_dim", "heads", "hidden", "key_heads", "kv_heads", "layers", "local_batch", "lora_rank",
    "max_positions",
    "micro_batch", "mla_kv_rank", "mla_nope_dim", "mla_q_rank", "mla_rope_dim", "mla_v_dim", "moe_experts", "moe_ffn",
    "moe_groups", "moe_shared_width", "moe_top_groups", "moe_top_k", "nodes", "pipeline_micro_batch", "pipeline_times",
    "pp", "recompute_number", "replicas", "round", "sequence", "shards", "stage_depth", "stage_layers",
    "stages_of_rank", "rank_tokens", "step_tokens", "tp", "tp_size", "vocab", "vp", "zero", "zero_stage",
})  # fmt: skip
"""Facts that are whole numbers; -1, `auto` and nothing leave one to the software."""
MEASURED = frozenset({"moe_routed_scale", "norm_eps", "per_device", "rope_theta", "rotary_base", "stretch"})
"""Facts that are numbers."""
ASKED = frozenset({
    "accumulation", "devices", "global_batch", "local_batch", "micro_batch", "nodes", "sequence",
    "steps",
})  # fmt: skip
"""Facts that a user may give beside a file."""
OUTSIDE = "$"
"""Begins a value that a script takes from outside: a variable that it does not set, or an argument."""
Form = Literal["yaml", "json", "toml", "shell", "python"]


def _said(value: Any) -> str:
    """As text, whatever its case; a name or a call in Python as it stands there."""
    return (value.name if isinstance(value, Called) else str(value)).lower().removesuffix("()")


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """An option of a file."""

    key: str
    """As the software writes it, dotted where files nest; `--tp` in a shell."""
    fact: str
    """The fact that it states."""
    meaning: str
    """For people, in a few words."""
    words: Mapping[Any, Any] | None = None
    """Value of the fact -> the software's; None = the same."""
    default: Any = None
    """The software's value where the option is left out; None = then it says nothing."""
    also: tuple[str, ...] = ()
    """Other names of it that are read: of other versions."""
    quiet: bool = False
    """Not written where it is the default."""

    def setting(self, facts: Facts) -> Setting | None:
        """As it is written; None where there is nothing to say."""
        if self.fact not in facts or facts[self.fact] is None:
            return None
        value = facts[self.fact]
        value = value if self.words is None else self.words[value]
        if value is None or (self.quiet and value == self.default):
            return None
        return Setting(key=self.key, value=value, meaning=self.meaning)

    def value(self, entry: Entry) -> Any:
        """The fact's value; PlanError with the words that there are, or where a count is no whole number."""
        if self.words is None:
            return self._number(entry) if self.fact in COUNTED | MEASURED else entry.value
        for fact, word in self.words.items():
            if word == entry.value and type(word) is type(entry.value):
                return fact
        for fact, word in self.words.items():
            if _said(word) == _said(entry.value):
                return fact
        known = ", ".join(getattr(word, "name", str(word)) for word in self.words.values() if word is not None)
        raise PlanError(f"line {entry.line}: {self.key}={_said(entry.value)} is not understood: take one of {known}")

    def _number(self, entry: Entry) -> Any:
        value, whole = entry.value, self.fact in COUNTED
        if isinstance(value, Called) and value.name.isidentifier():
            value = f"{OUTSIDE}{value.name}"  # an argument of the function that makes the configuration
        if value in (None, "auto"):
            return None
        if str(value).startswith(OUTSIDE):
            if self.fact in ASKED:
                return value
            raise PlanError(f"line {entry.line}: {self.key}={value} is set outside the file, and decides the answer")
        number = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
        if number and (not whole or value == int(value)):
            return int(value) if whole else value
        raise PlanError(f"line {entry.line}: {self.key}={_said(value)} must be a {'whole ' if whole else ''}number")


@dataclass(frozen=True, slots=True, kw_only=True)
class UncountedOption:
    """An option that changes memory or time, and is counted with one value only."""

    key: str
    counted: Any
    """With this value."""
    absent: Any
    """What the software takes where the option is left out."""
    effect: str
    """What another value does: the end of a sentence that begins with the option."""

    def note(self, value: Any) -> str:
        """A sentence about a file that has this value; empty where it is the one that is counted."""
        if value == self.counted or str(value).lower() == str(self.counted).lower():
            return ""
        return f"{self.key}={str(value).lower()} {self.effect}: not counted."


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFile:
    """A file of options that a software reads."""

    name: str
    """As it is written."""
    form: Form
    options: tuple[Option, ...]
    fixed: Mapping[str, tuple[Any, str]] = None  # type: ignore[assignment]  # an empty mapping cannot be a default
    """Key -> (value, meaning): written always, and right for every plan."""
    ignored: tuple[str, ...] = ()
    """Keys that change neither memory nor time; a trailing * stands for any rest."""
    refused: Mapping[str, str] = None  # type: ignore[assignment]  # the same
    """Keys that matter and are not counted, with what they do: refused where they are on."""
    bounded: Mapping[str, str] = None  # type: ignore[assignment]  # the same
    """Keys that save memory or time, with what they do: named where they are on, and the figures are a bound."""
    unread: tuple[UncountedOption, ...] = ()
    """Named in the answer where they have another value than is counted."""
    marks: tuple[str, ...] = ()
    """Keys one of which stands in every such file, beside keys that others have too; none = no such key."""
    title: str = ""
    """What the file is, for its first line."""
    head: Callable[[Facts], str] | None = None
    """Python: what stands above its statements."""
    tail: str = ""
    """And below them."""

    def __post_init__(self) -> None:
        for field in ("fixed", "refused", "bounded"):
            if getattr(self, field) is None:
                object.__setattr__(self, field, {})

    def option(self, key: str) -> Option | None:
        """The option of this name."""
        return next((one for one in self.options if key == one.key or key in one.also), None)

    def ignores(self, key: str) -> bool:
        """Whether this key is known not to matter."""
        return any(key == one or (one.endswith("*") and key.startswith(one[:-1])) for one in self.ignored)

    def knows(self, key: str) -> bool:
        """Whether it is in any list."""
        named = key in self.fixed or key in self.refused or key in self.bounded
        return named or self.option(key) is not None or self.ignores(key)

    def settings(self, facts: Facts) -> list[Setting]:
        """All that is written for a plan."""
        said = [one.setting(facts) for one in self.options]
        fixed = [Setting(key=key, value=value, meaning=meaning) for key, (value, meaning) in self.fixed.items()]
        return [one for one in said if one] + fixed


def as_shell(file: ConfigFile) -> ConfigFile:
    """The same options as arguments of a command: `key: value` of a YAML is `--key value`."""

    def flags(keys: Mapping[str, Any]) -> dict[str, Any]:
        return {f"--{key}": value for key, value in keys.items()}

    options = (replace(one, key=f"--{one.key}", also=tuple(f"--{key}" for key in one.also)) for one in file.options)
    return replace(
        file, form="shell", options=tuple(options), marks=tuple(f"--{key}" for key in file.marks), fixed={},
        ignored=tuple(f"--{key}" for key in file.ignored),
        refused=flags(file.refused), bounded=flags(file.bounded),
        unread=tuple(replace(one, key=f"--{one.key}") for one in file.unread),
    )  # fmt: skip
