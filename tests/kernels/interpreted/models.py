"""Whole small models whose operations are the Triton kernels, beside the plain ones: loss and every gradient."""

import pytest
import torch
from torch import Tensor

from meshwright.kernels import chooser
from meshwright.model import Transformer
from meshwright.parallel import on_one_device
from meshwright.spec import Layout
from tests.model.shrunk import model, packed, tokens

KINDS = ("gpt2-124m", "llama-3.1-8b", "qwen3-0.6b", "mixtral-8x7b", "deepseek-v3")
"""LayerNorm and GELU; RMSNorm, SwiGLU, GQA; norms of heads; experts; latent attention, shared experts."""


def loss_and_gradients(model: Transformer, mask: bool) -> list[Tensor]:
    inputs = tokens(1, 10)
    documents, positions = packed((4, 5), 1) if mask else (None, None)
    loss = model.loss(inputs[:, :-1], inputs[:, 1:], documents=documents, positions=positions)
    total = loss.cross_entropy if loss.balance is None else loss.cross_entropy + loss.balance.sum()
    total.backward()
    return [total.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("name", KINDS)
def test_a_model_of_triton_kernels(name: str) -> None:
    ours = loss_and_gradients(model(name, kernels="triton"), mask=name == "llama-3.1-8b")
    plain = loss_and_gradients(model(name, kernels="reference"), mask=name == "llama-3.1-8b")
    assert any(implementation.by == "triton" for implementation in chooser._choices.values())
    for actual, right in zip(ours, plain, strict=True):
        assert torch.isfinite(actual).all()
        assert (actual - right).norm() <= 2e-5 * right.norm() + 1e-6


@pytest.mark.parametrize(
    ("name", "recompute"),
    [("llama-3.1-8b", "norms"), ("llama-3.1-8b", "selective"), ("llama-3.1-8b", "all-but-attention"),
     ("mixtral-8x7b", "full"), ("qwen3-0.6b", "norms")],
)  # fmt: skip
def test_recomputation_around_triton_kernels(name: str, recompute: str) -> None:
    """Kernels are tried inside the first pass, and rotation overwrites queries that a norm or a product has made."""
    chooser._choices.clear()
    layout = Layout(recompute=recompute, compile="off")  # type: ignore[arg-type]
    ours = loss_and_gradients(on_one_device(model(name, kernels="triton"), layout).model, mask=False)
    plain = loss_and_gradients(model(name, kernels="reference"), mask=False)
    assert any(implementation.by == "triton" for implementation in chooser._choices.values())
    for actual, right in zip(ours, plain, strict=True):
        assert (actual - right).norm() <= 2e-5 * right.norm() + 1e-6
