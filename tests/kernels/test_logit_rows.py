"""Losses of rows of logits in compiled loops, and their gradients in place, against torch in fp64."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.kernels.c import training_rows
from meshwright.kernels.loss.cross_entropy import IGNORED
from tests.kernels.exactness import tensors

pytestmark = pytest.mark.skipif(
    not training_rows.is_compiled(), reason="no C compiler that takes the loops of kernels/c"
)
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 4e-3}
"""Relative: of an element of a gradient that is written in the dtype of the logits."""
FORMS = [(0.0, 0.0), (0.1, 0.0), (0.0, 1e-3), (0.2, 1e-2)]


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def case(columns: int, dtype: torch.dtype, rows: int = 9) -> tuple[Tensor, Tensor, Tensor]:
    """Logits that are a view, targets of which two are ignored, and factors."""
    (wide,) = tensors((rows, columns + 5), dtype=dtype)
    targets = torch.randint(columns, (rows,), generator=torch.Generator().manual_seed(columns))
    targets[[0, 4]] = IGNORED
    return (wide * 4)[:, 3 : 3 + columns], targets, torch.linspace(0.5, 2, rows)


def exact(logits: Tensor, targets: Tensor, factors: Tensor, smoothing: float, z: float) -> tuple[Tensor, Tensor]:
    """Losses (R,) and gradients (R, V), by autograd."""
    wide = logits.double().requires_grad_()
    losses = F.cross_entropy(wide, targets, ignore_index=IGNORED, reduction="none", label_smoothing=smoothing)
    losses = losses + z * wide.logsumexp(1).square() * (targets != IGNORED)
    (gradients,) = torch.autograd.grad((losses * factors.double()).sum(), wide)
    return losses.detach(), gradients


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(("smoothing", "z"), FORMS)
@pytest.mark.parametrize("columns", [1, 15, 16, 17, 333, 4096])
def test_losses_and_gradients(columns: int, smoothing: float, z: float, dtype: torch.dtype) -> None:
    logits, targets, factors = case(columns, dtype)
    losses, gradients = exact(logits, targets, factors, smoothing, z)
    form = {"ignored": IGNORED, "smoothing": smoothing, "z": z}
    before = logits.clone()
    actual = training_rows.losses(logits, targets, factors, gradient=False, **form)
    torch.testing.assert_close(actual.double(), losses, rtol=2e-6, atol=2e-6)
    assert logits.equal(before)
    assert training_rows.losses(logits, targets, factors, gradient=True, **form).equal(actual)
    torch.testing.assert_close(logits.double(), gradients, rtol=ROUNDING[dtype], atol=2e-6)
    assert not logits[[0, 4]].any()


@pytest.mark.parametrize("factor", [None, torch.tensor(0.25), torch.tensor([2.0, 9.0]).repeat(9)[::2]])
def test_a_factor_is_none_or_one_or_each(factor: Tensor | None) -> None:
    logits, targets, _ = case(100, torch.float32)
    each = torch.ones(9) if factor is None else factor.expand(9)
    _, gradients = exact(logits, targets, each, 0.0, 0.0)
    training_rows.losses(logits, targets, factor, ignored=IGNORED, gradient=True, smoothing=0.0, z=0.0)
    torch.testing.assert_close(logits.double(), gradients, rtol=1e-6, atol=2e-6)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(("smoothing", "z"), FORMS)
@pytest.mark.parametrize("cut", [1, 16, 70])
def test_parts_of_a_vocabulary(cut: int, smoothing: float, z: float, dtype: torch.dtype) -> None:
    """What two devices find of their columns makes the log-sum-exp of all, and from it each writes its gradients."""
    logits, targets, factors = case(101, dtype)
    losses, gradients = exact(logits, targets, factors, smoothing, z)
    parts = [(0, logits[:, :cut]), (cut, logits[:, cut:])]
    actual = torch.stack([training_rows.gathered(part, targets, first) for first, part in parts])
    lse = torch.logsumexp(actual[:, 0] + actual[:, 1].log(), 0)
    plain, chosen = actual[:, 2].sum(0), actual[:, 3].sum(0)
    made = (1 - smoothing) * -chosen - smoothing * plain / 101 + lse + z * lse.square()
    valid = targets != IGNORED
    torch.testing.assert_close(made[valid].double(), losses[valid], rtol=3e-6, atol=3e-6)
    for first, part in parts:
        training_rows.write_gradients(
            part, targets, lse, factors * valid, first=first, vocabulary=101, smoothing=smoothing, z=z
        )
    torch.testing.assert_close(logits.double(), gradients, rtol=ROUNDING[dtype], atol=3e-6)


@pytest.mark.parametrize("size", [1.0, 1e4, 1e30])
def test_extreme_logits(size: float) -> None:
    logits, targets, factors = case(200, torch.float32)
    losses, gradients = exact(logits * size, targets, factors, 0.0, 0.0)
    made = logits * size
    actual = training_rows.losses(made, targets, factors, ignored=IGNORED, gradient=True, smoothing=0.0, z=0.0)
    torch.testing.assert_close(actual.double(), losses, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(made.double(), gradients, rtol=1e-5, atol=1e-3 if size == 1e4 else 1e-6)


def test_a_masked_logit_learns_nothing_and_what_is_no_number_stays_in_its_row() -> None:
    (logits,) = tensors((4, 40))
    logits[0, 7], logits[1, 3], logits[2] = -torch.inf, torch.nan, -torch.inf
    actual = training_rows.losses(
        logits, torch.tensor([1, 1, 1, 99]), None, ignored=IGNORED, gradient=True, smoothing=0.0, z=0.0
    )
    assert actual.isfinite().tolist() == [True, False, False, False], "the last target has no column"
    assert logits[0, 7] == 0 and logits[0].isfinite().all() and logits[1].isnan().all() and logits[3].isfinite().all()


@pytest.mark.parametrize("targets, factor", [(8, 9), (10, 9), (9, 8), (9, 10)])
def test_what_does_not_fit_the_rows_is_refused(targets: int, factor: int) -> None:
    (logits,) = tensors((9, 40))
    with pytest.raises(RuntimeError, match="size"):
        training_rows.losses(
            logits, torch.zeros(targets).long(), torch.ones(factor), ignored=IGNORED, gradient=True, smoothing=0, z=0
        )


def test_targets_and_factors_of_other_dtypes() -> None:
    logits, targets, factors = case(50, torch.float32)
    actual = [logits.clone() for _ in range(2)]
    for made, places, each in zip(actual, (targets, targets.int()), (factors, factors.double()), strict=True):
        training_rows.losses(made, places, each, ignored=IGNORED, gradient=True, smoothing=0.0, z=0.0)
    assert actual[0].equal(actual[1])


def test_where_gradients_are_recorded_plain_code_runs() -> None:
    (logits,) = tensors((512, 512))
    assert not training_rows.takes_logits(logits)
    with torch.no_grad():
        assert training_rows.takes_logits(logits) and training_rows.takes_logits(logits.bfloat16())
        assert not training_rows.takes_logits(logits.half()) and not training_rows.takes_logits(logits[:8])
        assert not training_rows.takes_logits(logits.t())
