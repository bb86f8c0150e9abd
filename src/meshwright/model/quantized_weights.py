"""Matrices of a model that are codes and scales.

A `Linear` with `quantized` has no weight, and a stack of experts has `up_quantized` while `up` is None. Adapters,
biases and code around the layer are unchanged. The tensors are buffers, which nothing trains, or views of one frozen
parameter, which is sharded as other parameters are.
"""

from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from meshwright.kernels.quantized.matrix import PARTS, QuantizedMatrix, cut
from meshwright.spec.model.quantization_schemes import Scheme, Size
from meshwright.spec.model.shape import ModelShape
from meshwright.spec.weights.boxes import LINE_BYTES, Box, CodesCut, lines, nbytes
from meshwright.spec.weights.inventory import parameters

RUN = "quantized.run"
"""End of a parameter's name that marks bytes of codes."""


class QuantizedWeight(nn.Module):
    """Tensors of one matrix (rows, columns), or of a stack of matrices."""

    codes: Tensor
    run: nn.Parameter | None
    """Parameter (lines of LINE_BYTES, width) whose bytes the tensors are views of. None = they are buffers."""

    def __init__(
        self,
        scheme: Scheme,
        size: tuple[int, ...],
        outlier_columns: int,
        dtype: torch.dtype,
        *,
        keeps_copies: bool = True,
        prefer: str = "auto",
    ) -> None:
        super().__init__()
        *stack, rows, columns = size
        self.scheme, self.size, self.keeps_copies, self.prefer = scheme, size, keeps_copies, prefer
        self.part: CodesCut | None = None
        """Part of the matrix that is held here. None = all of it."""
        self.held: dict[str, Size] = scheme.sizes(rows, columns, stack, outlier_columns=outlier_columns)
        """Size and dtype of each tensor, by name."""
        if outlier_columns:
            self.held["kept"] = (*stack, rows, outlier_columns), str(dtype).removeprefix("torch.")
        for name, (dims, kind) in self.held.items():
            self.register_buffer(name, torch.empty(dims, dtype=getattr(torch, kind)))
        self.register_parameter("run", None)
        self._made: tuple[nn.Parameter | None, QuantizedMatrix] | None = None
        """Matrix that products take, and the run from which it was made."""
        self.register_load_state_dict_post_hook(_forget)  # type: ignore[no-untyped-call]  # torch has no annotations there

    def cut(self, box: Box) -> None:
        """Resize the tensors to a part of the matrix, before they have memory."""
        self.part = CodesCut(scheme=self.scheme, box=box)
        self.held = self.part.sizes()
        for name, (dims, kind) in self.held.items():
            self.register_buffer(name, torch.empty(dims, dtype=getattr(torch, kind), device=self.codes.device))

    def put_into_run(self, dtype: torch.dtype) -> None:
        """Replace the tensors by one frozen parameter, without memory yet, of the dtype of the other parameters."""
        size = lines(self.held.values()), LINE_BYTES // dtype.itemsize
        self.run = nn.Parameter(torch.empty(size, dtype=dtype, device=self.codes.device), requires_grad=False)
        for name in self.held:
            delattr(self, name)

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return self.codes.device if self.run is None else self.run.device

    @property
    def rows(self) -> int:
        """Number of outputs held here."""
        return self.held["scales"][0][-2]

    @property
    def matrix(self) -> QuantizedMatrix:
        """Matrix for products. Read it once the tensors are in their final memory; a run must be whole here."""
        if self._made is None or self._made[0] is not self.run:
            tensors = self._buffers_by_name() if self.run is None else self._views(self.run.detach())
            parts: dict[str, Any] = {PARTS[name]: tensor for name, tensor in tensors.items()}
            columns = self.size[-1] if self.part is None else self.part.box.sizes[-1]
            matrix = QuantizedMatrix(
                scheme=self.scheme, size_in=columns, keeps_copies=self.keeps_copies, prefer=self.prefer, **parts
            )
            if self.part is not None and not self.part.is_whole:
                matrix.before, matrix.places = self.part.before, self.part.places
            self._made = self.run, matrix
        return self._made[1]

    def take(self, matrix: QuantizedMatrix, share: Tensor | None = None, first: int = 0) -> None:
        """Copy the tensors of a matrix, or its part. `share` is the run's part held here, from line `first` on."""
        self._made = None  # it was made from the old tensors
        matrix = matrix if self.part is None else cut(matrix, self.part)
        if self.run is None:
            for name, tensor in matrix.tensors.items():
                getattr(self, name).copy_(tensor)
            return
        share = self.run.detach() if share is None else share
        # ZeRO cuts the run by lines, not by tensors, so the whole run is laid out and this share copied.
        whole = torch.zeros(len(self.run), LINE_BYTES, dtype=torch.uint8, device=share.device)
        for name, view in self._views(whole).items():
            view.copy_(matrix.tensors[name])
        share.view(torch.uint8).copy_(whole[first : first + len(share)])

    def _buffers_by_name(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in PARTS if name in self.held}

    def _views(self, run: Tensor) -> dict[str, Tensor]:
        """Return the tensors in a whole run, each aligned to a line."""
        flat, views, start = run.view(torch.uint8).flatten(), dict[str, Tensor](), 0
        for name, (dims, kind) in self.held.items():
            size = nbytes(((dims, kind),))
            views[name] = flat[start : start + size].view(getattr(torch, kind)).view(dims)
            start += LINE_BYTES * lines(((dims, kind),))
        return views


def _forget(weight: QuantizedWeight, _: object) -> None:
    """Drop the matrix made from tensors that loading has replaced."""
    weight._made = None


def is_run(name: str) -> bool:
    """Return True if a parameter of this name is bytes of codes."""
    return name.endswith(RUN)


def quantizable(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Return name and size of every matrix between hidden states, except routers. Schemes apply to these."""
    return {parameter.name: parameter.shape for parameter in parameters(shape.base) if parameter.matrices is not None}


def quantized_name(name: str) -> str:
    """Return the name of a matrix's quantized module: layers.3.mlp.up.weight -> layers.3.mlp.up.quantized."""
    return name.removesuffix(".weight") + (".quantized" if name.endswith(".weight") else "_quantized")


def frozen_schemes(shape: ModelShape) -> dict[str, Scheme]:
    """Return the scheme of each frozen matrix that is held as codes under adapters."""
    scheme = None if shape.lora is None else shape.lora.scheme
    return {parameter.name: scheme for parameter in parameters(shape) if scheme is not None and parameter.scheme}


def frozen_codes(models: Iterable[nn.Module], shape: ModelShape) -> dict[str, QuantizedWeight]:
    """Return the modules of these matrices in parts of a model, by the name of the matrix."""
    names = {quantized_name(name): name for name in frozen_schemes(shape)}
    modules = (pair for model in models for pair in model.named_modules())
    return {names[name]: module for name, module in modules if name in names and isinstance(module, QuantizedWeight)}


def put_quantized(
    model: nn.Module,
    shape: ModelShape,
    schemes: Mapping[str, Scheme],
    outlier_columns: Mapping[str, int],
    dtype: torch.dtype,
    *,
    keeps_copies: bool = True,
) -> None:
    """Replace weights of a skeleton (a Transformer), by name, with room for codes.

    `outlier_columns` counts the columns of each matrix that stay in `dtype`. Without `keeps_copies`, products restore a
    matrix each time.
    """
    sizes, kernels = quantizable(shape), cast(Any, model.kernels)
    with torch.device("meta"):
        for name, scheme in schemes.items():
            where, _, leaf = quantized_name(name).rpartition(".")
            module = model.get_submodule(where)
            module.register_parameter(name.rpartition(".")[2], None)
            room = QuantizedWeight(
                scheme,
                sizes[name],
                outlier_columns.get(name, 0),
                dtype,
                keeps_copies=keeps_copies,
                prefer=kernels.prefer,
            )
            setattr(module, leaf, room)
