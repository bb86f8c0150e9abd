"""Quantization schemes: one declaration each, read by the verb, the sizes of files, the pages and the tests.

    r = S (q - Z)        r a weight, q its code of a few bits, S a scale, Z the code of zero

Folders may have other layouts of quantized weights. A name spells out such a layout, so that a plan counts the codes of
frozen matrices without the folder (`find_scheme`):

    int4-g128-zeros-fp16        bits; inputs that share a scale (or `rows`: all); how zero is found; dtype of scales

A scheme has the number of bits and the meaning of a code, the inputs that share S and Z, the method that finds them,
and the treatment of activations.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any, Literal

from meshwright.spec.errors import PlanError, argument

FOLDER_FORMATS = ("meshwright", "compressed-tensors", "gptq", "awq", "bitsandbytes")
"""Formats of quantized folders, also values of the config's quant_method."""
Codes = Literal["integer", "nf4", "fp4", "e4m3"]
Method = Literal["absmax", "zero-point", "hqq", "gptq", "awq", "awq-gptq", "smooth"]
CALIBRATED = ("gptq", "awq", "awq-gptq", "smooth")
"""Methods that need calibration text: the inputs of each matrix decide its rounding or scaling."""
Zeros = Literal["fixed", "whole", "real"]
Activations = Literal["same", "int8", "fp8"]
Outliers = Literal["none", "calibrated", "threshold"]
Sharing = Literal["row", "tensor"]
"""Numbers that share a scale: those of a row, which is an output of weights and a token of activations, or all."""
Size = tuple[tuple[int, ...], str]
"""Dims of a tensor, and the name of its dtype in torch."""
WIDTHS = {"uint8": 1, "int8": 1, "float8_e4m3fn": 1, "bfloat16": 2, "float16": 2, "float32": 4, "int32": 4}
"""Bytes per element, by the name of the dtype."""
BITS = (2, 3, 4, 5, 6, 8)
GROUPS = (16, 32, 64, 128, 256)
"""Possible numbers of inputs that share a scale."""


NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""Published values, used by every file and kernel. They differ in the seventh digit from quantiles of
the normal distribution (Dettmers et al. 2023, arXiv:2305.14314, appendix E)."""
FP4 = tuple(sign * number / 12 for sign in (1, -1) for number in (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0))
"""bitsandbytes' 4-bit floating-point numbers by code: a sign, two bits of exponent, one of mantissa, the largest being
1 (https://github.com/bitsandbytes-foundation/bitsandbytes, functional.py, get_4bit_type)."""
TABLES: Mapping[Codes, tuple[float, ...]] = {"nf4": NF4, "fp4": FP4}
"""Codes that index a table of numbers."""
PIECE = 2**22
"""Elements of a matrix that are quantized or restored at a time, to limit temporary memory."""
PUBLISHED_THRESHOLD = 6.0
"""Outlier threshold of LLM.int8(), and the default of bitsandbytes."""
DOUBLED = 256
"""Scales that share an outer scale, in double quantization (QLoRA, section 3)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """Quantization of the matrices of a model."""

    name: str
    about: str
    """Description in one line."""
    bits: int
    codes: Codes = "integer"
    """Meaning of codes: whole numbers, quantiles of a normal distribution, or floating-point numbers of 4 or 8 bits."""
    zeros: Zeros = "fixed"
    """Z: constant, or one per scale, either a whole number, which keeps zero exact, or a real number in fp16."""
    group: int = 0
    """Inputs of a row that share a scale. 0 = all of them."""
    method: Method = "absmax"
    """Method that finds the scales."""
    scales: Literal["bfloat16", "float16", "float32", "double"] = "bfloat16"
    """Dtype of S. bf16 has the range of fp32, and codes are computed for the rounded scales. `double`: scales are 8-bit
    codes themselves, with one scale per DOUBLED of them and one offset (double quantization, arXiv:2305.14314)."""
    activations: Activations = "same"
    """Rounding of a product's input, with a scale per token. `same` = none."""
    weight_share: Sharing = "row"
    """Weights that share a scale, in addition to `group`. One of a whole matrix is stored for each output, so that
    every file and every product reads it like those of rows."""
    activation_share: Sharing = "row"
    """Rounded activations that share a scale. With `tensor`, a token's answer depends on the others in its batch."""
    activation_zeros: bool = False
    """Rounded activations have a whole Z with each scale, so that codes cover exactly their range."""
    outliers: Outliers = "none"
    """Columns that stay in 16 bits: none, a set calibrated on text, or those above `threshold` in the current batch, as
    in the paper (Dettmers et al. 2022, arXiv:2208.07339)."""
    threshold: float = PUBLISHED_THRESHOLD
    """Smallest absolute activation that is an outlier."""
    expected_kl: tuple[float, float] = (0.0, 0.0)
    """Usual range of the divergence from the original model, in nats per token."""
    max_kl: float = 0.1
    """Divergence above which the verb fails, unless another limit is given."""
    ordered: bool = False
    """Codes are in an order of inputs of their own, as GPTQ with desc_act writes them."""

    def __post_init__(self) -> None:
        if self.bits not in BITS or self.bits != {"integer": self.bits, "e4m3": 8}.get(self.codes, 4):
            widths = ", ".join(map(str, BITS))
            raise PlanError(f"bits={self.bits} is not supported: take one of {widths}; nf4 has 4, as fp4, and e4m3 8")
        if self.zeros != "fixed" and ((self.bits == 8 and not self.zero_point) or self.codes != "integer"):
            raise PlanError(f"zeros={self.zeros} are for whole numbers of fewer than 8 bits: zeros=fixed")
        if self.activations != "int8" and (
            self.activation_zeros or "tensor" in (self.weight_share, self.activation_share)
        ):
            raise PlanError("zeros of activations, and scales of a tensor, are for activations=int8")
        if self.activations != "same" and (self.group or self.bits < 8):
            raise PlanError(
                f"activations={self.activations} need 8-bit weights with a scale for each output: "
                f"{argument('group', 0)}"
            )
        if self.group and self.group not in GROUPS:
            raise PlanError(
                f"{argument('group', self.group)} is not supported: take one of {', '.join(map(str, GROUPS))}"
            )
        if self.weighs_errors and (self.codes != "integer" or self.activations != "same"):
            raise PlanError(f"method={self.method} is for whole numbers, and for activations that stay as they are")
        if self.method == "smooth" and self.activations == "same":
            raise PlanError("method=smooth is for activations that are rounded: activations=int8")
        if self.scales == "double" and self.codes not in TABLES:
            raise PlanError("scales=double are for nf4: take scales=bfloat16")
        if self.outliers != "none" and self.threshold <= 0:
            raise PlanError(f"{argument('threshold', self.threshold)} must be above 0")

    @property
    def calibrated(self) -> bool:
        """It needs calibration text."""
        return self.method in CALIBRATED

    @property
    def scales_inputs(self) -> bool:
        """Matrices are multiplied by scales by which the preceding operation is divided."""
        return self.method in ("awq", "awq-gptq", "smooth")

    @property
    def weighs_errors(self) -> bool:
        """Rounding weighs errors by the mean products of the inputs."""
        return self.calibrated and self.method != "smooth"

    @property
    def packed(self) -> bool:
        """Several codes share a byte."""
        return self.bits < 8

    @property
    def symmetric_by_token(self) -> bool:
        """Rounded rows have a scale for each token, and neither side has zeros: the form of the fast products."""
        return self.activation_share == "row" and not self.activation_zeros and self.zeros == "fixed"

    @property
    def vector_wise(self) -> bool:
        """Weights have a scale for each output, too."""
        return self.symmetric_by_token and self.weight_share == "row"

    @property
    def zero_point(self) -> bool:
        """Rounded activations or their weights have zeros."""
        return self.activation_zeros or (self.activations == "int8" and self.zeros == "whole")

    @property
    def trains_beside(self) -> bool:
        """Adapters can be trained on such weights.

        Either products take restored weights and unrounded inputs, so the gradient of an input matches the forward
        pass. Or the scheme is LLM.int8() with outliers of the batch in 16 bits, whose gradient is that of the restored
        weights (Dettmers et al. 2022, appendix).
        """
        if self.calibrated or self.ordered:
            return False
        plain = self.activations == "same" and self.outliers == "none"
        rounded = self.activations == "int8" and self.outliers == "threshold" and self.scales == "float32"
        rounded = rounded and self.vector_wise
        return plain or (rounded and self.threshold == PUBLISHED_THRESHOLD)

    def groups(self, columns: int) -> int:
        """Return the number of scales per row of `columns` inputs. The last group may be short."""
        return -(-columns // self.group) if self.group else 1

    def sizes(self, rows: int, columns: int, stack: Sequence[int] = (), *, outlier_columns: int = 0) -> dict[str, Size]:
        """Return the tensors that represent a matrix (rows, columns), or a stack of them.

        They are `codes`, `scales`, `outer` and `offset` of double scales, `zeros`, and `columns` and `order` where
        used. `outlier_columns` is the number of columns that stay plain numbers, which are not included.
        """
        lead, groups = tuple(stack), self.groups(columns)
        dtype = "uint8" if self.packed or self.zeros != "fixed" else "float8_e4m3fn" if self.codes == "e4m3" else "int8"
        sizes: dict[str, Size] = {
            "codes": ((*lead, rows, _bytes(columns, self.bits)), dtype),
            "scales": ((*lead, rows, groups), "uint8" if self.scales == "double" else self.scales),
        }
        if self.scales == "double":
            sizes["outer"] = ((*lead, -(-rows * groups // DOUBLED)), "float32")
            sizes["offset"] = ((*lead, 1), "float32")
        if self.zeros == "whole":
            sizes["zeros"] = ((*lead, rows, _bytes(groups, self.bits)), "uint8")
        if self.zeros == "real":
            sizes["zeros"] = ((*lead, rows, groups), "float16")
        if outlier_columns:
            sizes["columns"] = ((outlier_columns,), "int32")
        if self.ordered:
            sizes["order"] = ((*lead, columns), "int32")
        return sizes

    def bits_per_weight(self, rows: int, columns: int) -> float:
        """Return the number of bits per weight of a matrix, scales and zeros included."""
        return 8 * self.nbytes((rows, columns)) / (rows * columns)

    def nbytes(self, size: Sequence[int]) -> int:
        """Return the number of bytes of all tensors of a matrix (rows, columns), or of a stack of them."""
        *stack, rows, columns = size
        return sum(prod(dims) * WIDTHS[dtype] for dims, dtype in self.sizes(rows, columns, stack).values())


def _bytes(count: int, bits: int) -> int:
    """Return the number of bytes that hold `count` codes packed tightly."""
    return -(-count * bits // 8)


def _eight_bits(
    name: str, about: str, *, weights: Sharing = "row", activations: Sharing = "row", zero_point: bool = False,
    outliers: Outliers = "none", max_kl: float = 0.05,
) -> Scheme:  # fmt: skip
    """Return a scheme of 8-bit weights and activations: granularity of both, zeros, and columns that stay in 16 bits.

    These are the methods of table 1 of Dettmers et al. 2022 (arXiv:2208.07339).
    """
    return Scheme(
        name=name, about=about, bits=8, activations="int8", weight_share=weights, activation_share=activations,
        zeros="whole" if zero_point else "fixed", activation_zeros=zero_point, outliers=outliers, max_kl=max_kl,
        method="zero-point" if zero_point else "absmax", expected_kl=(1e-5, max_kl / 10),
    )  # fmt: skip


SCHEMES: Mapping[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        _eight_bits("int8", "8-bit weights and activations, a scale for each output and each token (vector-wise)"),
        _eight_bits(
            "llm-int8", "the same, with columns of outlier activations in 16 bit (LLM.int8())", outliers="calibrated",
            max_kl=0.02,
        ),
        _eight_bits(
            "int8-tensor", "`int8` with one scale for a matrix and one for its inputs (absmax per tensor)",
            weights="tensor", activations="tensor", max_kl=0.2,
        ),
        _eight_bits(
            "int8-zeropoint", "the same with zeros, which let codes cover a one-sided range (zero-point per tensor)",
            weights="tensor", activations="tensor", zero_point=True, max_kl=0.2,
        ),
        _eight_bits("int8-row", "one scale for a matrix, and one for each token (row-wise)", weights="tensor"),
        _eight_bits(
            "int8-vector-zeropoint", "`int8` with zeros on both sides (zero-point vector-wise)", zero_point=True,
        ),
        _eight_bits(
            "llm-int8-row", "`int8-row` with outlier columns in 16 bit", weights="tensor", outliers="calibrated",
        ),
        _eight_bits(
            "llm-int8-zeropoint", "`llm-int8` with zeros on both sides", zero_point=True, outliers="calibrated",
            max_kl=0.02,
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
"""Schemes by name. Ranges hold for models of a million to eight billion parameters (docs/quantize.md)."""


def keeps_outliers(name: str) -> bool:
    """Return whether the scheme of a name multiplies some columns in 16 bits."""
    return name in SCHEMES and SCHEMES[name].outliers != "none"


ZEROS: Mapping[str, tuple[Zeros, Method]] = {
    "sym": ("fixed", "absmax"), "zeros": ("whole", "zero-point"), "real": ("real", "hqq"),
}  # fmt: skip
"""Word -> zeros, and the method that rounds a matrix to such a layout."""
SCALES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "double": "double"}
KINDS: Mapping[str, Codes] = {"int": "integer", "nf": "nf4"}
FLOATS: Mapping[int, Codes] = {4: "fp4", 8: "e4m3"}
"""Codes of `fp` by their bits. KINDS has the other kinds."""
FORM = re.compile(r"(?P<kind>int|nf|fp)(?P<bits>\d)-(g(?P<group>\d+)|rows)-(?P<zeros>[a-z]+)-(?P<scales>[a-z]+\d*)")


LLM_INT8 = replace(SCHEMES["llm-int8"], scales="float32", outliers="threshold")
"""Format of frozen matrices under adapters, as in bitsandbytes, with outliers found in the current batch."""


@lru_cache(maxsize=64)
def find_scheme(name: str) -> Scheme | None:
    """Return the scheme of a name in SCHEMES, or of the form above. None = there is no such scheme."""
    if name == LLM_INT8.name:
        return LLM_INT8
    if name in SCHEMES:
        return SCHEMES[name]
    match = FORM.fullmatch(name)
    if match is None or match["zeros"] not in ZEROS or match["scales"] not in SCALES:
        return None
    bits, group = int(match["bits"]), int(match["group"] or 0)
    if (
        bits not in BITS
        or (match["kind"] == "fp" and bits not in FLOATS)
        or (match["group"] is not None and group not in GROUPS)
    ):
        return None
    zeros, method = ZEROS[match["zeros"]]
    fields: Any = {
        "name": name, "about": "as a folder holds it", "bits": bits, "group": group, "zeros": zeros, "method": method,
        "scales": SCALES[match["scales"]], "codes": KINDS.get(match["kind"]) or FLOATS[bits],
    }  # fmt: skip
    # A well-formed name may still combine what no scheme has, such as zeros with 8 bits.
    try:
        return Scheme(**fields)
    except PlanError:
        return None


def base_name(scheme: Scheme) -> str:
    """Return the name under which `find_scheme` finds the layout of a folder's codes, whatever their method.

    The scheme is one of weights alone, or LLM_INT8.
    """
    if scheme.activations != "same":
        return LLM_INT8.name
    word = {zeros: word for word, (zeros, _) in ZEROS.items()}[scheme.zeros]
    scales = {dtype: word for word, dtype in SCALES.items()}[scheme.scales]
    kind = {codes: kind for kind, codes in KINDS.items()}.get(scheme.codes, "fp")
    full = f"{kind}{scheme.bits}-{f'g{scheme.group}' if scheme.group else 'rows'}-{word}-{scales}"
    alike = (name for name, other in SCHEMES.items() if other.trains_beside and layout(other) == layout(scheme))
    # A name of the table only for the scheme of that name: others share the layout, but not the method.
    return next((name for name in alike if name == scheme.name), full)


def layout(scheme: Scheme) -> Scheme:
    """Return the scheme without how its codes were found: only how they are stored and read."""
    like = SCHEMES["int8"]
    return replace(
        scheme, name="", about="", method="absmax", expected_kl=like.expected_kl, max_kl=like.max_kl,
        threshold=like.threshold,
    )  # fmt: skip
