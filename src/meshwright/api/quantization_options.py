"""What `quantize` may be asked for: schemes, formats, patterns of what stays, each refusal with what to give."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.compress.bit_budget import ladder
from meshwright.data.preparation import check_text
from meshwright.spec.errors import ArgumentError, RunError
from meshwright.spec.gguf_schemes import GGUF, GGUF_SCHEMES
from meshwright.spec.presets import nearest
from meshwright.spec.quantization_schemes import FOLDER_FORMATS, SCHEMES, Scheme
from meshwright.spec.units import GIB, MIB, gib
from meshwright.store.durable import free_bytes, refuse_taken, refuse_unwritable
from meshwright.store.model_place import LAST, check_dtype, check_gguf_path, check_model

if TYPE_CHECKING:
    from meshwright.compress.original import OriginalModel

DEFAULT = FOLDER_FORMATS[0]
UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": MIB, "GiB": GIB, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def chosen_scheme(name: str, group: int | None, outliers: str | None, threshold: float | None) -> Scheme:
    """The scheme of a name, with what else was asked of it; ArgumentError for what it has not."""
    if name not in SCHEMES:
        known = [*SCHEMES, *GGUF_SCHEMES]
        close = [scheme for scheme in known if scheme.startswith(f"{name}-")] or nearest(name, known, 1)
        hint = f"; nearest: {', '.join(close)}" if close else ""
        raise ArgumentError(f"scheme={name} is not known: take one of {', '.join(known)}{hint}")
    found = SCHEMES[name]
    if group is not None:
        if not found.group:
            raise ArgumentError(f"group={group}: {name} has a scale for each output and no groups; leave it out")
        found = replace(found, group=group)
    if found.outliers == "none":
        if outliers is not None or threshold is not None:
            raise ArgumentError(f"outliers= and threshold= are for scheme=llm-int8, and {name} keeps no columns")
        return found
    limit = found.threshold if threshold is None else threshold
    if outliers in (None, "calibrated"):
        return replace(found, threshold=limit)
    if outliers != "threshold":
        raise ArgumentError(f"outliers={outliers} is not known: take calibrated or threshold")
    return replace(found, outliers="threshold", threshold=limit)


def check_request(
    model: Path, target: Path, name: str, *, format: str = DEFAULT, group: int | None = None,
    outliers: str | None = None, threshold: float | None = None, data: str | Path | None = None, sequences: int = 1,
    calibration: int = 1, budget: str | int | None = None, max_kl: float | None = None, dtype: str | None = None,
    checkpoint: str = LAST,
) -> Scheme | None:  # fmt: skip
    """Return the scheme of a folder, or None where a GGUF file is asked for.

    Refuses what can be refused before torch is loaded. ArgumentError for what is not known or out of range, PlanError
    for a target that is taken, RunError where there is no model or the target cannot be written, DataError for `data`.
    """
    check_model(model, checkpoint=checkpoint)
    if name in GGUF_SCHEMES or format == GGUF:
        _check_gguf(name, format, {"group": group, "outliers": outliers, "threshold": threshold, "budget": budget})
        taken, format = None, DEFAULT
    else:
        taken = chosen_scheme(name, group, outliers, threshold)
    if format not in FOLDER_FORMATS:
        raise ArgumentError(f"format={format} is not known: take one of {', '.join((*FOLDER_FORMATS, GGUF))}")
    for option, number in (("sequences", sequences), ("calibration", calibration)):
        if number < 1:
            raise ArgumentError(f"{option}={number} must be 1 or more")
    if max_kl is not None and not max_kl >= 0:
        raise ArgumentError(f"max_kl={max_kl} must be 0 or more")
    check_dtype(dtype)
    if taken is None:
        check_gguf_path(target)
    elif target.suffix == ".gguf":
        raise ArgumentError(f"out={target} names a GGUF file, which has schemes of its own: {', '.join(GGUF_SCHEMES)}")
    else:
        refuse_taken(target, "out=")
        if budget is not None:
            bytes_of(budget)
            ladder(taken)
    refuse_unwritable(target, "out=")
    if data is not None:
        check_text(data)
    return taken


def _check_gguf(name: str, format: str, other: Mapping[str, object]) -> None:
    """ArgumentError where a GGUF file is asked for what it has not."""
    if name not in GGUF_SCHEMES or format not in (GGUF, DEFAULT):
        raise ArgumentError(
            f"scheme={name} with format={format}: a GGUF file has its own schemes, {', '.join(GGUF_SCHEMES)}; others "
            "have none of these"
        )
    for option, asked in other.items():
        if asked is not None:
            raise ArgumentError(f"{option}={asked} is not for GGUF files: leave it out")


def bytes_of(budget: str | int) -> int:
    """1.2GiB, 800MB, or a number of bytes. ArgumentError for anything else."""
    if isinstance(budget, int):
        number, unit = str(budget), ""
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", budget)
        number, unit = match.groups() if match else ("", "")
    if not number or unit not in UNITS or float(number) <= 0:
        raise ArgumentError(f"budget={budget} is no size: give a number with {', '.join(list(UNITS)[1:])}, as 1.2GiB")
    return int(float(number) * UNITS[unit])


def check_room(target: Path, needed: int) -> None:
    """RunError where the disk of `target` has no room for so many bytes."""
    free = free_bytes(target)
    if free is not None and needed > free:
        raise RunError(
            f"out={target}: the disk is too small. Quantizing needs {gib(needed)} ({needed:,} bytes), and "
            f"{gib(free)} ({free:,} bytes) are free: free some space, or choose another OUT"
        )


def matrices_left(original: "OriginalModel", keep: Sequence[str]) -> list[str]:
    """Names of the matrices that are quantized: all but those of a pattern of `keep`; ArgumentError for a pattern of
    none."""
    from meshwright.model.quantized_weights import quantizable

    names = list(quantizable(original.shape))
    for pattern in keep:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ArgumentError(
                f"keep={pattern} names no matrix that would be quantized; the first ones are {', '.join(names[:3])}"
            )
    left = [name for name in names if not any(fnmatchcase(name, pattern) for pattern in keep)]
    if not left:
        raise ArgumentError(f"keep={keep[0]} leaves nothing to quantize")
    return left
