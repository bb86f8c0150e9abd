"""Fast maths, each with a slow twin of the same signature.

`Kernels` is the set of functions the model calls. `reference()` is the plain set (documentation and oracle), `fast()`
the one to train with; the model is handed one of them and never asks which. Which implementation a fast function runs
on a device, `chooser` says.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from meshwright.kernels import (
    attention,
    cross_entropy,
    experts,
    fp8,
    fp8_experts,
    linear,
    linear_divergence,
    linear_top,
    norm,
    quantized_linear,
    rope,
    swiglu,
)
from meshwright.kernels.divergence_rows import DistillationLoss, KnownTop


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """The inner functions of a transformer; signatures and shapes stand at each `reference` twin."""

    name: str
    prefer: str = "auto"
    """Of chooser.PREFERENCES: what those are told that call a function beside these."""
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
    """Plain PyTorch, one operation a line: what the fast set must equal."""
    return Kernels(
        name="reference",
        prefer="eager",
        attend=attention.attend_reference,
        linear=linear.linear_reference,
        linears=linear.linears_reference,
        rms_norm=norm.rms_norm_reference,
        add_rms_norm=norm.add_rms_norm_reference,
        layer_norm=norm.layer_norm_reference,
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
        linear_top=linear_top.linear_top_reference,
    )


def fast(prefer: str = "auto") -> Kernels:
    """The set to train with, on any device; `prefer` is one of chooser.PREFERENCES."""
    told = functools.partial(functools.partial, prefer=prefer) if prefer != "auto" else _as_it_is
    return Kernels(
        name="fast",
        prefer=prefer,
        attend=told(attention.attend),
        linear=linear.linear,
        linears=linear.linears,
        rms_norm=told(norm.rms_norm),
        add_rms_norm=told(norm.add_rms_norm),
        layer_norm=told(norm.layer_norm),
        rotate=rope.rotate,
        rotate_pair=told(rope.rotate_pair),
        swiglu=told(swiglu.swiglu),
        swiglu_linear=told(swiglu.swiglu_linear),
        gelu=told(swiglu.gelu),
        expert_linear=told(experts.expert_linear),
        quantized_linears=quantized_linear.quantized_linears,
        linear_cross_entropy=told(cross_entropy.linear_cross_entropy),
        linear_log_probabilities=told(cross_entropy.linear_log_probabilities),
        linear_divergence=linear_divergence.linear_divergence,
        linear_top=linear_top.linear_top,
    )


def in_form(kernels: Kernels, form: str) -> Kernels:
    """The same with products of a form of kernels.fp8, for the blocks of a model; those of experts with FP8_ALL."""
    if form == linear.SAME:
        return kernels
    given = functools.partial(functools.partial, form=form)
    if kernels.name == "reference":
        of_experts = fp8_experts.expert_linear_reference if form == fp8.FP8_ALL else kernels.expert_linear
        return replace(
            kernels,
            linear=given(fp8.linear_reference),
            linears=given(fp8.linears_reference),
            swiglu_linear=given(fp8.swiglu_linear_reference),
            expert_linear=of_experts,
        )
    return replace(
        kernels,
        linear=given(kernels.linear),
        linears=given(kernels.linears),
        swiglu_linear=given(kernels.swiglu_linear),
        expert_linear=given(kernels.expert_linear),
    )


def _as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def choose(name: str) -> Kernels:
    """As layout.kernels: `reference`, or the fast set with one of chooser.PREFERENCES."""
    return reference() if name == "reference" else fast(name)
