"""Schemes by name: those of the table, and any other layout of weights alone that a folder may hold.

    int4-g128-zeros-fp16        bits; inputs that share a scale (or `rows`: all); how zero is found; dtype of scales

A plan names the codes that frozen matrices are held as by such a word, so that it is counted where the folder is not.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from meshwright.spec.errors import PlanError
from meshwright.spec.quantization_schemes import BITS, GROUPS, SCHEMES, Codes, Method, Scheme, Zeros

ZEROS: Mapping[str, tuple[Zeros, Method]] = {
    "sym": ("fixed", "absmax"), "zeros": ("whole", "zero-point"), "real": ("real", "hqq"),
}  # fmt: skip
"""Word -> zeros, and how codes are found where a matrix is rounded to such a layout."""
SCALES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "double": "double"}
KINDS: Mapping[str, Codes] = {"int": "integer", "nf": "nf4"}
FLOATS: Mapping[int, Codes] = {4: "fp4", 8: "e4m3"}
"""Kind -> codes; of `fp` by their bits."""
FORM = re.compile(r"(?P<kind>int|nf|fp)(?P<bits>\d)-(g(?P<group>\d+)|rows)-(?P<zeros>[a-z]+)-(?P<scales>[a-z]+\d*)")


LLM_INT8 = replace(SCHEMES["llm-int8"], scales="float32", outliers="threshold")
"""As frozen matrices are held beside adapters: as bitsandbytes holds them, outliers found in the batch at hand."""


@lru_cache(maxsize=64)
def scheme_named(name: str) -> Scheme | None:
    """Of the table, or of the form above; None = there is no such scheme."""
    if name == LLM_INT8.name:
        return LLM_INT8
    if name in SCHEMES:
        return SCHEMES[name]
    found = FORM.fullmatch(name)
    if found is None or found["zeros"] not in ZEROS or found["scales"] not in SCALES:
        return None
    bits, group = int(found["bits"]), int(found["group"] or 0)
    if (
        bits not in BITS
        or (found["kind"] == "fp" and bits not in FLOATS)
        or (found["group"] is not None and group not in GROUPS)
    ):
        return None
    zeros, method = ZEROS[found["zeros"]]
    given: Any = {
        "name": name, "about": "as a folder holds it", "bits": bits, "group": group, "zeros": zeros, "method": method,
        "scales": SCALES[found["scales"]], "codes": KINDS.get(found["kind"]) or FLOATS[bits],
    }  # fmt: skip
    try:
        return Scheme(**given)
    except PlanError:
        return None


def base_name(scheme: Scheme) -> str:
    """The name under which `scheme_named` finds the layout of a folder's codes, however they were found. The scheme is
    one of weights alone, or LLM_INT8."""
    if scheme.activations != "same":
        return LLM_INT8.name
    word = {zeros: word for word, (zeros, _) in ZEROS.items()}[scheme.zeros]
    scales = {dtype: word for word, dtype in SCALES.items()}[scheme.scales]
    kind = {codes: kind for kind, codes in KINDS.items()}.get(scheme.codes, "fp")
    full = f"{kind}{scheme.bits}-{f'g{scheme.group}' if scheme.group else 'rows'}-{word}-{scales}"
    known = (name for name, one in SCHEMES.items() if one.trains_beside and layout(one) == layout(scheme))
    return next((name for name in known if name == scheme.name), full)


def layout(scheme: Scheme) -> Scheme:
    """What of a scheme says how its codes are kept and read, and nothing of how they were found."""
    like = SCHEMES["int8"]
    return replace(
        scheme, name="", about="", method="absmax", expected_kl=like.expected_kl, max_kl=like.max_kl,
        threshold=like.threshold,
    )  # fmt: skip
