"""A model whose matrices are codes and scales."""

from collections.abc import Mapping

import torch

from meshwright.model.quantized_weights import put_quantized
from meshwright.model.transformer import Transformer, materialize, shrink, skeleton
from meshwright.spec.quantization_schemes import Scheme
from meshwright.spec.shape import ModelShape


def build_quantized(
    shape: ModelShape, schemes: Mapping[str, Scheme], *, kept: Mapping[str, int], dtype: torch.dtype,
    device: torch.device | str = "cpu", kernels: str = "auto",
) -> Transformer:  # fmt: skip
    """With room for codes of the matrices that have a scheme, and for everything else in `dtype`, all unset. `kept`:
    columns that stay in `dtype`, of matrices that have any."""
    model = skeleton(shape, kernels=kernels)
    put_quantized(model, shape, schemes, kept, dtype)
    shrink(model, dtype)
    materialize(model, device)
    return model.requires_grad_(False)
