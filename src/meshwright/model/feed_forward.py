"""Feed-forward half of a block: gated (SwiGLU), plain (GELU), or a mixture of experts.

A mixture has a router, stacked experts, shared experts and the balance loss. It is dropless: every token reaches its
top_k experts, however uneven the load.
Letters: B batch, S sequence, N = B S tokens, D hidden, F width, k experts per token, X experts, R rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from meshwright.kernels import Kernels
from meshwright.kernels.experts.experts import Counts, combine, keeps_counts, spread
from meshwright.kernels.norm.dropout import dropout, features, mix
from meshwright.kernels.quantized.matrix import QuantizedMatrix, experts
from meshwright.kernels.quantized.quantized_linear import quantized_expert_linear
from meshwright.model.layers import Linear, Weight, read, sole_matrix, write
from meshwright.model.seams import Border, Seams, same
from meshwright.spec.model.shape import ModelShape, MoEShape

TINY = 1e-9
"""Least number of positions in a row, for rows that are all padding."""
Half = Callable[..., Any]
"""Function (shared experts, ...) that runs their `begin` or `finish`."""


class GatedMLP(nn.Module):
    """Gated feed-forward: down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden: int, ffn: int, kernels: Kernels, border: Border, bias: bool = False) -> None:
        super().__init__()
        self.gate = Linear(hidden, ffn, kernels, bias)
        self.up = Linear(hidden, ffn, kernels, bias)
        self.down = Linear(ffn, hidden, kernels, bias)
        self.kernels, self.border = kernels, border

    def forward(self, x: Tensor, keys: Tensor | None = None) -> Tensor:
        """Map x (..., D) to (..., D). `keys` (...) are those of the adapters' dropout."""
        return self.finish(*self.begin(x, keys), keys=keys)

    def begin(self, x: Tensor, keys: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return the arguments of `finish`: gate and up, (..., F) each."""
        return read(self.border, x, self.gate, self.up, keys=keys)

    def finish(self, gate: Tensor, up: Tensor, *, keys: Tensor | None = None) -> Tensor:
        """Map gate and up to the output (..., D)."""
        # If the down product is more than one matrix, it cannot be fused with the gate.
        weight = None if self.border.prepared is not None else sole_matrix(self.down)
        if weight is None:
            return write(self.border, self.kernels.swiglu(gate, up), self.down, keys)
        summed = self.border.write
        down: Tensor = self.kernels.swiglu_linear(gate, up, weight, self.down.local_bias, summed)
        return down if summed else self.border.leave(down)


class PlainMLP(nn.Module):
    """Feed-forward without a gate: down(gelu(up(x)))."""

    def __init__(self, hidden: int, ffn: int, kernels: Kernels, border: Border, bias: bool, approximate: str) -> None:
        super().__init__()
        self.up = Linear(hidden, ffn, kernels, bias)
        self.down = Linear(ffn, hidden, kernels, bias)
        self.kernels, self.border, self.approximate = kernels, border, approximate

    def forward(self, x: Tensor, keys: Tensor | None = None) -> Tensor:
        """Map x (..., D) to (..., D). `keys` (...) are those of the adapters' dropout."""
        return self.finish(*self.begin(x, keys), keys=keys)

    def begin(self, x: Tensor, keys: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return the argument of `finish`, (..., F)."""
        return read(self.border, x, self.up, keys=keys)

    def finish(self, up: Tensor, *, keys: Tensor | None = None) -> Tensor:
        """Map up to the output (..., D)."""
        return write(self.border, self.kernels.gelu(up, self.approximate), self.down, keys)


def make_mlp(shape: ModelShape, kernels: Kernels, border: Border, ffn: int, bias: bool) -> GatedMLP | PlainMLP:
    """Build the dense feed-forward of a shape, `ffn` wide."""
    if shape.mlp == "swiglu":
        return GatedMLP(shape.hidden, ffn, kernels, border, bias)
    return PlainMLP(shape.hidden, ffn, kernels, border, bias, gelu_form(shape))


def gelu_form(shape: ModelShape) -> str:
    """Return F.gelu's `approximate` for a shape without a gate."""
    return "tanh" if shape.mlp == "gelu_tanh" else "none"


class Router(nn.Module):
    """Router: scores all experts in fp32 and picks top_k of them per token."""

    correction_bias: Tensor

    def __init__(self, shape: ModelShape, moe: MoEShape) -> None:
        super().__init__()
        self.moe = moe
        self.weight = nn.Parameter(torch.empty(moe.experts, shape.hidden))
        if moe.correction_bias:
            self.register_buffer("correction_bias", torch.zeros(moe.experts, dtype=torch.float32))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Map x (N, D) to weights (N, k) fp32, experts (N, k) int64 and scores (N, X) fp32 that sum to 1."""
        logits = x.float() @ self.weight.float().t()
        scores = logits.softmax(-1) if self.moe.scoring == "softmax" else logits.sigmoid()
        experts = self._choose(scores)
        # The correction only decides which experts are chosen; weights are the plain scores.
        weights = scores.gather(1, experts)
        if self.moe.normalize_top_k:
            # Sigmoid scores may all round to zero; those of a softmax sum to 1.
            tiny = 1e-20 if self.moe.scoring == "sigmoid" else 0.0
            weights = weights / (weights.sum(-1, keepdim=True) + tiny)
        probabilities = scores if self.moe.scoring == "softmax" else scores / scores.sum(-1, keepdim=True)
        return weights * self.moe.routed_scale, experts, probabilities

    def _choose(self, scores: Tensor) -> Tensor:
        """Return the indices (N, k) of the chosen experts. A group of experts ranks by the sum of its two best."""
        moe, choice = self.moe, scores.detach()
        if moe.correction_bias:
            choice = choice + self.correction_bias
        if moe.groups > 1:
            # Experts outside the top_groups groups cannot be chosen (DeepSeek-V3, section 2.1.2).
            grouped = choice.view(len(choice), moe.groups, -1)
            strength = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
            best = strength.topk(moe.top_groups, dim=-1).indices
            allowed = torch.zeros_like(strength, dtype=torch.bool).scatter_(1, best, True)
            choice = grouped.masked_fill(~allowed.unsqueeze(-1), float("-inf")).flatten(1)
        return choice.topk(moe.top_k, dim=-1).indices


@dataclass(frozen=True, slots=True)
class ExpertStack:
    """Matrices (X, out, in) of experts and their adapter (model/low_rank.py): A (X, rank, in), B (X, out, rank)."""

    matrices: Tensor | QuantizedMatrix
    low: tuple[Tensor, ...] = ()
    scale: float = 1.0
    dropout: float = 0.0
    site: int = 0
    first_input: int = 0
    """Number of this stack in its layer for dropout, and of the first input held here."""
    read: Callable[[Tensor], Tensor] = same
    """Transform of the rows before the product. Stacks that read the same rows share it."""
    name: str = ""
    first: int = 0
    """Index of the first expert among those held here."""

    def parts(self, number: int) -> "list[ExpertStack]":
        """Cut the experts into equal parts."""
        if number == 1:
            return [self]
        whole = self.matrices
        if isinstance(whole, QuantizedMatrix):
            experts_per_part = len(whole.codes) // number
            stacks: Sequence[Tensor | QuantizedMatrix] = [
                experts(whole, part * experts_per_part, experts_per_part) for part in range(number)
            ]
        else:
            stacks = whole.chunk(number)
        cut = zip(stacks, *(adapter.chunk(number) for adapter in self.low), strict=True)
        parts = [replace(self, matrices=matrices, low=tuple(low)) for matrices, *low in cut]
        held = len(whole.codes if isinstance(whole, QuantizedMatrix) else whole)
        return [replace(part, first=index * held // number) for index, part in enumerate(parts)]


class AddedProducts(Protocol):
    """Products that are added to those of rows with experts' matrices."""

    def add(self, stack: ExpertStack, rows: Tensor, products: Tensor) -> Tensor:
        """Return products (R, out) of rows (R, in) with a stack, plus the added ones."""


class Experts(nn.Module):
    """X feed-forwards as three stacked matrices, or two without a gate. A kernel multiplies runs of rows."""

    def __init__(self, shape: ModelShape, moe: MoEShape, kernels: Kernels, seams: Seams) -> None:
        super().__init__()
        self.gated = shape.mlp == "swiglu"
        if self.gated:
            self.gate = nn.Parameter(torch.empty(moe.experts, moe.ffn, shape.hidden))
        self.approximate = gelu_form(shape)
        self.up = nn.Parameter(torch.empty(moe.experts, moe.ffn, shape.hidden))
        self.down = nn.Parameter(torch.empty(moe.experts, shape.hidden, moe.ffn))
        self.kernels, self.seams = kernels, seams
        self.rounding: dict[str, Weight] = {}
        """Weights of stacks that are rounded in each product, by name."""
        self.adapters: ExpertAdapters | None = None

    def forward(self, *sent: Any) -> Any:
        """Map what Dispatch.send returned to the argument of Dispatch.receive."""
        return self.seams.dispatch.compute(self, *sent)

    def compute(self, rows: Tensor, counts: Tensor, keys: Tensor | None = None) -> Tensor:
        """Map rows (N k, D), sorted by expert, and counts (X,) per expert, to (N k, D). All experts are here.

        `keys` (N k,) are those of the rows for dropout.
        """
        # A kernel that reads the counts on the device spares the host a wait.
        if self.up is not None and keeps_counts(rows, self.up, self.kernels.prefer):
            return self.feed_forward(rows, counts, keys=keys)
        return self.feed_forward(rows, self.seams.counts_on_host(counts.unsqueeze(0), len(rows))[0], keys=keys)

    def stacks(self, pieces: int = 1) -> list[tuple[ExpertStack, ...]]:
        """Return the matrices (gate,) up, down of each of `pieces` equal parts of the experts."""
        held = [self._stack(name).parts(pieces) for name in (("gate",) if self.gated else ()) + ("up", "down")]
        return list(zip(*held, strict=True))

    def _stack(self, name: str) -> ExpertStack:
        lora = getattr(self, f"{name}_lora", None)
        quantized = getattr(self, f"{name}_quantized", None)
        rounding, held = self.rounding.get(name), getattr(self, name)
        if rounding is not None:
            (matrices,) = rounding.matrices(held)
            return ExpertStack(matrices, name=name, read=rounding.read)
        matrices = held if quantized is None else quantized.matrix
        if lora is None:
            return ExpertStack(matrices, name=name)
        return ExpertStack(matrices, (lora.a, lora.b), lora.scale, lora.dropout, lora.site, lora.first_input, name=name)

    def feed_forward(
        self, rows: Tensor, counts: Counts, stacks: Sequence[ExpertStack] = (), keys: Tensor | None = None
    ) -> Tensor:
        """Map sorted rows (R, D) and counts per expert to (R, D), by all experts here or those of `stacks`.

        `keys` (R,) are those of the rows for dropout.
        """
        *first, down = stacks or self.stacks()[0]
        added = None
        if self.adapters is not None:
            rows, added = self.adapters(self, rows, counts)
        rows = first[0].read(rows)
        read = [self._product(rows, stack, counts, added, keys) for stack in first]
        inner = self.kernels.swiglu(*read) if self.gated else self.kernels.gelu(*read, self.approximate)
        return self._product(down.read(inner), down, counts, added, keys)

    def _product(
        self, rows: Tensor, stack: ExpertStack, counts: Counts, added: AddedProducts | None, keys: Tensor | None
    ) -> Tensor:
        product = self._plain_product(rows, stack, counts, keys)
        return product if added is None else added.add(stack, rows, product)

    def _plain_product(self, rows: Tensor, stack: ExpertStack, counts: Counts, keys: Tensor | None) -> Tensor:
        multiply = self.kernels.expert_linear
        if isinstance(stack.matrices, QuantizedMatrix):
            assert not isinstance(counts, Tensor)
            product = quantized_expert_linear(rows, stack.matrices, counts, self.kernels.quantized_linears)
        else:
            product = multiply(rows, stack.matrices, counts)
        if not stack.low:
            return product
        a, b = stack.low
        drops = stack.dropout > 0 and self.training
        dropped = dropout(rows, stack.dropout, keys, stack.site, stack.first_input) if drops else rows
        low: Tensor = multiply(multiply(dropped, a, counts) * stack.scale, b, counts)
        return product + low


class ExpertAdapters(Protocol):
    """Adapters of the current pass's requests, whose products are added to those of the experts."""

    def __call__(self, experts: Experts, rows: Tensor, counts: Counts) -> tuple[Tensor, AddedProducts]:
        """Return the rows (R, D) of what was sent, and what is added to their products."""


def begin(shared: GatedMLP | PlainMLP, x: Tensor, keys: Tensor | None) -> tuple[Tensor, ...]:
    """Run the first half of the shared experts."""
    return shared.begin(x, keys)


def finish(shared: GatedMLP | PlainMLP, keys: Tensor | None, *begun: Tensor) -> Tensor:
    """Run the second half of the shared experts."""
    return shared.finish(*begun, keys=keys)


IN_HALVES: tuple[Half, Half] = begin, finish


class RoutedTokens(NamedTuple):
    """Tokens with their experts, and how their rows are put together again."""

    x: Tensor
    """Tokens (B, S, D)."""
    counts: Tensor
    """Rows of each expert (X,)."""
    weights: Tensor
    """Weights (N, k) fp32."""
    experts: Tensor
    """Experts (N, k) int64 of each token."""
    probabilities: Tensor
    """Scores (N, X) fp32."""
    order: Tensor
    """Choice of each row (N k,)."""
    inverse: Tensor
    """Row of each choice (N k,)."""
    keys: Tensor | None = None
    """Keys (B, S) of tokens for the dropout of adapters, at the positions that shared experts read."""
    row_keys: Tensor | None = None
    """Keys of the rows (N k,)."""


class MoE(nn.Module):
    """Routed experts plus shared ones."""

    def __init__(self, shape: ModelShape, kernels: Kernels, seams: Seams | None = None) -> None:
        super().__init__()
        assert shape.moe is not None
        self.moe = shape.moe
        self.seams = seams = seams or Seams()
        self.router = Router(shape, shape.moe)
        self.experts = Experts(shape, shape.moe, kernels, seams)
        if shape.moe.shared_experts:
            self.shared = make_mlp(shape, kernels, seams.shared, shape.moe.shared_experts * shape.moe.ffn, False)

    def forward(self, x: Tensor, padding: Tensor | None = None, keys: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Map x (B, S, D) to (B, S, D) and the balance loss of each sequence (B,) fp32.

        `padding` (B, S) is left out of the balance loss. `keys` (B, S) are those of adapters' dropout.
        """
        routed, rows = self.route(x, keys)
        received, shared = self.visit(routed, rows)
        return self.join(routed, received, shared, padding)

    def route(self, x: Tensor, keys: Tensor | None = None) -> tuple[RoutedTokens, list[Tensor]]:
        """Route x (B, S, D): return where its tokens go, and their rows (N k, D) sorted by expert.

        The rows are alone in a list, so the sender can release them.
        """
        x = self.seams.routed.enter(x)
        flat, dispatch, prefer = x.flatten(0, 1), self.seams.dispatch, self.experts.kernels.prefer
        weights, experts, probabilities = self.router(flat)
        # A stable sort keeps the tokens of an expert in order, so a result does not depend on the sort.
        # `inverse` is a scatter, cheaper than a second sort.
        choices = experts.flatten()
        order = dispatch.ordered(choices).argsort(stable=True)
        inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        counts = choices.new_zeros(self.moe.experts).scatter_add_(0, choices, torch.ones_like(choices))
        rows = spread(flat, order, inverse, self.moe.top_k, prefer)
        row_keys = None
        if keys is not None:
            # The experts of a token drop other elements of it each.
            by_expert = features(0, self.moe.experts, x.device)[choices].view_as(experts)
            row_keys = mix(self.seams.in_routed(keys).reshape(-1, 1) + by_expert).flatten()[order]
        return RoutedTokens(x, counts, weights, experts, probabilities, order, inverse, keys, row_keys), [rows]

    def visit(
        self, routed: RoutedTokens, rows: list[Tensor], halves: tuple[Half, Half] = IN_HALVES
    ) -> tuple[Tensor, Tensor | None]:
        """Send rows to the experts and back. Returns their output (N k, D) and that of the shared experts (B, S, D).

        Where rows travel, the shared experts run in two `halves`: while rows arrive, and while they return. The
        backward pass overlaps the same way. Elsewhere `join` runs them.
        """
        dispatch, (begin, finish) = self.seams.dispatch, halves
        # The shared experts fill the time in which rows travel.
        beside = self.moe.shared_experts > 0 and dispatch.travels
        row_keys = () if routed.row_keys is None else (routed.row_keys,)
        sent = dispatch.send(self.experts, rows.pop(), routed.counts, *row_keys)
        begun = begin(self.shared, routed.x, routed.keys) if beside else ()
        outputs = self.experts(*sent)
        shared = finish(self.shared, routed.keys, *begun) if beside else None
        return dispatch.receive(outputs), shared

    def join(
        self, routed: RoutedTokens, received: Tensor, shared: Tensor | None, padding: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Combine the experts' rows (N k, D) into the output of `forward`."""
        x, prefer = routed.x, self.experts.kernels.prefer
        out = combine(received, routed.weights, routed.order, routed.inverse, prefer).view_as(x)
        if self.moe.shared_experts:
            out = out + (self.shared(x, routed.keys) if shared is None else shared)
        chosen = torch.zeros_like(routed.probabilities).scatter_(1, routed.experts, 1.0)
        balance = self._balance(chosen.view(*x.shape[:2], -1), routed.probabilities.view(*x.shape[:2], -1), padding)
        return self.seams.routed.leave(out), balance  # `leave` is last: recomputation stops before it

    def _balance(self, chosen: Tensor, probabilities: Tensor, padding: Tensor | None) -> Tensor:
        """Return X * sum over experts of (share of choices) * (mean probability), both given as (B, S, X).

        It is 1 when even (arXiv:2101.03961, eq. 4). It is taken per sequence and without padding (DeepSeek-V3, eq.
        17-20), so no split of a batch changes it. Where ranks hold parts of sequences, a seam averages over whole ones.
        """
        if padding is None:
            means = self.seams.over_sequence(torch.stack((chosen.mean(1), probabilities.mean(1))))
        else:
            real = (~padding).unsqueeze(-1).to(chosen)
            sums = [torch.cat((values * real, real), -1).mean(1) for values in (chosen, probabilities)]
            means, number = self.seams.over_sequence(torch.stack(sums)).split((self.moe.experts, 1), -1)
            means = means / number.clamp(min=TINY)
        share, probability = means.unbind()
        return self.moe.experts / self.moe.top_k * (share * probability).sum(-1)
