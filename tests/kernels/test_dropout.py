"""Masks of dropout from keys: their rate, their independence, what they do to a tensor and its gradient."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.kernels.norm import dropout as masks
from meshwright.kernels.norm.dropout import AttentionDropout, TokenKeys, dropout, features, keep_mask, site_key

ROWS, POSITIONS, WIDTH, RATE = 4, 64, 256, 0.1
SITES = ("attention", "mlp")


def mask(seed: int = 0, sample: int = 0, layer: int = 0, site: str = "mlp", rate: float = RATE) -> Tensor:
    """Elements (B, S, D) that stay."""
    keys = masks.token_keys(seed, range(sample, sample + ROWS), torch.arange(POSITIONS))
    rows = TokenKeys(keys, keys).of_layer(str(layer)).stream
    return keep_mask(masks.mix(rows + site_key(site)), features(0, WIDTH, rows.device), rate)


def lowbias32(x: int) -> int:
    """The hash in Python's own integers, as its author wrote it (github.com/skeeto/hash-prospector)."""
    x = (x ^ (x >> 16)) * 0x7FEB352D % 2**32
    x = (x ^ (x >> 15)) * 0x846CA68B % 2**32
    return x ^ (x >> 16)


def test_the_hash_is_lowbias32() -> None:
    numbers = [0, 1, 2, 12345, 2**31 - 1, 2**31, 2**32 - 1, 0xDEADBEEF]
    right = [lowbias32(number) for number in numbers]
    words = torch.tensor(numbers).to(torch.int32)
    assert [int(word) % 2**32 for word in masks.mix(words)] == right


@pytest.mark.parametrize("rate", [0.02, 0.1, 0.5, 0.9])
def test_the_rate_is_within_binomial_bounds(rate: float) -> None:
    """All elements, and each feature and each position by itself: none may be dropped more often than others."""
    stays = mask(rate=rate).double()
    for dims in ((0, 1, 2), (0, 1), (0, 2)):
        count = stays.numel() / stays.mean(dims).numel()
        sigma = (rate * (1 - rate) / count) ** 0.5
        assert float((stays.mean(dims) - (1 - rate)).abs().max()) < 5 * sigma
    # The spread between rows is that of independent draws, too: chi-square over rows, within 5 of its deviations.
    rows = stays.flatten(0, 1)
    chi_square = float(((rows.sum(1) - WIDTH * (1 - rate)) ** 2 / (WIDTH * rate * (1 - rate))).sum())
    assert abs(chi_square - len(rows)) < 5 * (2 * len(rows)) ** 0.5


def correlation(a: Tensor, b: Tensor) -> float:
    """Correlation of two masks, in deviations of that of independent ones."""
    a, b = a.double().flatten(), b.double().flatten()
    return float(torch.corrcoef(torch.stack((a, b)))[0, 1]) * len(a) ** 0.5


def test_masks_of_steps_layers_sites_and_seeds_are_independent() -> None:
    drawn = [
        mask(**words)  # type: ignore[arg-type]
        for words in (
            {}, {"sample": ROWS}, {"sample": 2**40}, {"layer": 1}, {"layer": 2}, {"site": "attention"}, {"seed": 1},
            {"seed": 2**63}, {"layer": 1, "site": "attention"},
        )
    ]  # fmt: skip
    for a, b in itertools.combinations(drawn, 2):
        assert abs(correlation(a, b)) < 5


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("shift", [1, 2, 3, 16])
def test_neighbours_are_independent(dim: int, shift: int) -> None:
    """Samples, positions and features that are near one another, where a weak hash shows."""
    stays = mask(rate=0.5)
    length = stays.shape[dim]
    if shift < length:
        assert abs(correlation(stays.narrow(dim, 0, length - shift), stays.narrow(dim, shift, length - shift))) < 5


def test_pairs_of_elements_are_independent() -> None:
    """Three neighbours in a row have each of their 8 patterns equally often: chi-square with 7 degrees."""
    stays = mask(rate=0.5).long()
    patterns = torch.bincount((stays[..., :-2] + 2 * stays[..., 1:-1] + 4 * stays[..., 2:])[..., ::3].flatten())
    expected = patterns.sum() / 8
    assert float(((patterns - expected) ** 2 / expected).sum()) < 35  # p < 1e-5


def test_what_stays_is_scaled_and_the_gradient_is_the_same_mask() -> None:
    x = torch.randn(3, 50, 40, dtype=torch.float64, requires_grad=True)
    rows = torch.randint(-(2**31), 2**31, (3, 50)).to(torch.int32)
    out = dropout(x, 0.25, rows, 7)
    factors = (out / x).detach()
    assert set(factors.unique().tolist()) <= {0.0, *(factors[factors > 0]).unique().tolist()}
    torch.testing.assert_close(factors[factors > 0], torch.full_like(factors[factors > 0], 4 / 3))
    upstream = torch.randn_like(x)
    (gradient,) = torch.autograd.grad(out, x, upstream)
    torch.testing.assert_close(gradient, upstream * factors)
    ones = dropout(torch.ones(64, 64, 64), 0.25, torch.randint(2**31, (64, 64), dtype=torch.int32), 7)
    assert abs(float(ones.mean()) - 1) < 5 * (0.25 / 0.75 / ones.numel()) ** 0.5


def test_a_part_is_cut_from_the_whole() -> None:
    """Features from a first one on, heads from a first one on, and masks in many parts."""
    rows = torch.randint(-(2**31), 2**31, (3, 50)).to(torch.int32)
    whole = keep_mask(rows, features(0, 96, rows.device), 0.3)
    assert torch.equal(whole[..., 32:], keep_mask(rows, features(32, 64, rows.device), 0.3))
    heads = AttentionDropout.make(rows, 0.3, 8, 0).rows
    assert torch.equal(heads[..., 4:], AttentionDropout.make(rows, 0.3, 4, 4).rows)


def test_parts_of_a_large_mask_are_one_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.randint(-(2**31), 2**31, (3, 50)).to(torch.int32)
    columns = features(0, 96, rows.device)
    whole = keep_mask(rows, columns, 0.3)
    monkeypatch.setattr(masks, "AT_ONCE", {"cpu": 1000})
    assert torch.equal(keep_mask(rows, columns, 0.3), whole)
    compiled = torch.compile(lambda: keep_mask(rows, columns, 0.3), backend="aot_eager")
    assert torch.equal(compiled(), whole)


def test_it_keeps_a_byte_per_element_like_torch() -> None:
    x, rows = torch.randn(4, 8, 32, requires_grad=True), torch.zeros(4, 8, dtype=torch.int32)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda packed: packed):
        out = dropout(x, 0.5, rows, 0)
    assert [tensor.dtype for tensor in saved] == [torch.bool] and saved[0].numel() == x.numel()
    # Its spread is that of torch's own dropout.
    theirs = F.dropout(torch.ones(400, 400), 0.5)
    ours = dropout(torch.ones(400, 400), 0.5, torch.arange(400, dtype=torch.int32), 0)
    assert abs(float(ours.std() - theirs.std())) < 0.01 and out.shape == x.shape
