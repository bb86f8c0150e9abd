"""Schemes of quantization: one declaration each, read by the verb, the sizes of files, the pages and the tests.

    r = S (q - Z)        r a weight, q its code of a few bits, S a scale, Z the code of zero

A scheme says how many bits a code has, which numbers codes stand for, how many inputs share S and Z, how these are
found, and what happens to activations.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from statistics import NormalDist
from typing import Literal

from meshwright.spec.errors import PlanError

FOLDER_FORMATS = ("meshwright", "compressed-tensors", "gptq", "awq", "bitsandbytes")
"""Formats of quantized folders; each is the config's quant_method, too."""
Codes = Literal["integer", "nf4", "fp4", "e4m3"]
Method = Literal["absmax", "zero-point", "hqq", "gptq", "awq", "awq-gptq", "smooth"]
CALIBRATED = ("gptq", "awq", "awq-gptq", "smooth")
"""Methods that need text: what each matrix reads decides how it is rounded, or how inputs are scaled before."""
Zeros = Literal["fixed", "whole", "real"]
Activations = Literal["same", "int8", "fp8"]
Outliers = Literal["none", "calibrated", "threshold"]
Size = tuple[tuple[int, ...], str]
"""Dims of a tensor, and the name of its dtype in torch."""
WIDTHS = {"uint8": 1, "int8": 1, "float8_e4m3fn": 1, "bfloat16": 2, "float16": 2, "float32": 4, "int32": 4}
"""Bytes of an element, by the name of its dtype."""
BITS = (2, 3, 4, 5, 6, 8)
GROUPS = (16, 32, 64, 128, 256)
"""Inputs that may share a scale."""


def normal_float(bits: int = 4) -> tuple[float, ...]:
    """The numbers of a normal float (Dettmers et al. 2023, arXiv:2305.14314, eq. 4 and appendix E): quantiles of the
    standard normal distribution, evenly spaced in probability on both sides of zero, divided by the largest.

    One side has half of the codes, the other one less, and zero is exact. The outermost quantile is the mean of those
    that both sides would have: 1 - (1 / 30 + 1 / 32) / 2 for 4 bits.
    """
    half = 2 ** (bits - 1)
    outermost = 1 - (1 / (2 * (2 * half - 1)) + 1 / (2 * 2 * half)) / 2
    quantile = NormalDist().inv_cdf

    def side(count: int) -> list[float]:
        """`count` quantiles from the outermost one inwards; the next, at 1/2, would be zero."""
        return [quantile(outermost + (0.5 - outermost) * place / count) for place in range(count)]

    above, below = side(half), side(half - 1)
    return tuple(one / above[0] for one in sorted([*above, 0.0, *(-one for one in below)]))


NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""`normal_float(4)` as it was published, and as every file and kernel has it: other numbers in the seventh digit."""
FP4 = tuple(sign * number / 12 for sign in (1, -1) for number in (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0))
"""bitsandbytes' 4-bit floating-point numbers by their codes: a sign, two bits of exponent, one of mantissa; the largest
is 1 (https://github.com/bitsandbytes-foundation/bitsandbytes, functional.py, get_4bit_type)."""
TABLES: Mapping[Codes, tuple[float, ...]] = {"nf4": NF4, "fp4": FP4}
"""Codes that name numbers of a table."""
PIECE = 2**22
"""Elements of a matrix that are quantized or restored at a time, so that what this takes beside the result stays
small."""
PUBLISHED_THRESHOLD = 6.0
"""Of LLM.int8()'s outliers, and bitsandbytes' where none is given."""
DOUBLED = 256
"""Scales that share a scale of their own, where these are codes, too (QLoRA, section 3)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """How the matrices of a model are quantized."""

    name: str
    about: str
    """One line for people."""
    bits: int
    codes: Codes = "integer"
    """What codes stand for: whole numbers, quantiles of a normal distribution, or floating-point numbers of 4 bits or
    8."""
    zeros: Zeros = "fixed"
    """Z: the same everywhere, or one for each scale; a whole number, so that zero is exact, or a real one in fp16."""
    group: int = 0
    """Inputs of a row that share a scale; 0 = all of them."""
    method: Method = "absmax"
    """How scales are found."""
    scales: Literal["bfloat16", "float16", "float32", "double"] = "bfloat16"
    """Dtype of S: bf16 reaches as far as fp32, and codes are made for the rounded ones. `double`: S are codes of 8 bits
    themselves, with a scale for each run of DOUBLED and one offset (double quantization, arXiv:2305.14314)."""
    activations: Activations = "same"
    """What a product's input is rounded to, with a scale for each token; `same` = it is not."""
    outliers: Outliers = "none"
    """Which columns stay in 16 bit: none; a set found on text before; or those above `threshold` in the batch at hand,
    as the paper has it (Dettmers et al. 2022, arXiv:2208.07339)."""
    threshold: float = PUBLISHED_THRESHOLD
    """Of an activation that is an outlier."""
    expected_kl: tuple[float, float] = (0.0, 0.0)
    """Nats per token between the model before and after: what is usual."""
    max_kl: float = 0.1
    """Above which the verb fails, unless another limit is given."""
    ordered: bool = False
    """Whether codes stand in an order of inputs of the matrix's own, as GPTQ with desc_act leaves them."""

    def __post_init__(self) -> None:
        if self.bits not in BITS or self.bits != {"integer": self.bits, "e4m3": 8}.get(self.codes, 4):
            known = ", ".join(map(str, BITS))
            raise PlanError(f"bits={self.bits} is not supported: take one of {known}; nf4 has 4, as fp4, and e4m3 8")
        if self.zeros != "fixed" and (self.bits == 8 or self.codes != "integer"):
            raise PlanError(f"zeros={self.zeros} are for whole numbers of fewer than 8 bits: zeros=fixed")
        if self.activations != "same" and (self.group or self.bits < 8):
            raise PlanError(f"activations={self.activations} need 8-bit weights with a scale for each output: group=0")
        if self.group and self.group not in GROUPS:
            raise PlanError(f"group={self.group} is not supported: take one of {', '.join(map(str, GROUPS))}")
        if self.weighs_errors and (self.codes != "integer" or self.activations != "same"):
            raise PlanError(f"method={self.method} is for whole numbers, and for activations that stay as they are")
        if self.method == "smooth" and self.activations == "same":
            raise PlanError("method=smooth is for activations that are rounded: activations=int8")
        if self.scales == "double" and self.codes not in TABLES:
            raise PlanError("scales=double are for nf4: take scales=bfloat16")
        if self.outliers != "none" and self.threshold <= 0:
            raise PlanError(f"threshold={self.threshold} must be above 0")

    @property
    def calibrated(self) -> bool:
        """Whether it needs text."""
        return self.method in CALIBRATED

    @property
    def scales_inputs(self) -> bool:
        """Whether matrices are multiplied by scales that what comes before them is divided by."""
        return self.method in ("awq", "awq-gptq", "smooth")

    @property
    def weighs_errors(self) -> bool:
        """Whether rounding goes by what matrices read, of which it needs the mean products."""
        return self.calibrated and self.method != "smooth"

    @property
    def packed(self) -> bool:
        """Whether several codes share a byte."""
        return self.bits < 8

    @property
    def trains_beside(self) -> bool:
        """Whether adapters can be trained beside such weights: products take restored weights and inputs as they are,
        so that the gradient of an input is the one of what was computed; or they are LLM.int8()'s, with outliers of the
        batch in 16 bit, whose gradient is that of the restored weights (Dettmers et al. 2022, appendix)."""
        if self.calibrated or self.ordered:
            return False
        plain = self.activations == "same" and self.outliers == "none"
        rounded = self.activations == "int8" and self.outliers == "threshold" and self.scales == "float32"
        return plain or (rounded and self.threshold == PUBLISHED_THRESHOLD)

    def groups(self, columns: int) -> int:
        """Scales of a row of so many inputs; the last group may be short."""
        return -(-columns // self.group) if self.group else 1

    def sizes(self, rows: int, columns: int, stack: Sequence[int] = (), *, kept: int = 0) -> dict[str, Size]:
        """The tensors that stand for a matrix (rows, columns), or for a stack of them, but for its columns that are
        kept: `codes`, `scales`, of doubled ones `outer` and `offset`, and `zeros`. `kept`: of its columns, so many are
        not quantized."""
        lead, groups = tuple(stack), self.groups(columns)
        dtype = "uint8" if self.packed else "float8_e4m3fn" if self.codes == "e4m3" else "int8"
        found: dict[str, Size] = {
            "codes": ((*lead, rows, _bytes(columns, self.bits)), dtype),
            "scales": ((*lead, rows, groups), "uint8" if self.scales == "double" else self.scales),
        }
        if self.scales == "double":
            found["outer"] = ((*lead, -(-rows * groups // DOUBLED)), "float32")
            found["offset"] = ((*lead, 1), "float32")
        if self.zeros == "whole":
            found["zeros"] = ((*lead, rows, _bytes(groups, self.bits)), "uint8")
        if self.zeros == "real":
            found["zeros"] = ((*lead, rows, groups), "float16")
        if kept:
            found["columns"] = ((kept,), "int32")
        if self.ordered:
            found["order"] = ((*lead, columns), "int32")
        return found

    def bits_per_weight(self, rows: int, columns: int) -> float:
        """Of a matrix, its scales and zeros included."""
        return 8 * self.nbytes((rows, columns)) / (rows * columns)

    def nbytes(self, size: Sequence[int]) -> int:
        """Of all tensors that stand for a matrix (rows, columns), or for a stack of them."""
        *stack, rows, columns = size
        return sum(prod(dims) * WIDTHS[dtype] for dims, dtype in self.sizes(rows, columns, stack).values())


def _bytes(count: int, bits: int) -> int:
    """That hold so many codes, one after the other."""
    return -(-count * bits // 8)


SCHEMES: Mapping[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        Scheme(
            name="int8", bits=8, activations="int8", expected_kl=(1e-5, 5e-3), max_kl=0.05,
            about="8-bit weights and activations, a scale for each output and each token (vector-wise)",
        ),
        Scheme(
            name="llm-int8", bits=8, activations="int8", outliers="calibrated", expected_kl=(1e-5, 2e-3), max_kl=0.02,
            about="the same, with columns of outlier activations in 16 bit (LLM.int8())",
        ),
        Scheme(
            name="fp8", bits=8, codes="e4m3", activations="fp8", expected_kl=(1e-4, 1e-2), max_kl=0.05,
            about="8-bit floating-point weights (e4m3) and, where the device multiplies them, activations",
        ),
        Scheme(
            name="int4-rtn", bits=4, zeros="whole", group=32, method="zero-point", expected_kl=(3e-3, 8e-2),
            max_kl=0.2, about="4-bit weights, rounded to nearest, a scale and a zero for each 32 inputs",
        ),
        Scheme(
            name="int4-sym", bits=4, group=128, expected_kl=(5e-3, 0.15), max_kl=0.3,
            about="4-bit weights without zeros, a scale for each 128 inputs (W4A16)",
        ),
        Scheme(
            name="int4-hqq", bits=4, zeros="real", group=32, method="hqq", expected_kl=(3e-3, 6e-2), max_kl=0.2,
            about="4-bit weights, real zeros found by half-quadratic quantization, without data",
        ),
        Scheme(
            name="nf4", bits=4, codes="nf4", group=64, scales="float32", expected_kl=(4e-3, 9e-2), max_kl=0.2,
            about="4-bit normal floats, a scale for each 64 inputs, as bitsandbytes has them",
        ),
        Scheme(
            name="nf4-double", bits=4, codes="nf4", group=64, scales="double", expected_kl=(4e-3, 9e-2), max_kl=0.2,
            about="the same, with scales in 8 bits (QLoRA's double quantization)",
        ),
        Scheme(
            name="int3", bits=3, zeros="real", group=32, method="hqq", expected_kl=(1e-2, 0.3), max_kl=0.6,
            about="3-bit weights, real zeros found by half-quadratic quantization",
        ),
        Scheme(
            name="int8-smooth", bits=8, activations="int8", method="smooth", expected_kl=(1e-5, 5e-3), max_kl=0.05,
            about="`int8` after outliers moved from activations to weights (SmoothQuant); needs text",
        ),
        Scheme(
            name="int4-gptq", bits=4, zeros="whole", group=32, method="gptq", expected_kl=(1e-3, 5e-2), max_kl=0.2,
            about="4-bit weights; columns take over each other's rounding errors (GPTQ); needs text",
        ),
        Scheme(
            name="int4-awq", bits=4, zeros="whole", group=32, method="awq", expected_kl=(2e-3, 6e-2), max_kl=0.2,
            about="4-bit weights, inputs scaled by what they carry before rounding (AWQ); needs text",
        ),
        Scheme(
            name="int4-awq-gptq", bits=4, zeros="whole", group=32, method="awq-gptq", expected_kl=(1e-3, 5e-2),
            max_kl=0.2, about="4-bit weights, inputs scaled as by AWQ and columns rounded as by GPTQ; needs text",
        ),
        Scheme(
            name="int3-gptq", bits=3, zeros="real", group=32, method="gptq", expected_kl=(5e-3, 0.2), max_kl=0.6,
            about="3-bit weights with real zeros by GPTQ; needs text",
        ),
    )
}  # fmt: skip
"""By name. Ranges are of models between a million and eight billion parameters (docs/quantize.md)."""
