"""What `quantize` may be asked for: schemes, formats, patterns of what stays, each refusal with what to give."""

from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

from meshwright.compress.original import OriginalModel
from meshwright.model.quantized_formats.format_table import FORMATS
from meshwright.model.quantized_weights import quantizable
from meshwright.spec.errors import ArgumentError, PlanError, RunError
from meshwright.spec.gguf_schemes import GGUF, GGUF_SCHEMES
from meshwright.spec.presets import nearest
from meshwright.spec.quantization_schemes import SCHEMES, Scheme
from meshwright.spec.units import gib
from meshwright.store.durable import free_bytes
from meshwright.training.precision import DTYPES


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


def check_options(
    format: str, sequences: int, calibration: int, max_kl: float | None, dtype: str | None, target: Path
) -> None:  # fmt: skip
    """ArgumentError for a value out of range, PlanError for a folder that has something in it."""
    if format not in FORMATS:
        raise ArgumentError(f"format={format} is not known: take one of {', '.join((*FORMATS, GGUF))}")
    if sequences < 1:
        raise ArgumentError(f"sequences={sequences} must be 1 or more")
    if calibration < 1:
        raise ArgumentError(f"calibration={calibration} must be 1 or more")
    if max_kl is not None and not max_kl >= 0:
        raise ArgumentError(f"max_kl={max_kl} must be 0 or more")
    if dtype is not None and dtype not in DTYPES:
        raise ArgumentError(f"dtype={dtype} is not known: take one of {', '.join(DTYPES)}")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        what = "is not empty: take another folder, or empty this one" if target.is_dir() else "is there: name another"
        raise PlanError(f"out={target} {what}")


def check_room(target: Path, needed: int) -> None:
    """RunError where the disk of `target` has no room for so many bytes."""
    free = free_bytes(target)
    if free is not None and needed > free:
        raise RunError(
            f"out={target} needs {gib(needed)} ({needed:,} bytes) while it is made, and its disk has {gib(free)} "
            f"({free:,} bytes) free: free some space, or choose another OUT"
        )


def matrices_left(original: OriginalModel, keep: Sequence[str]) -> list[str]:
    """Names of the matrices that are quantized: all but those of a pattern of `keep`; ArgumentError for a pattern of
    none."""
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
