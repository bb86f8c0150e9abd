"""Dropout that keeps a byte for each element."""

import torch
from torch import Tensor


def dropout(x: Tensor, rate: float, training: bool = True) -> Tensor:
    """x with a share of its elements set to 0 while training, and the others divided by what stays (Srivastava et al.
    2014). The backward pass needs a mask of a byte an element on every device; `F.dropout` keeps numbers of x's dtype
    on a CPU, and so does a dry run of it."""
    return torch.native_dropout(x, rate, True)[0] if training and rate else x
