"""CUDA graphs of training (layout.cuda_graphs): each pass of a micro-batch is captured once, then launched in one call.

They are for models so small that the host launches kernels slower than the device runs them (graph_capture.py).
Gradients are added to buffers at fixed addresses, and parameters are updated in place. Passes of another `form` have
other sizes, or differ in having documents.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from meshwright.kernels import Kernels, choose
from meshwright.kernels.experts.experts import keeps_counts
from meshwright.kernels.linear.gradient_sums import gradient_dtype, sum_of
from meshwright.kernels.target import simulated_kind
from meshwright.model import Transformer
from meshwright.parallel.graphs.graph_capture import CudaCapture, FormGraphs, Launch, NoCapture, Repeatable
from meshwright.parallel.groups.mesh import Mesh
from meshwright.parallel.pipeline.passes import Pass
from meshwright.parallel.zero.replicas import Bucket, Replicas
from meshwright.spec.errors import PlanError
from meshwright.spec.layout.layout import Layout
from meshwright.spec.model.shape import ModelShape

_log = logging.getLogger("meshwright")


class Capturable(Pass, Repeatable, Protocol):
    """A pass that can be captured."""


@dataclass(slots=True, kw_only=True, eq=False)
class PassGraphs(FormGraphs[Capturable]):
    """The passes of a model without a pipeline, as graphs."""

    model: Transformer
    replicas: Sequence[Replicas] = ()
    gradients: dict[nn.Parameter, Tensor] = field(init=False, default_factory=dict)
    """Gradient of each parameter, to which all graphs add."""
    _buffers: list[Tensor] = field(init=False, default_factory=list)
    """Memory of the gradients: of every bucket, then of gradients without one."""

    def run(self, passes: Iterable[Capturable]) -> None:
        """Run every micro-batch of a step. The caller sums gradients over replicas."""
        self._begin()
        for micro_pass in passes:
            self.call(micro_pass, self._pass)

    def _begin(self) -> None:
        """Zero the gradients and attach them again: whoever reads them may have detached them."""
        if not self.gradients:
            self._lay_out()
        for buffer in self._buffers:
            buffer.zero_()
        for parameter, gradient in self.gradients.items():
            parameter.grad = gradient
        # Buffers of buckets come first; those behind them belong to gradients without one.
        for bucket, buffer in zip(self._buckets(), self._buffers, strict=False):
            bucket.buffer = buffer
        self.read([*self.model.parameters(), *self.model.buffers()])

    def _lay_out(self) -> None:
        """Lay gradients out one behind the other: those of each bucket, then the others by dtype."""
        for bucket in self._buckets():
            self._side_by_side(bucket.parameters, bucket.dtype)
        held = [p for p in self.model.parameters() if p.requires_grad and p not in self.gradients]
        for dtype in dict.fromkeys(map(gradient_dtype, held)):
            self._side_by_side([p for p in held if gradient_dtype(p) == dtype], dtype)
        # Autograd must add gradients on the stream of the captures: CUDA refuses a capture that waits for another
        # stream.
        with self.capture.beside():
            for gradient_sum in filter(None, map(sum_of, self.gradients)):
                gradient_sum.move_to_current_stream()

    def _buckets(self) -> list[Bucket]:
        return [bucket for replicas in self.replicas for bucket in replicas.buckets]

    def _side_by_side(self, parameters: Sequence[nn.Parameter], dtype: torch.dtype) -> None:
        sizes = [parameter.numel() for parameter in parameters]
        buffer = torch.zeros(sum(sizes), dtype=dtype, device=parameters[0].device)
        for parameter, part in zip(parameters, buffer.split(sizes), strict=True):
            self.gradients[parameter] = part.view_as(parameter)
        self._buffers.append(buffer)

    def _capture(
        self, call: Capturable, work: Callable[[Capturable], None]
    ) -> tuple[Capturable | None, Launch | None]:  # fmt: skip
        """Capture work. Return nothing if the device cannot: passes then run without graphs, and none is lost."""
        try:
            return FormGraphs._capture(self, call, work)
        except RuntimeError as error:
            self.most = 0
            reason = str(error).partition("\n")[0]
            _log.warning("meshwright: note: passes run without CUDA graphs, which is slower: %s", reason)
            return None, None

    def _pass(self, micro_pass: Pass) -> None:
        _, loss = micro_pass(self.model, None)
        loss.backward()


def pass_graphs(
    model: Transformer, mesh: Mesh, device: torch.device, replicas: Sequence[Replicas]
) -> PassGraphs | None:  # fmt: skip
    """Return the graphs of a laid-out model, if its layout asks for them. Raises PlanError when the device cannot."""
    if mesh.layout.cuda_graphs != "on":
        return None
    check_device(model.shape, mesh.layout, device, next(model.parameters()).dtype)
    capture = CudaCapture(device) if device.type == "cuda" else NoCapture()
    return PassGraphs(model=model, capture=capture, replicas=replicas)


def check_device(shape: ModelShape, layout: Layout, device: torch.device, dtype: torch.dtype) -> None:
    """Raise PlanError when layout.cuda_graphs=on cannot work on a device.

    The device may have no CUDA graphs, or experts' products may have the host wait for the lengths of their runs.
    Settings that no device can capture are refused earlier (spec.legal).
    """
    if layout.cuda_graphs != "on":
        return
    kind = simulated_kind() or device.type
    if kind != "cuda":
        raise PlanError(f"layout.cuda_graphs=on needs a GPU, and this is a {kind}: take layout.cuda_graphs=off")
    if shape.moe and not counts_stay(shape, layout.kernels, device, dtype):
        raise PlanError(
            "layout.cuda_graphs=on cannot capture experts here: their products wait for the host. Take "
            "layout.cuda_graphs=off, or recipe.precision=bf16 on a GPU of compute capability 9.0"
        )


def counts_stay(shape: ModelShape, kernels: str | Kernels, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether all products of experts read each expert's rows on the device. `kernels`: or their name."""
    moe, lora = shape.moe, shape.lora
    assert moe is not None
    chosen = choose(kernels) if isinstance(kernels, str) else kernels
    if chosen.name == "reference":
        return False
    # All sizes of experts' products: their matrices, then the two factors of an adapter.
    pairs = [(moe.ffn, shape.hidden)]
    pairs += [(lora.rank, shape.hidden), (lora.rank, moe.ffn)] if lora else []
    return all(
        keeps_counts(torch.empty(1, width, dtype=dtype, device=device),
                     torch.empty(1, height, width, dtype=dtype, device=device), chosen.prefer)
        for height, width in pairs
    )  # fmt: skip
