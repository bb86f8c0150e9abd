"""Head and loss with the Triton rows: every form against whole logits in fp64, and heads of several parts."""

from functools import partial
from threading import Barrier, Lock, Thread

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright import compat
from meshwright.kernels.loss import cross_entropy
from meshwright.kernels.loss.cross_entropy import IGNORED, LossForm, Vocabulary
from meshwright.kernels.triton import logit_rows
from tests.kernels.exactness import LOW, assert_not_worse, assert_single, outcome, tensors
from tests.kernels.interpreted.poison import nothing_is_left_unwritten  # noqa: F401  # a fixture

VOCAB, WIDTH = 37, 16
FORMS = {"plain": LossForm(), "smoothing": LossForm(smoothing=0.1), "z": LossForm(z=0.01), "both": LossForm(0.2, 0.003)}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks, and several blocks of a row."""
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", {"cpu": 0, "cuda": 0})
    monkeypatch.setattr(cross_entropy, "MIN_CHUNK_ROWS", 8)
    monkeypatch.setattr(logit_rows, "BLOCK", 16)


def exact(x: Tensor, weight: Tensor, targets: Tensor, form: LossForm, scale: Tensor | None = None) -> Tensor:
    """Row by row, written out."""
    logits = F.linear(x, weight)
    loss = logits.sum() * 0
    for row, target in enumerate(targets.tolist()):
        if target == IGNORED:
            continue
        lse = logits[row].logsumexp(0)
        row_loss = lse - (1 - form.smoothing) * logits[row, target] - form.smoothing * logits[row].mean()
        row_loss = row_loss + form.z * lse**2
        loss = loss + (row_loss if scale is None else row_loss * (scale[row] if scale.dim() else scale))
    return loss


def targets_of(rows: int, ignored: tuple[int, ...] = ()) -> Tensor:
    targets = torch.randint(VOCAB, (rows,), generator=torch.Generator().manual_seed(rows))
    targets[list(ignored)] = IGNORED
    return targets


TARGETS = {"one": targets_of(1), "rest": targets_of(13, (3,)), "a chunk ignored": targets_of(11, tuple(range(8)))}
SCALES = {"none": lambda n: None, "factor": lambda n: torch.tensor(0.7), "weights": lambda n: torch.rand(n)}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("targets", TARGETS.values(), ids=TARGETS)
def test_value_and_gradients(form: LossForm, targets: Tensor) -> None:
    inputs = tensors((len(targets), WIDTH), (VOCAB, WIDTH))
    fast = partial(cross_entropy.linear_cross_entropy, targets=targets, form=form, prefer="triton")
    assert_single(fast, partial(exact, targets=targets, form=form), inputs)


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
def test_weights_of_targets(scale: object) -> None:
    assert callable(scale)
    targets = targets_of(13, (3, 12))
    inputs, factor = tensors((13, WIDTH), (VOCAB, WIDTH)), scale(13)
    fast = partial(cross_entropy.linear_cross_entropy, targets=targets, scale=factor, prefer="triton")
    assert_single(fast, partial(exact, targets=targets, form=LossForm(), scale=factor), inputs)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("kind", ["eager", "reference"])
def test_the_slow_twins_know_the_forms_too(form: LossForm, kind: str) -> None:
    targets = targets_of(13, (3,))
    inputs = tensors((13, WIDTH), (VOCAB, WIDTH))
    plain = cross_entropy.linear_cross_entropy_reference if kind == "reference" else cross_entropy.linear_cross_entropy
    assert_single(partial(plain, targets=targets, form=form), partial(exact, targets=targets, form=form), inputs)


def test_16_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "cpu_multiplies", lambda dtype: True)
    targets = targets_of(40, (1, 2, 33))
    inputs = tensors((40, WIDTH), (VOCAB, WIDTH), dtype=LOW[1])
    fast = partial(cross_entropy.linear_cross_entropy, targets=targets, prefer="triton")
    plain = partial(cross_entropy.linear_cross_entropy_reference, targets=targets)
    right = partial(exact, targets=targets, form=LossForm())
    assert_not_worse(fast, plain, right, inputs, [1.05, 1.05, 1.2], seed=None)


def test_log_probabilities() -> None:
    targets = targets_of(13, (3,))
    inputs = tensors((13, WIDTH), (VOCAB, WIDTH))

    def right(x: Tensor, weight: Tensor) -> Tensor:
        logs = F.linear(x, weight).log_softmax(-1)
        return logs.gather(1, targets.clamp(min=0)[:, None])[:, 0] * (targets != IGNORED)

    assert_single(partial(cross_entropy.linear_log_probabilities, targets=targets, prefer="triton"), right, inputs)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("other", ["triton", "eager"])
def test_a_head_in_parts(form: LossForm, other: str) -> None:
    """Two parts in two threads that meet at each reduction; one computes at a time, as the interpreter wants it."""
    targets = targets_of(13, (3,))
    x, weight = tensors((13, WIDTH), (VOCAB, WIDTH))
    right = outcome(partial(exact, targets=targets, form=form), [x.double(), weight.double()], seed=None)
    pieces, barrier, slots = weight.split((20, 17)), Barrier(2, timeout=60), [x, x]
    actual: list[list[Tensor]] = [[], []]
    turn = Lock()

    def run(mine: int) -> None:
        def reduce(how: object, value: Tensor) -> Tensor:
            assert callable(how)
            slots[mine] = value.clone()
            turn.release()
            barrier.wait()
            both = torch.stack(slots)
            barrier.wait()
            turn.acquire()
            result: Tensor = how(both)
            return result

        vocabulary = Vocabulary(
            first=20 * mine, number=len(pieces[mine]), most=20, whole=VOCAB,
            largest=partial(reduce, lambda both: both.amax(0)), total=partial(reduce, lambda both: both.sum(0)),
        )  # fmt: skip
        run_one = partial(
            cross_entropy.linear_cross_entropy,
            targets=targets,
            vocabulary=vocabulary,
            form=form,
            prefer=other if mine else "triton",
        )
        with turn:
            actual[mine] = outcome(run_one, [x, pieces[mine]], seed=None)

    run_in_threads = [Thread(target=run, args=(n,)) for n in range(2)]
    for thread in run_in_threads:
        thread.start()
    for thread in run_in_threads:
        thread.join()
    (loss, of_x, of_first), (again, of_x_too, of_second) = actual
    torch.testing.assert_close(loss, right[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(loss, again, rtol=1e-6, atol=0.0)
    torch.testing.assert_close(of_x + of_x_too, right[1], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.cat((of_first, of_second)), right[2], rtol=1e-5, atol=1e-6)


def test_a_target_that_no_column_has_gives_no_number() -> None:
    x, weight = tensors((2, WIDTH), (VOCAB, WIDTH))
    loss = cross_entropy.linear_cross_entropy(x, weight, torch.tensor([0, VOCAB]), prefer="triton")
    assert loss.isnan()


def test_hidden_logits_of_minus_infinity_change_nothing() -> None:
    logits = torch.randn(3, VOCAB)
    logits[:, 5] = float("-inf")
    targets = torch.tensor([1, 2, IGNORED])
    right = F.cross_entropy(logits, targets, reduction="none")
    actual = logit_rows.losses(logits, targets, None, ignored=IGNORED, gradient=True, smoothing=0.0, z=0.0)
    torch.testing.assert_close(actual, right)
    assert torch.isfinite(logits).all()


def test_the_same_inputs_give_the_same_bits() -> None:
    inputs = tensors((13, WIDTH), (VOCAB, WIDTH))
    fast = partial(cross_entropy.linear_cross_entropy, targets=targets_of(13), prefer="triton")
    runs = [outcome(fast, inputs) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
