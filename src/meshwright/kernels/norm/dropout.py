"""Dropout that saves a byte for each element."""

import torch
from torch import Tensor


def dropout(x: Tensor, rate: float, training: bool = True) -> Tensor:
    """Drop a share of the elements of x while training, and divide the others by the rest (Srivastava et al. 2014).

    The backward pass needs a mask of one byte per element on every device. `F.dropout` saves numbers of x's dtype on a
    CPU, and so does a dry run of it.
    """
    return torch.native_dropout(x, rate, True)[0] if training and rate else x
