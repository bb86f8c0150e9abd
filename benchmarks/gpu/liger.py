"""Liger's kernels as contestants, where `liger_kernel` is installed (it is no dependency)."""

import importlib
from functools import partial
from typing import Any

from torch import Tensor

from benchmarks.gpu.case import Run

NAME = "Liger"


def functional() -> Any:
    """Its functions; None without the package. A package that fails on import counts as missing."""
    try:
        return importlib.import_module("liger_kernel.transformers.functional")
    except Exception:
        return None


def offered(operation: str, **options: float) -> dict[str, Run]:
    """The contestant for an operation, if this version of Liger has it."""
    made = _MADE[operation](functional(), **options) if functional() else None
    return {NAME: made} if made else {}


def _rms_norm(module: Any, eps: float) -> Run:
    """Not in place: its backward pass would write over the gradient that the other contestants read."""
    return lambda x, weight: module.liger_rms_norm(x, weight, eps, in_place=False)


def _add_rms_norm(module: Any, eps: float) -> Run | None:
    function = getattr(module, "liger_fused_add_rms_norm", None)
    return None if function is None else lambda x, added, weight: function(x, added, weight, eps, in_place=False)


def _layer_norm(module: Any, eps: float) -> Run:
    return lambda x, weight, bias: module.liger_layer_norm(x, weight, bias, eps)


def _swiglu(module: Any) -> Run:
    return lambda gate, up: module.liger_swiglu(gate, up)


_MADE: dict[str, Any] = {
    "rms_norm": _rms_norm, "add_rms_norm": _add_rms_norm, "layer_norm": _layer_norm, "swiglu": _swiglu,
}  # fmt: skip


def rotary(cos: Tensor, sin: Tensor) -> dict[str, Run]:
    """Queries and keys come as (B, S, H, E); Liger takes heads first, and tables (1, S, E)."""
    module = functional()
    if module is None:
        return {}
    tables = [x.flatten(2).repeat(1, 1, 2) for x in (cos, sin)]

    def turned(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        q, k = module.liger_rope(q.transpose(1, 2), k.transpose(1, 2), *tables)
        return q.transpose(1, 2), k.transpose(1, 2)

    return {NAME: turned}


def linear_loss(targets: Tensor) -> dict[str, Run]:
    """Head and loss in one."""
    module = functional()
    if module is None:
        return {}
    return {NAME: lambda x, weight: module.liger_fused_linear_cross_entropy(x, weight, targets, reduction="sum")}


def loss(targets: Tensor) -> dict[str, Run]:
    """Loss of logits, and their gradient, which stands in their place after the forward pass."""
    module = functional()
    return {} if module is None else {NAME: partial(_loss, module, targets)}


def _loss(module: Any, targets: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    leaf = logits.detach().requires_grad_()
    summed: Tensor = module.liger_cross_entropy(leaf, targets, reduction="sum")
    return summed.detach(), leaf.detach()
