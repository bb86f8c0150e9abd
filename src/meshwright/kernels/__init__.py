"""Fast maths, each with a slow twin of the same signature.

`Kernels` is the set of functions the model calls. `reference()` is the plain set (documentation and oracle), `fast()`
the one to train with; the model is handed one of them and never asks which.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from meshwright.kernels import attention, cross_entropy, experts, linear, norm, rope, swiglu


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """The inner functions of a transformer; signatures and shapes stand at each `reference` twin."""

    name: str
    attend: Callable[..., Tensor]
    linear: Callable[..., Tensor]
    linears: Callable[..., tuple[Tensor, ...]]
    rms_norm: Callable[..., Tensor]
    rotate: Callable[..., Tensor]
    swiglu: Callable[..., Tensor]
    swiglu_linear: Callable[..., Tensor]
    expert_linear: Callable[..., Tensor]
    linear_cross_entropy: Callable[..., Tensor]
    linear_log_probabilities: Callable[..., Tensor]


def reference() -> Kernels:
    """Plain PyTorch, one operation a line: what the fast set must equal."""
    return Kernels(
        name="reference",
        attend=attention.attend_reference,
        linear=linear.linear_reference,
        linears=linear.linears_reference,
        rms_norm=norm.rms_norm_reference,
        rotate=rope.rotate_reference,
        swiglu=swiglu.swiglu_reference,
        swiglu_linear=swiglu.swiglu_linear_reference,
        expert_linear=experts.expert_linear_reference,
        linear_cross_entropy=cross_entropy.linear_cross_entropy_reference,
        linear_log_probabilities=cross_entropy.linear_log_probabilities_reference,
    )


def fast() -> Kernels:
    """The set to train with, on any device."""
    return Kernels(
        name="fast",
        attend=attention.attend,
        linear=linear.linear,
        linears=linear.linears,
        rms_norm=norm.rms_norm,
        rotate=rope.rotate,
        swiglu=swiglu.swiglu,
        swiglu_linear=swiglu.swiglu_linear,
        expert_linear=experts.expert_linear,
        linear_cross_entropy=cross_entropy.linear_cross_entropy,
        linear_log_probabilities=cross_entropy.linear_log_probabilities,
    )


def choose(name: str) -> Kernels:
    """`auto` or `reference`, as in layout.kernels."""
    return reference() if name == "reference" else fast()
