"""CUDA graphs (layout.cuda_graphs): a micro-batch's forward and backward pass, captured once and then launched in one
call (graph_capture.py). For models so small that the host launches kernels slower than the device runs them.

Gradients are added to buffers that stay where they are, and the parameters are updated in place. Passes of another
`form` are of other sizes, or with documents or without.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from meshwright.kernels import Kernels, choose
from meshwright.kernels.experts import keeps_counts
from meshwright.kernels.gradient_sums import gradient_dtype, sum_of
from meshwright.kernels.target import acts
from meshwright.model import Transformer
from meshwright.parallel.graph_capture import CudaCapture, FormGraphs, Launch, NoCapture, Repeatable
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.passes import Pass
from meshwright.parallel.replicas import Bucket, Replicas
from meshwright.spec.errors import PlanError
from meshwright.spec.layout import Layout
from meshwright.spec.shape import ModelShape

_log = logging.getLogger("meshwright")


class Capturable(Pass, Repeatable, Protocol):
    """A pass that can be captured."""


@dataclass(slots=True, kw_only=True, eq=False)
class PassGraphs(FormGraphs[Capturable]):
    """The passes of a model without a pipeline, as graphs."""

    model: Transformer
    replicas: Sequence[Replicas] = ()
    gradients: dict[nn.Parameter, Tensor] = field(init=False, default_factory=dict)
    """Of each parameter, where all graphs add to."""
    _buffers: list[Tensor] = field(init=False, default_factory=list)
    """What those are views of: of every bucket, then of gradients without one."""

    def run(self, passes: Iterable[Capturable]) -> None:
        """Every micro-batch of a step. Gradients are summed over replicas by who called."""
        self._begin()
        for one in passes:
            self.call(one, self._pass)

    def _begin(self) -> None:
        """Gradients of zero, at their places: who reads them may have let go of them."""
        if not self.gradients:
            self._lay()
        for buffer in self._buffers:
            buffer.zero_()
        for parameter, gradient in self.gradients.items():
            parameter.grad = gradient
        for bucket, buffer in zip(self._buckets(), self._buffers, strict=False):
            bucket.buffer = buffer
        self.read([*self.model.parameters(), *self.model.buffers()])

    def _lay(self) -> None:
        """Gradients lie one behind the other: those that are summed in one call, and the others."""
        for bucket in self._buckets():
            self._side_by_side(bucket.parameters, bucket.dtype)
        held = [p for p in self.model.parameters() if p.requires_grad and p not in self.gradients]
        for dtype in dict.fromkeys(map(gradient_dtype, held)):
            self._side_by_side([p for p in held if gradient_dtype(p) == dtype], dtype)
        with self.capture.beside():
            for gradient_sum in filter(None, map(sum_of, self.gradients)):
                gradient_sum.move_to_current_stream()

    def _buckets(self) -> list[Bucket]:
        return [bucket for one in self.replicas for bucket in one.buckets]

    def _side_by_side(self, parameters: Sequence[nn.Parameter], dtype: torch.dtype) -> None:
        sizes = [parameter.numel() for parameter in parameters]
        buffer = torch.zeros(sum(sizes), dtype=dtype, device=parameters[0].device)
        for parameter, part in zip(parameters, buffer.split(sizes), strict=True):
            self.gradients[parameter] = part.view_as(parameter)
        self._buffers.append(buffer)

    def _captured(
        self, one: Capturable, work: Callable[[Capturable], None]
    ) -> tuple[Capturable | None, Launch | None]:  # fmt: skip
        """Nothing where a device cannot: a capture computes nothing, so that the passes go on without."""
        try:
            return FormGraphs._captured(self, one, work)
        except RuntimeError as error:
            self.most = 0
            reason = str(error).partition("\n")[0]
            _log.warning("meshwright: note: passes run without CUDA graphs, which is slower: %s", reason)
            return None, None

    def _pass(self, one: Pass) -> None:
        _, loss = one(self.model, None)
        loss.backward()


def pass_graphs(
    model: Transformer, mesh: Mesh, device: torch.device, replicas: Sequence[Replicas]
) -> PassGraphs | None:  # fmt: skip
    """Of a model that is laid out, where its layout has them. PlanError where the device cannot."""
    if mesh.layout.cuda_graphs != "on":
        return None
    check_device(model.shape, mesh.layout, device, next(model.parameters()).dtype)
    capture = CudaCapture(device) if device.type == "cuda" else NoCapture()
    return PassGraphs(model=model, capture=capture, replicas=replicas)


def check_device(shape: ModelShape, layout: Layout, device: torch.device, dtype: torch.dtype) -> None:
    """PlanError where layout.cuda_graphs=on is for a device that has none, or for experts whose products have the host
    wait for the lengths of their runs. What no device can capture is refused before (spec.legal)."""
    if layout.cuda_graphs != "on":
        return
    kind = acts() or device.type
    if kind != "cuda":
        raise PlanError(f"layout.cuda_graphs=on needs a GPU, and this is a {kind}: take layout.cuda_graphs=off")
    if shape.moe and not counts_stay(shape, layout.kernels, device, dtype):
        raise PlanError(
            "layout.cuda_graphs=on cannot capture experts here: their products wait for the host. Take "
            "layout.cuda_graphs=off, or recipe.precision=bf16 on a GPU of compute capability 9.0"
        )


def counts_stay(shape: ModelShape, kernels: str | Kernels, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether all products of experts read on the device how many rows each expert has. `kernels`: those of a model, or
    their name."""
    moe, lora = shape.moe, shape.lora
    assert moe is not None
    chosen = choose(kernels) if isinstance(kernels, str) else kernels
    if chosen.name == "reference":
        return False
    pairs = [(moe.ffn, shape.hidden)]
    pairs += [(lora.rank, shape.hidden), (lora.rank, moe.ffn)] if lora else []
    return all(
        keeps_counts(torch.empty(1, width, dtype=dtype, device=device),
                     torch.empty(1, height, width, dtype=dtype, device=device), chosen.prefer)
        for height, width in pairs
    )  # fmt: skip
