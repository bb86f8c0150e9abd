"""FLOP counts of each source behind its MFU and TFLOP/s, for recomputing its figures from tokens/s.

Published MFU of the same run differs by up to a fifth between sources: with or without the head, all keys or only those
a query may see, recomputation counted or not. The formulas are in docs/accuracy.md. N = all parameters, V = vocabulary,
D = hidden, L = layers, S = sequence.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

from meshwright.planner.accuracy.published_run import number, plan_of
from meshwright.spec.model.shape import ModelShape
from meshwright.spec.plan.plan import Plan
from meshwright.spec.weights.inventory import num_active_parameters

Count = Callable[[ModelShape, int], float]
"""FLOP of a token, from shape and sequence."""
BAR = 0.005
"""A figure agrees within this share, plus rounding in print."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Convention:
    """The formulas of a source."""

    name: str
    formula: str
    training: Count
    """FLOP of forward and backward pass, behind its MFU or TFLOP/s, unless `hardware_rate`."""
    hardware: Count | None = None
    """FLOP with recomputation, behind its HFU."""
    hardware_rate: bool = False
    """True if the TFLOP/s it prints are those of `hardware`."""
    other_tflops: bool = False
    """True if the TFLOP/s it prints follow a third formula, which is not recomputed here."""
    ends_twice: bool = False
    """True if N counts a tied embedding twice under a pipeline, once on each end (inferred from the rows)."""

    def step_s(self, plan: Plan, columns: dict[str, str]) -> float:
        """Return the seconds of a step from the printed TFLOP/s or MFU. 0 = neither is printed."""
        rate = number(columns, "tflops_gpu", 0.0) * 1e12
        if not rate:
            rate = number(columns, "mfu_pct", 0.0) / 100 * peak_flop_per_s(columns)
            count = self.training_flop(plan)
        else:
            count = self.hardware_flop(plan) if self.hardware_rate else self.training_flop(plan)
        tokens = plan.recipe.global_batch * plan.recipe.sequence
        return tokens * count / (rate * plan.layout.world) if rate else 0.0

    def training_flop(self, plan: Plan) -> float:
        """Return the FLOP of a token behind its MFU."""
        shape = plan.model
        twice = self.ends_twice and shape.tied and plan.layout.pp > 1
        return self.training(shape, plan.recipe.sequence) + (6.0 * shape.vocab * shape.hidden if twice else 0.0)

    def hardware_flop(self, plan: Plan) -> float:
        """Return the FLOP of a token behind its HFU, with recomputation if the run recomputes."""
        if self.hardware is None or plan.layout.recompute == "none":
            return self.training_flop(plan)
        return self.hardware(plan.model, plan.recipe.sequence)


def _keys(shape: ModelShape, sequence: int, share: float = 1.0) -> float:
    """Return 12 L D S, every query with every key, or a share of it."""
    widths = shape.mla.nope_dim + shape.mla.rope_dim + shape.mla.v_dim if shape.mla else 2 * shape.head_dim
    return 6.0 * shape.layers * shape.heads * widths * sequence * share


@cache
def _weights(shape: ModelShape) -> float:
    return float(num_active_parameters(shape))


def _palm(shape: ModelShape, sequence: int, times: float = 6, keys: float = 1.0) -> float:
    return times * _weights(shape) + _keys(shape, sequence, keys)


def _products(shape: ModelShape, sequence: int, keys: float = 1.0) -> float:
    """Count without the input embedding: the head is counted once."""
    untied = _weights(shape) - (0 if shape.tied else shape.vocab * shape.hidden)
    return 6 * untied + _keys(shape, sequence, keys)


def _megatron(shape: ModelShape, sequence: int, layers: float = 72) -> float:
    """Return Narayanan's and Korthikanti's forms for a GPT whose MLP is four times its width."""
    wide = shape.layers * shape.hidden**2
    return layers * wide * (1 + sequence / (6 * shape.hidden)) + 6 * shape.vocab * shape.hidden


def _megatron_selective(shape: ModelShape, sequence: int) -> float:
    return _megatron(shape, sequence) + _keys(shape, sequence)


NANOTRON = Convention(name="nanotron", formula="6 N + 12 L D S", training=_palm, ends_twice=True)
ALEPH = Convention(name="Aleph Alpha", formula="6 N + 12 L D S", training=_palm, other_tflops=True)
FOUNDRY = Convention(
    name="llm-foundry", formula="6 N + 12 L D S; HFU 8 N + 16 L D S", training=_palm,
    hardware=partial(_palm, times=8, keys=4 / 3),
)  # fmt: skip
FMS = Convention(name="fms-fsdp", formula="6 N + 12 L D S", training=_palm)
TITAN = Convention(name="torchtitan", formula="6 (N - V D) + 12 L D S", training=_products)
NEMO = Convention(name="NeMo 24.07", formula="6 (N - V D) + 12 L D S", training=_products)
README = Convention(name="Megatron-LM llama README", formula="6 (N - V D) + 12 L D S", training=_products)
BRIDGE = Convention(name="Megatron-Bridge", formula="6 (N - V D) + 6 L D S", training=partial(_products, keys=0.5))
NARAYANAN = Convention(
    name="Megatron 2021", formula="96 L D^2 (1 + S / 6D + V / 16LD)", training=_megatron,
    hardware=partial(_megatron, layers=96), hardware_rate=True,
)  # fmt: skip
KORTHIKANTI = Convention(
    name="Korthikanti 2022", formula="72 L D^2 (1 + S / 6D + V / 12LD); HFU + 12 L D S", training=_megatron,
    hardware=_megatron_selective,
)  # fmt: skip
MEGATRON_CORE = Convention(name="Megatron-Core 0.8", formula="72 L D^2 (1 + S / 6D + V / 12LD)", training=_megatron)
LLAMA3 = Convention(
    name="Llama 3", formula="6 (N - V D) + 6 L D S (not printed, the causal count assumed)",
    training=partial(_products, keys=0.5),
)  # fmt: skip

BY_ROW = (
    ("nanotron", "", NANOTRON), ("aleph", "", ALEPH), ("llm-foundry", "", FOUNDRY), ("fms-fsdp", "", FMS),
    ("torchtitan", "", TITAN), ("", "examples/llama/readme", README), ("nemo/", "", NEMO),
    ("megatron-bridge", "", BRIDGE), ("megatron-lm 2021", "", NARAYANAN), ("megatron-lm 2022", "", KORTHIKANTI),
    ("megatron-core 0.8", "", MEGATRON_CORE), ("meta in-house", "", LLAMA3),
)  # fmt: skip
"""(word of the framework, word of the source, convention). The first line with both words counts."""


def convention_of(columns: dict[str, str]) -> Convention | None:
    """Return the convention of a row's source. None = not known."""
    framework, source = columns.get("framework", "").lower(), columns.get("source", "").lower()
    return next((known for word, origin, known in BY_ROW if word in framework and origin in source), None)


def peak_flop_per_s(columns: dict[str, str]) -> float:
    """Return the peak behind a source's MFU."""
    plan, _ = plan_of(columns)
    device, precision = plan.cluster.device, columns.get("precision", "").lower()
    peak = device.half_flop_per_s
    return 2 * peak if "fp8" in precision and "foundry" in columns.get("framework", "").lower() else peak


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A printed figure, and the same recomputed from the row's tokens/s."""

    kind: str
    """tflops, mfu or hfu."""
    printed: float
    again: float
    rounding: float
    """Share of the figure that its printed digits, and those of the tokens/s, leave open."""

    @property
    def error(self) -> float:
        """Relative error."""
        return self.again / self.printed - 1

    @property
    def agrees(self) -> bool:
        """True if the error is within BAR, beyond rounding."""
        return abs(self.error) <= BAR + self.rounding


def figures(columns: dict[str, str]) -> list[Figure]:
    """Recompute the figures that a row prints next to its speed. Raises ValueError when its plan cannot be read."""
    convention = convention_of(columns)
    plan, _ = plan_of(columns)
    tokens = _tokens_per_s(columns, plan)
    if convention is None or not tokens:
        return []
    training, hardware = tokens * convention.training_flop(plan), tokens * convention.hardware_flop(plan)
    peak = peak_flop_per_s(columns)
    again = {
        "tflops_gpu": (hardware if convention.hardware_rate else training) / 1e12,
        "mfu_pct": 100 * training / peak,
        "hfu_pct": 100 * hardware / peak,
    }
    made = []
    for column, computed in again.items():
        printed = number(columns, column, 0.0)
        if printed and computed and not (column == "tflops_gpu" and convention.other_tflops):
            rounding = _rounding(columns[column]) + (
                0.0 if columns.get("step_time_s") else _rounding(columns["tok_s_gpu"])
            )
            made.append(Figure(kind=column.partition("_")[0], printed=printed, again=computed, rounding=rounding))
    return made


def _rounding(text: str) -> float:
    """Return half a unit of the last digit, as a share."""
    digits = len(text.strip().partition(".")[2])
    return 0.5 * 10.0**-digits / float(text)


def _tokens_per_s(columns: dict[str, str], plan: Plan) -> float:
    """Return the rate of one device: from the step time, which has more digits, else as printed."""
    step = number(columns, "step_time_s", 0.0)
    if step:
        return plan.recipe.global_batch * plan.recipe.sequence / step / plan.layout.world
    return number(columns, "tok_s_gpu", 0.0)
