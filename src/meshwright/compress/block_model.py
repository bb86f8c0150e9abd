"""A model that holds one block in memory at a time, together with its calibration text."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from meshwright.compress.layer_inputs import reading
from meshwright.kernels.experts.experts import Counts
from meshwright.model.rope import frequencies
from meshwright.model.transformer import Block, shrink, skeleton
from meshwright.spec.model.shape import ModelShape
from meshwright.training.step.batches import Batch


class _StopForward(Exception):
    """Ends a forward pass once the requested activations were observed."""


class BlockModel:
    """The model, the text, and the hidden states (B, S, D) of each batch at the input of the next block."""

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
        """Compute the inputs of the first block from the embedding, and learned positions, by name."""
        parts: list[nn.Module] = [self.model.embed]
        parts += [self.model.positions] if self.model.shape.positions == "learned" else []
        for part in parts:
            part.to_empty(device=self.device)
        parameters = self.model.state_dict()
        for name, tensor in weights.items():
            parameters[name].copy_(tensor)
        self.hidden = [self.model.enter(batch.tokens, _positions(batch)) for batch in self.batches]
        for part in parts:
            part.to("meta")

    @contextmanager
    def block(self, layer: int, weights: Iterable[tuple[str, Tensor]]) -> Iterator[Block]:
        """Materialize one block with its weights inside `with`, and free its memory afterwards.

        Weights are consumed one at a time.
        """
        block = self.model.blocks[layer]
        block.to_empty(device=self.device)
        self.fill(layer, weights)
        try:
            yield block
        finally:
            block.to("meta")

    @torch.no_grad()
    def fill(self, layer: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy weights, by name, into a block that has memory."""
        prefix, parameters = f"layers.{layer}.", self.model.blocks[layer].state_dict()
        for name, tensor in weights:
            parameters[name.removeprefix(prefix)].copy_(tensor)
            del tensor

    @torch.no_grad()
    def listen(self, layer: int, name: str, observe: Callable[[Tensor, Counts | None], None]) -> None:
        """Run a block on each batch up to the matrix of this name, and call `observe` with its inputs."""

        def stop_at(_: str, x: Tensor, counts: Counts | None) -> None:
            observe(x, counts)
            raise _StopForward

        with reading(self.model, [name], stop_at):
            for number in range(len(self.batches)):
                try:
                    self._output(layer, number)
                except _StopForward:
                    continue

    @torch.no_grad()
    def step(self, layer: int) -> None:
        """Replace the hidden states by the outputs of a block."""
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
