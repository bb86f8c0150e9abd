"""Head and distillation loss in one: against whole logits in fp64, over chunks that do not divide the rows."""

import importlib
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from threading import Barrier
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright import compat
from meshwright.kernels.linear import cpu_product
from meshwright.kernels.loss import cross_entropy, linear_divergence
from meshwright.kernels.loss.cross_entropy import IGNORED, Vocabulary
from meshwright.kernels.loss.linear_divergence import DistillationLoss, Divergence, KnownTop, TeacherHead
from meshwright.planner.step import shared_costs
from tests.counting import Alive, Operations
from tests.kernels.exactness import LOW, SLACK, assert_not_worse, assert_single, outcome, tensors

VOCAB, WIDTH, THEIRS = 37, 16, 24
FORMS = [
    Divergence(beta=beta, temperature=heat, hard=hard)
    for beta, (heat, hard) in product((0.0, 0.3, 1.0), ((1.0, 0.0), (1.0, 0.4), (2.5, 0.4)))
]
KEPT = 5


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight rows a chunk, so that small tensors have several."""
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", {"cpu": 0, "cuda": 0})
    monkeypatch.setattr(cross_entropy, "MIN_CHUNK_ROWS", 8)
    monkeypatch.setattr(cross_entropy, "ROW_STEP", 2)


def inputs(rows: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Hidden states and heads of student and teacher; logits of a few units."""
    x, weight, theirs, head = tensors((rows, WIDTH), (VOCAB, WIDTH), (rows, THEIRS), (VOCAB, THEIRS), dtype=dtype)
    return [x, weight, theirs, head]


def targets_of(rows: int, ignored: tuple[int, ...] = ()) -> Tensor:
    targets = torch.randint(VOCAB, (rows,), generator=torch.Generator().manual_seed(rows))
    targets[list(ignored)] = IGNORED
    return targets


def top_of(theirs: Tensor, head: Tensor, form: Divergence, number: int = KEPT) -> KnownTop:
    logs = (theirs @ head.T / form.temperature).float().log_softmax(-1)
    actual, ids = logs.topk(number)
    rest = logs.scatter(1, ids, -torch.inf).logsumexp(1, keepdim=True)
    return KnownTop(ids, torch.cat((actual, rest), 1))


def whole(
    x: Tensor, weight: Tensor, *, teacher: TeacherHead | KnownTop, targets: Tensor, form: Divergence,
    scale: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The loss written out by its definition, row by row, in the dtype of x."""
    logits = x @ weight.T
    total = logits.sum() * 0
    for row, target in enumerate(targets.tolist()):
        if target < 0:
            continue
        s = (logits[row] / form.temperature).softmax(-1)
        if isinstance(teacher, KnownTop):
            ids = teacher.ids[row]
            t = teacher.normal[row].exp().to(s.dtype)
            s = torch.cat((s[ids], (s.sum() - s[ids].sum()).unsqueeze(0)))
        else:
            t = ((teacher.x[row] @ teacher.weight.T).to(s.dtype) / form.temperature).softmax(-1)
        mixed = {0.0: s, 1.0: t}.get(form.beta, form.beta * t + (1 - form.beta) * s)
        first, second = (t * (t / mixed).log()).sum(), (s * (s / mixed).log()).sum()
        soft = {0.0: first, 1.0: second}.get(form.beta, form.beta * first + (1 - form.beta) * second)
        hard = -logits[row].log_softmax(-1)[target]
        total = total + (1 - form.hard) * form.temperature**2 * soft + form.hard * hard
    return total if scale is None else total * scale


def loss_of(function: Callable[..., DistillationLoss], x: Tensor, weight: Tensor, **options: object) -> Tensor:
    return function(x, weight, **options).loss


def in_fp64(teacher: TeacherHead | KnownTop) -> TeacherHead | KnownTop:
    return TeacherHead(*(tensor.double() for tensor in teacher)) if isinstance(teacher, TeacherHead) else teacher


FUNCTIONS = {
    "fast": linear_divergence.linear_divergence,
    "reference": linear_divergence.linear_divergence_reference,
}
ROWS = {"rest": targets_of(9, (3,)), "one": targets_of(1), "few": targets_of(19, (*range(1, 19, 2), 4, 6, 8))}


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_value_and_gradients(form: Divergence, function: Callable[..., DistillationLoss]) -> None:
    for targets in ROWS.values():
        x, weight, *theirs = inputs(len(targets))
        teacher = TeacherHead(*theirs)
        assert_single(
            partial(loss_of, function, teacher=teacher, targets=targets, form=form, scale=torch.tensor(0.7)),
            partial(whole, teacher=in_fp64(teacher), targets=targets, form=form, scale=torch.tensor(0.7)),
            [x, weight],
            bound=2e-6,
        )


@pytest.mark.parametrize("form", [form for form in FORMS if form.beta == 0], ids=str)
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_value_and_gradients_of_what_was_kept(form: Divergence, function: Callable[..., DistillationLoss]) -> None:
    for targets in ROWS.values():
        x, weight, *theirs = inputs(len(targets))
        teacher = top_of(*theirs, form=form)
        assert_single(
            partial(loss_of, function, teacher=teacher, targets=targets, form=form),
            partial(whole, teacher=teacher, targets=targets, form=form),
            [x, weight],
            bound=2e-6,
        )


def test_all_of_a_vocabulary_kept_is_the_teacher_itself() -> None:
    targets, form = targets_of(21), Divergence(temperature=2.0, hard=0.25)
    x, weight, *theirs = inputs(21)
    known = top_of(*theirs, form=form, number=VOCAB)
    made = [
        outcome(partial(loss_of, FUNCTIONS["fast"], teacher=tensor, targets=targets, form=form), [x, weight])
        for tensor in (TeacherHead(*theirs), known)
    ]
    for a, b in zip(*made, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_parts_are_the_divergence_and_the_cross_entropy() -> None:
    targets, form = targets_of(21, (2,)), Divergence(beta=0.5, temperature=2.0, hard=0.3)
    x, weight, *theirs = inputs(21)
    for function in FUNCTIONS.values():
        loss, parts = function(x, weight, TeacherHead(*theirs), targets, None, form=form)
        hard = F.cross_entropy(x @ weight.T, targets, ignore_index=IGNORED, reduction="sum")
        torch.testing.assert_close(parts[1], hard)
        torch.testing.assert_close(loss, 0.7 * parts[0] + 0.3 * parts[1])


def test_a_student_that_is_its_teacher_has_nothing_to_learn() -> None:
    x, weight, _, _ = inputs(21)
    for beta in (0.0, 0.5, 1.0):
        call = partial(
            loss_of, FUNCTIONS["fast"], teacher=TeacherHead(x, weight), targets=targets_of(21),
            form=Divergence(beta=beta),
        )  # fmt: skip
        value, *gradients = outcome(call, [x, weight])
        assert abs(value.item()) < 1e-4 and all(tensor.abs().max() < 1e-5 for tensor in gradients)


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_16_bit_is_no_further_from_fp64_than_plain_code(dtype: torch.dtype) -> None:
    """Its products are those of the plain code; where a CPU multiplies 16-bit numbers each chunk's part of the head's
    gradient is rounded before the fp32 sum."""
    targets, form = targets_of(60, (1, 2, 33)), Divergence(hard=0.2)
    x, weight, *theirs = inputs(60, dtype)
    teacher = TeacherHead(*theirs)
    assert_not_worse(
        partial(loss_of, FUNCTIONS["fast"], teacher=teacher, targets=targets, form=form),
        partial(loss_of, FUNCTIONS["reference"], teacher=teacher, targets=targets, form=form),
        partial(whole, teacher=in_fp64(teacher), targets=targets, form=form),
        [x, weight],
        [SLACK, 1.05, 1.25],
        None,
    )


def loss_alone(x: Tensor, weight: Tensor, teacher: TeacherHead, targets: Tensor) -> Tensor:
    return cross_entropy.linear_cross_entropy(x, weight, targets)


def kept_alone(x: Tensor, weight: Tensor, teacher: TeacherHead, targets: Tensor) -> Tensor:
    return linear_divergence.linear_top(teacher.x, teacher.weight, KEPT).log_probabilities + 0 * (
        x.sum() + weight.sum()
    )


def divergence_alone(x: Tensor, weight: Tensor, teacher: TeacherHead, targets: Tensor) -> Tensor:
    return FUNCTIONS["fast"](x, weight, teacher, targets, form=Divergence(hard=0.2)).loss


@pytest.mark.parametrize("function", [loss_alone, kept_alone, divergence_alone])
def test_a_head_of_16_bits_is_widened_by_rows(function: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a CPU has no 16-bit products: some words at a time give what all do, gradients too, in less memory."""
    monkeypatch.setattr(compat, "cpu_multiplies", lambda dtype: False)
    words, width = 1000, 64
    x, weight, theirs, head = tensors(*[(3, width), (words, width)] * 2, dtype=torch.bfloat16)
    options = {"teacher": TeacherHead(theirs, head), "targets": targets_of(3)}
    made, peaks = [], []
    for at_once in (words, 30):
        monkeypatch.setattr(cpu_product, "WIDENED_AT_ONCE", at_once * width)
        made.append(outcome(partial(function, **options), [x, weight]))
        with torch.no_grad(), Alive([x, weight, theirs, head]) as alive:
            function(x, weight, **options)
        peaks.append(alive.peak_bytes)
    for a, b in zip(*made, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-5)
    assert peaks[0] > 4 * words * width > 2 * peaks[1]


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_large_logits_overflow_nowhere(beta: float) -> None:
    """Logits of several hundred carry an error of some 1e-5 themselves."""
    x, weight, theirs, head = inputs(9)
    options = {"targets": targets_of(9), "form": Divergence(beta=beta, hard=0.1)}
    teacher = TeacherHead(theirs * 150, head)
    value, *gradients = outcome(partial(loss_of, FUNCTIONS["fast"], teacher=teacher, **options), [x * 150, weight])
    right, *exact = outcome(partial(loss_of, FUNCTIONS["reference"], teacher=teacher, **options), [x * 150, weight])
    torch.testing.assert_close(value, right, rtol=1e-4, atol=1e-4)
    assert all(torch.isfinite(tensor).all() for tensor in gradients)
    for a, b in zip(gradients, exact, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-2)


def test_no_more_than_chunks_of_logits_and_one_backward_pass() -> None:
    x, weight, *theirs = inputs(64)
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    with Operations() as made:
        loss, _ = FUNCTIONS["fast"](*leaves, TeacherHead(*theirs), targets_of(64))
    heads = (WIDTH, VOCAB), (THEIRS, VOCAB)
    assert {shape[0] for shape in made.shapes if shape[1:] == (VOCAB,) and shape not in heads} == {8}
    assert made.products == 8 * 4, "eight chunks: logits of both, gradients of input and weight"
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="one backward pass only"):
        loss.backward()


def test_a_second_derivative_is_refused() -> None:
    x, weight, *theirs = inputs(9)
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    loss, _ = FUNCTIONS["fast"](*leaves, TeacherHead(*theirs), targets_of(9))
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(loss, leaves, create_graph=True)


def test_evaluation_makes_no_gradients() -> None:
    x, weight, *theirs = (tensor.requires_grad_() for tensor in inputs(21))
    with torch.no_grad(), Operations() as made:
        FUNCTIONS["fast"](x, weight, TeacherHead(*theirs), targets_of(21))
    assert made.products == 3 * 2


@pytest.mark.parametrize("stored", [0, 8], ids=["online", "stored"])
def test_memory_grows_by_less_than_64_kib_a_token_at_a_vocabulary_of_128k(
    monkeypatch: pytest.MonkeyPatch, stored: int
) -> None:
    """Every storage is followed, of twice as many tokens too; whole logits in fp32 would be 513 KB a token."""
    monkeypatch.setattr(cross_entropy, "MIN_CHUNK_ROWS", 16)
    vocabulary, width = 128_256, 32

    def peak(rows: int) -> int:
        x, weight = (tensor.requires_grad_() for tensor in tensors((rows, width), (vocabulary, width)))
        teacher: TeacherHead | KnownTop = TeacherHead(x.detach(), weight.detach())
        if stored:
            logs = torch.full((rows, stored + 1), -math.log(stored + 1))
            teacher = KnownTop(torch.arange(stored).expand(rows, stored), logs)
        with Alive([x, weight, *teacher]) as alive:
            FUNCTIONS["fast"](x, weight, teacher, torch.zeros(rows, dtype=torch.int64)).loss.backward()
        return alive.peak_bytes

    assert (peak(64) - peak(32)) / 32 <= 4 * width + 64, "a row of x's gradient"


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_chunk_has_no_more_tensors_of_logits_than_are_planned(form: Divergence) -> None:
    rows, width, vocabulary = 8, 4, 5000
    x, weight, *theirs = tensors(*[(rows, width), (vocabulary, width)] * 2)
    teachers = [TeacherHead(*theirs), *([top_of(*theirs, form=form)] if form.beta == 0 else [])]
    for teacher in teachers:
        with torch.no_grad(), Alive([x, weight, *teacher]) as alive:
            FUNCTIONS["fast"](x, weight, teacher, torch.zeros(rows, dtype=torch.int64), form=form)
        assert alive.peak_bytes <= (linear_divergence.BUFFERS + 0.1) * 4 * rows * vocabulary
    assert linear_divergence.BUFFERS == shared_costs.BUFFERS, "what a plan counts"


@pytest.mark.parametrize(
    ("beta", "is_stored"), [(0.0, False), (0.3, False), (1.0, False), (0.0, True)],
    ids=["forward", "between", "reverse", "stored"],
)  # fmt: skip
def test_a_vocabulary_in_parts_gives_what_a_whole_one_does(beta: float, is_stored: bool) -> None:
    """Three parts of unequal size; their reductions are played over threads that wait for each other."""
    targets, form = targets_of(21, (3, 4)), Divergence(beta=beta, temperature=1.5, hard=0.3)
    x, weight, *theirs = inputs(21)
    teacher = top_of(*theirs, form=form) if is_stored else TeacherHead(*theirs)
    right = outcome(partial(loss_of, FUNCTIONS["fast"], teacher=teacher, targets=targets, form=form), [x, weight])
    actual = in_parts(x, weight, teacher, targets, form)
    torch.testing.assert_close(actual[0], right[0].float(), rtol=1e-6, atol=1e-6)
    for a, b in zip(actual[1:], (right[1], right[2]), strict=True):
        torch.testing.assert_close(a.double(), b / seed_of(), rtol=1e-5, atol=1e-5)


def seed_of() -> Tensor:
    """What `outcome` multiplies gradients by."""
    return torch.randn((), generator=torch.Generator().manual_seed(1)).bfloat16().double()


PARTS = [(0, 13), (13, 13), (26, 11)]


def together(tensor: Callable[[Vocabulary], Any], parts: list[tuple[int, int]]) -> tuple[list[Any], set[int]]:
    """(what each part of a vocabulary finds, how many reductions each made), a thread a part."""
    barrier, shared = Barrier(len(parts)), [Tensor()] * len(parts)
    calls = [0] * len(parts)

    def reduce(index: int, largest: bool, mine: Tensor) -> Tensor:
        calls[index] += 1
        shared[index] = mine.clone()
        barrier.wait()
        stacked = torch.stack(shared)
        barrier.wait()
        return stacked.amax(0) if largest else stacked.sum(0)

    def run(index: int) -> Any:
        first, number = parts[index]
        vocabulary = Vocabulary(
            first=first, number=number, most=max(size for _, size in parts), whole=VOCAB, index=index, parts=len(parts),
            largest=partial(reduce, index, True), total=partial(reduce, index, False),
        )  # fmt: skip
        return tensor(vocabulary)

    with ThreadPoolExecutor(len(parts)) as pool:
        return list(pool.map(run, range(len(parts)))), set(calls)


def in_parts(
    x: Tensor, weight: Tensor, teacher: TeacherHead | KnownTop, targets: Tensor, form: Divergence
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, gradient of x, of the weight)."""

    def tensor(vocabulary: Vocabulary) -> tuple[Tensor, Tensor, Tensor]:
        here = slice(vocabulary.first, vocabulary.first + vocabulary.number)
        leaves = x.clone().requires_grad_(), weight[here].clone().requires_grad_()
        theirs = TeacherHead(teacher.x, teacher.weight[here]) if isinstance(teacher, TeacherHead) else teacher
        loss = FUNCTIONS["fast"](*leaves, theirs, targets, vocabulary=vocabulary, form=form).loss
        return loss.detach(), *torch.autograd.grad(loss, leaves)

    actual, calls = together(tensor, PARTS)
    chunks = -(-len(x) // 8)
    between = 0 < form.beta < 1
    assert calls == {chunks * (3 if between else 2)}, "two reductions a chunk, three between forward and reverse"
    assert all(torch.equal(each[0], actual[0][0]) for each in actual)
    return actual[0][0], torch.stack([each[1] for each in actual]).sum(0), torch.cat([each[2] for each in actual])


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("heat", [1.0, 2.0])
def test_values_are_those_of_trl(beta: float, heat: float) -> None:
    """Its generalized JSD has no factor T^2."""
    pytest.importorskip("trl")
    trainer = importlib.import_module("trl.experimental.gkd").GKDTrainer
    targets = targets_of(21, (3, 5))
    x, weight, theirs, head = inputs(21)
    form = Divergence(beta=beta, temperature=heat)
    _, parts = FUNCTIONS["fast"](x, weight, TeacherHead(theirs, head), targets, form=form)
    right = trainer.generalized_jsd_loss(
        (x @ weight.T)[None], (theirs @ head.T)[None], targets[None], beta=beta, temperature=heat, reduction="sum"
    )
    torch.testing.assert_close(parts[0] / heat**2, right, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("heat", [1.0, 2.5])
def test_the_likeliest_are_those_of_whole_logits(heat: float) -> None:
    _, _, theirs, head = inputs(21)
    right = top_of(theirs, head, Divergence(temperature=heat))
    for function in (linear_divergence.linear_top, linear_divergence.linear_top_reference):
        actual = function(theirs, head, KEPT, heat)
        assert torch.equal(actual.ids, right.ids)
        torch.testing.assert_close(actual.log_probabilities, right.log_probabilities, rtol=1e-5, atol=1e-5)
        every = function(theirs, head, VOCAB + 3)
        assert every.ids.shape == (21, VOCAB) and (every.log_probabilities[:, -1] < -15).all()
        assert torch.isfinite(every.log_probabilities).all()


def test_the_likeliest_of_a_vocabulary_in_parts() -> None:
    """Also of parts that are smaller than what is kept."""
    _, _, theirs, head = inputs(21)
    for number in (KEPT, 12):
        right = linear_divergence.linear_top_reference(theirs, head, number, 1.5)

        def tensor(vocabulary: Vocabulary, number: int = number) -> KnownTop:
            part = head[vocabulary.first : vocabulary.first + vocabulary.number]
            return linear_divergence.linear_top(theirs, part, number, 1.5, vocabulary)

        for actual in together(tensor, PARTS)[0]:
            assert torch.equal(actual.ids, right.ids)
            torch.testing.assert_close(actual.log_probabilities, right.log_probabilities, rtol=1e-5, atol=1e-5)
