"""Heads whose number of rows no GPU multiplies fast: padded in memory, with the numbers of the head as it is."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.kernels import fast, reference
from meshwright.kernels.c import training_rows
from meshwright.kernels.chooser import simulate_device
from meshwright.kernels.loss import cross_entropy
from meshwright.kernels.loss.cross_entropy import IGNORED, HeadMatrix, Vocabulary, scaled_gradient
from meshwright.kernels.loss.linear_divergence import Divergence, TeacherHead
from meshwright.model.transformer import build
from meshwright.observe.profile.allocator import watching
from meshwright.spec import ModelShape
from meshwright.spec.memory.held import PADDED_TO, ROW_BYTES, padded_columns
from tests.counting import Operations
from tests.kernels.exactness import SINGLE, assert_not_worse, assert_single, outcome, tensors

ROWS, WIDTH = 19, 32
VOCABULARIES = (1, 97, 127, 128, 300, 1001, 50257)
LONG_SUMS = 1.5
"""Times the error of an fp32 kernel: a sum over 50,257 words has 1.08e-6, padded or not."""
PRODUCTS = ("mm", "addmm", "addmm_")


@pytest.fixture(autouse=True, params=["plain", "loops"])
def padded(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU pads as a GPU does, and takes eight rows a chunk; losses by plain code and by compiled loops."""
    monkeypatch.setattr(cross_entropy, "PADDING_DEVICES", {"cpu", "cuda"})
    monkeypatch.setattr(training_rows, "LEAST", 0 if request.param == "loops" else 2**62)
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", {"cpu": 0, "cuda": 0})
    monkeypatch.setattr(cross_entropy, "MIN_CHUNK_ROWS", 8)
    monkeypatch.setattr(cross_entropy, "FEWEST_LEFT_OUT", 1.0)


def targets_of(vocab: int) -> Tensor:
    actual = torch.randint(vocab, (ROWS,), generator=torch.Generator().manual_seed(vocab))
    actual[[2, 11]] = IGNORED
    return actual


def each(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    chosen = (x @ weight.T).log_softmax(-1).gather(1, targets.clamp(min=0).unsqueeze(1)).squeeze(1)
    return chosen * (targets >= 0)


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_loss_and_gradients(vocab: int) -> None:
    targets = targets_of(vocab)
    assert_single(
        partial(fast().linear_cross_entropy, targets=targets),
        lambda x, weight: -each(x, weight, targets).sum(),
        tensors((ROWS, WIDTH), (vocab, WIDTH)),
        LONG_SUMS * SINGLE * (2 if vocab > 10_000 else 1),  # vectors of half the width add runs of twice the length
    )


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_log_probabilities(vocab: int) -> None:
    targets = targets_of(vocab)
    assert_single(
        partial(fast().linear_log_probabilities, targets=targets),
        partial(each, targets=targets),
        tensors((ROWS, WIDTH), (vocab, WIDTH)),
        LONG_SUMS * SINGLE,
    )


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("vocab", [1, 97, 1001])
def test_distillation(vocab: int, beta: float) -> None:
    targets, form = targets_of(vocab), Divergence(beta=beta, temperature=1.5, hard=0.3)
    x, weight, *theirs = tensors((ROWS, WIDTH), (vocab, WIDTH), (ROWS, 24), (vocab, 24))

    def loss(function: Callable[..., Any], x: Tensor, weight: Tensor) -> Tensor:
        teacher = TeacherHead(*(tensor.to(x.dtype) for tensor in theirs))
        actual: Tensor = function(x, weight, teacher, targets, form=form).loss
        return actual

    actual = outcome(partial(loss, fast().linear_divergence), [x, weight])
    right = outcome(partial(loss, reference().linear_divergence), [x, weight])
    for a, b in zip(actual, right, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("vocab", [97, 1001])
def test_the_likeliest(vocab: int) -> None:
    x, weight = tensors((ROWS, WIDTH), (vocab, WIDTH))
    actual, right = (kernels.linear_top(x, weight, 7, 0.8) for kernels in (fast(), reference()))
    assert torch.equal(actual.ids, right.ids)
    torch.testing.assert_close(actual.log_probabilities, right.log_probabilities)


@pytest.mark.parametrize("vocab", [97, 1001])
def test_16_bits_are_no_further_from_fp64(vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last rows' part of the gradient of x is rounded apart from the rest."""
    monkeypatch.setattr("meshwright.compat.cpu_multiplies", lambda dtype: True)
    targets = targets_of(vocab)
    assert_not_worse(
        partial(fast().linear_cross_entropy, targets=targets),
        partial(reference().linear_cross_entropy, targets=targets),
        lambda x, weight: -each(x, weight, targets).sum(),
        tensors((ROWS, WIDTH), (vocab, WIDTH), dtype=torch.bfloat16),
        [1.02, 1.1, 1.2],
        None,
    )


def test_parts_of_a_vocabulary() -> None:
    """A tensor-parallel rank pads its own part; what is exchanged are numbers of rows."""
    vocab, targets = 97, targets_of(97)
    x, weight = tensors((ROWS, WIDTH), (vocab, WIDTH))
    whole, *right = outcome(partial(fast().linear_cross_entropy, targets=targets), [x, weight], None)
    logits = (x @ weight.T).float()
    peaks = [logits[start : start + 8].amax(1) for start in range(0, ROWS, 8)]

    def part(first: int, number: int) -> list[Tensor]:
        """Of a rank beside one that has the rest, whose numbers come from whole logits."""
        number_of = iter(range(2 * len(peaks)))

        def largest(mine: Tensor) -> Tensor:
            return peaks[next(number_of) // 2]

        def total(mine: Tensor) -> Tensor:
            at = next(number_of) // 2
            rows = slice(8 * at, 8 * at + 8)
            actual = (logits[rows] - peaks[at].unsqueeze(1)).exp().sum(1)
            chosen = logits[rows].gather(1, targets[rows].clamp(min=0).unsqueeze(1)).squeeze(1) - peaks[at]
            assert mine.shape == (2, len(actual)) and (mine[0] <= actual * (1 + 1e-5)).all()
            return torch.stack((actual, chosen))

        parts = Vocabulary(first=first, number=number, most=49, whole=vocab, parts=2, largest=largest, total=total)
        call = partial(fast().linear_cross_entropy, targets=targets, vocabulary=parts)
        return outcome(call, [x, weight[first : first + number]], None)

    first, second = part(0, 49), part(49, 48)
    torch.testing.assert_close(first[0], whole, rtol=1e-6, atol=0)
    torch.testing.assert_close(first[1] + second[1], right[0], rtol=1e-5, atol=5e-6)
    torch.testing.assert_close(torch.cat((first[2], second[2])), right[1], rtol=1e-5, atol=1e-6)


def test_an_ignored_row_of_infinities_teaches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeros times infinity are no numbers: what a loop clears before V has to be cleared behind it too."""
    monkeypatch.setattr(training_rows, "LEAST", 0)
    targets = targets_of(97)
    x, weight = tensors((ROWS, WIDTH), (97, WIDTH))
    x[2], x[11] = torch.inf, torch.nan
    made = x.clone().requires_grad_()
    fast().linear_cross_entropy(made, weight, targets).backward()
    assert made.grad is not None and made.grad.isfinite().all() and not made.grad[2].any()


class Widths(TorchDispatchMode):
    """Collects leading strides in bytes, and sizes, of operands and results of products."""

    def __init__(self) -> None:
        super().__init__()
        self.strides, self.sizes = set[int](), set[int]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function.overloadpacket.__name__ in PRODUCTS:
            for tensor in (*args, result):
                if isinstance(tensor, Tensor) and tensor.dim() == 2:
                    self.strides.add(max(tensor.stride()) * tensor.element_size())
                    self.sizes |= set(tensor.shape)
        return result


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_every_product_is_aligned(vocab: int) -> None:
    """The count that holds on a CPU too: no row of any operand begins elsewhere than at a multiple of 16 bytes."""
    x, weight = tensors((16, 128), (vocab, 128))
    with Widths() as seen:
        fast().linear_cross_entropy(x.requires_grad_(), weight.requires_grad_(), targets_of(vocab)[:16]).backward()
    assert seen.strides and all(stride % ROW_BYTES == 0 for stride in seen.strides)
    widths = {padded_columns(vocab, 4), PADDED_TO, padded_columns(vocab, 4) - PADDED_TO}
    assert seen.sizes <= widths | {8, 16, 128}, "and no width but those that are padded to"


def test_what_is_aligned_stays_as_it_is() -> None:
    weight = torch.randn(96, WIDTH)
    actual = HeadMatrix.padded(weight, torch.float32)
    assert not actual.is_padded and actual.parts[0][1] is weight
    assert [padded_columns(50257, 2), padded_columns(50304, 2), padded_columns(128256, 2)] == [50304, 50304, 128256]
    assert [padded_columns(16032, 2), padded_columns(1, 4), padded_columns(0, 4)] == [16032, 128, 0]


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_learns_the_same_and_keeps_its_shape(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = ModelShape(vocab=97, hidden=32, layers=1, heads=2, ffn=64, max_positions=16, tied=tied)
    tokens = torch.randint(97, (2, 16), generator=torch.Generator().manual_seed(3))

    def gradients() -> tuple[Tensor, dict[str, Tensor]]:
        model = build(shape)
        loss = model.loss(tokens, tokens.roll(-1, 1)).cross_entropy
        loss.backward()
        for name, parameter in model.named_parameters():
            assert parameter.untyped_storage().nbytes() == parameter.numel() * 4, name
            assert parameter.grad is not None and parameter.grad.shape == parameter.shape
        return loss, {name: tensor.grad for name, tensor in model.named_parameters() if tensor.grad is not None}

    loss, actual = gradients()
    monkeypatch.setattr(cross_entropy, "PADDING_DEVICES", {"cuda"})
    plain, right = gradients()
    torch.testing.assert_close(loss, plain, rtol=1e-6, atol=0)
    assert actual.keys() == right.keys()
    for name, tensor in actual.items():
        torch.testing.assert_close(tensor, right[name], rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("factor", [1.0, -0.37], ids=str)
def test_a_gpu_rounds_the_gradient_of_a_head_in_the_pass_that_multiplies_it(factor: float) -> None:
    """One operation that reads fp32 and writes 16 bits: 6 bytes per element, where two would move 14."""
    (total,), scale = tensors((97, WIDTH)), torch.tensor(factor)
    right = (total.double() * float(scale)).float().to(torch.bfloat16)
    with simulate_device("cuda"), Operations() as counted:
        rounded = scaled_gradient(total, scale, torch.bfloat16)
    assert torch.equal(rounded, right)
    assert dict(counted.counts) == {"new_empty": 1, "mul": 1}
    assert torch.equal(scaled_gradient(total, scale, torch.bfloat16), right)


@pytest.mark.parametrize("rows", [0, 1, ROWS], ids=str)
@pytest.mark.parametrize("vocab", [96, 97, 1001])
def test_the_first_chunk_writes_the_gradient_of_a_head(vocab: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No pass fills it with zeros, and what lay in that memory is not read: here it is not a number."""
    monkeypatch.setattr(HeadMatrix, "empty_gradient", _poisoned(HeadMatrix.empty_gradient))
    targets = targets_of(vocab)[:rows]
    x, weight = tensors((rows, WIDTH), (vocab, WIDTH))
    with Operations() as counted:
        loss, *gradients = outcome(partial(fast().linear_cross_entropy, targets=targets), [x, weight], None)
    assert counted.counts["new_zeros"] == HeadMatrix.padded(weight, weight.dtype).is_padded + (not rows)
    right_loss, *right = outcome(lambda x, weight: -each(x, weight, targets).sum(), [x, weight], None)
    # Python floats of fp32 sums: without fp32's own tolerance, sums in another order would have to be equal to the bit.
    torch.testing.assert_close(loss, right_loss, rtol=1.3e-6, atol=0)
    for gradient, exact in zip(gradients, right, strict=True):
        torch.testing.assert_close(gradient, exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("vocab", [4096, 4097])
@pytest.mark.parametrize("form", ["cross entropy", "log probabilities"])
def test_the_gradients_of_a_tied_matrix_take_two_matrices(vocab: int, form: str) -> None:
    """The head's, to which autograd adds the embedding's in place. A view would make it allocate a third."""
    targets = targets_of(vocab)
    weight = torch.randn(vocab, WIDTH, requires_grad=True)
    weight.grad = torch.zeros_like(weight)

    def step() -> None:
        x = torch.nn.functional.embedding(targets.clamp(min=0), weight)
        if form == "cross entropy":
            fast().linear_cross_entropy(x, weight, targets=targets).backward()
        else:
            fast().linear_log_probabilities(x, weight, targets=targets).sum().backward()

    step()  # the second one adds to gradients that are there
    with watching() as recorder:
        step()
    matrices = max(size for _, size in recorder.totals()) / (4 * vocab * WIDTH)
    assert 2 <= matrices < 2.6


def _poisoned(make: Callable[[HeadMatrix, int], torch.Tensor]) -> Callable[[HeadMatrix, int], torch.Tensor]:
    def room(head: HeadMatrix, rows: int) -> torch.Tensor:
        gradient = make(head, rows)
        if rows:
            gradient.as_strided((head.width, gradient.shape[1]), gradient.stride()).fill_(torch.nan)
        return gradient

    return room
