"""Head and loss in one: against whole logits in fp64, over chunks that do not divide the rows."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright import compat
from meshwright.kernels import fast, reference
from meshwright.kernels.c import training_rows
from meshwright.kernels.loss import cross_entropy
from meshwright.kernels.loss.cross_entropy import IGNORED, Vocabulary, chunk_rows
from tests.counting import Operations
from tests.kernels.exactness import LOW, SLACK, assert_not_worse, assert_single, outcome, tensors

VOCAB, WIDTH = 37, 16
CHUNKS = 1.2
"""Times the error of plain code, where a CPU multiplies 16-bit numbers: each chunk's part of the head's gradient is
rounded before the fp32 sum."""
ROUNDED_AGAIN = 1.42
"""The same where a factor follows the loss. Both gradients are made in the forward pass; the factor multiplies numbers
that are rounded already, so there are two roundings: sqrt(2). In training the factor is 1, which changes no bit."""


@pytest.fixture(autouse=True, params=["plain", "loops"])
def small_chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight rows a chunk, so that small tensors have several; by plain code and by compiled loops."""
    monkeypatch.setattr(training_rows, "LEAST", 0 if request.param == "loops" else 2**62)
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", {"cpu": 0, "cuda": 0})
    monkeypatch.setattr(cross_entropy, "MIN_CHUNK_ROWS", 8)
    monkeypatch.setattr(cross_entropy, "ROW_STEP", 2)


def whole(x: Tensor, weight: Tensor, targets: Tensor, scale: Tensor | None = None) -> Tensor:
    """The sum written out, in the dtype it is given."""
    logs = (x @ weight.T).log_softmax(-1)
    loss = sum((-logs[row, target] for row, target in enumerate(targets.tolist()) if target >= 0), logs.sum() * 0)
    return loss if scale is None else loss * scale


def targets_of(rows: int, ignored: tuple[int, ...] = ()) -> Tensor:
    targets = torch.randint(VOCAB, (rows,), generator=torch.Generator().manual_seed(rows))
    targets[list(ignored)] = IGNORED
    return targets


def inputs(rows: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return tensors((rows, WIDTH), (VOCAB, WIDTH), dtype=dtype)


CASES = {
    "one-row": targets_of(1),
    "less-than-a-chunk": targets_of(5),
    "whole-chunks": targets_of(16),
    "a-rest": targets_of(21, ignored=(3,)),
    "a-chunk-all-ignored": targets_of(24, ignored=tuple(range(8, 16))),
    "last-chunk-all-ignored": targets_of(17, ignored=(16,)),
    "first-and-last": targets_of(9, ignored=(0, 8)),
    "most-ignored": targets_of(21, ignored=(*range(1, 21, 2), 4, 6, 8)),
    "all-ignored": targets_of(9, ignored=tuple(range(9))),
}


@pytest.mark.parametrize("targets", CASES.values(), ids=CASES)
@pytest.mark.parametrize("scale", [None, 0.125, 3.7])
@pytest.mark.parametrize("name", ["fast", "reference"])
def test_value_and_gradients(targets: Tensor, scale: float | None, name: str) -> None:
    function = (fast() if name == "fast" else reference()).linear_cross_entropy
    factor = None if scale is None else torch.tensor(scale)
    operands = inputs(len(targets))
    assert_single(
        partial(function, targets=targets, scale=factor), partial(whole, targets=targets, scale=factor), operands
    )


@pytest.mark.parametrize("native", [False, True], ids=["widened", "native"])
@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("seed", [None, 1, 2], ids=["training", "by a factor", "by another"])
def test_16_bit_is_no_further_from_fp64_than_plain_code(
    monkeypatch: pytest.MonkeyPatch, native: bool, dtype: torch.dtype, seed: int | None
) -> None:
    """On every CPU both ways are tried, whichever it would take itself: with 16-bit products and without."""
    monkeypatch.setattr(compat, "cpu_multiplies", lambda dtype: native)
    targets = targets_of(60, ignored=(1, 2, 33))
    plain = partial(reference().linear_cross_entropy, targets=targets)
    bars = [SLACK, SLACK if seed is None else ROUNDED_AGAIN, CHUNKS if seed is None else ROUNDED_AGAIN]
    assert_not_worse(
        partial(fast().linear_cross_entropy, targets=targets),
        plain,
        partial(whole, targets=targets),
        inputs(60, dtype),
        bars if native else (),
        seed,
    )


def test_nothing_to_predict_costs_nothing_and_teaches_nothing() -> None:
    targets = torch.full((11,), IGNORED)
    value, *gradients = outcome(partial(fast().linear_cross_entropy, targets=targets), inputs(11))
    assert value == 0 and all(not gradient.any() for gradient in gradients)


def test_an_ignored_row_changes_no_bit_of_the_others() -> None:
    targets = targets_of(16, ignored=(5,))
    operands = inputs(16)
    first = outcome(partial(fast().linear_cross_entropy, targets=targets), operands)
    operands[0][5] = 1e4
    second = outcome(partial(fast().linear_cross_entropy, targets=targets), operands)
    assert torch.equal(first[0], second[0]) and torch.equal(first[2], second[2])
    assert not second[1][5].any() and torch.equal(first[1], second[1])


def test_large_logits_do_not_overflow() -> None:
    """Logits of several hundred carry an error of some 1e-5 themselves."""
    x, weight = inputs(9)
    targets = targets_of(9)
    assert_single(
        partial(fast().linear_cross_entropy, targets=targets),
        partial(whole, targets=targets),
        [x * 200, weight],
        bound=1e-4,
    )


@pytest.mark.parametrize("wanted", [(True, False), (False, True)], ids=["input", "weight"])
def test_only_the_gradient_that_is_wanted(wanted: tuple[bool, bool]) -> None:
    x, weight = (tensor.requires_grad_(want) for tensor, want in zip(inputs(21), wanted, strict=True))
    targets = targets_of(21)
    with Operations() as made:
        loss = fast().linear_cross_entropy(x, weight, targets)
    assert made.products == 3 * 2, "three chunks, two products each"
    loss.backward()
    for tensor, want in zip((x, weight), wanted, strict=True):
        assert (tensor.grad is not None) == want
    right = outcome(partial(whole, targets=targets), [t.detach().double() for t in (x, weight)], seed=1)
    seed = torch.randn((), generator=torch.Generator().manual_seed(1)).bfloat16().double()
    for tensor, exact in zip((x, weight), right[1:], strict=True):
        if tensor.grad is not None:
            torch.testing.assert_close(tensor.grad.double(), exact / seed, rtol=1e-5, atol=1e-6)


def test_evaluation_makes_no_gradients() -> None:
    """Weights require gradients even then: only torch.no_grad tells."""
    x, weight = (tensor.requires_grad_() for tensor in inputs(21))
    with torch.no_grad(), Operations() as made:
        loss = fast().linear_cross_entropy(x, weight, targets_of(21))
    assert made.products == 3
    assert torch.equal(loss, fast().linear_cross_entropy(x, weight, targets_of(21)).detach())


def test_a_second_backward_pass_is_refused() -> None:
    """The gradients were handed out; to give them again in silence would give wrong ones."""
    x, weight = (tensor.requires_grad_() for tensor in inputs(9))
    loss = fast().linear_cross_entropy(x, weight, targets_of(9))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="one backward pass only"):
        loss.backward()


def test_a_second_derivative_is_refused() -> None:
    """Behind other layers it would lack what the loss adds to it, in silence."""
    x, weight = (tensor.requires_grad_() for tensor in inputs(9))
    loss = fast().linear_cross_entropy(x.square(), weight, targets_of(9))
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(loss, (x, weight), create_graph=True)


def test_a_factor_on_the_loss_reaches_the_gradients() -> None:
    x, weight = (tensor.requires_grad_() for tensor in inputs(21))
    targets = targets_of(21)
    plain = torch.autograd.grad(fast().linear_cross_entropy(x, weight, targets), (x, weight))
    for actual, once in zip(
        torch.autograd.grad(4 * fast().linear_cross_entropy(x, weight, targets), (x, weight)), plain, strict=True
    ):
        assert torch.equal(actual, 4 * once)


OUTSIDE = pytest.mark.parametrize("target", [VOCAB, -1, IGNORED - 1, 2**40])


@OUTSIDE
@pytest.mark.parametrize("name", ["linear_cross_entropy", "linear_log_probabilities"])
def test_targets_without_a_matching_row_are_an_error_of_the_plain_form_too(name: str, target: int) -> None:
    for kernels in (reference(), fast()):
        with pytest.raises((IndexError, RuntimeError)):
            getattr(kernels, name)(*inputs(2), torch.tensor([0, target]))


@OUTSIDE
def test_a_target_in_no_part_of_the_vocabulary_gives_no_number(target: int) -> None:
    parts = Vocabulary(first=0, number=VOCAB, most=VOCAB, whole=VOCAB, largest=Tensor.clone, total=Tensor.clone)
    x, weight = inputs(3)
    targets = torch.tensor([0, target, IGNORED])
    assert fast().linear_cross_entropy(x, weight, targets, vocabulary=parts).isnan()
    actual = fast().linear_log_probabilities(x, weight, targets, vocabulary=parts)
    assert actual.isnan().tolist() == [False, True, False]


def test_never_more_logits_than_a_chunk() -> None:
    x, weight = (tensor.requires_grad_() for tensor in inputs(64))
    with Operations() as made:
        fast().linear_cross_entropy(x, weight, targets_of(64))
    assert made.largest_numel(columns=VOCAB, but=(WIDTH, VOCAB)) == 8 * VOCAB


def test_rows_of_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert chunk_rows(10, 128_000, "cpu") == 10, "never more than there are"
    assert chunk_rows(10_000, 128_256, "cpu") == 256, "never so few that products are slow"
    assert chunk_rows(100_000, 2048, "cpu") * 2048 * 4 == 64 * 2**20, "else 64 MiB of logits"


def test_the_plain_form_is_the_usual_loss() -> None:
    x, weight = inputs(12)
    targets = targets_of(12, ignored=(4,))
    usual = F.cross_entropy(x @ weight.T, targets, ignore_index=IGNORED, reduction="sum")
    torch.testing.assert_close(reference().linear_cross_entropy(x, weight, targets), usual)


@pytest.mark.parametrize("targets", CASES.values(), ids=CASES)
@pytest.mark.parametrize("name", ["fast", "reference"])
def test_a_factor_for_each_target(targets: Tensor, name: str) -> None:
    function = (fast() if name == "fast" else reference()).linear_cross_entropy
    factors = torch.rand(len(targets), generator=torch.Generator().manual_seed(2))

    def written_out(x: Tensor, weight: Tensor) -> Tensor:
        return -(each_written_out(x, weight, targets=targets) * factors.to(x.dtype)).sum()

    assert_single(partial(function, targets=targets, scale=factors), written_out, inputs(len(targets)))


def each_written_out(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    chosen = (x @ weight.T).log_softmax(-1).gather(1, targets.clamp(min=0).unsqueeze(1)).squeeze(1)
    return chosen * (targets >= 0)


@pytest.mark.parametrize("targets", CASES.values(), ids=CASES)
@pytest.mark.parametrize("name", ["fast", "reference"])
def test_log_probabilities(targets: Tensor, name: str) -> None:
    """Each is given a gradient of its own."""
    function = (fast() if name == "fast" else reference()).linear_log_probabilities
    assert_single(partial(function, targets=targets), partial(each_written_out, targets=targets), inputs(len(targets)))


def test_log_probabilities_may_be_differentiated_twice_and_need_no_more_than_a_chunk() -> None:
    x, weight = (tensor.requires_grad_() for tensor in inputs(64))
    targets = targets_of(64)
    with Operations() as made:
        actual = fast().linear_log_probabilities(x, weight, targets)
        first = torch.autograd.grad(actual.sum(), (x, weight), retain_graph=True)
    assert made.largest_numel(columns=VOCAB, but=(WIDTH, VOCAB)) == 8 * VOCAB
    second = torch.autograd.grad(actual.sum(), (x, weight))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("scale", [None, 3.0])
def test_ignored_rows_are_not_multiplied(scale: float | None) -> None:
    x, weight = inputs(24)
    targets = targets_of(24, ignored=tuple(range(0, 24, 3)))
    factor = None if scale is None else torch.full((24,), scale)
    with Operations() as made:
        fast().linear_cross_entropy(x.requires_grad_(), weight.requires_grad_(), targets, factor).backward()
    logits = [shape for shape in made.shapes if shape[-1:] == (VOCAB,) and len(shape) == 2]
    assert {rows for rows, _ in logits} <= {6, WIDTH}, "of eight rows a chunk, two or three are ignored"
    assert x.grad is not None and not x.grad[targets == IGNORED].any() and x.grad[targets != IGNORED].all()


def test_products_have_few_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many rows count: oneDNN keeps code of each size, and memory between the code of two is lost."""
    monkeypatch.setattr(cross_entropy, "ROW_STEP", 64)
    sizes = set()
    for number in range(1025):
        valid = (torch.arange(1024) * 401 % 1024) < number
        saved = cross_entropy.multiplied_rows(valid, None)
        sizes.add(1024 if saved is None else len(saved))
        if saved is not None:
            assert valid[saved].sum() == number and len(saved.unique()) == len(saved) < number + 64
        else:
            assert number > 0.75 * 1024 - 64
    assert len(sizes) == 14
