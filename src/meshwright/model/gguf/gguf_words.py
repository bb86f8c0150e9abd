"""How llama.cpp cuts text into words before it merges bytes: a list that is built into it, which a file names from.

A tokenizer whose rule is none of them gets the name of the nearest one, and the share of borders that agree on a sample
is said: ids are then exact only where they are given as ids.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tokenizers

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = _CONTRACTED + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST
_QWEN2 = _CONTRACTED + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASES = tuple(rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}{one}{_LOWER}{other}" for one, other in (("*", "+"), ("+", "*")))
_SLASHED = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = "|".join(_CASES) + r"|\p{N}" + _SLASHED
_GPT4O = "|".join(f"{one}{_CONTRACTED}?" for one in _CASES) + r"|\p{N}{1,3}" + _SLASHED
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"""
    r"\s*[\r\n]+|\s+(?!\S)|\s+",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WordRule:
    """One of llama.cpp's."""

    name: str
    """In the key tokenizer.ggml.pre."""
    patterns: tuple[str, ...]
    """Of words, one after the other, as a tokenizer.json spells them."""
    whole_words: bool = False
    """Whether a word that is a token is never merged from parts (`ignore_merges`)."""


RULES: Mapping[str, WordRule] = {
    one.name: one
    for one in (
        WordRule(name="gpt-2", patterns=(_GPT2,)),
        WordRule(name="llama-bpe", patterns=(_LLAMA3,), whole_words=True),
        WordRule(name="dbrx", patterns=(_LLAMA3,)),
        WordRule(name="qwen2", patterns=(_QWEN2,)),
        WordRule(name="tekken", patterns=(_TEKKEN,), whole_words=True),
        WordRule(name="gpt-4o", patterns=(_GPT4O,)),
        WordRule(name="smollm", patterns=(r"\p{N}", _GPT2)),
        WordRule(name="deepseek-v3", patterns=_DEEPSEEK3),
    )
}
ALSO: Mapping[str, str] = {
    "llama3": "llama-bpe", "llama-v3": "llama-bpe", "pixtral": "llama-bpe", "smaug-bpe": "dbrx", "phi-2": "gpt-2",
    "deepseek-r1-qwen": "qwen2", "megrez": "qwen2", "llama4": "gpt-4o", "starcoder": "smollm", "refact": "smollm",
    "command-r": "smollm", "codeshell": "smollm",
}  # fmt: skip
"""Other names of the same rules."""
SAMPLE = (
    "It's 12345 o'clock: the U.S. didn't win 3-2, they'd WE'LL see.\n\n"
    "class Reader:\n    def __init__(self, path='x.txt', *, count=1000):\n        self.path = path  # why?\n"
    "\n        if not path.exists():\n\t\traise ValueError(f\"{path!r} is'nt there\")\n        return {'a': [1, 22]}\n"
    'x += 1;\tfor(int i=0; i<10; i++) { camelCaseName(i); }\r\n<p class="a">caf\u00e9 na\u00efve \u4f60\u597d</p>\n'
)
"""Prose and code, which the share of equal borders is measured on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenRule:
    """What a file names, and how near that is."""

    name: str
    agreement: float
    """1 = the rule itself; else the share of borders between tokens that both have, on the sample."""


def patterns_of(tokenizer: Mapping[str, Any]) -> tuple[str, ...] | None:
    """The patterns of a tokenizer.json, one after the other; None where it cuts in another way, or is no byte-level
    one."""
    found, steps = [], _steps(tokenizer.get("pre_tokenizer"))
    if not any(step.get("type") == "ByteLevel" for step in steps):
        return None
    for step in steps:
        kind = step.get("type")
        if kind == "Split" and step.get("behavior") == "Isolated" and not step.get("invert"):
            found.append(str(step.get("pattern", {}).get("Regex", "")))
        elif kind == "Digits" and step.get("individual_digits"):
            found.append(r"\p{N}")
        elif kind == "ByteLevel" and not step.get("add_prefix_space"):
            found += [_GPT2] if step.get("use_regex", True) else []
        else:
            return None
    return tuple(found)


def _steps(pre_tokenizer: Any) -> list[dict[str, Any]]:
    if not isinstance(pre_tokenizer, dict):
        return []
    parts = pre_tokenizer.get("pretokenizers")
    return list(parts) if isinstance(parts, list) else [pre_tokenizer]


def split_by(rule: WordRule) -> dict[str, Any]:
    """The pre-tokenizer of a tokenizer.json that cuts by a rule."""
    splits: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in rule.patterns
    ]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [*splits, level]}


def choose_rule(tokenizer: Mapping[str, Any]) -> ChosenRule:
    """The rule of a byte-level tokenizer.json, or the nearest one."""
    model = tokenizer["model"]
    patterns, whole = patterns_of(tokenizer), bool(model.get("ignore_merges"))
    if not model["merges"]:
        return ChosenRule(name="gpt-2", agreement=1.0)  # bytes are never merged, whatever the words are
    for rule in RULES.values():
        if (rule.patterns, rule.whole_words) == (patterns, whole):
            return ChosenRule(name=rule.name, agreement=1.0)
    own = _borders(tokenizer)
    shares = {
        rule.name: _share(own, _borders({**tokenizer, "pre_tokenizer": split_by(rule)}))
        for rule in RULES.values()
        if rule.whole_words == whole
    }
    best = max(shares, key=lambda name: shares[name])
    return ChosenRule(name=best, agreement=min(shares[best], 1 - 1e-6))


def _borders(tokenizer: Mapping[str, Any]) -> set[int]:
    """Where tokens of the sample end."""
    found = tokenizers.Tokenizer.from_str(json.dumps(tokenizer)).encode(SAMPLE, add_special_tokens=False)
    return {end for _, end in found.offsets}


def _share(one: set[int], other: set[int]) -> float:
    return len(one & other) / max(1, len(one | other))
