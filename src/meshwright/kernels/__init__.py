"""Fast kernels, each with a slow reference of the same signature.

`Kernels` is the set of functions that the model calls. `reference()` is the plain set (documentation and oracle),
`fast()` the one to train with. The model receives one of them and never asks which. `chooser` decides which
implementation a fast function runs on a device.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from meshwright.kernels.attention import attend as attention
from meshwright.kernels.attention import rope
from meshwright.kernels.experts import experts
from meshwright.kernels.linear import fp8, linear, swiglu
from meshwright.kernels.loss import cross_entropy, linear_divergence
from meshwright.kernels.loss.linear_divergence import DistillationLoss, KnownTop
from meshwright.kernels.norm import norms
from meshwright.kernels.quantized import quantized_linear


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """Inner functions of a transformer. Signatures and shapes are documented at each `reference` twin."""

    name: str
    prefer: str = "auto"
    """One of chooser.PREFERENCES, for code that calls a kernel outside this set."""
    attend: Callable[..., Tensor]
    linear: Callable[..., Tensor]
    linears: Callable[..., tuple[Tensor, ...]]
    rms_norm: Callable[..., Tensor]
    add_rms_norm: Callable[..., tuple[Tensor, Tensor]]
    layer_norm: Callable[..., Tensor]
    rotate: Callable[..., Tensor]
    rotate_pair: Callable[..., tuple[Tensor, Tensor]]
    swiglu: Callable[..., Tensor]
    swiglu_linear: Callable[..., Tensor]
    gelu: Callable[..., Tensor]
    expert_linear: Callable[..., Tensor]
    quantized_linears: Callable[..., tuple[Tensor, ...]]
    linear_cross_entropy: Callable[..., Tensor]
    linear_log_probabilities: Callable[..., Tensor]
    linear_divergence: Callable[..., DistillationLoss]
    linear_top: Callable[..., KnownTop]


def reference() -> Kernels:
    """Return the plain PyTorch set, one operation a line, which the fast set must equal."""
    return Kernels(
        name="reference",
        prefer="eager",
        attend=attention.attend_reference,
        linear=linear.linear_reference,
        linears=linear.linears_reference,
        rms_norm=norms.rms_norm_reference,
        add_rms_norm=norms.add_rms_norm_reference,
        layer_norm=norms.layer_norm_reference,
        rotate=rope.rotate_reference,
        rotate_pair=rope.rotate_pair_reference,
        swiglu=swiglu.swiglu_reference,
        swiglu_linear=swiglu.swiglu_linear_reference,
        gelu=swiglu.gelu_reference,
        expert_linear=experts.expert_linear_reference,
        quantized_linears=quantized_linear.quantized_linears_reference,
        linear_cross_entropy=cross_entropy.linear_cross_entropy_reference,
        linear_log_probabilities=cross_entropy.linear_log_probabilities_reference,
        linear_divergence=linear_divergence.linear_divergence_reference,
        linear_top=linear_divergence.linear_top_reference,
    )


def fast(prefer: str = "auto") -> Kernels:
    """Return the set to train with, on any device. `prefer` is one of chooser.PREFERENCES."""

    def preferring(kernel: Callable[..., Any]) -> Callable[..., Any]:
        return kernel if prefer == "auto" else functools.partial(kernel, prefer=prefer)

    return Kernels(
        name="fast",
        prefer=prefer,
        attend=preferring(attention.attend),
        linear=linear.linear,
        linears=linear.linears,
        rms_norm=preferring(norms.rms_norm),
        add_rms_norm=preferring(norms.add_rms_norm),
        layer_norm=preferring(norms.layer_norm),
        rotate=rope.rotate,
        rotate_pair=preferring(rope.rotate_pair),
        swiglu=preferring(swiglu.swiglu),
        swiglu_linear=preferring(swiglu.swiglu_linear),
        gelu=preferring(swiglu.gelu),
        expert_linear=preferring(experts.expert_linear),
        quantized_linears=quantized_linear.quantized_linears,
        linear_cross_entropy=preferring(cross_entropy.linear_cross_entropy),
        linear_log_probabilities=preferring(cross_entropy.linear_log_probabilities),
        linear_divergence=linear_divergence.linear_divergence,
        linear_top=linear_divergence.linear_top,
    )


def in_form(kernels: Kernels, form: str) -> Kernels:
    """Return the set with products in a form of kernels.fp8, for the blocks of a model. FP8_ALL includes experts."""
    if form == linear.SAME:
        return kernels

    def formed(kernel: Callable[..., Any]) -> Callable[..., Any]:
        return functools.partial(kernel, form=form)

    # The plain set has plain twins of the products: no kernel may run in an oracle.
    if kernels.name == "reference":
        expert_linear = fp8.expert_linear_reference if form == fp8.FP8_ALL else kernels.expert_linear
        return replace(
            kernels,
            linear=formed(fp8.linear_reference),
            linears=formed(fp8.linears_reference),
            swiglu_linear=formed(fp8.swiglu_linear_reference),
            expert_linear=expert_linear,
        )
    return replace(
        kernels,
        linear=formed(kernels.linear),
        linears=formed(kernels.linears),
        swiglu_linear=formed(kernels.swiglu_linear),
        expert_linear=formed(kernels.expert_linear),
    )


def choose(name: str) -> Kernels:
    """Return the set that `layout.kernels` names: `reference`, or the fast set with one of chooser.PREFERENCES."""
    return reference() if name == "reference" else fast(name)
