"""The transformer: embed, blocks, norm, head, and predictions of next tokens, from which objectives are computed.

Arithmetic only; the file to read first.

Letters: B batch, S sequence, D hidden, V vocab.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

from meshwright.kernels import Kernels, choose, in_form
from meshwright.kernels.attention.attend import UNKNOWN, DocumentSpans
from meshwright.kernels.linear.linear import SAME
from meshwright.kernels.linear.weight_gradients import use_alias
from meshwright.kernels.loss.linear_divergence import FORWARD, DistillationLoss, Divergence, KnownTop, TeacherHead
from meshwright.kernels.norm.dropout import TokenKeys, draw_token_keys, dropout, site_key
from meshwright.model.attention import (
    Attention,
    AttentionMetadata,
    Cache,
    LatentAttention,
    Past,
    frequencies,
    table_factor,
    tables,
)
from meshwright.model.feed_forward import MoE, make_mlp
from meshwright.model.init import fill_initial
from meshwright.model.layers import Head, make_norm
from meshwright.model.low_rank import add_adapters
from meshwright.model.quantized_weights import put_quantized
from meshwright.model.seams import Seams
from meshwright.spec.errors import PlanError
from meshwright.spec.model.quantization_schemes import Scheme
from meshwright.spec.model.shape import ModelShape

Output = TypeVar("Output")


ATTENTION_SITE, MLP_SITE, EMBEDDING_SITE = map(site_key, ("attention", "mlp", "embedding"))
"""Numbers of the places of dropout in the residual stream."""


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
        self.adapters_drop = bool(shape.lora and shape.lora.dropout)

    def forward(
        self, x: Tensor, metadata: AttentionMetadata, cache: Past | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Map x (B, S, D) to (B, S, D). Routed layers also return the balance loss of each sequence (B,)."""
        return self.seams.call(self, x, metadata, cache)

    def compute(
        self, x: Tensor, metadata: AttentionMetadata, cache: Past | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Run `forward` on one device, without the seams."""
        normed, x = self.attend(x, metadata, cache)
        keys = (metadata.token_keys,) if self.adapters_drop and metadata.keys is not None else ()
        if self.routed:
            out, balance = self.mlp(normed, metadata.padding, *keys)
            return x + self.drop(out, metadata, MLP_SITE), balance
        return x + self.drop(self.mlp(normed, *keys), metadata, MLP_SITE), None

    def attend(self, x: Tensor, metadata: AttentionMetadata, cache: Past | None = None) -> tuple[Tensor, Tensor]:
        """Return the input of the feed-forward and the residual that its output is added to, both (B, S, D)."""
        attended = self.drop(self.attention(self.attention_norm(x), metadata, cache), metadata, ATTENTION_SITE)
        normed, x = self.mlp_norm.after(x, attended)
        return normed, x

    def drop(self, x: Tensor, metadata: AttentionMetadata, site: int) -> Tensor:
        """Apply dropout in training, at a site of the residual stream."""
        if not self.dropout or not self.training:
            return x
        return dropout(x, self.dropout, metadata.keys and metadata.keys.stream, site)


class Embedding(nn.Embedding):
    """Token embedding: one row of a matrix (V, D) per token."""

    def __init__(self, size: int, width: int, seams: Seams) -> None:
        super().__init__(size, width)
        self.seams = seams

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the rows (B, S, D) of tokens (B, S)."""
        return self.seams.look_up(tokens, self.weight)


class Loss(NamedTuple):
    """Sums of one forward pass, times the scale that the caller gave. Tuple, so tree utilities find its tensors."""

    cross_entropy: Tensor
    """Cross-entropy, or the loss of another objective."""
    balance: Tensor | None


class Transformer(nn.Module):
    """Decoder-only language model whose variants are data in its shape.

    It may hold only a part of the layers. With `first` it embeds tokens; with `last` it ends in norm, head and loss.
    A last stage with a tied head holds the matrix as `embed.weight` too.
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
        """Matrix (V, D) that produces logits. With a tied head, the embedding."""
        return self.embed.weight if self.shape.tied else self.head.weight

    def forward(
        self,
        tokens: Tensor,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Return logits (B, S, V) of tokens (B, S). See `hidden` for the other arguments."""
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
        """Return summed cross-entropy in nats over targets (B, S) not -100, times scale, and balance loss (B,)."""
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
        keys: Tensor | None = None,
        objective: "Criterion | None" = None,
    ) -> tuple[Tensor, Loss]:
        """Run the layers of one pipeline stage and return its hidden states and its part of the loss.

        The cross-entropy is zero on all stages but the last.

        Args:
            x: Hidden states of the previous stage (B, S, D). None on the first stage.
            tokens: Input tokens (B, S).
            targets: See `loss`, as for `scale`.
            spans: Document boundaries as far as the host knows them.
            padding: Mask (B, S) of padding, which the balance loss leaves out.
            keys: Keys (B, S) int32 of dropout, by which every layout draws the same masks. None = random ones.
            objective: Loss of the predictions. None = cross-entropy.
        """
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
        token_keys = self.token_keys(tokens, keys)
        x = self.enter(tokens, positions, token_keys) if x is None else x
        metadata = self.attention_metadata(positions, tokens.shape[1], documents, spans, padding, token_keys)
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
        """Return the last hidden states (B, S, D) and each sequence's balance loss (B,), a mean over routed layers.

        `positions` (B, S) default to 0, 1, 2 ... after the cache. With `documents` (B, S), a token attends only to
        tokens of its own document.
        """
        past = cache.length if cache else 0
        if positions is None:
            # Positions go on behind those in the cache.
            positions = torch.arange(past, past + tokens.shape[1], device=tokens.device).unsqueeze(0)
        keys = self.token_keys(tokens)
        attention_metadata = self.attention_metadata(positions, past + tokens.shape[1], documents, token_keys=keys)
        x, balance = self.run_layers(self.enter(tokens, positions, keys), attention_metadata, cache)
        return self.seams.enter_head(self.norm(x)), balance

    def token_keys(self, tokens: Tensor, keys: Tensor | None = None) -> TokenKeys | None:
        """Return the keys of dropout for tokens (B, S), given ones (B, S) or random ones. None = no dropout."""
        if not self.training or not (self.dropout or (self.shape.lora and self.shape.lora.dropout)):
            return None
        whole = draw_token_keys(tokens) if keys is None else keys
        return TokenKeys(whole, self.seams.positions(whole))

    def enter(self, tokens: Tensor, positions: Tensor, keys: TokenKeys | None = None) -> Tensor:
        """Return the input (B, S, D) of the first layer."""
        x = self.embed(tokens)
        if self.shape.positions == "learned":
            x = x + self.positions(self.seams.positions(positions))
        return dropout(x, self.dropout, keys.stream, EMBEDDING_SITE) if self.dropout and keys is not None else x

    @property
    def blocks(self) -> list[Block]:
        """Layers that this model holds, in order."""
        return cast(list[Block], list(self.layers.values()))

    def run_layers(
        self, x: Tensor, attention_metadata: dict[int, AttentionMetadata], cache: Cache | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Run x (B, S, D) through all layers held here and return it with the balance loss (B,).

        It is divided by the routed layers of the whole shape, so pipeline stages add up to the mean.
        """
        balances: list[Tensor] = []
        for index, (number, block) in enumerate(zip(self.layers, self.blocks, strict=True)):
            metadata = attention_metadata[block.window]
            if metadata.keys is not None:
                metadata = metadata.of_layer(number)
            x, balance = block(x, metadata, cache.layers[index] if cache else None)
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
        token_keys: TokenKeys | None = None,
    ) -> dict[int, AttentionMetadata]:
        """Build what layers need to know about positions (B, S) and documents (B, keys), by window size."""
        cos = sin = None
        if self.shape.positions == "rope":
            cos, sin = tables(self.inverse, positions, table_factor(self.shape))
        queries = positions.shape[1]
        # Layers with equal windows share one mask.
        windows = {block.window for block in self.blocks}
        mask = partial(self.seams.mask, queries, keys, documents=documents, spans=spans, device=positions.device)
        if padding is not None:
            padding = self.seams.in_routed(padding)
        return {window: AttentionMetadata(mask(window=window), cos, sin, padding, token_keys) for window in windows}

    def at_head(self, x: Tensor, use: Callable[[Tensor, Tensor], Output]) -> Output:
        """Return use(x (N, D), weight (V, D)) with the weight of the head, tied or not."""
        if self.shape.tied:
            return use(x, use_alias(self.embed.weight))
        output: Output = self.head(x, use)
        return output


@dataclass(frozen=True, slots=True)
class Predictions:
    """Predictions of next tokens, available without the whole logits.

    `_x` (B, S, D) is the input of the head. The gradient of anything else computed from it would be summed over
    tensor-parallel ranks.
    """

    model: Transformer
    _x: Tensor

    def cross_entropy(self, targets: Tensor, scale: Tensor | None = None) -> Tensor:
        """Return the sum () fp32 of -log p in nats over targets (B, S) that are not -100, times scale, () or (B, S)."""
        model = self.model
        kernel = model.seams.loss or model.kernels.linear_cross_entropy
        factor = scale.flatten() if scale is not None and scale.dim() else scale
        return self._at_head(lambda x, weight: kernel(x, weight, targets.flatten(), factor))

    def log_probabilities(self, targets: Tensor) -> Tensor:
        """Return log p (B, S) fp32 in nats of targets (B, S), 0 where they are -100."""
        kernel = self.model.seams.log_probabilities or self.model.kernels.linear_log_probabilities
        return self._at_head(lambda x, weight: kernel(x, weight, targets.flatten())).view(targets.shape)

    def divergence(
        self, teacher: "Predictions | TeacherHead | KnownTop", targets: Tensor, scale: Tensor | None = None,
        form: Divergence = FORWARD, shared: int = 0,
    ) -> DistillationLoss:  # fmt: skip
        """Return the distillation loss summed over targets (B, S) that are not -100, times scale ().

        The teacher gets no gradient. It is given as predictions, as its head, or as its stored likeliest tokens.
        `shared` limits the comparison to the first tokens of both vocabularies. 0 = all.
        """
        kernel = self.model.seams.divergence or self.model.kernels.linear_divergence
        has_gradient, losses = torch.is_grad_enabled(), list[DistillationLoss]()

        def against(theirs: KnownTop | TeacherHead) -> Tensor:
            with torch.set_grad_enabled(has_gradient):
                use = partial(kernel, teacher=theirs, targets=targets.flatten(), scale=scale, form=form)
                losses.append(self._at_head(lambda x, weight: use(x, weight[: shared or None])))
            return targets.new_zeros(())  # nothing that could be differentiated leaves a teacher's head

        if isinstance(teacher, KnownTop):
            against(teacher)
        elif isinstance(teacher, TeacherHead):
            against(TeacherHead(teacher.x, teacher.weight[: shared or None]))
        else:
            with torch.no_grad():
                teacher._at_head(lambda x, weight: against(TeacherHead(x, weight[: shared or None])))
        return losses[0]

    def head(self) -> TeacherHead:
        """Return the head's hidden states (B S, D) and matrix (V, D), of this rank's part of the vocabulary.

        A gathered matrix stays whole while the stage runs.
        """
        return self._at_head(lambda x, weight: TeacherHead(x.detach(), weight.detach()))

    def top(self, top_k: int, temperature: float, shared: int = 0) -> KnownTop:
        """Return the `top_k` likeliest next tokens (B, S, K) at a temperature.

        Log-probabilities are (B, S, K + 1): those of the K tokens, and that of all others together.
        """
        kernel = self.model.seams.top or self.model.kernels.linear_top
        use = partial(kernel, top_k=top_k, temperature=temperature)
        parts = self._at_head(lambda x, weight: use(x, weight[: shared or None]))
        return KnownTop(*(part.view(*self._x.shape[:2], -1) for part in parts))

    def whole_sums(self, sums: Tensor) -> Tensor:
        """Sum over whole sequences, from sums over the positions held here. Context-parallel ranks get the same sums.

        Each rank must then add the same to the loss of the step: its share, as `Objective.count` counts it.
        """
        return self.model.seams.whole_sums(sums)

    def logits_at(self, positions: Tensor) -> Tensor:
        """Return logits (B, V) fp32 at one position (B,) of each row, for this rank's part of the vocabulary."""
        first = torch.arange(len(positions), device=positions.device) * self._x.shape[1]
        linear = self.model.kernels.linear
        return self._at_head(lambda x, weight: linear(x[first + positions], weight).float())

    def _at_head(self, use: Callable[[Tensor, Tensor], Output]) -> Output:
        return self.model.at_head(self._x.flatten(0, 1), use)


Criterion = Callable[[Predictions, Tensor, Tensor | None], Tensor]
"""Function (predictions, targets (B, S), scale () or None) -> sum () fp32 over the targets, times scale."""


def skeleton(shape: ModelShape, *, dropout: float = 0.0, kernels: str = "auto", products: str = SAME) -> Transformer:
    """Build the whole model on the meta device, without memory. Raises PlanError for a shape that is plan-only."""
    if shape.plan_only:
        raise PlanError(f"{shape.name}: {shape.plan_only}; `meshwright plan` answers for it")
    with torch.device("meta"):
        return Transformer(shape, kernels=choose(kernels), dropout=dropout, products=products)


def shrink(
    model: Transformer, dtype: torch.dtype, sizes: Mapping[str, Sequence[int]] | None = None,
    frozen: torch.dtype | None = None,
) -> None:  # fmt: skip
    """Set the dtype of a skeleton's parameters, and their sizes where a rank holds a part. Allocates nothing.

    `frozen` is the dtype of parameters that are not trained. None = `dtype`.
    """
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            size = (sizes or {}).get(f"{prefix}.{name}" if prefix else name, parameter.shape)
            # The optimizer needs the wide dtype only for what it trains.
            parameter_dtype = dtype if parameter.requires_grad else frozen or dtype
            empty = torch.empty(tuple(size), dtype=parameter_dtype, device="meta")
            setattr(module, name, nn.Parameter(empty, requires_grad=parameter.requires_grad))


def materialize(model: Transformer, device: torch.device | str) -> None:
    """Allocate a skeleton's tensors: unset parameters (only this rank's shards), and buffers with their values."""
    model.to_empty(device=device)
    # to_empty leaves memory as it was, but buffers have no loader and no initial distribution.
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
    """Build a model with initial weights of (seed, parameter name). `initialize=False` leaves them to a loader."""
    model = skeleton(shape, dropout=dropout, kernels=kernels)
    shrink(model, dtype)
    materialize(model, device)
    with torch.no_grad():
        for name, parameter in model.named_parameters() if initialize else ():
            fill_initial(parameter, name, shape, seed, whole=parameter.shape)
    return model


def build_quantized(
    shape: ModelShape,
    schemes: Mapping[str, Scheme],
    *,
    outlier_columns: Mapping[str, int],
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    kernels: str = "auto",
) -> Transformer:
    """Build a model with room for codes of the matrices that have a scheme. Everything is unset and frozen.

    All other tensors are in `dtype`. `outlier_columns` counts the columns of each matrix that are in `dtype` too.
    """
    model = skeleton(shape, kernels=kernels)
    put_quantized(model, shape, schemes, outlier_columns, dtype)
    shrink(model, dtype)
    materialize(model, device)
    return model.requires_grad_(False)
