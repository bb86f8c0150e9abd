"""The transformer: embed, blocks, norm, head. Arithmetic only; the file to read first.

Letters: B batch, S sequence, D hidden, V vocab.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from meshwright.kernels import Kernels, choose, in_form
from meshwright.kernels.attention import UNKNOWN, DocumentSpans
from meshwright.kernels.dropout import dropout
from meshwright.kernels.gradient_sums import use_alias
from meshwright.kernels.linear import SAME
from meshwright.model.attention import Attention, AttentionMetadata, LatentAttention
from meshwright.model.init import fill_initial
from meshwright.model.kv_cache import Cache, Past
from meshwright.model.linear import Head
from meshwright.model.low_rank import add_adapters
from meshwright.model.mlp import make_mlp
from meshwright.model.moe import MoE
from meshwright.model.norm import make_norm
from meshwright.model.predictions import Made, Predictions
from meshwright.model.rope import frequencies, table_factor, tables
from meshwright.model.seams import Seams
from meshwright.spec.errors import PlanError
from meshwright.spec.shape import ModelShape


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, shape: ModelShape, layer: int, kernels: Kernels, seams: Seams, dropout: float) -> None:
        super().__init__()
        self.attention_norm = make_norm(shape, kernels)
        self.attention = (LatentAttention if shape.mla else Attention)(shape, kernels, seams, dropout)
        self.mlp_norm = make_norm(shape, kernels)
        self.window = shape.window_of(layer)
        self.routed = shape.is_moe_layer(layer)
        dense = () if self.routed else (seams.dense, shape.ffn, shape.mlp_bias)
        self.mlp = make_mlp(shape, kernels, *dense) if dense else MoE(shape, kernels, seams)
        self.seams, self.dropout = seams, dropout
        self.draws = bool(dropout or (shape.lora and shape.lora.dropout))
        """Whether training draws random numbers here."""

    def forward(
        self, x: Tensor, metadata: AttentionMetadata, cache: Past | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """x (B, S, D) -> (B, S, D) and, for routed layers, the balance loss of each sequence (B,)."""
        return self.seams.call(self, x, metadata, cache)

    def compute(
        self, x: Tensor, metadata: AttentionMetadata, cache: Past | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """As `forward`: the arithmetic of one device."""
        normed, x = self.attend(x, metadata, cache)
        if self.routed:
            out, balance = self.mlp(normed, metadata.padding)
            return x + self.drop(out), balance
        return x + self.drop(self.mlp(normed)), None

    def attend(self, x: Tensor, metadata: AttentionMetadata, cache: Past | None = None) -> tuple[Tensor, Tensor]:
        """x (B, S, D) -> what the feed-forward reads, and what its result is added to."""
        attended = self.drop(self.attention(self.attention_norm(x), metadata, cache))
        normed, x = self.mlp_norm.after(x, attended)
        return normed, x

    def drop(self, x: Tensor) -> Tensor:
        """x with dropout."""
        return dropout(x, self.dropout, self.training)


class Embedding(nn.Embedding):
    """A row of a matrix (V, D) for each token."""

    def __init__(self, size: int, width: int, seams: Seams) -> None:
        super().__init__(size, width)
        self.seams = seams

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens (B, S) -> (B, S, D)."""
        return self.seams.look_up(tokens, self.weight)


class Loss(NamedTuple):
    """What a forward pass adds up, times what the caller gave. A tuple, so that those who look for tensors find
    them."""

    cross_entropy: Tensor
    """Or what another objective makes of the predictions."""
    balance: Tensor | None


class Transformer(nn.Module):
    """A decoder-only language model whose variants are data in its shape.

    It may hold a part of the layers only: `first` says whether it embeds tokens, `last` whether it
    ends in norm, head and loss. A tied head's matrix is `embed.weight` on a last stage too.
    """

    def __init__(self, shape: ModelShape, *, kernels: Kernels, dropout: float = 0.0, products: str = SAME) -> None:
        super().__init__()
        self.shape, self.kernels, self.dropout, self.products = shape, kernels, dropout, products
        inner = in_form(kernels, products)
        self.seams = Seams()
        self.embed = Embedding(shape.vocab, shape.hidden, self.seams)
        if shape.positions == "learned":
            self.positions = nn.Embedding(shape.max_positions, shape.hidden)
        else:
            self.inverse: Tensor
            self.register_buffer("inverse", frequencies(shape), persistent=False)
        self.layers = nn.ModuleDict(
            {str(layer): Block(shape, layer, inner, self.seams, dropout) for layer in range(shape.layers)}
        )
        self.norm = make_norm(shape, kernels)
        if not shape.tied:
            self.head = Head(shape.hidden, shape.vocab, kernels)
        add_adapters(self, shape)
        self.first = self.last = True

    @property
    def head_weight(self) -> Tensor:
        """The matrix (V, D) that makes logits; with a tied head the embedding."""
        return self.embed.weight if self.shape.tied else self.head.weight

    def forward(
        self,
        tokens: Tensor,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Logits (B, S, V) of tokens (B, S); see `hidden` for the rest."""
        x, _ = self.hidden(tokens, positions=positions, documents=documents, cache=cache)
        logits: Tensor = self.kernels.linear(x, self.head_weight) if self.shape.tied else self.head(x)
        return logits

    def loss(
        self,
        tokens: Tensor,
        targets: Tensor,
        *,
        scale: Tensor | None = None,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Loss:
        """Summed cross-entropy over targets (B, S) that are not -100, in nats, times scale; the balance loss (B,)."""
        return self.stage(None, tokens, targets, scale=scale, positions=positions, documents=documents)[1]

    def stage(
        self,
        x: Tensor | None,
        tokens: Tensor,
        targets: Tensor,
        *,
        scale: Tensor | None = None,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        spans: DocumentSpans = UNKNOWN,
        padding: Tensor | None = None,
        objective: "Criterion | None" = None,
    ) -> tuple[Tensor, Loss]:
        """What this model's layers make of the hidden states x of the stage before (None on the first), and its part of
        the loss: see `loss`. The cross-entropy is zero on all but the last, where `objective` may make another of the
        predictions. `spans`: what the host knows of documents; `padding` (B, S): what fills rows up, which the balance
        loss leaves out."""
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
        x = self.enter(tokens, positions) if x is None else x
        metadata = self.attention_metadata(positions, tokens.shape[1], documents, spans, padding)
        x, balance = self.run_layers(x, metadata)
        if not self.last:
            return x, Loss(torch.zeros((), device=x.device), balance)
        predictions = Predictions(self, self.seams.enter_head(self.norm(x)))
        return x, Loss((objective or Predictions.cross_entropy)(predictions, targets, scale), balance)

    def hidden(
        self,
        tokens: Tensor,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        cache: Cache | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Last hidden states (B, S, D), and the balance loss of each sequence (B,) averaged over routed layers.

        `positions` (B, S) default to 0, 1, 2 ... after the cache; `documents` (B, S): tokens of other documents are not
        seen.
        """
        past = cache.length if cache else 0
        if positions is None:
            positions = torch.arange(past, past + tokens.shape[1], device=tokens.device).unsqueeze(0)
        attention_metadata = self.attention_metadata(positions, past + tokens.shape[1], documents)
        x, balance = self.run_layers(self.enter(tokens, positions), attention_metadata, cache)
        return self.seams.enter_head(self.norm(x)), balance

    def enter(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """What the first layer reads (B, S, D)."""
        x = self.embed(tokens)
        if self.shape.positions == "learned":
            x = x + self.positions(self.seams.positions(positions))
        return dropout(x, self.dropout, self.training)

    @property
    def blocks(self) -> list[Block]:
        """The layers that it holds, in order."""
        return cast(list[Block], list(self.layers.values()))

    def run_layers(
        self, x: Tensor, attention_metadata: dict[int, AttentionMetadata], cache: Cache | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """x (B, S, D) through all layers that this model holds; the balance loss (B,) is a mean over all of the shape's
        routed layers, so that those of pipeline stages add up to it."""
        balances: list[Tensor] = []
        for index, block in enumerate(self.blocks):
            x, balance = block(x, attention_metadata[block.window], cache.layers[index] if cache else None)
            if balance is not None:
                balances.append(balance)
        return x, torch.stack(balances).sum(0) / self.shape.routed_layers if balances else None

    def attention_metadata(
        self,
        positions: Tensor,
        keys: int,
        documents: Tensor | None,
        spans: DocumentSpans = UNKNOWN,
        padding: Tensor | None = None,
    ) -> dict[int, AttentionMetadata]:
        """What each kind of layer sees, by window size; made once a pass. positions (B, S), documents (B, keys)."""
        cos = sin = None
        if self.shape.positions == "rope":
            cos, sin = tables(self.inverse, positions, table_factor(self.shape))
        queries = positions.shape[1]
        windows = {block.window for block in self.blocks}
        mask = partial(self.seams.mask, queries, keys, documents=documents, spans=spans, device=positions.device)
        if padding is not None:
            padding = self.seams.in_routed(padding)
        return {window: AttentionMetadata(mask(window=window), cos, sin, padding) for window in windows}

    def at_head(self, x: Tensor, use: Callable[[Tensor, Tensor], Made]) -> Made:
        """use(x (N, D), weight (V, D)) of the head, tied or not."""
        if self.shape.tied:
            return use(x, use_alias(self.embed.weight))
        found: Made = self.head(x, use)
        return found


Criterion = Callable[[Predictions, Tensor, Tensor | None], Tensor]
"""(predictions, targets (B, S), scale () or None) -> a sum () fp32 over the targets, times scale."""


def skeleton(
    shape: ModelShape, *, dropout: float = 0.0, kernels: str = "auto", products: str = SAME
) -> Transformer:  # fmt: skip
    """The whole model without memory: every parameter on the meta device. PlanError where parts are for plans only."""
    if shape.plan_only:
        raise PlanError(f"{shape.name}: {shape.plan_only}; `meshwright plan` answers for it")
    with torch.device("meta"):
        return Transformer(shape, kernels=choose(kernels), dropout=dropout, products=products)


def shrink(
    model: Transformer, dtype: torch.dtype, sizes: Mapping[str, Sequence[int]] | None = None,
    frozen: torch.dtype | None = None,
) -> None:  # fmt: skip
    """Give a skeleton's parameters their dtype (`frozen`: of those that are not trained), and sizes where a rank holds
    a part of them; still without memory."""
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            size = (sizes or {}).get(f"{prefix}.{name}" if prefix else name, parameter.shape)
            own = dtype if parameter.requires_grad else frozen or dtype
            empty = torch.empty(tuple(size), dtype=own, device="meta")
            setattr(module, name, nn.Parameter(empty, requires_grad=parameter.requires_grad))


def materialize(model: Transformer, device: torch.device | str) -> None:
    """Give a skeleton memory: parameters unset, those of fully_shard this rank's shards only; buffers as they begin."""
    model.to_empty(device=device)
    for buffer in model.buffers():
        buffer.zero_()
    if model.shape.positions == "rope":
        model.inverse = frequencies(model.shape).to(device)


def build(
    shape: ModelShape,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    dropout: float = 0.0,
    kernels: str = "auto",
    initialize: bool = True,
) -> Transformer:
    """A model with initial weights of (seed, parameter name); `initialize=False` leaves them unset for a loader."""
    model = skeleton(shape, dropout=dropout, kernels=kernels)
    shrink(model, dtype)
    materialize(model, device)
    with torch.no_grad():
        for name, parameter in model.named_parameters() if initialize else ():
            fill_initial(parameter, name, shape, seed, whole=parameter.shape)
    return model
