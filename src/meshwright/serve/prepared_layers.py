"""The layers of a model whose matrices an engine has prepared (kernels/prepared_product.py).

The model's own code runs: at the borders of attention and of MLPs it asks `Border.prepared` first. Layers that read one
input together are one product. A layer with hooks or an adapter of its own is left as it is; so are stacks of experts.
Adapters of requests are added to the product.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import final

from torch import Tensor, nn

from meshwright import compat
from meshwright.kernels.compiled import library
from meshwright.kernels.compiled.library import Loops
from meshwright.kernels.linear import SAME
from meshwright.kernels.prepared_product import Matrix, PreparedProduct, int8_product, joined_product, prepared_product
from meshwright.model.attention import AttentionMetadata
from meshwright.model.kv_cache import Past
from meshwright.model.linear import Linear, held_rows, is_ours
from meshwright.model.seams import compute
from meshwright.model.transformer import Block, Transformer
from meshwright.serve.fused_blocks import FusedBlocks
from meshwright.serve.request_adapters import BesideRows
from meshwright.spec.serving_defaults import HeadForm


@final
class PreparedLayers:
    """Copies of one model's matrices, each made when its layers are first called. Use under `torch.no_grad`; weights
    must not change afterwards."""

    def __init__(self, model: Transformer, *, packed: bool, head: HeadForm, loops: Loops | None = None) -> None:
        """`packed`: whether there are copies, or on a GPU joined matrices; the head in int8 is one of its own. `loops`
        are used beside them."""
        self._model, self._loops = model, loops
        self._packed = packed and not model.seams.dense.gathers and model.products == SAME
        self._known: dict[nn.Module, tuple[PreparedProduct, list[int]] | None] = {}
        weight = model.head_weight
        on_gpu = weight.device.type == "cuda" or model.kernels.prefer == "triton"  # which a CPU interprets
        self._prepare = joined_product if on_gpu else prepared_product
        copied = packed and not on_gpu
        self._head = int8_product(weight) if head == "int8" else prepared_product([weight], [None]) if copied else None
        self._blocks: FusedBlocks | DeferredSums | None = None
        if on_gpu:
            self._blocks = DeferredSums(model.blocks)
        elif loops is not None and self._packed:
            self._blocks = FusedBlocks(loops, self.product)

    @property
    def bytes(self) -> int:
        """Of the copies that have been made."""
        products = [known[0] for known in self._known.values() if known is not None]
        return sum(one.bytes for one in [*products, *([self._head] if self._head is not None else [])])

    def __call__(self, x: Tensor, layers: Sequence[nn.Module]) -> tuple[Tensor, ...] | None:
        """As Border.prepared: x (..., in) -> (..., out) of each layer."""
        known = self._prepared(layers)
        if known is None:
            return None
        product, sizes = known
        found = product(x.view(-1, x.shape[-1])).view(*x.shape[:-1], -1)
        parts = (found,) if len(sizes) == 1 else found.split_with_sizes(sizes, -1)
        return tuple(_beside(layer, x, part) for layer, part in zip(layers, parts, strict=True))

    def product(self, layers: Sequence[nn.Module]) -> PreparedProduct | None:
        """With the matrices of all of them, side by side; None = they are not prepared."""
        known = self._prepared(layers)
        return None if known is None else known[0]

    def _prepared(self, layers: Sequence[nn.Module]) -> tuple[PreparedProduct, list[int]] | None:
        """One product for layers that read one input, and the width of each."""
        if any(map(compat.is_hooked, layers)):  # at any time: what is known is for when they are gone
            return None
        first = layers[0]
        if first not in self._known:
            self._known[first] = _prepared(layers, self._prepare)
        return self._known[first]

    @contextmanager
    def used(self) -> Iterator[None]:
        """While it lasts, the model computes with them."""
        seams = self._model.seams
        calls = self._blocks if seams.call is compute else None
        if self._packed:
            seams.dense.prepared = seams.shared.prepared = self
        if calls is not None and not (isinstance(calls, DeferredSums) and calls.is_hooked()):
            seams.call = calls
        try:
            with library.used(self._loops):
                yield
        finally:
            seams.dense.prepared = seams.shared.prepared = None
            if calls is not None:
                seams.call = compute

    def logits(self, states: Tensor) -> Tensor:
        """Of hidden states (R, D) -> (R, V)."""
        if self._head is not None:
            return self._head(states)
        found: Tensor = self._model.kernels.linear(states, self._model.head_weight)
        return found


@final
class DeferredSums:
    """Calls the blocks of one model, as BlockCall: what a block adds to the residual stream at its end is added by the
    kernel of the next block's norm. The last block adds it itself."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self._blocks = blocks
        self._pending: tuple[Tensor, Tensor] | None = None

    def is_hooked(self) -> bool:
        """Whether somebody looks at what blocks give, which is not whole between them. Begins a new pass."""
        self._pending = None
        return any(map(compat.is_hooked, self._blocks))

    def __call__(
        self, block: Block, x: Tensor, metadata: AttentionMetadata, cache: Past | None
    ) -> tuple[Tensor, Tensor | None]:
        """As Block.compute, in evaluation mode."""
        pending, self._pending = self._pending, None
        if pending is None or x is not pending[0]:  # the first block
            normed = block.attention_norm(x)
        else:
            normed, x = block.attention_norm.after(*pending)
        normed, x = block.mlp_norm.after(x, block.attention(normed, metadata, cache))
        added, balance = block.mlp(normed, metadata.padding) if block.routed else (block.mlp(normed), None)
        if block is self._blocks[-1]:
            return x + added, balance
        self._pending = x, added
        return x, balance


def _prepared(
    layers: Sequence[nn.Module],
    prepare: Callable[[Sequence[Matrix], Sequence[Tensor | None]], PreparedProduct | None],
) -> tuple[PreparedProduct, list[int]] | None:
    """One product for all of them, and the width of each."""
    ours: list[Linear] = [layer for layer in layers if is_ours(layer) and _is_whole(layer)]
    if len(ours) < len(layers):
        return None
    product = prepare([layer.matrix for layer in ours], [layer.local_bias for layer in ours])
    return None if product is None else (product, [held_rows(layer, layer.out_features) for layer in ours])


def _is_whole(layer: Linear) -> bool:
    """Whether its matrix is all that is multiplied, but for adapters of requests."""
    return layer.lora is None or isinstance(layer.lora, BesideRows)


def _beside(layer: nn.Module, x: Tensor, found: Tensor) -> Tensor:
    """The product of a layer, with what adapters of requests add."""
    lora: object = getattr(layer, "lora", None)
    return lora.added(x, found) if isinstance(lora, BesideRows) else found
