"""Schemes by name: those of the table, and any other layout of quantized weights that a folder may have.

    int4-g128-zeros-fp16        bits; inputs that share a scale (or `rows`: all); how zero is found; dtype of scales

A plan names the codes of frozen matrices by such a word, so they can be counted without the folder.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from meshwright.spec.errors import PlanError
from meshwright.spec.model.quantization_schemes import BITS, GROUPS, SCHEMES, Codes, Method, Scheme, Zeros

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
"""Format of frozen matrices beside adapters, as in bitsandbytes, with outliers found in the current batch."""


@lru_cache(maxsize=64)
def scheme_named(name: str) -> Scheme | None:
    """Return the scheme of the table, or of the form above. None = there is no such scheme."""
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
    try:
        return Scheme(**fields)
    except PlanError:
        return None


def base_name(scheme: Scheme) -> str:
    """Return the name under which `scheme_named` finds the layout of a folder's codes, whatever their method.

    The scheme is one of weights alone, or LLM_INT8.
    """
    if scheme.activations != "same":
        return LLM_INT8.name
    word = {zeros: word for word, (zeros, _) in ZEROS.items()}[scheme.zeros]
    scales = {dtype: word for word, dtype in SCALES.items()}[scheme.scales]
    kind = {codes: kind for kind, codes in KINDS.items()}.get(scheme.codes, "fp")
    full = f"{kind}{scheme.bits}-{f'g{scheme.group}' if scheme.group else 'rows'}-{word}-{scales}"
    known = (name for name, other in SCHEMES.items() if other.trains_beside and layout(other) == layout(scheme))
    return next((name for name in known if name == scheme.name), full)


def layout(scheme: Scheme) -> Scheme:
    """Return the scheme without how its codes were found: only how they are stored and read."""
    like = SCHEMES["int8"]
    return replace(
        scheme, name="", about="", method="absmax", expected_kl=like.expected_kl, max_kl=like.max_kl,
        threshold=like.threshold,
    )  # fmt: skip
