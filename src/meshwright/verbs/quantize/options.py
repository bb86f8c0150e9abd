"""Options of `quantize`: schemes, formats, patterns of unquantized matrices."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.compress.bit_budget import ladder
from meshwright.data.preparation import check_text
from meshwright.spec.errors import ArgumentError, RunError, argument
from meshwright.spec.model.quantization_schemes import FOLDER_FORMATS, SCHEMES, Scheme, Zeros
from meshwright.spec.presets import find_nearest
from meshwright.spec.units import GIB, MIB, gib
from meshwright.spec.weights.gguf_schemes import GGUF, GGUF_SCHEMES
from meshwright.store.durable import free_bytes, refuse_nonempty, refuse_unwritable
from meshwright.store.run_folder import LAST, check_dtype, check_gguf_path, check_model

if TYPE_CHECKING:
    from meshwright.compress.original import OriginalModel

DEFAULT = FOLDER_FORMATS[0]
ZERO_POINT = ("both", "weights", "activations")
"""Sides of a zero-point scheme that have zeros."""
UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": MIB, "GiB": GIB, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def chosen_scheme(
    name: str, group: int | None, outliers: str | None, threshold: float | None, zero_point: str | None = None
) -> Scheme:
    """Return the scheme of a name, with the given changes. Raises ArgumentError for options that it lacks."""
    if name not in SCHEMES:
        scheme_names = [*SCHEMES, *GGUF_SCHEMES]
        # A bare method such as int4 is completed to its schemes before spelling is compared.
        close = [candidate for candidate in scheme_names if candidate.startswith(f"{name}-")] or find_nearest(
            name, scheme_names, 1
        )
        hint = f"; nearest: {', '.join(close)}" if close else ""
        raise ArgumentError("scheme", name, "is not known", f"take one of {', '.join(scheme_names)}{hint}")
    scheme = SCHEMES[name]
    if group is not None:
        if not scheme.group:
            raise ArgumentError(
                "group", group, remedy=f"{name} has a scale for each output and no groups; leave it out"
            )
        scheme = replace(scheme, group=group)
    if zero_point is not None:
        if not scheme.zero_point:
            schemes = ", ".join(other for other in SCHEMES if SCHEMES[other].zero_point)
            raise ArgumentError("zero_point", zero_point, f"is for {schemes}", f"leave it out with {name}")
        if zero_point not in ZERO_POINT:
            raise ArgumentError("zero_point", zero_point, "is not known", f"take {' or '.join(ZERO_POINT)}")
        zeros: Zeros = "fixed" if zero_point == "activations" else "whole"
        scheme = replace(scheme, zeros=zeros, activation_zeros=zero_point != "weights")
    if scheme.outliers == "none":
        if outliers is not None or threshold is not None:
            raise ArgumentError(
                "outliers",
                rule=(
                    f"and {argument('threshold')} are for {argument('scheme', 'llm-int8')}, and {name} keeps no columns"
                ),
            )
        return scheme
    limit = scheme.threshold if threshold is None else threshold
    if outliers in (None, "calibrated"):
        return replace(scheme, threshold=limit)
    if outliers != "threshold":
        raise ArgumentError("outliers", outliers, "is not known", "take calibrated or threshold")
    return replace(scheme, outliers="threshold", threshold=limit)


def check_request(
    model: Path, target: Path, name: str, *, format: str = DEFAULT, group: int | None = None,
    outliers: str | None = None, threshold: float | None = None, zero_point: str | None = None,
    data: str | Path | None = None, sequences: int = 1, calibration: int = 1, budget: str | int | None = None,
    max_kl: float | None = None, dtype: str | None = None, checkpoint: str = LAST,
) -> Scheme | None:  # fmt: skip
    """Return the scheme of a folder, or None for a GGUF file, before torch is imported.

    Raises ArgumentError for anything unknown or out of range, PlanError for a target that is taken. Raises RunError
    without a model or a writable target, and DataError for an unreadable text.
    """
    check_model(model, checkpoint=checkpoint)
    if name in GGUF_SCHEMES or format == GGUF:
        others = {"group": group, "outliers": outliers, "threshold": threshold, "zero_point": zero_point}
        _check_gguf(name, format, others | {"budget": budget})
        folder_scheme, format = None, DEFAULT
    else:
        folder_scheme = chosen_scheme(name, group, outliers, threshold, zero_point)
    if format not in FOLDER_FORMATS:
        raise ArgumentError("format", format, "is not known", f"take one of {', '.join((*FOLDER_FORMATS, GGUF))}")
    for option, number in (("sequences", sequences), ("calibration", calibration)):
        if number < 1:
            raise ArgumentError(option, number, "must be 1 or more")
    # Written with not, so that NaN is refused as well.
    if max_kl is not None and not max_kl >= 0:
        raise ArgumentError("max_kl", max_kl, "must be 0 or more")
    check_dtype(dtype)
    if folder_scheme is None:
        check_gguf_path(target)
    elif target.suffix == ".gguf":
        raise ArgumentError(
            "out", target, "names a GGUF file, which has schemes of its own", f"{', '.join(GGUF_SCHEMES)}"
        )
    else:
        refuse_nonempty(target, "out")
        if budget is not None:
            bytes_of(budget)
            # It raises for a scheme of one fixed width, before the model is read.
            ladder(folder_scheme)
    refuse_unwritable(target, "out")
    if data is not None:
        check_text(data)
    return folder_scheme


def _check_gguf(name: str, format: str, other: Mapping[str, object]) -> None:
    if name not in GGUF_SCHEMES or format not in (GGUF, DEFAULT):
        raise ArgumentError(
            "scheme",
            name,
            f"with {argument('format', format)}",
            f"a GGUF file has its own schemes, {', '.join(GGUF_SCHEMES)}, which other formats lack",
        )
    for option, asked in other.items():
        if asked is not None:
            raise ArgumentError(option, asked, "is not for GGUF files", "leave it out")


def bytes_of(budget: str | int) -> int:
    """Return the bytes of 1.2GiB, 800MB, or a number. Raises ArgumentError for anything else."""
    if isinstance(budget, int):
        number, unit = str(budget), ""
    else:
        # Units keep their case: MB is 10^6 bytes, and Mb would be bits.
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", budget)
        number, unit = match.groups() if match else ("", "")
    if not number or unit not in UNITS or float(number) <= 0:
        units = ", ".join(list(UNITS)[1:])
        raise ArgumentError("budget", budget, "is not a size", f"give a number with {units}, as 1.2GiB")
    return int(float(number) * UNITS[unit])


def check_room(target: Path, needed: int) -> None:
    """Raise RunError unless the disk of `target` has room for this many bytes."""
    free = free_bytes(target)
    # Some network file systems do not tell their free space; then the disk itself refuses.
    if free is not None and needed > free:
        raise RunError(
            f"{argument('out', target)}: the disk is too small. Quantizing needs {gib(needed)} ({needed:,} bytes), and "
            f"{gib(free)} ({free:,} bytes) are free: free some space, or choose another OUT"
        )


def matrices_to_quantize(original: "OriginalModel", keep: Sequence[str]) -> list[str]:
    """Return the matrices outside all patterns of `keep`. Raises ArgumentError for a pattern without a matrix."""
    from meshwright.model.quantized_weights import quantizable

    names = list(quantizable(original.shape))
    for pattern in keep:
        # A mistyped pattern would silently quantize what the user wanted to keep.
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ArgumentError(
                "keep", pattern, f"names no matrix that would be quantized; the first ones are {', '.join(names[:3])}"
            )
    quantized_names = [name for name in names if not any(fnmatchcase(name, pattern) for pattern in keep)]
    if not quantized_names:
        raise ArgumentError("keep", keep[0], "leaves nothing to quantize")
    return quantized_names
