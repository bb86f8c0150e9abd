"""Products with a head whose number of rows V does not suit a GPU's matrix units (spec/memory/buffers.py).

Logits (R, V) and their gradients are stored as (R, W), W the next multiple of 128, and the gradient of the head as
(W, D): all rows are aligned. The head itself is not moved, since a parameter may be a shard, a gathered buffer or a
part of another rank's. Only its last rows, fewer than 128, are copied to a block of 128 that zeros fill up.

No loss reads past V, and no gradient of the padding leaves this module.

Letters: R rows of a chunk, D width of the model, V rows of the head that are here, W the same padded.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.kernels.linear import cpu_product
from meshwright.kernels.target import device_kind
from meshwright.spec.memory.buffers import PADDED_TO, padded_columns

PADDING_DEVICES = {"cuda"}
"""Kinds of devices that pad rows. A CPU's products take any width at the same speed."""


@dataclass(frozen=True, slots=True)
class HeadMatrix:
    """A head (V, D), for products in one dtype. Created for each call of a loss."""

    weight: Tensor
    width: int
    """W. V where nothing is padded."""
    parts: tuple[tuple[slice, Tensor], ...]
    """Columns of the padded logits, and the rows of the head that make them.

    The last block comes first: its share of the gradient of x is rounded before the rest is added, and is the smallest.
    """

    @classmethod
    def padded(cls, weight: Tensor, dtype: torch.dtype) -> "HeadMatrix":
        """Create the matrix for products in `dtype`."""
        rows = len(weight)
        width = padded_columns(rows, dtype.itemsize) if device_kind(weight) in PADDING_DEVICES else rows
        if width == rows:
            return cls(weight, width, ((slice(0, rows), weight),))
        # Only the last block of rows is copied; all before it are aligned already.
        first = width - PADDED_TO
        block = weight.new_zeros(PADDED_TO, weight.shape[1], dtype=dtype)
        block[: rows - first] = weight[first:]
        last = (slice(first, width), block)
        return cls(weight, width, (last, (slice(0, first), weight[:first].to(dtype))) if first else (last,))

    @property
    def is_padded(self) -> bool:
        """True where W is larger than V."""
        return self.width > len(self.weight)

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits (R, V) of x (R, D)."""
        if not self.is_padded:
            return cpu_product.widened_linear(x, self.weight)
        logits = x.new_empty(len(x), self.width)
        for columns, matrix in self.parts:
            torch.mm(x, matrix.t(), out=logits[:, columns])
        return logits[:, : len(self.weight)]

    def padded_gradients(self, gradients: Tensor, dtype: torch.dtype) -> Tensor:
        """Pad gradients of logits (R, V) with zeros to (R, W) in `dtype`, in place where they overlay `logits`."""
        if not self.is_padded:
            return gradients.to(dtype)
        rows, columns = gradients.shape
        size = (rows, self.width)
        if gradients.dtype == dtype and self._has_room(gradients):
            padded = gradients.as_strided(size, (self.width, 1))
        else:
            padded = gradients.new_empty(size, dtype=dtype)
            padded[:, :columns] = gradients
        padded[:, columns:].zero_()  # these are 0 x 0 already, but nan in an ignored row that is infinite
        return padded

    def _has_room(self, gradients: Tensor) -> bool:
        """Return whether each row owns W - V further numbers behind it."""
        if gradients.stride() != (self.width, 1):
            return False
        numbers = gradients.storage_offset() + len(gradients) * self.width
        return gradients.untyped_storage().nbytes() >= numbers * gradients.element_size()

    def input_gradient(self, gradients: Tensor) -> Tensor:
        """Return the gradient of x (R, D) from `padded_gradients`."""
        if not self.is_padded:
            return cpu_product.widened_multiply(gradients, self.weight)
        (columns, matrix), *others = self.parts
        total = cpu_product.multiply(gradients[:, columns], matrix)
        for columns, matrix in others:
            cpu_product.add_product(total, gradients[:, columns], matrix)
        return total

    def empty_gradient(self, rows: int) -> Tensor:
        """Allocate the gradient of the head (V, D) fp32, W rows in memory, which the first chunk writes.

        `rows`: rows of x. Without any it is zeros.
        """
        make = self.weight.new_empty if rows else self.weight.new_zeros
        return make(self.width, self.weight.shape[1], dtype=torch.float32)[: len(self.weight)]

    def add_gradient(self, total: Tensor, gradients: Tensor, x: Tensor, *, first: bool) -> None:
        """Add gradients^T x to total, with `padded_gradients` and x (R, D). The `first` chunk overwrites total."""
        whole = total.as_strided((self.width, total.shape[1]), total.stride()) if self.is_padded else total
        cpu_product.add_product(whole, gradients.t(), x, beta=int(not first))


def scaled_gradient(total: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply total (V, D) fp32, which is consumed, by factor (), and round to `dtype` once.

    A GPU rounds while it multiplies, 6 bytes per element in 16 bits. In two passes, as on a CPU, they are 14.
    """
    if dtype == total.dtype or device_kind(total) == "cpu" or torch.compiler.is_compiling():
        return total.mul_(factor).to(dtype)
    return torch.mul(total, factor, out=total.new_empty(total.shape, dtype=dtype))
