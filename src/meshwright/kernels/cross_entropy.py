"""Head and loss in one, without the whole logits: sums of -log softmax(x W^T)[target], or each log-probability.

One loop over chunks of rows serves both, and heads of which each device of a group holds some rows: what a chunk finds
is then combined by the reductions of a `Vocabulary`. Products are the library's. What a chunk's logits are for is made
in their place by one kernel: in Triton on a GPU (triton/loss_rows.py), in C on a CPU (compiled/logit_rows.py); else by
plain code.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright import compat
from meshwright.kernels import logit_rows
from meshwright.kernels.chooser import uses_triton
from meshwright.kernels.head_matrix import HeadMatrix, scaled_gradient
from meshwright.kernels.linear import product_dtype
from meshwright.kernels.target import acts, kind
from meshwright.spec.head_chunk import CHUNK_BYTES
from meshwright.spec.purpose import takes

IGNORED = -100
MIN_CHUNK_ROWS = 256
FEWEST_LEFT_OUT = 0.25
"""Share of a chunk's rows that must be ignored for a CPU to leave them out of its products: prompts of fine-tuning."""
ROW_STEP = 64
"""Rows that are left out are left out by at least so many."""


@dataclass(frozen=True, slots=True)
class LossForm:
    """What is made of a row of logits beside -log softmax of its target. A loss of another kind (a teacher's
    distribution in place of targets) has its place here: the chunk loop only asks for losses and gradients of rows."""

    smoothing: float = 0.0
    """Share of the target's probability that all of the vocabulary gets alike (Szegedy et al. 2015,
    arXiv:1512.00567)."""
    z: float = 0.0
    """Factor of (log sum exp)^2, which keeps logits from drifting (Chowdhery et al. 2022, arXiv:2204.02311)."""


PLAIN = LossForm()


@takes("logits")
def linear_cross_entropy_reference(
    x: Tensor, weight: Tensor, targets: Tensor, scale: Tensor | None = None, form: LossForm = PLAIN
) -> Tensor:
    """Summed loss in nats, fp32. x (N, D), weight (V, D), targets (N,) with -100 = ignored; times scale, () or one for
    each target (N,)."""
    logits, smoothing = F.linear(x, weight).float(), form.smoothing
    loss = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="none", label_smoothing=smoothing)
    if form.z:
        loss = loss + form.z * logits.logsumexp(1).square() * (targets != IGNORED)
    if scale is not None and scale.dim():
        return (loss * scale).sum()
    return loss.sum() if scale is None else loss.sum() * scale


@takes("logits")
def linear_log_probabilities_reference(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Log-probability of each target (N,) in nats, fp32; 0 where it is -100. x (N, D), weight (V, D)."""
    return -F.cross_entropy(F.linear(x, weight).float(), targets, ignore_index=IGNORED, reduction="none")


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """Rows `first` to `first + number` of a head, `most` being the longest such part, and how parts are combined."""

    first: int
    number: int
    most: int
    whole: int
    """Rows of the head on all devices."""
    index: int = 0
    """Which of `parts` this is."""
    parts: int = 1
    largest: Callable[[Tensor], Tensor]
    """Maxima (R,) of the rows here -> of all rows."""
    total: Callable[[Tensor], Tensor]
    """Sums over the rows here -> over all rows."""


def chunk_rows(rows: int, vocab: int, device: str) -> int:
    """Rows of one chunk: about CHUNK_BYTES of fp32 logits, at least 256 rows so that the product stays efficient.

    Each chunk reads and writes the whole fp32 gradient of the head, so a GPU takes larger ones.
    """
    return max(1, min(rows, max(MIN_CHUNK_ROWS, CHUNK_BYTES.get(device, CHUNK_BYTES["cuda"]) // (4 * vocab))))


def kept_rows(valid: Tensor, vocabulary: Vocabulary | None) -> Tensor | None:
    """Which rows of a chunk are multiplied, where not all are: on a CPU, whose host knows the numbers. `valid` (R,) are
    among them, and others so that their number is a multiple. Parts of a vocabulary exchange whole chunks, as is
    planned."""
    if vocabulary is not None or kind(valid) != "cpu" or compat.is_fake(valid):
        return None
    number = rounded_rows(int(valid.sum()), len(valid))
    return valid.argsort(descending=True, stable=True)[:number] if number < len(valid) else None


def rounded_rows(number: int, rows: int) -> int:
    """Of a chunk of so many rows: how many are multiplied where `number` count. Few numbers, since oneDNN makes code of
    each number of rows and keeps it, and memory between the code of two is lost to larger tensors."""
    step = max(ROW_STEP, rows // 16)
    rounded = -(-number // step) * step
    return rounded if rows - rounded >= FEWEST_LEFT_OUT * rows else rows


def _kernel(logits: Tensor, in_triton: bool, prefer: str) -> Any:
    """The module that makes losses and gradients in the place of logits; None for plain code. In a dry run that of a
    CPU stands for Triton's: they take the same memory."""
    if in_triton:
        from meshwright.kernels.triton import loss_rows

        return loss_rows
    stands_in = acts() == "cuda" and prefer in ("auto", "triton")
    return logit_rows if stands_in or logit_rows.takes(logits) else None


def _check_targets(targets: Tensor, valid: Tensor, rows: int) -> None:
    """In Triton the loss is nan instead: a GPU's host would wait."""
    outside = targets[valid & ((targets < 0) | (targets >= rows))]
    if len(outside):
        raise IndexError(f"a target is {int(outside[0])}, and the head has rows 0 to {rows - 1}")


@dataclass(slots=True)
class _Chunks:
    """The loop: targets (N,) of x (N, D), chunk by chunk, with gradients of the sum of factor x loss where wanted."""

    x: Tensor
    weight: Tensor
    targets: Tensor
    vocabulary: Vocabulary | None
    form: LossForm = PLAIN
    prefer: str = "auto"
    x_gradient: Tensor | None = None
    weight_gradient: Tensor | None = None
    """fp32, whatever the dtype of the weight."""
    head: HeadMatrix = field(init=False)

    def __post_init__(self) -> None:
        self.head = HeadMatrix.padded(self.weight, product_dtype(self.weight))

    def want(self, x: bool, weight: bool) -> None:
        """Have gradients made."""
        self.x_gradient = torch.empty_like(self.x) if x else None
        self.weight_gradient = self.head.empty_gradient(len(self.x)) if weight else None

    def losses(self, factor: Tensor | None = None) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Of each chunk: its rows, -log softmax of their targets (R,) fp32, and which of them count (R,)."""
        parts, factor = self.vocabulary, None if factor is None else factor.float()
        weight, head, dtype = self.weight, self.head, product_dtype(self.weight)
        rows = chunk_rows(len(self.x), parts.most if parts else len(weight), kind(self.x))
        in_triton = uses_triton("loss_rows", weight, prefer=self.prefer)
        for start in range(0, len(self.x), rows):
            here = slice(start, start + rows)
            targets, valid = self.targets[here], self.targets[here] != IGNORED
            each = factor[here] if factor is not None and factor.dim() else factor
            kept = kept_rows(valid, parts)
            part = (self.x[here] if kept is None else self.x[here][kept]).to(dtype)
            logits = head.logits(part)
            kernel = _kernel(logits, in_triton, self.prefer)
            if kernel is None:
                logits = logits.float()
            make = self._chunk if kernel is None else partial(self._in_place, kernel)
            if kept is None:
                losses = make(logits, targets, valid, each)
                if parts is not None:  # no part of the head can tell by itself
                    losses.masked_fill_(valid & ((targets < 0) | (targets >= parts.whole)), torch.nan)
            else:
                each = each[kept] if each is not None and each.dim() else each
                found = make(logits, targets[kept], valid[kept], each)
                losses = found.new_zeros(len(valid)).index_copy_(0, kept, found)
            yield here, losses, valid
            if self._wants_gradients:
                logits = head.laid_out(logits, part.dtype)
            if self.x_gradient is not None:
                found = head.input_gradient(logits)
                if kept is None:
                    self.x_gradient[here] = found
                else:
                    self.x_gradient[here].zero_().index_copy_(0, kept, found.to(self.x_gradient.dtype))
                del found
            if self.weight_gradient is not None:
                head.add_gradient(self.weight_gradient, logits, part, first=not start)
            del logits, part  # else a chunk stands beside the next

    def _chunk(self, logits: Tensor, targets: Tensor, valid: Tensor, factor: Tensor | None) -> Tensor:
        """The losses (R,) of a chunk; `logits` (R, V) fp32 becomes (softmax - onehot) * factor in place (0 where
        ignored)."""
        parts, mine = self.vocabulary, None
        index = targets.where(valid, 0)
        if parts is not None:
            local = targets - parts.first
            mine = valid & (local >= 0) & (local < parts.number)
            index = local.clamp(0, parts.number - 1)
        peak = logits.amax(1)
        peak = (parts.largest(peak) if parts else peak).unsqueeze(1)
        chosen = (logits.gather(1, index.unsqueeze(1)) - peak).squeeze(1)
        logits.sub_(peak)
        plain = logits.sum(1) if self.form.smoothing else None
        logits.exp_()
        total = logits.sum(1)
        if parts is not None and mine is not None:
            found = (total, chosen * mine) if plain is None else (total, chosen * mine, plain)
            total, chosen, *rest = parts.total(torch.stack(found)).unbind(0)
            plain = rest[0] if rest else None
        lse = total.log() + peak.squeeze(1) if self.form.z else None
        if self._wants_gradients:
            each = valid.to(logits.dtype) if factor is None else valid * factor
            grown = each if lse is None else each * (1 + 2 * self.form.z * lse)
            logits.mul_((grown / total).unsqueeze(1))
            if self.form.smoothing:
                logits.sub_((each * (self.form.smoothing / self._whole(logits))).unsqueeze(1))
                each = each * (1 - self.form.smoothing)
            logits.scatter_add_(1, index.unsqueeze(1), -(each if mine is None else each * mine).unsqueeze(1))
        losses = total.log() - chosen
        if plain is not None:
            losses += self.form.smoothing * (chosen - plain / self._whole(logits))
        return losses if lse is None else losses + self.form.z * lse.square()

    @property
    def _wants_gradients(self) -> bool:
        return self.x_gradient is not None or self.weight_gradient is not None

    def _whole(self, logits: Tensor) -> int:
        return self.vocabulary.whole if self.vocabulary else logits.shape[1]

    def _in_place(
        self, kernel: Any, logits: Tensor, targets: Tensor, valid: Tensor, factor: Tensor | None
    ) -> Tensor:  # fmt: skip
        """As `_chunk`, of logits in the dtype that the product gave."""
        parts, smoothing, z = self.vocabulary, self.form.smoothing, self.form.z
        if parts is None:
            if kernel is logit_rows and not compat.is_fake(logits):
                _check_targets(targets, valid, len(self.weight))
            losses: Tensor = kernel.losses(
                logits, targets, factor, ignored=IGNORED, gradient=self._wants_gradients, smoothing=smoothing, z=z
            )
            return losses
        peak, total, plain, chosen = kernel.gathered(logits, targets, parts.first).unbind(0)
        highest = parts.largest(peak.clone())
        mine = (targets >= parts.first) & (targets < parts.first + parts.number)
        found = [total * (peak - highest).exp(), (chosen - highest) * mine]  # as `_chunk` sends them: one device may
        found += [plain - highest * parts.number] if smoothing else []  # have a kernel and another not
        total, chosen, *rest = parts.total(torch.stack(found)).unbind(0)
        lse = highest + total.log()
        if self._wants_gradients:
            each = valid.float() if factor is None else valid * factor
            kernel.write_gradients(
                logits, targets, lse, each, first=parts.first, vocabulary=parts.whole, smoothing=smoothing, z=z
            )
        losses = total.log() - chosen
        if smoothing:
            losses += smoothing * (chosen - rest[0] / parts.whole)
        return losses + z * lse.square() if z else losses


class _LinearCrossEntropy(torch.autograd.Function):
    """Makes both gradients during the forward pass, chunk by chunk: three products in all and never more than a chunk
    of logits alive. The backward pass multiplies them by the incoming gradient in place, so it can run once."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, scale: Tensor | None, vocabulary: Vocabulary | None,
        form: LossForm, prefer: str,
    ) -> Tensor:  # fmt: skip
        chunks = _Chunks(x, weight, targets, vocabulary, form, prefer)
        chunks.want(*ctx.needs_input_grad[:2])
        each = scale if scale is not None and scale.dim() else None
        loss = torch.zeros((), dtype=torch.float32, device=x.device)
        for rows, losses, valid in chunks.losses(scale):
            loss += (losses * (valid if each is None else valid * each[rows])).sum()
            del losses, valid
        ctx.x_gradient, ctx.weight_gradient, ctx.dtype = chunks.x_gradient, chunks.weight_gradient, weight.dtype
        return loss if scale is None or each is not None else loss * scale

    @staticmethod
    @takes("logits")
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if ctx.dtype is None:
            raise RuntimeError("linear_cross_entropy keeps its gradients for one backward pass only")
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError("linear_cross_entropy has no second derivative: its gradients were made without a graph")
        x_gradient, weight_gradient = ctx.x_gradient, ctx.weight_gradient
        if x_gradient is not None:
            x_gradient.mul_(gradient)
        if weight_gradient is not None:
            weight_gradient = scaled_gradient(weight_gradient, gradient, ctx.dtype)
        ctx.x_gradient = ctx.weight_gradient = ctx.dtype = None
        return x_gradient, weight_gradient, *(None,) * 5


@takes("logits")
def linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, scale: Tensor | None = None, vocabulary: Vocabulary | None = None,
    form: LossForm = PLAIN, prefer: str = "auto",
) -> Tensor:  # fmt: skip
    """As the reference; one backward pass, and no gradient of `scale` (ValueError where one is asked for). With a
    vocabulary `weight` is a part of the head, the loss is that of all parts, and the gradient of x what this part adds
    to it. A target that is no row of the head is an error; of parts, and in Triton, the loss is nan."""
    if scale is not None and scale.requires_grad:
        raise ValueError("linear_cross_entropy makes no gradient of its scale: detach it")
    if not torch.is_grad_enabled():  # an autograd function is not told, and would make gradients for nothing
        x, weight = x.detach(), weight.detach()
    result: Tensor = _LinearCrossEntropy.apply(x, weight, targets, scale, vocabulary, form, prefer)  # type: ignore[no-untyped-call]  # torch has no annotations there
    return result


class _LinearLogProbabilities(torch.autograd.Function):
    """Keeps x and the weight; the backward pass makes the logits again, now that it knows each target's factor."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, vocabulary: Vocabulary | None, prefer: str
    ) -> Tensor:
        ctx.save_for_backward(x, weight, targets)
        ctx.vocabulary, ctx.prefer = vocabulary, prefer
        chunks = _Chunks(x, weight, targets, vocabulary, prefer=prefer)
        found = [-(losses * valid) for _, losses, valid in chunks.losses()]
        return torch.cat(found) if found else x.new_zeros(0, dtype=torch.float32)

    @staticmethod
    @takes("logits")
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight, targets = ctx.saved_tensors
        chunks = _Chunks(x, weight, targets, ctx.vocabulary, prefer=ctx.prefer)
        chunks.want(*ctx.needs_input_grad[:2])
        for _ in chunks.losses(-gradient):
            pass
        weight_gradient = None if chunks.weight_gradient is None else chunks.weight_gradient.to(weight.dtype)
        return chunks.x_gradient, weight_gradient, None, None, None


@takes("logits")
def linear_log_probabilities(
    x: Tensor, weight: Tensor, targets: Tensor, vocabulary: Vocabulary | None = None, prefer: str = "auto"
) -> Tensor:
    """As the reference, with any number of backward passes; `vocabulary` as for linear_cross_entropy."""
    result: Tensor = _LinearLogProbabilities.apply(x, weight, targets, vocabulary, prefer)  # type: ignore[no-untyped-call]  # torch has no annotations there
    return result
