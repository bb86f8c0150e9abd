"""Time and money of a token budget, and the global batch compared with the critical one.

Beyond the critical batch size, twice the batch no longer halves the steps (McCandlish et al. 2018, arXiv:1812.06162).
Kaplan et al. 2020 (arXiv:2001.08361), eq. 5.3: B_crit(L) = 2e8 tokens / L^(1 / 0.21) for a loss of L nats per token.
The loss that a model reaches: Hoffmann et al. 2022 (arXiv:2203.15556), eq. 10: L = 1.69 + 406.4 / N^0.34 + 410.7 /
D^0.28. Both are fits on other texts and tokenizers, so they give an order of magnitude.
"""

from dataclasses import dataclass

from meshwright.spec.model.shape import ModelShape
from meshwright.spec.weights.inventory import num_active_parameters

TOKENS_PER_PARAMETER = 20.0
"""Default budget (Hoffmann et al. 2022)."""
SECONDS_PER_DAY = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Critical:
    """Critical batch at the end of training."""

    loss_nats: float
    batch_tokens: float


def expected_loss(parameters: float, tokens: float) -> float:
    """Return nats per token after training on this number of tokens (Hoffmann et al. 2022)."""
    return float(1.69 + 406.4 / parameters**0.34 + 410.7 / tokens**0.28)


def critical(shape: ModelShape, tokens: float = 0.0) -> Critical:
    """Return the critical batch at the end of training on `tokens`, by default 20 per parameter.

    Of a mixture of experts the active parameters count.
    """
    parameters = num_active_parameters(shape)
    loss = expected_loss(parameters, tokens or TOKENS_PER_PARAMETER * parameters)
    return Critical(loss_nats=loss, batch_tokens=2e8 / loss ** (1 / 0.21))


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Steps, time and money for a number of tokens."""

    steps: int
    days: float
    device_hours: float
    price: float
    """Price in the currency of a device hour. 0 = no price known."""


def budget(tokens: float, tokens_per_step: int, step_s: float, devices: int, price_per_hour: float = 0.0) -> Budget:
    """Return steps, days, device hours and money, without checkpoints, evaluation and failures."""
    steps = -(-int(tokens) // tokens_per_step)
    seconds = steps * step_s
    hours = seconds / 3600 * devices
    return Budget(steps=steps, days=seconds / SECONDS_PER_DAY, device_hours=hours, price=hours * price_per_hour)
