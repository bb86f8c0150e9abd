"""Matrices of a model that are codes and scales: where they stand.

A `Linear` with `quantized` has no weight; a stack of experts `up` is None beside `up_quantized`. An adapter, a bias and
whatever runs around the layer stay as they are. The tensors are buffers, which nothing trains; or views of one frozen
parameter, which can be shared as parameters are.
"""

from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from meshwright.kernels.cut_matrices import cut
from meshwright.kernels.quantized_matrix import PARTS, QuantizedMatrix
from meshwright.spec.boxes import Box
from meshwright.spec.code_cuts import LINE_BYTES, CodesCut, lines, nbytes
from meshwright.spec.inventory import parameters
from meshwright.spec.quantization_schemes import Scheme, Size
from meshwright.spec.shape import ModelShape

RUN = "quantized.run"
"""End of the name of a parameter that is bytes of codes."""


class QuantizedWeight(nn.Module):
    """The tensors of one matrix (rows, columns), or of a stack of them."""

    codes: Tensor
    run: nn.Parameter | None
    """Where the tensors are views of it: (lines of LINE_BYTES, some), of any dtype, which says nothing of what is in
    it. None = they are buffers."""

    def __init__(
        self,
        scheme: Scheme,
        size: tuple[int, ...],
        kept: int,
        dtype: torch.dtype,
        *,
        keeps_copies: bool = True,
        prefer: str = "auto",
    ) -> None:
        super().__init__()
        *stack, rows, columns = size
        self.scheme, self.size, self.keeps_copies, self.prefer = scheme, size, keeps_copies, prefer
        self.part: CodesCut | None = None
        """What of the matrix is here; None = all."""
        self.held: dict[str, Size] = scheme.sizes(rows, columns, stack, kept=kept)
        """Of the tensors."""
        if kept:
            self.held["kept"] = (*stack, rows, kept), str(dtype).removeprefix("torch.")
        for name, (dims, kind) in self.held.items():
            self.register_buffer(name, torch.empty(dims, dtype=getattr(torch, kind)))
        self.register_parameter("run", None)
        self._made: tuple[nn.Parameter | None, QuantizedMatrix] | None = None
        """The matrix, and the run of which it is made."""
        self.register_load_state_dict_post_hook(_forget)  # type: ignore[no-untyped-call]  # torch has no annotations there

    def cut(self, box: Box) -> None:
        """Have room for a part of the matrix, before there is memory."""
        self.part = CodesCut(scheme=self.scheme, box=box)
        self.held = self.part.sizes()
        for name, (dims, kind) in self.held.items():
            self.register_buffer(name, torch.empty(dims, dtype=getattr(torch, kind), device=self.codes.device))

    def put_into_run(self, dtype: torch.dtype) -> None:
        """Have room for its tensors in one frozen parameter, before there is memory. `dtype`: of the parameters beside
        it, so that all of them travel as they are."""
        size = lines(self.held.values()), LINE_BYTES // dtype.itemsize
        self.run = nn.Parameter(torch.empty(size, dtype=dtype, device=self.codes.device), requires_grad=False)
        for name in self.held:
            delattr(self, name)

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""
        return self.codes.device if self.run is None else self.run.device

    @property
    def rows(self) -> int:
        """Outputs that are here."""
        return self.held["scales"][0][-2]

    @property
    def matrix(self) -> QuantizedMatrix:
        """What products take. Made once the tensors are where they stay; a run must be whole here."""
        if self._made is None or self._made[0] is not self.run:
            parts: dict[str, Any] = self._buffers_by_name() if self.run is None else self._views(self.run.detach())
            columns = self.size[-1] if self.part is None else self.part.box.sizes[-1]
            made = QuantizedMatrix(
                scheme=self.scheme, size_in=columns, keeps_copies=self.keeps_copies, prefer=self.prefer, **parts
            )
            if self.part is not None and not self.part.is_whole:
                made.before, made.places = self.part.before, self.part.places
            self._made = self.run, made
        return self._made[1]

    def take(self, matrix: QuantizedMatrix, share: Tensor | None = None, first: int = 0) -> None:
        """Have its tensors be those of a matrix of its scheme and size; of a part, that part of them. `share`: of a
        run, the lines that are here, from the `first` on."""
        self._made = None  # what products made of the tensors before
        matrix = matrix if self.part is None else cut(matrix, self.part)
        if self.run is None:
            for name, tensor in matrix.tensors.items():
                getattr(self, name).copy_(tensor)
            return
        share = self.run.detach() if share is None else share
        whole = torch.zeros(len(self.run), LINE_BYTES, dtype=torch.uint8, device=share.device)
        for name, place in self._views(whole).items():
            place.copy_(matrix.tensors[name])
        share.view(torch.uint8).copy_(whole[first : first + len(share)])

    def _buffers_by_name(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in PARTS if name in self.held}

    def _views(self, run: Tensor) -> dict[str, Tensor]:
        """The tensors that stand in a whole run, each from the beginning of a line."""
        flat, found, start = run.view(torch.uint8).flatten(), dict[str, Tensor](), 0
        for name, (dims, kind) in self.held.items():
            size = nbytes(((dims, kind),))
            found[name] = flat[start : start + size].view(getattr(torch, kind)).view(dims)
            start += LINE_BYTES * lines(((dims, kind),))
        return found


def _forget(weight: QuantizedWeight, _: object) -> None:
    """What products made of other tensors than those that were loaded."""
    weight._made = None


def is_run(name: str) -> bool:
    """Whether a parameter of this name is bytes of codes."""
    return name.endswith(RUN)


def quantizable(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Name and size of every matrix that schemes are for: those between hidden states. Embeddings, head, norms,
    biases and routers are not among them."""
    return {one.name: one.shape for one in parameters(shape.base) if one.matrices is not None}


def place(name: str) -> str:
    """Of a matrix's module in the model: layers.3.mlp.up.weight -> layers.3.mlp.up.quantized."""
    return name.removesuffix(".weight") + (".quantized" if name.endswith(".weight") else "_quantized")


def frozen_schemes(shape: ModelShape) -> dict[str, Scheme]:
    """Of each frozen matrix that is held as codes beside adapters."""
    scheme = None if shape.lora is None else shape.lora.scheme
    return {one.name: scheme for one in parameters(shape) if scheme is not None and one.scheme}


def frozen_codes(models: Iterable[nn.Module], shape: ModelShape) -> dict[str, QuantizedWeight]:
    """The same matrices where they stand, of those that these parts of a model hold."""
    places = {place(name): name for name in frozen_schemes(shape)}
    found = (named for model in models for named in model.named_modules())
    return {places[name]: one for name, one in found if name in places and isinstance(one, QuantizedWeight)}


def put_quantized(
    model: nn.Module, shape: ModelShape, schemes: Mapping[str, Scheme], kept: Mapping[str, int], dtype: torch.dtype,
    *, keeps_copies: bool = True,
) -> None:  # fmt: skip
    """Give matrices of a skeleton (a Transformer), by name, codes in place of a weight. `kept`: how many columns of
    which are in `dtype`. Not `keeps_copies`: products restore a matrix each time."""
    sizes, kernels = quantizable(shape), cast(Any, model.kernels)
    with torch.device("meta"):
        for name, scheme in schemes.items():
            where, _, leaf = place(name).rpartition(".")
            module = model.get_submodule(where)
            module.register_parameter(name.rpartition(".")[2], None)
            made = QuantizedWeight(
                scheme, sizes[name], kept.get(name, 0), dtype, keeps_copies=keeps_copies, prefer=kernels.prefer
            )
            setattr(module, leaf, made)
