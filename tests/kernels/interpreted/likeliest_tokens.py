"""The likeliest token of each row and its log-probability, beside torch in fp64, at random; ties and no numbers."""

import pytest
import torch

from meshwright.kernels.triton import logit_rows as kernel
from meshwright.kernels.triton.logit_rows import likeliest
from tests.kernels.interpreted.poison import nothing_is_left_unwritten  # noqa: F401  # a fixture


@pytest.mark.parametrize("vocab", [1, 7, 64, 65, 300, 1001])
def test_as_torch_has_it(vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "BLOCK", 64)
    logits = 5 * torch.randn(4, vocab + 3, generator=torch.Generator().manual_seed(vocab))[:, :vocab]
    actual, right = likeliest(logits), logits.double().log_softmax(-1).max(-1)
    assert torch.equal(actual[:, 0].long(), right.indices)
    torch.testing.assert_close(actual[:, 1].double(), right.values, rtol=1e-5, atol=1e-6)


def test_ties_infinities_and_no_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of equal ones; tokens that are ruled out have no share; a row with a hole says so."""
    monkeypatch.setattr(kernel, "BLOCK", 64)
    logits = torch.full((4, 200), float("-inf"))
    logits[0, [5, 150]] = 3.0
    logits[1, 199] = -7.0
    logits[2] = 0.0
    logits[2, 100] = float("nan")
    logits[3, 64:] = 1.0
    actual = likeliest(logits)
    assert actual[[0, 1, 3], 0].tolist() == [5.0, 199.0, 64.0] and actual[2, 1].isnan()
    right = logits[[0, 1, 3]].double().log_softmax(-1).amax(-1)
    torch.testing.assert_close(actual[[0, 1, 3], 1].double(), right, rtol=1e-6, atol=1e-6)
