"""Critical batch and token budgets against the figures of their sources."""

import pytest

from meshwright.planner.step.prediction import budget, critical, expected_loss
from meshwright.spec import presets


def test_loss_of_chinchilla() -> None:
    """Hoffmann et al. 2022, eq. 10 with 70B parameters and 1.4T tokens: 1.69 + 0.083 + 0.163."""
    assert expected_loss(70e9, 1.4e12) == pytest.approx(1.936, abs=0.005)


def test_critical_batch_grows_as_the_loss_falls() -> None:
    """Kaplan et al. 2020: doubles for every 13 % of loss."""
    early, late = critical(presets.model("llama-3.1-8b"), 1e9), critical(presets.model("llama-3.1-8b"), 15e12)
    assert late.loss_nats < early.loss_nats and late.batch_tokens > early.batch_tokens
    doubling = (1 / 0.87) ** (1 / 0.21)
    assert doubling == pytest.approx(2, rel=0.05)
    assert late.batch_tokens == pytest.approx(2e8 / late.loss_nats ** (1 / 0.21))


def test_a_bill() -> None:
    """1,000 steps of 4M tokens at 3.6 s on 100 devices at 2: an hour, 100 device hours, 200."""
    bill = budget(4e9, 4_000_000, 3.6, 100, 2.0)
    assert (bill.steps, bill.days, bill.device_hours, bill.price) == pytest.approx((1000, 1 / 24, 100, 200))
