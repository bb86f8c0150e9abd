"""Layers that somebody replaced or hung something on are called, wherever they stand."""

import pytest
import torch
from torch import Tensor, nn

from meshwright.kernels import fast
from meshwright.kernels.loss.cross_entropy import linear_cross_entropy
from meshwright.model.layers import Linear, read
from meshwright.model.seams import Border
from meshwright.spec.errors import IllegalLayout
from tests.model.shrunk import model, tokens


class Doubled(Linear):
    """An adapter as others write them: a subclass with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def layer_of(kind: type[Linear]) -> Linear:
    torch.manual_seed(0)
    return kind(4, 3, fast())


def test_a_subclass_is_called_beside_layers_of_ours() -> None:
    x = torch.randn(2, 4)
    plain, doubled = layer_of(Linear), layer_of(Doubled)
    first, second = read(Border(), x, plain, doubled)
    torch.testing.assert_close(second, 2 * first)


@pytest.mark.parametrize("name", ["q", "k", "v", "o"])
def test_hooks_are_called_on_every_layer_of_attention(name: str) -> None:
    transformer, seen = model("llama-3.1-8b"), []
    layer = getattr(next(iter(transformer.layers.values())).attention, name)
    layer.register_forward_hook(lambda module, inputs, out: seen.append(out.shape))
    transformer(tokens(1, 8))
    assert len(seen) == 1


@pytest.mark.parametrize("other", [layer_of(Doubled), nn.Linear(4, 3)], ids=["subclass", "torch's"])
def test_a_tensor_parallel_border_refuses_what_it_cannot_enter(other: nn.Module) -> None:
    """Its input would not be entered: gradients would be those of one rank, without a word."""
    border = Border(read=lambda x, weights, biases: (x,) * len(weights))
    with pytest.raises(IllegalLayout, match=r"layout\.tp=1"):
        read(border, torch.randn(2, 4), layer_of(Linear), other)


def test_a_scale_that_wants_a_gradient_is_refused_and_any_dtype_is_taken() -> None:
    x, weight, targets = torch.randn(5, 4), torch.randn(7, 4, requires_grad=True), torch.arange(5)
    for dtype in (torch.float64, torch.bfloat16):
        linear_cross_entropy(x, weight, targets, torch.ones(5, dtype=dtype)).backward()
    with pytest.raises(ValueError, match="detach"):
        linear_cross_entropy(x, weight, targets, torch.ones(5, requires_grad=True))
