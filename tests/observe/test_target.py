"""What a dry run takes a GPU's kernels to need."""

import math

import pytest
import torch

from meshwright import compat
from meshwright.kernels.attention import Mask, attend
from meshwright.kernels.target import acting_as
from meshwright.observe.storages import Watch


@pytest.mark.parametrize(
    ("dtype", "heads", "dim"), [(torch.float32, 2, 64), (torch.bfloat16, 2, 320), (torch.bfloat16, 2, 64)]
)
def test_a_gpu_never_stores_the_weights_of_attention(dtype: torch.dtype, heads: int, dim: int) -> None:
    """Unequal heads, which torch's other fused kernel does not take: it would compute with S x T weights."""
    length = 1024
    with compat.fake_tensors(), acting_as("cuda"), Watch() as watch:
        q, k, v = (torch.empty(1, length, n, dim, dtype=dtype, requires_grad=True) for n in (8, heads, heads))
        attend(q, k, v, Mask(), scale=0.3).sum().backward()
    largest = max(math.prod(record.shape) for record in watch.records)
    assert largest <= 8 * length * dim < 8 * length * length
    assert q.grad is not None and k.grad is not None and k.grad.shape == k.shape


def test_what_torch_would_store_is_no_dry_run() -> None:
    q, k = (torch.empty(1, heads, 8, 4) for heads in (4, 2))
    with pytest.raises(AssertionError, match="equal heads"):
        compat.cuda_attention(q, k, k, attn_mask=None, dropout_p=0.0, is_causal=True, scale=1.0, enable_gqa=True)
