"""Stores of keys and values for tests."""

import torch
from torch import Tensor

from meshwright.kernels.attention.paged import PagedStore
from meshwright.spec.plan.execution import CacheForm


def stored(numbers: Tensor, form: CacheForm = "model") -> PagedStore:
    """Of numbers (blocks, block, K, E)."""
    blocks, size, heads, width = numbers.shape
    actual = PagedStore((blocks, size, heads, width), numbers, form)
    actual.write(torch.arange(blocks * size), numbers.flatten(0, 1))
    return actual
