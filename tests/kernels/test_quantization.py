"""Linear quantization: the lecture's example, twins, and every edge."""

import math

import pytest
import torch
from torch import Tensor

from meshwright.kernels.quantized.rounding import (
    Quantized,
    Share,
    absmax,
    pack,
    table_codes,
    unpack,
    zero_point,
)
from meshwright.spec.errors import PlanError
from meshwright.spec.model.quantization_schemes import NF4, SCHEMES, Scheme
from tests.kernels.references import absmax_reference, nf4_codes_reference, pack_reference, zero_point_reference

SHARES: list[Share] = ["tensor", "row", "column", 4, 5]
METHODS = [(absmax, absmax_reference), (zero_point, zero_point_reference)]


def numbers(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def same(tensor: Quantized, other: Quantized) -> None:
    assert torch.equal(tensor.codes, other.codes)
    assert torch.equal(tensor.scale, other.scale) and torch.equal(tensor.zero, other.zero)


def test_the_lecture_s_example() -> None:
    actual = absmax(torch.tensor([[15, 0.1, 0.02, 1.0, 0.01]]))
    assert actual.codes.tolist() == [[127, 1, 0, 8, 0]]
    assert actual.scale.item() == pytest.approx(15 / 127)


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("bits", [8, 4, 3])
@pytest.mark.parametrize(("fast", "slow"), METHODS, ids=["absmax", "zero-point"])
def test_twins_agree_and_errors_are_half_a_step(fast, slow, bits: int, share: Share) -> None:  # type: ignore[no-untyped-def]  # functions of one signature
    x = numbers(6, 13)
    actual = fast(x, bits, share)
    same(actual, slow(x, bits, share))
    scale = actual.scale.repeat_interleave(share, -1)[:, :13] if isinstance(share, int) else actual.scale
    assert bool(((actual.restored() - x).abs() <= scale / 2 * (1 + 1e-5)).all())
    again = fast(actual.restored(), bits, share)
    assert torch.allclose(again.restored(), actual.restored(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("fast", "slow"), METHODS, ids=["absmax", "zero-point"])
def test_zeros_and_constants_come_back(fast, slow) -> None:  # type: ignore[no-untyped-def]  # functions of one signature
    x = torch.stack((torch.zeros(8), torch.full((8,), 3.0), torch.full((8,), -0.25), torch.full((8,), 1e-44)))
    actual = fast(x, 8, "row")
    same(actual, slow(x, 8, "row"))
    assert torch.allclose(actual.restored()[:3], x[:3], rtol=1e-6) and actual.restored()[0].abs().max() == 0
    assert actual.restored()[3].abs().max() <= 1e-43, "too small for a scale: zero, not NaN"
    assert fast(torch.tensor([[3e38, -3e38]]), 8, "row").restored().isfinite().all(), "their difference is infinite"


@pytest.mark.parametrize(("fast", "slow"), METHODS, ids=["absmax", "zero-point"])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_stays_visible_and_where_it_is(fast, slow, bad: float) -> None:  # type: ignore[no-untyped-def]  # functions of one signature
    x = numbers(3, 8)
    x[1, 2] = bad
    actual = fast(x, 8, "row").restored()
    assert not actual[1].isfinite().any() and actual[[0, 2]].isfinite().all()


def test_more_scales_lose_less() -> None:
    x = numbers(16, 64) * torch.logspace(-2, 1, 64)
    errors = [float((absmax(x, 8, share).restored() - x).norm()) for share in ("tensor", "row", 16)]
    assert errors == sorted(errors, reverse=True)


def test_nf4_is_its_definition() -> None:
    """The numbers of arXiv:2305.14314, appendix E."""
    published = (
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    )  # fmt: skip
    assert pytest.approx(published, abs=2e-6) == NF4
    x = numbers(500).clamp(-1, 1)
    assert torch.equal(table_codes(x, NF4), nf4_codes_reference(x))
    assert table_codes(torch.tensor(NF4), NF4).tolist() == list(range(16))


@pytest.mark.parametrize("bits", [2, 3, 4, 5])
@pytest.mark.parametrize("columns", [1, 7, 8, 13, 32])
def test_codes_are_packed_and_unpacked(bits: int, columns: int) -> None:
    codes = torch.randint(0, 2**bits, (3, columns), generator=torch.Generator().manual_seed(bits)).to(torch.uint8)
    packed = pack(codes, bits)
    assert packed.shape == (3, -(-columns * bits // 8))
    assert torch.equal(unpack(packed, bits, columns), codes)
    assert all(torch.equal(row, pack_reference(row_codes, bits)) for row, row_codes in zip(packed, codes, strict=True))


def test_schemes_say_their_sizes() -> None:
    assert SCHEMES["int4-rtn"].bits_per_weight(64, 1024) == 4 + 16 / 32 + 4 / 32
    assert SCHEMES["nf4"].bits_per_weight(64, 1024) == 4 + 32 / 64
    assert SCHEMES["int3"].sizes(8, 40) == {
        "codes": ((8, 15), "uint8"), "scales": ((8, 2), "bfloat16"), "zeros": ((8, 2), "float16"),
    }  # fmt: skip
    assert SCHEMES["llm-int8"].sizes(8, 40, (2,), outlier_columns=3)["columns"] == ((3,), "int32")
    with pytest.raises(PlanError, match="group=48 is not supported: take one of 16, 32"):
        Scheme(name="odd", about="", bits=4, group=48)
    with pytest.raises(PlanError, match="threshold=0 must be above 0"):
        Scheme(name="odd", about="", bits=8, outliers="threshold", threshold=0)
