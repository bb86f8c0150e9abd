"""Held-out loss, perplexity and bits per byte, by hand."""

import math

import pytest
import torch

from meshwright.parallel import on_one_device
from meshwright.training.step.batches import Batch
from meshwright.training.step.evaluate import evaluate
from tests.counting import Operations
from tests.model.shrunk import VOCAB
from tests.training.tiny import batch, small


def test_figures_by_hand() -> None:
    """Batches of unequal numbers of valid tokens count by token; rows of many documents by the mask."""
    model = small()
    batches = [batch(3, 10, valid=[10, 4, 0], borders=True), batch(1, 10, valid=[7], seed=1)]
    nats, count = 0.0, 0
    with torch.no_grad():
        for held_out in batches:
            logs = (
                model(held_out.tokens, documents=held_out.documents, positions=held_out.positions)
                .double()
                .log_softmax(-1)
            )
            for row, column in (held_out.targets >= 0).nonzero().tolist():
                nats -= logs[row, column, held_out.targets[row, column]].item()
                count += 1
    metrics = evaluate(on_one_device(model), iter(batches), step=7, tokens_per_byte=0.31)
    assert (metrics.step, metrics.tokens) == (7, 21) and count == 21
    assert metrics.loss == pytest.approx(nats / 21, rel=1e-6)
    assert metrics.perplexity == pytest.approx(math.exp(nats / 21), rel=1e-5)
    assert metrics.bits_per_byte == pytest.approx(nats / 21 / math.log(2) * 0.31, rel=1e-6)
    assert metrics.seconds > 0


def test_a_model_that_knows_nothing_needs_log2_of_the_vocabulary() -> None:
    """A byte a token: log2 V bits per byte."""
    model = small()
    with torch.no_grad():
        model.head.weight.zero_()
    metrics = evaluate(on_one_device(model), [batch(2, 9)], step=0, tokens_per_byte=1.0)
    assert metrics.bits_per_byte == pytest.approx(math.log2(VOCAB), rel=1e-6)
    assert metrics.perplexity == pytest.approx(VOCAB, rel=1e-5)


@pytest.mark.parametrize("training", [True, False])
def test_without_dropout_or_gradients_and_the_mode_is_put_back(training: bool) -> None:
    model = small(dropout=0.5).train(training)
    state = torch.get_rng_state()
    with Operations() as made:
        first = evaluate(on_one_device(model), [batch(2, 9)], step=0, tokens_per_byte=1.0)
    assert first.loss == evaluate(on_one_device(small()), [batch(2, 9)], step=0, tokens_per_byte=1.0).loss
    assert torch.equal(state, torch.get_rng_state()), "what training draws next is not moved"
    assert model.training == training and all(parameter.grad is None for parameter in model.parameters())
    assert made.counts["mm"] == 3 * 7 + 1, "seven products a layer and the head"


def test_the_mode_is_put_back_after_an_error() -> None:
    model = small()
    broken = Batch(tokens=torch.full((1, 3), VOCAB), targets=torch.zeros(1, 3, dtype=torch.int64), valid=3)
    with pytest.raises((IndexError, RuntimeError)):
        evaluate(on_one_device(model), [broken], step=0, tokens_per_byte=1.0)
    assert model.training


def test_the_mean_does_not_depend_on_the_batches() -> None:
    model = small()
    whole = batch(4, 10, valid=[10, 2, 5, 9])
    parts = [
        Batch(tokens=whole.tokens[i : i + 1], targets=whole.targets[i : i + 1], valid=v)
        for i, v in enumerate([10, 2, 5, 9])
    ]
    whole_score, four = (
        evaluate(on_one_device(model), batches, step=0, tokens_per_byte=1.0) for batches in ([whole], parts)
    )
    assert whole_score.loss == pytest.approx(four.loss, rel=1e-6) and whole_score.tokens == four.tokens == 26


def test_extreme_losses_stay_numbers_where_they_can() -> None:
    model = small()
    with torch.no_grad():
        model.head.weight.mul_(1e4)
    metrics = evaluate(on_one_device(model), [batch(2, 9)], step=0, tokens_per_byte=1.0)
    assert metrics.loss > 1000 and math.isfinite(metrics.perplexity)
    with torch.no_grad():
        model.head.weight[0, 0] = torch.nan
    assert math.isnan(evaluate(on_one_device(model), [batch(2, 9)], step=0, tokens_per_byte=1.0).loss)


def test_nothing_to_score() -> None:
    metrics = evaluate(on_one_device(small()), [], step=0, tokens_per_byte=1.0)
    assert (metrics.tokens, metrics.loss) == (0, 0.0)
