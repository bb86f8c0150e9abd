"""A model whose matrices are codes and scales."""

from collections.abc import Mapping

import torch

from meshwright.model.quantized_weights import put_quantized
from meshwright.model.transformer import Transformer, materialize, shrink, skeleton
from meshwright.spec.quantization_schemes import Scheme
from meshwright.spec.shape import ModelShape


def build_quantized(
    shape: ModelShape, schemes: Mapping[str, Scheme], *, outlier_columns: Mapping[str, int], dtype: torch.dtype,
    device: torch.device | str = "cpu", kernels: str = "auto",
) -> Transformer:  # fmt: skip
    """Build a model with room for codes of the matrices that have a scheme. Everything is unset and frozen.

    All other tensors are in `dtype`. `outlier_columns` counts the columns of each matrix that are in `dtype` too.
    """
    model = skeleton(shape, kernels=kernels)
    put_quantized(model, shape, schemes, outlier_columns, dtype)
    shrink(model, dtype)
    materialize(model, device)
    return model.requires_grad_(False)
