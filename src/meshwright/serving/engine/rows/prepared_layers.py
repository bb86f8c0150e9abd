"""The layers of a model whose matrices an engine has prepared (kernels/quantized/prepared_product.py).

The model's own code runs: at the borders of attention and of MLPs it calls `Border.prepared` first. Layers that read
one input are one product. A layer with hooks or with an adapter of its own is left alone, and so are stacks of experts.
Adapters of requests are added to the product.

On a CPU, compiled loops may compute a whole block in one call (kernels/attention/block.py). These are blocks of
grouped-query attention with rotary positions, RMSNorm and a gated feed-forward, in fp32. The whole block must be on
this rank, without hooks on its parts. Keys and values are plain numbers or int8. Steps must have few rows, each
attended alone. All others run as usual, with the same bits.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from ctypes import Structure
from itertools import accumulate
from typing import Any, final

from torch import Tensor, nn

from meshwright import compat
from meshwright.kernels.attention.block import PARTS, BlockParts, FusedBlock, FusedStep, Norm
from meshwright.kernels.c import serving_library
from meshwright.kernels.c.serving_library import INT8, INT8_ROWS, Loops, Panels, takes
from meshwright.kernels.linear.linear import SAME
from meshwright.kernels.quantized.prepared_product import (
    Matrix,
    PreparedProduct,
    int8_product,
    joined_product,
    prepared_product,
)
from meshwright.model.attention import Attention, AttentionMetadata, Past
from meshwright.model.feed_forward import GatedMLP
from meshwright.model.layers import Linear, RMSNorm, held_rows, is_ours
from meshwright.model.seams import Border, compute, same
from meshwright.model.transformer import Block, Transformer
from meshwright.serving.engine.cache.paged_cache import PagedLayer, StepPlaces
from meshwright.serving.engine.rows.request_adapters import LayerAdapters
from meshwright.spec.plan.execution import HeadForm


@final
class _PreparedBlock:
    def __init__(
        self, block: FusedBlock, cache: PagedLayer, layers: Mapping[str, Sequence[tuple[Linear, int]]],
        few: Callable[[int], bool],
    ) -> None:  # fmt: skip
        """Take the layers of each part with the column of its product at which each begins."""
        self.block, self._cache, self._layers, self._few = block, cache, layers, few

    def takes(self, x: Tensor, cache: PagedLayer) -> bool:
        """Return whether a step's rows x (B, R, D) are few, and attended one by one over this cache."""
        rows = None if cache.places is None else cache.places.rows
        return (
            rows is not None
            and len(rows.last) == x.shape[1]
            and self._few(x.shape[1])
            and len(x) == 1
            and cache is self._cache
            and x.is_contiguous()
        )

    def adapter_fields(self, loops: Loops) -> Mapping[str, Sequence[Structure]] | None:
        """Return what adapters of requests add, by part. None = loops cannot add all of it."""
        fields_by_part: dict[str, list[Structure]] = {}
        for part, layers in self._layers.items():
            for layer, column in layers:
                if layer.lora is None:
                    continue
                current = layer.lora.current if isinstance(layer.lora, LayerAdapters) else ()
                fields = [product.fields(rows, column, loops) for product, rows in current]
                usable = [field for field in fields if field is not None]
                # All or nothing: a part that was added already cannot be added again by the slow way.
                if not usable or len(usable) < len(fields):
                    return None
                fields_by_part.setdefault(part, []).extend(usable)
        return fields_by_part


@final
class FusedBlocks:
    """Caller of one model's blocks (see BlockCall). Use like PreparedLayers."""

    def __init__(self, loops: Loops, product: Callable[[Sequence[nn.Module]], PreparedProduct | None]) -> None:
        """Take `product`, which returns the prepared product of layers that read one input, if there is one."""
        self._loops, self._product = loops, product
        self._prepared_blocks: dict[Block, _PreparedBlock | None] = {}
        self._parts: dict[Block, list[nn.Module]] = {}
        self._step: tuple[StepPlaces, FusedStep] | None = None

    def __call__(
        self, block: Block, x: Tensor, metadata: AttentionMetadata, cache: Past | None
    ) -> tuple[Tensor, Tensor | None]:
        """Compute a block as one fused call where it can be, else as Block.compute."""
        # Hooks are looked at in each step, everything else once: hooks come and go.
        if isinstance(cache, PagedLayer) and cache.places is not None and not self._is_hooked(block):
            if block not in self._prepared_blocks:
                self._prepared_blocks[block] = self._prepare(block, cache)
            prepared = self._prepared_blocks[block]
            if prepared is not None and prepared.takes(x, cache):
                low_rank = prepared.adapter_fields(self._loops)
                if low_rank is not None:
                    return prepared.block(x, self._fields(cache.places, metadata), low_rank), None
        return block.compute(x, metadata, cache)

    def _is_hooked(self, block: Block) -> bool:
        """Return whether a part of the block has hooks. They may be gone at the next step."""
        if block not in self._parts:
            # Listed once: walking the modules takes longer than a block of a small model.
            self._parts[block] = [part for part in block.modules() if part is not block]
        return any(map(compat.is_hooked, self._parts[block]))

    def _fields(self, places: StepPlaces, metadata: AttentionMetadata) -> FusedStep:
        """Return the fields of a step, which are equal for all blocks."""
        if self._step is None or self._step[0] is not places:
            assert places.rows is not None and metadata.cos is not None and metadata.sin is not None
            self._step = places, FusedStep(metadata.cos, metadata.sin, places.slots, places.rows)
        return self._step[1]

    def _prepare(self, block: Block, cache: PagedLayer) -> _PreparedBlock | None:
        attention, mlp = block.attention, block.mlp
        if type(attention) is not Attention or type(mlp) is not GatedMLP or not _is_plain(block, cache):
            return None
        layer_groups = (attention.q, attention.k, attention.v), (attention.o,), (mlp.gate, mlp.up), (mlp.down,)
        panels = [_panels(self._product(group)) for group in layer_groups]
        qkv, o, gate_up, down = panels
        if qkv is None or o is None or gate_up is None or down is None:
            return None
        has_head_norms = attention.shape.qk_norm
        parts = BlockParts(
            norm=_norm(block.attention_norm),
            qkv=qkv,
            q_norm=_norm(attention.q_norm) if has_head_norms else None,
            k_norm=_norm(attention.k_norm) if has_head_norms else None,
            o=o,
            mlp_norm=_norm(block.mlp_norm),
            gate_up=gate_up,
            down=down,
            keys=cache.keys,
            values=cache.values,
            heads=attention.shape.heads,
            window=block.window,
            scale=attention.scale,
        )
        has_int8 = any(part.kind == INT8 for part in (qkv, o, gate_up, down))
        layers = dict(zip(PARTS, map(_column_offsets, layer_groups), strict=True))
        return _PreparedBlock(
            FusedBlock(self._loops, parts), cache, layers, _is_few_int8 if has_int8 else self._loops.few
        )


def _column_offsets(layers: Sequence[Linear]) -> list[tuple[Linear, int]]:
    ends = accumulate(held_rows(layer, layer.out_features) for layer in layers)
    return list(zip(layers, (0, *ends), strict=False))


def _is_few_int8(rows: int) -> bool:
    return rows <= INT8_ROWS


def _is_plain(block: Block, cache: PagedLayer) -> bool:
    """Return whether one call can compute a block, apart from its matrices."""
    shape, attention = block.attention.shape, block.attention
    norms: list[Any] = [block.attention_norm, block.mlp_norm]
    norms += [attention.q_norm, attention.k_norm] if shape.qk_norm else []
    return (
        type(block) is Block
        and shape.positions == "rope"
        and not shape.rope_interleaved
        and cache.keys.form in ("model", "int8")
        and all(type(norm) is RMSNorm and takes(norm.weight) for norm in norms)
        and _is_local(block.seams.dense)
    )


def _is_local(border: Border) -> bool:
    return border.leave is same and border.write is None and not border.gathers


def _panels(product: PreparedProduct | None) -> Panels | None:
    return None if product is None else product.panels


def _norm(module: Any) -> Norm:
    return Norm(module.weight, module.eps)


@final
class PreparedLayers:
    """Copies of one model's matrices, each made when its layers are first called.

    Use under `torch.no_grad`. Weights must not change afterwards.
    """

    def __init__(self, model: Transformer, *, packed: bool, head: HeadForm, loops: Loops | None = None) -> None:
        """Prepare the head; layers follow when they are called.

        Args:
            packed: Copy matrices, or on a GPU join them. An int8 head is always a copy.
            loops: Compiled loops to use in addition to the copies.
        """
        self._model, self._loops = model, loops
        # Layers that gather their inputs, and those with other products, are computed by themselves.
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
        prepared = self._product_of(layers)
        if prepared is None:
            return None
        product, sizes = prepared
        out = product(x.view(-1, x.shape[-1])).view(*x.shape[:-1], -1)
        parts = (out,) if len(sizes) == 1 else out.split_with_sizes(sizes, -1)
        return tuple(_with_adapters(layer, x, part) for layer, part in zip(layers, parts, strict=True))

    def product(self, layers: Sequence[nn.Module]) -> PreparedProduct | None:
        """Return the product with all matrices side by side. None = they are not prepared."""
        prepared = self._product_of(layers)
        return None if prepared is None else prepared[0]

    def _product_of(self, layers: Sequence[nn.Module]) -> tuple[PreparedProduct, list[int]] | None:
        if any(map(compat.is_hooked, layers)):  # looked at in each call: hooks come and go
            return None
        first = layers[0]
        if first not in self._prepared_products:
            self._prepared_products[first] = _prepare_layers(layers, self._prepare)
        return self._prepared_products[first]

    @contextmanager
    def use(self) -> Iterator[None]:
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
            # In any case: the model may be trained on, or belong to another engine next.
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
    return lora.add(x, out) if isinstance(lora, LayerAdapters) else out
