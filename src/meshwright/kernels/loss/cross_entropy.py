"""Head and loss in one, without the full logits: sums of -log softmax(x W^T)[target], or each log-probability.

One loop over chunks of rows serves both. It also serves heads of which each device of a group holds some rows: the
reductions of a `Vocabulary` combine the chunk's partial sums.

Products are the library's. One kernel turns a chunk's logits into their gradients in place: in Triton on a GPU
(triton/logit_rows.py), in C on a CPU (c/training_rows.py), else plain code.

A number of head rows V may not suit a GPU's matrix units (spec/memory/held.py). Logits (R, V) and their gradients
are then stored as (R, W), W the next multiple of 128, and the gradient of the head as (W, D): all rows are aligned. The
head itself is not moved, since a parameter may be a shard, a gathered buffer or a part of another rank's. Only its last
rows, fewer than 128, are copied to a block of 128 that zeros fill up. No loss reads past V, and no gradient of the
padding leaves this module.

Letters: R rows of a chunk, D width of the model, V rows of the head that are here, W the same padded.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright import compat
from meshwright.kernels.c import training_rows
from meshwright.kernels.chooser import device_kind, simulated_kind, uses_triton
from meshwright.kernels.linear import cpu_product
from meshwright.kernels.linear.linear import product_dtype
from meshwright.spec.memory.held import CHUNK_BYTES, PADDED_TO, padded_columns, takes

PADDING_DEVICES = {"cuda"}
"""Kinds of devices that pad rows. A CPU's products take any width at the same speed."""


@dataclass(frozen=True, slots=True)
class HeadMatrix:
    """A head (V, D), for products in one dtype. Created for each call of a loss."""

    weight: Tensor
    width: int
    """W. V where nothing is padded."""
    parts: tuple[tuple[slice, Tensor], ...]
    """Columns of the padded logits, and the rows of the head that make them.

    The last block comes first: its share of the gradient of x is rounded before the rest is added, and is the smallest.
    """

    @classmethod
    def padded(cls, weight: Tensor, dtype: torch.dtype) -> "HeadMatrix":
        """Create the matrix for products in `dtype`."""
        rows = len(weight)
        width = padded_columns(rows, dtype.itemsize) if device_kind(weight) in PADDING_DEVICES else rows
        if width == rows:
            return cls(weight, width, ((slice(0, rows), weight),))
        # Only the last block of rows is copied; all before it are aligned already.
        first = width - PADDED_TO
        block = weight.new_zeros(PADDED_TO, weight.shape[1], dtype=dtype)
        block[: rows - first] = weight[first:]
        last = (slice(first, width), block)
        return cls(weight, width, (last, (slice(0, first), weight[:first].to(dtype))) if first else (last,))

    @property
    def is_padded(self) -> bool:
        """True where W is larger than V."""
        return self.width > len(self.weight)

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits (R, V) of x (R, D)."""
        if not self.is_padded:
            return cpu_product.widened_linear(x, self.weight)
        logits = x.new_empty(len(x), self.width)
        for columns, matrix in self.parts:
            torch.mm(x, matrix.t(), out=logits[:, columns])
        return logits[:, : len(self.weight)]

    def padded_gradients(self, gradients: Tensor, dtype: torch.dtype) -> Tensor:
        """Pad gradients of logits (R, V) with zeros to (R, W) in `dtype`, in place where they overlay `logits`."""
        if not self.is_padded:
            return gradients.to(dtype)
        rows, columns = gradients.shape
        size = (rows, self.width)
        if gradients.dtype == dtype and self._has_room(gradients):
            padded = gradients.as_strided(size, (self.width, 1))
        else:
            padded = gradients.new_empty(size, dtype=dtype)
            padded[:, :columns] = gradients
        padded[:, columns:].zero_()  # these are 0 x 0 already, but nan in an ignored row that is infinite
        return padded

    def _has_room(self, gradients: Tensor) -> bool:
        """Return whether each row owns W - V further numbers behind it."""
        if gradients.stride() != (self.width, 1):
            return False
        numbers = gradients.storage_offset() + len(gradients) * self.width
        return gradients.untyped_storage().nbytes() >= numbers * gradients.element_size()

    def input_gradient(self, gradients: Tensor) -> Tensor:
        """Return the gradient of x (R, D) from `padded_gradients`."""
        if not self.is_padded:
            return cpu_product.widened_multiply(gradients, self.weight)
        (columns, matrix), *others = self.parts
        total = cpu_product.multiply(gradients[:, columns], matrix)
        for columns, matrix in others:
            cpu_product.add_product(total, gradients[:, columns], matrix)
        return total

    def empty_gradient(self, rows: int) -> Tensor:
        """Allocate the gradient of the head (V, D) fp32, W rows in memory, which the first chunk writes.

        `rows`: rows of x. Without any it is zeros.
        """
        make = self.weight.new_empty if rows else self.weight.new_zeros
        gradient = make(self.width, self.weight.shape[1], dtype=torch.float32)
        # No view: into those autograd adds nothing in place, and a tied embedding's gradient would take a third matrix.
        return gradient.resize_(self.weight.shape) if self.is_padded else gradient

    def add_gradient(self, total: Tensor, gradients: Tensor, x: Tensor, *, first: bool) -> None:
        """Add gradients^T x to total, with `padded_gradients` and x (R, D). The `first` chunk overwrites total."""
        padded_total = total.as_strided((self.width, total.shape[1]), total.stride()) if self.is_padded else total
        cpu_product.add_product(padded_total, gradients.t(), x, beta=int(not first))


def scaled_gradient(total: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply total (V, D) fp32, which is consumed, by factor (), and round to `dtype` once.

    A GPU rounds while it multiplies, 6 bytes per element in 16 bits. In two passes, as on a CPU, they are 14.
    """
    if dtype == total.dtype or device_kind(total) == "cpu" or torch.compiler.is_compiling():
        return total.mul_(factor).to(dtype)
    return torch.mul(total, factor, out=total.new_empty(total.shape, dtype=dtype))


def take_gradients(ctx: Any, factor: Tensor, name: str) -> tuple[Tensor | None, Tensor | None]:
    """Multiply the gradients that the forward pass of `name` left in `ctx` by factor (), once."""
    if ctx.dtype is None:
        raise RuntimeError(f"{name} keeps its gradients for one backward pass only")
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(f"{name} has no second derivative: its gradients were made without a graph")
    x_gradient, weight_gradient = ctx.x_gradient, ctx.weight_gradient
    if x_gradient is not None:
        x_gradient.mul_(factor)
    if weight_gradient is not None:
        weight_gradient = scaled_gradient(weight_gradient, factor, ctx.dtype)
    # The gradients were scaled in place, so a second pass would scale them again.
    ctx.x_gradient = ctx.weight_gradient = ctx.dtype = None
    return x_gradient, weight_gradient


IGNORED = -100
MIN_CHUNK_ROWS = 256
FEWEST_LEFT_OUT = 0.25
"""Least share of ignored rows for a CPU to leave them out of a chunk's products: prompts of fine-tuning."""
ROW_STEP = 64
"""Step in which rows are left out, at least."""


@dataclass(frozen=True, slots=True)
class LossForm:
    """Terms of the loss in addition to -log softmax of the target.

    A loss of another kind (a teacher's distribution in place of targets) belongs here: the chunk loop only asks for
    losses and gradients of rows.
    """

    smoothing: float = 0.0
    """Share of the target's probability that is spread evenly over the vocabulary.

    Szegedy et al. 2015, arXiv:1512.00567.
    """
    z: float = 0.0
    """Factor of (log sum exp)^2, which keeps logits from drifting (Chowdhery et al. 2022, arXiv:2204.02311)."""


PLAIN = LossForm()


@takes("logits")
def linear_cross_entropy_reference(
    x: Tensor, weight: Tensor, targets: Tensor, scale: Tensor | None = None, form: LossForm = PLAIN
) -> Tensor:
    """Return the summed loss in nats, fp32, times scale.

    Args:
        x: (N, D).
        weight: (V, D).
        targets: (N,), -100 = ignored.
        scale: (), or one for each target (N,).
    """
    logits, smoothing = F.linear(x, weight).float(), form.smoothing
    loss = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="none", label_smoothing=smoothing)
    if form.z:
        loss = loss + form.z * logits.logsumexp(1).square() * (targets != IGNORED)
    if scale is not None and scale.dim():
        return (loss * scale).sum()
    return loss.sum() if scale is None else loss.sum() * scale


@takes("logits")
def linear_log_probabilities_reference(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return the log-probability of each target (N,) in nats, fp32. 0 where a target is -100.

    x (N, D), weight (V, D).
    """
    return -F.cross_entropy(F.linear(x, weight).float(), targets, ignore_index=IGNORED, reduction="none")


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """A device's part of a head, rows `first` to `first + number`, and how the parts are combined."""

    first: int
    number: int
    most: int
    whole: int
    """Rows of the head on all devices."""
    index: int = 0
    """Index of this part among `parts`."""
    parts: int = 1
    largest: Callable[[Tensor], Tensor]
    """Reduce maxima (R,) of the rows here to those of all rows."""
    total: Callable[[Tensor], Tensor]
    """Reduce sums over the rows here to those over all rows."""


def chunk_rows(rows: int, vocab: int, device: str) -> int:
    """Return the rows of a chunk: about CHUNK_BYTES of fp32 logits, at least 256 rows to keep the product efficient.

    Each chunk reads and writes the whole fp32 gradient of the head, so a GPU takes larger ones.
    """
    return max(1, min(rows, max(MIN_CHUNK_ROWS, CHUNK_BYTES.get(device, CHUNK_BYTES["cuda"]) // (4 * vocab))))


def multiplied_rows(valid: Tensor, vocabulary: Vocabulary | None) -> Tensor | None:
    """Return the rows of a chunk that are multiplied, or None for all of them.

    Only a CPU leaves rows out: its host knows the numbers. The valid rows (R,) are included, and others up to a round
    number. Parts of a vocabulary exchange whole chunks, as planned.
    """
    if vocabulary is not None or device_kind(valid) != "cpu" or compat.is_fake(valid):
        return None
    number = rounded_rows(int(valid.sum()), len(valid))
    return valid.argsort(descending=True, stable=True)[:number] if number < len(valid) else None


def rounded_rows(number: int, rows: int) -> int:
    """Return how many of a chunk's `rows` are multiplied where `number` of them count.

    Few distinct numbers: oneDNN compiles and caches code for each, and memory between two such codes is lost to larger
    tensors.
    """
    step = max(ROW_STEP, rows // 16)
    rounded = -(-number // step) * step
    return rounded if rows - rounded >= FEWEST_LEFT_OUT * rows else rows


def _kernel(logits: Tensor, in_triton: bool, prefer: str) -> Any:
    """Return the module that computes losses and gradients in the place of logits. None = plain code.

    In a dry run the CPU's module stands for Triton's: they take the same memory.
    """
    if in_triton:
        from meshwright.kernels.triton import logit_rows

        return logit_rows
    stands_in = simulated_kind() == "cuda" and prefer in ("auto", "triton")
    return training_rows if stands_in or training_rows.takes_logits(logits) else None


def _check_targets(targets: Tensor, valid: Tensor, rows: int) -> None:
    """Raise IndexError for a target that is no row of the head. Triton returns nan instead: its host would wait."""
    outside = targets[valid & ((targets < 0) | (targets >= rows))]
    if len(outside):
        raise IndexError(f"a target is {int(outside[0])}, and the head has rows 0 to {rows - 1}")


@dataclass(slots=True)
class _Chunks:
    """Loop over chunks of targets (N,) and x (N, D), with optional gradients of the sum of factor x loss."""

    x: Tensor
    weight: Tensor
    targets: Tensor
    vocabulary: Vocabulary | None
    form: LossForm = PLAIN
    prefer: str = "auto"
    x_gradient: Tensor | None = None
    weight_gradient: Tensor | None = None
    """Gradient in fp32, whatever the dtype of the weight."""
    head: HeadMatrix = field(init=False)

    def __post_init__(self) -> None:
        self.head = HeadMatrix.padded(self.weight, product_dtype(self.weight))

    def request_gradients(self, x: bool, weight: bool) -> None:
        """Allocate the gradients to compute."""
        self.x_gradient = torch.empty_like(self.x) if x else None
        self.weight_gradient = self.head.empty_gradient(len(self.x)) if weight else None

    def losses(self, factor: Tensor | None = None) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield each chunk's rows, -log softmax of their targets (R,) fp32, and which of them count (R,)."""
        parts, factor = self.vocabulary, None if factor is None else factor.float()
        weight, head, dtype = self.weight, self.head, product_dtype(self.weight)
        rows = chunk_rows(len(self.x), parts.most if parts else len(weight), device_kind(self.x))
        in_triton = uses_triton("loss_rows", weight, prefer=self.prefer)
        for start in range(0, len(self.x), rows):
            chunk = slice(start, start + rows)
            targets, valid = self.targets[chunk], self.targets[chunk] != IGNORED
            row_factor = factor[chunk] if factor is not None and factor.dim() else factor
            multiplied = multiplied_rows(valid, parts)
            inputs = (self.x[chunk] if multiplied is None else self.x[chunk][multiplied]).to(dtype)
            logits = head.logits(inputs)
            kernel = _kernel(logits, in_triton, self.prefer)
            if kernel is None:
                logits = logits.float()
            compute_losses = self._chunk if kernel is None else partial(self._in_place, kernel)
            if multiplied is None:
                losses = compute_losses(logits, targets, valid, row_factor)
                # A part alone cannot tell an invalid target from one of another part.
                if parts is not None:
                    losses.masked_fill_(valid & ((targets < 0) | (targets >= parts.whole)), torch.nan)
            else:
                row_factor = row_factor[multiplied] if row_factor is not None and row_factor.dim() else row_factor
                multiplied_losses = compute_losses(logits, targets[multiplied], valid[multiplied], row_factor)
                losses = multiplied_losses.new_zeros(len(valid)).index_copy_(0, multiplied, multiplied_losses)
            yield chunk, losses, valid
            # compute_losses has overwritten the logits with their gradients.
            if self._wants_gradients:
                logits = head.padded_gradients(logits, inputs.dtype)
            if self.x_gradient is not None:
                gradient = head.input_gradient(logits)
                if multiplied is None:
                    self.x_gradient[chunk] = gradient
                else:
                    self.x_gradient[chunk].zero_().index_copy_(0, multiplied, gradient.to(self.x_gradient.dtype))
                del gradient
            if self.weight_gradient is not None:
                head.add_gradient(self.weight_gradient, logits, inputs, first=not start)
            # Otherwise this chunk stays in memory while the next is computed.
            del logits, inputs

    def _chunk(self, logits: Tensor, targets: Tensor, valid: Tensor, factor: Tensor | None) -> Tensor:
        """Return the losses (R,) of a chunk.

        `logits` (R, V) fp32 become (softmax - onehot) * factor in place, 0 where ignored.
        """
        parts, mine = self.vocabulary, None
        # Ignored rows gather some logit, here the first; their factor is 0.
        index = targets.where(valid, 0)
        if parts is not None:
            local = targets - parts.first
            mine = valid & (local >= 0) & (local < parts.number)
            index = local.clamp(0, parts.number - 1)
        peak = logits.amax(1)
        peak = (parts.largest(peak) if parts else peak).unsqueeze(1)
        chosen = (logits.gather(1, index.unsqueeze(1)) - peak).squeeze(1)
        logits.sub_(peak)
        # Everything that other parts need is summed in one reduction, before the gradient overwrites the logits.
        plain = logits.sum(1) if self.form.smoothing else None
        logits.exp_()
        total = logits.sum(1)
        if parts is not None and mine is not None:
            local_sums = (total, chosen * mine) if plain is None else (total, chosen * mine, plain)
            total, chosen, *rest = parts.total(torch.stack(local_sums)).unbind(0)
            plain = rest[0] if rest else None
        lse = total.log() + peak.squeeze(1) if self.form.z else None
        if self._wants_gradients:
            row_factor = valid.to(logits.dtype) if factor is None else valid * factor
            grown = row_factor if lse is None else row_factor * (1 + 2 * self.form.z * lse)
            logits.mul_((grown / total).unsqueeze(1))
            if self.form.smoothing:
                logits.sub_((row_factor * (self.form.smoothing / self._whole(logits))).unsqueeze(1))
                row_factor = row_factor * (1 - self.form.smoothing)
            logits.scatter_add_(
                1, index.unsqueeze(1), -(row_factor if mine is None else row_factor * mine).unsqueeze(1)
            )
        losses = total.log() - chosen
        if plain is not None:
            losses += self.form.smoothing * (chosen - plain / self._whole(logits))
        return losses if lse is None else losses + self.form.z * lse.square()

    @property
    def _wants_gradients(self) -> bool:
        return self.x_gradient is not None or self.weight_gradient is not None

    def _whole(self, logits: Tensor) -> int:
        return self.vocabulary.whole if self.vocabulary else logits.shape[1]

    def _in_place(self, kernel: Any, logits: Tensor, targets: Tensor, valid: Tensor, factor: Tensor | None) -> Tensor:
        """Compute as `_chunk` does, on logits in the dtype of the product."""
        parts, smoothing, z = self.vocabulary, self.form.smoothing, self.form.z
        if parts is None:
            if kernel is training_rows and not compat.is_fake(logits):
                _check_targets(targets, valid, len(self.weight))
            losses: Tensor = kernel.losses(
                logits, targets, factor, ignored=IGNORED, gradient=self._wants_gradients, smoothing=smoothing, z=z
            )
            return losses
        peak, total, plain, target_logits = kernel.gathered(logits, targets, parts.first).unbind(0)
        # The reduction works in place, and the part's own maximum is needed below.
        highest = parts.largest(peak.clone())
        mine = (targets >= parts.first) & (targets < parts.first + parts.number)
        # The same sums as in `_chunk`: one device of the group may have a kernel and another not.
        local_sums = [total * (peak - highest).exp(), (target_logits - highest) * mine]
        local_sums += [plain - highest * parts.number] if smoothing else []
        total, target_logits, *rest = parts.total(torch.stack(local_sums)).unbind(0)
        lse = highest + total.log()
        if self._wants_gradients:
            row_factor = valid.float() if factor is None else valid * factor
            kernel.write_gradients(
                logits, targets, lse, row_factor, first=parts.first, vocabulary=parts.whole, smoothing=smoothing, z=z
            )
        losses = total.log() - target_logits
        if smoothing:
            losses += smoothing * (target_logits - rest[0] / parts.whole)
        return losses + z * lse.square() if z else losses


class _LinearCrossEntropy(torch.autograd.Function):
    """Cross-entropy that computes both gradients in its forward pass, chunk by chunk.

    That takes three products in all, and never holds more than one chunk of logits. The backward pass multiplies the
    gradients by the incoming one in place, so it can run once.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, scale: Tensor | None, vocabulary: Vocabulary | None,
        form: LossForm, prefer: str,
    ) -> Tensor:  # fmt: skip
        chunks = _Chunks(x, weight, targets, vocabulary, form, prefer)
        chunks.request_gradients(*ctx.needs_input_grad[:2])
        row_scale = scale if scale is not None and scale.dim() else None
        loss = torch.zeros((), dtype=torch.float32, device=x.device)
        for rows, losses, valid in chunks.losses(scale):
            loss += (losses * (valid if row_scale is None else valid * row_scale[rows])).sum()
            del losses, valid
        ctx.x_gradient, ctx.weight_gradient, ctx.dtype = chunks.x_gradient, chunks.weight_gradient, weight.dtype
        return loss if scale is None or row_scale is not None else loss * scale

    @staticmethod
    @takes("logits")
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return *take_gradients(ctx, gradient, "linear_cross_entropy"), *(None,) * 5


@takes("logits")
def linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, scale: Tensor | None = None, vocabulary: Vocabulary | None = None,
    form: LossForm = PLAIN, prefer: str = "auto",
) -> Tensor:  # fmt: skip
    """Compute the loss as the reference does. One backward pass, and no gradient of `scale`.

    A target that is no row of the head raises IndexError. In Triton, and with a vocabulary, the loss is nan instead.

    Args:
        vocabulary: `weight` is a part of the head. The loss is that of all parts, the gradient of x this part's share.

    Raises:
        ValueError: `scale` requires a gradient.
    """
    if scale is not None and scale.requires_grad:
        raise ValueError("linear_cross_entropy makes no gradient of its scale: detach it")
    if not torch.is_grad_enabled():  # an autograd function cannot see this, and would compute gradients for nothing
        x, weight = x.detach(), weight.detach()
    loss: Tensor = _LinearCrossEntropy.apply(x, weight, targets, scale, vocabulary, form, prefer)  # type: ignore[no-untyped-call]  # torch has no annotations there
    return loss


class _LinearLogProbabilities(torch.autograd.Function):
    """Log-probabilities that save only x and the weight.

    The backward pass, which knows the factor of each target, recomputes the logits.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, vocabulary: Vocabulary | None, prefer: str
    ) -> Tensor:
        ctx.save_for_backward(x, weight, targets)
        ctx.vocabulary, ctx.prefer = vocabulary, prefer
        chunks = _Chunks(x, weight, targets, vocabulary, prefer=prefer)
        log_probabilities = [-(losses * valid) for _, losses, valid in chunks.losses()]
        return torch.cat(log_probabilities) if log_probabilities else x.new_zeros(0, dtype=torch.float32)

    @staticmethod
    @takes("logits")
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight, targets = ctx.saved_tensors
        chunks = _Chunks(x, weight, targets, ctx.vocabulary, prefer=ctx.prefer)
        chunks.request_gradients(*ctx.needs_input_grad[:2])
        for _ in chunks.losses(-gradient):
            pass
        weight_gradient = None if chunks.weight_gradient is None else chunks.weight_gradient.to(weight.dtype)
        return chunks.x_gradient, weight_gradient, None, None, None


@takes("logits")
def linear_log_probabilities(
    x: Tensor, weight: Tensor, targets: Tensor, vocabulary: Vocabulary | None = None, prefer: str = "auto"
) -> Tensor:
    """Compute as the reference does, with any number of backward passes. `vocabulary` as in linear_cross_entropy."""
    log_probabilities: Tensor = _LinearLogProbabilities.apply(x, weight, targets, vocabulary, prefer)  # type: ignore[no-untyped-call]  # torch has no annotations there
    return log_probabilities
