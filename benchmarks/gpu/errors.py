"""Errors against fp64: of what is fast, beside those of plain code of the same dtype."""

from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.case import BARS, SINGLE, Case, InputSet, Run, gradients, inputs, several

NOTHING = 1e-7
"""Relative error below which code counts as exact, and a ratio of two such errors as 1."""


def outcome(run: Run, input_set: InputSet, learns: bool, dtype: torch.dtype | None = None) -> list[Tensor]:
    """Results and gradients, of copies of the inputs, in fp64."""
    leaves = [x.detach().to(dtype or x.dtype, copy=True).requires_grad_(learns) for x in input_set.leaves]
    outputs = run(*leaves)
    results = [x.detach().double() for x in several(outputs)]
    if learns:
        copies = InputSet(leaves=leaves, upstream=[x.to(dtype or x.dtype, copy=True) for x in input_set.upstream])
        results += [x.double() for x in gradients(outputs, copies)]
    return results


def distances(tensors: list[Tensor], right: list[Tensor]) -> list[float]:
    """Relative errors, Euclidean norms; infinite where a number is none."""
    each = [((a - b).norm() / b.norm().clamp(min=1e-300)).item() for a, b in zip(tensors, right, strict=True)]
    return [error if error == error else float("inf") for error in each]


def ratio(fast: float, plain: float) -> float:
    """How many times as far; 1 where both are exact."""
    return max(fast, NOTHING) / max(plain, NOTHING)


def judged(case: Case, runs: dict[str, Run], device: torch.device) -> dict[str, Any]:
    """Of plain code its errors; of each contestant errors, the largest ratio to plain code of each kind of BARS, and
    whether all bars hold. A contestant that fails says why."""
    input_set = inputs(case, device)
    right = outcome(case.exact, input_set, case.learns, torch.float64)
    plain = distances(outcome(case.eager, input_set, case.learns), right)
    contestants = {name: _judged_run(case, run, input_set, right, plain) for name, run in runs.items()}
    return {"plain": plain, "contestants": contestants}


def _judged_run(case: Case, run: Run, input_set: InputSet, right: list[Tensor], plain: list[float]) -> dict[str, Any]:
    try:
        errors = distances(outcome(run, input_set, case.learns), right)
    except Exception as failure:  # rivals fail in many ways
        return {"failed": reason(failure)}
    ratios: dict[str, float] = {}
    for kind, fast, slow in zip(case.kinds, errors, plain, strict=True):
        ratios[kind] = max(ratios.get(kind, 0.0), ratio(fast, slow))
    holds = all(ratios[kind] <= BARS[kind] for kind in ratios)
    few_roundings = case.dtype == torch.float32 and max(errors) <= SINGLE
    return {"errors": errors, "ratios": ratios, "holds": holds or few_roundings}


def reason(failure: Exception) -> str:
    """One line."""
    lines = str(failure).splitlines() or [""]
    return f"{type(failure).__name__}: {lines[0][:160]}".rstrip(": ")
