"""What a dry run takes a GPU's kernels to need."""

import itertools
import math

import pytest
import torch

from meshwright import compat
from meshwright.kernels.attention.attend import Mask, attend
from meshwright.kernels.chooser import simulate_device
from meshwright.observe.dryrun.simulate import workspace_bytes
from meshwright.observe.dryrun.storage_tracker import StorageWatch


@pytest.mark.parametrize(
    ("dtype", "heads", "dim"), [(torch.float32, 2, 64), (torch.bfloat16, 2, 320), (torch.bfloat16, 2, 64)]
)
def test_a_gpu_never_stores_the_weights_of_attention(dtype: torch.dtype, heads: int, dim: int) -> None:
    """Unequal heads, which torch's other fused kernel does not take: it would compute with S x T weights."""
    length = 1024
    with compat.fake_tensors(), simulate_device("cuda"), StorageWatch() as watch:
        q, k, v = (torch.empty(1, length, n, dim, dtype=dtype, requires_grad=True) for n in (8, heads, heads))
        attend(q, k, v, Mask(), scale=0.3).sum().backward()
    largest = max(math.prod(record.shape) for record in watch.records)
    assert largest <= 8 * length * dim < 8 * length * length
    assert q.grad is not None and k.grad is not None and k.grad.shape == k.shape


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_a_kernel_takes_inside_counts_while_it_runs(dtype: torch.dtype) -> None:
    """By hand: sums of dQ (fp32) and a number a row; dK and dV of each head where flash attention has fewer keys."""
    peaks = []
    for within in (None, workspace_bytes):
        with compat.fake_tensors(), simulate_device("cuda"), StorageWatch(within=within) as watch:
            q, k, v = (torch.empty(1, 200, n, 64, dtype=dtype, requires_grad=True) for n in (4, 2, 2))
            out = attend(q, k, v, Mask(), scale=0.3)
            watch.enter("backward")
            out.backward(torch.empty_like(out))
        assert sum(size for _, size in watch.events()) == sum(r.size_bytes for r in watch.records)
        inside = [record for record in watch.records if record.dtype == "uint8"]
        peaks.append(max(itertools.accumulate(size for _, size in watch.events())))
    rows, dims = 4 * (256 if dtype == torch.bfloat16 else 200), 64
    flash = rows * (dims + 1) * 4 + 2 * 200 * 4 * 64 * 2
    assert [record.shape for record in inside] == [(flash if dtype == torch.bfloat16 else rows * 4,)]
    assert peaks[1] > peaks[0]


def test_what_torch_would_store_is_no_dry_run() -> None:
    q, k = (torch.empty(1, heads, 8, 4) for heads in (4, 2))
    with pytest.raises(AssertionError, match="equal heads"):
        compat.cuda_attention(q, k, k, attn_mask=None, is_causal=True, scale=1.0, enable_gqa=True)
