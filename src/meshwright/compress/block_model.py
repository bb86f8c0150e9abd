"""A model of which one block at a time has memory, on the text that it is calibrated with."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from meshwright.compress.layer_inputs import reading
from meshwright.kernels.experts import Counts
from meshwright.model.rope import frequencies
from meshwright.model.transformer import Block, shrink, skeleton
from meshwright.spec.shape import ModelShape
from meshwright.training.batches import Batch


class _Enough(Exception):
    """Everything that was asked for of a batch was heard."""


class BlockModel:
    """The model, the text, and what the next block reads of it: (B, S, D) for each batch."""

    def __init__(self, shape: ModelShape, dtype: torch.dtype, batches: Iterable[Batch]) -> None:
        self.batches, self.dtype = list(batches), dtype
        self.device = self.batches[0].tokens.device
        self.model = skeleton(shape).eval()
        shrink(self.model, dtype)
        self.model.requires_grad_(False)
        if shape.positions == "rope":
            self.model.inverse = frequencies(shape).to(self.device)
        self.hidden: list[Tensor] = []

    @torch.no_grad()
    def enter(self, weights: Mapping[str, Tensor]) -> None:
        """Begin with what the first block reads; the embedding, and learned positions, by name."""
        parts: list[nn.Module] = [self.model.embed]
        parts += [self.model.positions] if self.model.shape.positions == "learned" else []
        for part in parts:
            part.to_empty(device=self.device)
        places = self.model.state_dict()
        for name, tensor in weights.items():
            places[name].copy_(tensor)
        self.hidden = [self.model.enter(batch.tokens, _positions(batch)) for batch in self.batches]
        for part in parts:
            part.to("meta")

    @contextmanager
    def block(self, layer: int, weights: Iterable[tuple[str, Tensor]]) -> Iterator[Block]:
        """One block with its weights by name, inside; afterwards its memory is free again. No weight is held beside the
        next."""
        block = self.model.blocks[layer]
        block.to_empty(device=self.device)
        self.fill(layer, weights)
        try:
            yield block
        finally:
            block.to("meta")

    @torch.no_grad()
    def fill(self, layer: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Give weights, by name, to a block that has memory."""
        prefix, places = f"layers.{layer}.", self.model.blocks[layer].state_dict()
        for name, tensor in weights:
            places[name.removeprefix(prefix)].copy_(tensor)
            del tensor

    @torch.no_grad()
    def listen(self, layer: int, name: str, hear: Callable[[Tensor, Counts | None], None]) -> None:
        """Let a block run until the matrix of this name was reached, for each batch; `hear` is given what it reads."""

        def seen(_: str, x: Tensor, counts: Counts | None) -> None:
            hear(x, counts)
            raise _Enough

        with reading(self.model, [name], seen):
            for number in range(len(self.batches)):
                try:
                    self._output(layer, number)
                except _Enough:
                    continue

    @torch.no_grad()
    def step(self, layer: int) -> None:
        """From what a block reads to what the next one does."""
        for number in range(len(self.batches)):
            self.hidden[number] = self._output(layer, number)

    def _output(self, layer: int, number: int) -> Tensor:
        block, batch = self.model.blocks[layer], self.batches[number]
        positions = _positions(batch)
        attention_metadata = self.model.attention_metadata(positions, batch.tokens.shape[1], batch.documents)
        x: Tensor
        x, _ = block(self.hidden[number], attention_metadata[block.window])
        return x


def _positions(batch: Batch) -> Tensor:
    if batch.positions is not None:
        return batch.positions
    return torch.arange(batch.tokens.shape[1], device=batch.tokens.device).unsqueeze(0)
