"""Small models of every kind, with weights loud enough that every part matters."""

from collections.abc import Sequence

import torch
from torch import Tensor

from meshwright.model import Transformer, build
from meshwright.model.init import width_deviation
from meshwright.observe.oracle.features import VOCAB, shrink

__all__ = ["DENSE", "KINDS", "VOCAB", "model", "shrink"]

KINDS = (
    "gpt2-124m",
    "llama-2-7b",
    "llama-3.1-8b",
    "mistral-7b-v0.1",
    "qwen2.5-0.5b",
    "qwen3-0.6b",
    "mixtral-8x7b",
    "qwen3-30b-a3b",
    "deepseek-v3",
)
"""One model of each kind: learned positions, MHA, GQA with scaled rotation, window, biases and a tied head, norms of
queries and keys, experts, experts with those norms, latent attention with grouped experts."""
DENSE = KINDS[:6]


def model(name: str, *, seed: int = 0, louder: float = 8.0, **options: object) -> Transformer:
    """A small model whose weights, `louder` times 0.02, are large enough that every part matters to its output."""
    shrunk_model = build(shrink(name), seed=seed, **options)  # type: ignore[arg-type]
    louder *= 0.02 / width_deviation(shrunk_model.shape.hidden)
    with torch.no_grad():
        for key, parameter in shrunk_model.named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(louder)
            elif key.endswith("bias"):
                parameter.add_(torch.linspace(-0.3, 0.3, len(parameter)))
            else:
                parameter.mul_(torch.linspace(0.8, 1.2, len(parameter)))
        for module in shrunk_model.modules():
            if hasattr(module, "correction_bias"):
                module.correction_bias.copy_(torch.linspace(-0.2, 0.2, len(module.correction_bias)))
    return shrunk_model


def tokens(rows: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def packed(lengths: Sequence[int], rows: int = 1) -> tuple[Tensor, Tensor]:
    """documents and positions (rows, S) of rows that hold documents of these lengths."""
    documents = torch.cat([torch.full((length,), number) for number, length in enumerate(lengths)])
    positions = torch.cat([torch.arange(length) for length in lengths])
    return documents.expand(rows, -1).int(), positions.expand(rows, -1).int()
