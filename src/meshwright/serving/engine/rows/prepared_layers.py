"""The layers of a model whose matrices an engine has prepared (kernels/quantized/prepared_product.py).

The model's own code runs: at the borders of attention and of MLPs it calls `Border.prepared` first. Layers that read
one input are one product. A layer with hooks or with an adapter of its own is left alone, and so are stacks of experts.
Adapters of requests are added to the product.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import final

from torch import Tensor, nn

from meshwright import compat
from meshwright.kernels.c import serving_library
from meshwright.kernels.c.serving_library import Loops
from meshwright.kernels.linear.linear import SAME
from meshwright.kernels.quantized.prepared_product import (
    Matrix,
    PreparedProduct,
    int8_product,
    joined_product,
    prepared_product,
)
from meshwright.model.attention import AttentionMetadata
from meshwright.model.kv_cache import Past
from meshwright.model.linear import Linear, held_rows, is_ours
from meshwright.model.seams import compute
from meshwright.model.transformer import Block, Transformer
from meshwright.serving.engine.rows.fused_blocks import FusedBlocks
from meshwright.serving.engine.rows.request_adapters import LayerAdapters
from meshwright.spec.plan.execution import HeadForm


@final
class PreparedLayers:
    """Copies of one model's matrices, each made when its layers are first called.

    Use under `torch.no_grad`. Weights must not change afterwards.
    """

    def __init__(self, model: Transformer, *, packed: bool, head: HeadForm, loops: Loops | None = None) -> None:
        """Prepare the head; layers follow when they are called.

        Args:
            packed: Copy matrices, or on a GPU join them. An int8 head is always a copy.
            loops: Compiled loops to use beside the copies.
        """
        self._model, self._loops = model, loops
        self._packed = packed and not model.seams.dense.gathers and model.products == SAME
        self._prepared_products: dict[nn.Module, tuple[PreparedProduct, list[int]] | None] = {}
        weight = model.head_weight
        on_gpu = weight.device.type == "cuda" or model.kernels.prefer == "triton"  # Triton on a CPU is interpreted
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
        """Memory of the copies made so far."""
        products = [prepared[0] for prepared in self._prepared_products.values() if prepared is not None]
        return sum(product.bytes for product in [*products, *([self._head] if self._head is not None else [])])

    def __call__(self, x: Tensor, layers: Sequence[nn.Module]) -> tuple[Tensor, ...] | None:
        """Return x (..., in) -> (..., out) of each layer. See Border.prepared."""
        prepared = self._prepared(layers)
        if prepared is None:
            return None
        product, sizes = prepared
        out = product(x.view(-1, x.shape[-1])).view(*x.shape[:-1], -1)
        parts = (out,) if len(sizes) == 1 else out.split_with_sizes(sizes, -1)
        return tuple(_with_adapters(layer, x, part) for layer, part in zip(layers, parts, strict=True))

    def product(self, layers: Sequence[nn.Module]) -> PreparedProduct | None:
        """Return the product with all matrices side by side. None = they are not prepared."""
        prepared = self._prepared(layers)
        return None if prepared is None else prepared[0]

    def _prepared(self, layers: Sequence[nn.Module]) -> tuple[PreparedProduct, list[int]] | None:
        if any(map(compat.is_hooked, layers)):  # looked at in each call: hooks come and go
            return None
        first = layers[0]
        if first not in self._prepared_products:
            self._prepared_products[first] = _prepare_layers(layers, self._prepare)
        return self._prepared_products[first]

    @contextmanager
    def used(self) -> Iterator[None]:
        """Let the model compute with the copies within the context."""
        seams = self._model.seams
        calls = self._blocks if seams.call is compute else None
        if self._packed:
            seams.dense.prepared = seams.shared.prepared = self
        if calls is not None and not (isinstance(calls, DeferredSums) and calls.is_hooked()):
            seams.call = calls
        try:
            with serving_library.used(self._loops):
                yield
        finally:
            seams.dense.prepared = seams.shared.prepared = None
            if calls is not None:
                seams.call = compute

    def logits(self, states: Tensor) -> Tensor:
        """Return the logits (R, V) of hidden states (R, D)."""
        if self._head is not None:
            return self._head(states)
        logits: Tensor = self._model.kernels.linear(states, self._model.head_weight)
        return logits


@final
class DeferredSums:
    """Caller of one model's blocks (see BlockCall) that defers a block's last addition to the residual stream.

    The kernel of the next block's norm makes it. The last block makes its own.
    """

    def __init__(self, blocks: Sequence[Block]) -> None:
        self._blocks = blocks
        self._pending: tuple[Tensor, Tensor] | None = None

    def is_hooked(self) -> bool:
        """Return whether hooks read what blocks return, which is incomplete between them. Begins a new pass."""
        self._pending = None
        return any(map(compat.is_hooked, self._blocks))

    def __call__(
        self, block: Block, x: Tensor, metadata: AttentionMetadata, cache: Past | None
    ) -> tuple[Tensor, Tensor | None]:
        """Compute a block as Block.compute does in evaluation mode, without its last addition.

        The norm of the next block adds that.
        """
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


def _prepare_layers(
    layers: Sequence[nn.Module],
    prepare: Callable[[Sequence[Matrix], Sequence[Tensor | None]], PreparedProduct | None],
) -> tuple[PreparedProduct, list[int]] | None:
    """Return one product for all layers, and the width of each. None = not all can be prepared."""
    ours: list[Linear] = [layer for layer in layers if is_ours(layer) and _is_whole(layer)]
    if len(ours) < len(layers):
        return None
    product = prepare([layer.matrix for layer in ours], [layer.local_bias for layer in ours])
    return None if product is None else (product, [held_rows(layer, layer.out_features) for layer in ours])


def _is_whole(layer: Linear) -> bool:
    """Return whether its matrix is all that is multiplied, apart from adapters of requests."""
    return layer.lora is None or isinstance(layer.lora, LayerAdapters)


def _with_adapters(layer: nn.Module, x: Tensor, out: Tensor) -> Tensor:
    """Return the product of a layer with what adapters of requests add."""
    lora: object = getattr(layer, "lora", None)
    return lora.added(x, out) if isinstance(lora, LayerAdapters) else out
