"""Mixture of experts: routing against plain loops over tokens, the balance loss against sums by hand."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from meshwright.kernels import choose
from meshwright.model.feed_forward import MoE
from meshwright.spec import ModelShape
from tests.model.shrunk import model, shrink, tokens

NAMES = ("mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3")


def layer(name: str, kernels: str = "auto", **changes: object) -> MoE:
    """A routed feed-forward alone, with weights of size one."""
    shape: ModelShape = shrink(name)
    assert shape.moe is not None
    moe_layer = MoE(replace(shape, moe=replace(shape.moe, **changes)), choose(kernels))  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in moe_layer.parameters():
            parameter.normal_(0, 0.4, generator=generator)
        if moe_layer.moe.correction_bias:
            moe_layer.router.correction_bias.normal_(0, 0.3, generator=generator)
    return moe_layer


def states(rows: int = 2, length: int = 9, seed: int = 1) -> Tensor:
    return torch.randn(rows, length, 24, generator=torch.Generator().manual_seed(seed))


def choice(moe_layer: MoE, token: Tensor) -> tuple[list[int], list[float], list[float]]:
    """Experts, weights and probabilities of one token by Python's own sorting, as the papers say it."""
    moe = moe_layer.moe
    logits = (moe_layer.router.weight @ token).tolist()
    scores = torch.tensor(logits).softmax(0) if moe.scoring == "softmax" else torch.tensor(logits).sigmoid()
    ranked = scores + moe_layer.router.correction_bias if moe.correction_bias else scores
    each = moe.experts // moe.groups
    groups = sorted(range(moe.groups), key=lambda g: -sum(sorted(ranked[g * each : (g + 1) * each].tolist())[-2:]))
    open_groups = groups[: moe.top_groups] if moe.groups > 1 else groups
    allowed = [expert for group in open_groups for expert in range(group * each, (group + 1) * each)]
    chosen = sorted(allowed, key=lambda expert: -ranked[expert].item())[: moe.top_k]
    total = sum(scores[expert].item() for expert in chosen) if moe.normalize_top_k else 1.0
    weights = [scores[expert].item() / total * moe.routed_scale for expert in chosen]
    return chosen, weights, (scores / scores.sum()).tolist()


def act(moe_layer: MoE, up: Tensor, gate: Tensor | None) -> Tensor:
    """Apply the activation.

    Shazeer 2020 (arXiv:2002.05202) with a gate, Hendrycks and Gimpel (arXiv:1606.08415) without.
    """
    if gate is not None:
        return up * gate * gate.sigmoid()
    if moe_layer.experts.approximate == "tanh":
        return up / 2 * (1 + ((2 / math.pi) ** 0.5 * (up + 0.044715 * up**3)).tanh())
    return up / 2 * (1 + (up / 2**0.5).erf())


def by_hand(moe_layer: MoE, x: Tensor) -> Tensor:
    experts, rows = moe_layer.experts, []
    for token in x.flatten(0, 1):
        chosen, weights, _ = choice(moe_layer, token)
        out = torch.zeros_like(token)
        for expert, weight in zip(chosen, weights, strict=True):
            gate = experts.gate[expert] @ token if experts.gated else None
            inner = act(moe_layer, experts.up[expert] @ token, gate)
            out = out + weight * (experts.down[expert] @ inner)
        if moe_layer.moe.shared_experts:
            shared = moe_layer.shared
            gate = shared.gate.weight @ token if experts.gated else None
            inner = act(moe_layer, shared.up.weight @ token, gate)
            out = out + shared.down.weight @ inner
        rows.append(out)
    return torch.stack(rows).view_as(x)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("top_k", [1, 3])
@pytest.mark.parametrize("normalize", [True, False])
def test_routing_equals_a_loop_over_tokens(name: str, kernels: str, top_k: int, normalize: bool) -> None:
    moe_layer = layer(name, kernels, top_k=top_k, normalize_top_k=normalize)
    with torch.no_grad():
        torch.testing.assert_close(moe_layer(states())[0], by_hand(moe_layer, states()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mlp", ["gelu", "gelu_tanh"])
def test_experts_without_a_gate_equal_a_loop_over_tokens(name: str, mlp: str) -> None:
    shape = shrink(name)
    assert shape.moe is not None
    moe_layer = MoE(replace(shape, mlp=mlp), choose("auto"))  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in moe_layer.parameters():
            parameter.normal_(0, 0.4, generator=torch.Generator().manual_seed(parameter.numel()))
        assert not hasattr(moe_layer.experts, "gate")
        torch.testing.assert_close(moe_layer(states())[0], by_hand(moe_layer, states()), rtol=1e-5, atol=1e-5)


def test_no_token_is_dropped_when_all_want_one_expert() -> None:
    moe_layer = layer("mixtral-8x7b", top_k=1)
    with torch.no_grad():
        moe_layer.router.weight.zero_()
        moe_layer.router.weight[5] = 1.0
        x = states().abs()
        assert {choice(moe_layer, token)[0][0] for token in x.flatten(0, 1)} == {5}
        torch.testing.assert_close(moe_layer(x)[0], by_hand(moe_layer, x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_an_expert_without_tokens_gets_a_gradient_of_zero(name: str) -> None:
    """And breaks nothing: the others learn as if it were not there."""
    moe_layer = layer(name, top_k=1, correction_bias=False)
    x = states()
    with torch.no_grad():
        moe_layer.router.weight.mul_(4)
    out, balance = moe_layer(x)
    (out.square().sum() + balance.sum()).backward()
    visited = {choice(moe_layer, token)[0][0] for token in x.flatten(0, 1)}
    assert 1 < len(visited) < moe_layer.moe.experts, "the case that is meant"
    for stack in (moe_layer.experts.gate, moe_layer.experts.up, moe_layer.experts.down):
        assert stack.grad is not None and torch.isfinite(stack.grad).all()
        assert {expert for expert in range(moe_layer.moe.experts) if stack.grad[expert].any()} == visited
    router = moe_layer.router.weight.grad
    assert router is not None and torch.isfinite(router).all()


@pytest.mark.parametrize("name", NAMES)
def test_gradients_equal_those_of_the_loop(name: str) -> None:
    """Through experts, inputs and, by the weights, the router."""
    moe_layer = layer(name)
    x = states().requires_grad_()
    wanted = [x, *moe_layer.parameters()]
    fast = torch.autograd.grad(moe_layer(x)[0].square().sum(), wanted, allow_unused=True)
    slow = torch.autograd.grad(_differentiable(moe_layer, x).square().sum(), wanted, allow_unused=True)
    for gradient, other in zip(fast, slow, strict=True):
        assert gradient is not None and other is not None
        assert (gradient - other).norm() < 1e-5 * other.norm()


def _differentiable(moe_layer: MoE, x: Tensor) -> Tensor:
    """The loop again, its weights as tensors."""
    rows, experts = [], moe_layer.experts
    for token in x.flatten(0, 1):
        chosen = choice(moe_layer, token.detach())[0]
        logits = moe_layer.router.weight @ token
        scores = logits.softmax(0) if moe_layer.moe.scoring == "softmax" else logits.sigmoid()
        weights = scores[chosen] / (scores[chosen].sum() if moe_layer.moe.normalize_top_k else 1)
        parts = [experts.down[e] @ (F.silu(experts.gate[e] @ token) * (experts.up[e] @ token)) for e in chosen]
        out = (torch.stack(parts) * weights.unsqueeze(1)).sum(0) * moe_layer.moe.routed_scale
        rows.append(out + moe_layer.shared(token) if moe_layer.moe.shared_experts else out)
    return torch.stack(rows).view_as(x)


@pytest.mark.parametrize("name", NAMES)
def test_balance_loss_by_hand(name: str) -> None:
    """X times the sum over experts of (share of the choices) x (mean probability), a sequence at a time."""
    moe_layer = layer(name)
    moe, x = moe_layer.moe, states(rows=3)
    with torch.no_grad():
        balance = moe_layer(x)[1]
        for row in range(3):
            choices, mean = [0] * moe.experts, [0.0] * moe.experts
            for token in x[row]:
                chosen, _, probabilities = choice(moe_layer, token)
                for expert in chosen:
                    choices[expert] += 1
                mean = [m + p / 9 for m, p in zip(mean, probabilities, strict=True)]
            shares = [count / (9 * moe.top_k) for count in choices]
            expected = moe.experts * sum(share * m for share, m in zip(shares, mean, strict=True))
            assert balance[row].item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_padding_is_not_in_the_balance_loss(name: str) -> None:
    """Rows of 9, 4 and 0 real tokens: each as if it were alone and ended there."""
    moe_layer, lengths = layer(name), (9, 4, 0)
    padding = torch.arange(9) >= torch.tensor(lengths).unsqueeze(1)
    x = states(rows=3)
    balance = moe_layer(x, padding)[1]
    alone = [moe_layer(x[row : row + 1, :length])[1] for row, length in enumerate(lengths) if length]
    torch.testing.assert_close(balance, torch.cat((*alone, torch.zeros(1))), rtol=1e-5, atol=1e-7)
    gradients = [
        torch.autograd.grad(loss, moe_layer.router.weight)[0] for loss in (balance.sum(), torch.cat(alone).sum())
    ]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)
    assert (moe_layer(x)[1] - balance).abs()[1] > 1e-3


def test_balance_loss_is_one_when_even_and_all_experts_when_lost() -> None:
    moe_layer = layer("mixtral-8x7b", top_k=1)
    with torch.no_grad():
        moe_layer.router.weight.zero_()
        assert moe_layer(states())[1].tolist() == pytest.approx([1.0, 1.0])
        moe_layer.router.weight[2] = 50.0
        assert moe_layer(states().abs())[1].tolist() == pytest.approx([8.0, 8.0])


@pytest.mark.parametrize("name", NAMES)
def test_balance_loss_knows_no_micro_batches(name: str) -> None:
    moe_layer = model(name, louder=4.0)
    ids = tokens(4, 12)
    whole = moe_layer.loss(ids, ids).balance
    parts = [moe_layer.loss(ids[i : i + size], ids[i : i + size]).balance for i, size in ((0, 1), (1, 3))]
    assert whole is not None and whole.shape == (4,)
    torch.testing.assert_close(torch.cat([part for part in parts if part is not None]), whole, rtol=1e-5, atol=1e-6)


def test_balance_loss_is_the_mean_over_routed_layers_only() -> None:
    moe_layer = model("deepseek-v3")
    assert [moe_layer.shape.is_moe_layer(i) for i in range(3)] == [False, True, True]
    seen: list[Tensor] = []
    for block in list(moe_layer.layers.values())[1:]:
        block.mlp.register_forward_hook(lambda module, ids, out: seen.append(out[1]))
    balance = moe_layer.loss(tokens(2, 9), tokens(2, 9)).balance
    assert balance is not None and len(seen) == 2
    torch.testing.assert_close(balance, (seen[0] + seen[1]) / 2)


def test_chosen_groups_bound_the_choice_and_the_bias_only_chooses() -> None:
    """DeepSeek-V3: experts come from the best groups alone, and their weights are the plain scores."""
    moe_layer = layer("deepseek-v3")
    moe = moe_layer.moe
    assert moe.groups == 4 and moe.top_groups == 2 and moe.correction_bias and moe.scoring == "sigmoid"
    x = states().flatten(0, 1)
    with torch.no_grad():
        weights, experts, probabilities = moe_layer.router(x)
        scores = (x @ moe_layer.router.weight.T).sigmoid()
    assert all(len({expert // 2 for expert in row}) <= 2 for row in experts.tolist())
    picked = scores.gather(1, experts)
    torch.testing.assert_close(weights, moe.routed_scale * picked / picked.sum(1, keepdim=True))
    torch.testing.assert_close(probabilities, scores / scores.sum(1, keepdim=True))
    with torch.no_grad():
        moe_layer.router.correction_bias.zero_()
        moe_layer.router.correction_bias[3] = 100.0
        _, forced, _ = moe_layer.router(x)
    assert (forced == 3).any(1).all() and not moe_layer.router.correction_bias.requires_grad


def test_the_router_stays_fp32_in_a_16_bit_model() -> None:
    moe_layer = layer("deepseek-v3").bfloat16()
    weights, _, probabilities = moe_layer.router(states().bfloat16().flatten(0, 1))
    assert weights.dtype == probabilities.dtype == torch.float32
    torch.testing.assert_close(probabilities.sum(1), torch.ones(18), rtol=1e-6, atol=1e-6)
    assert moe_layer(states().bfloat16())[0].dtype == torch.bfloat16


@pytest.mark.parametrize("name", NAMES)
def test_the_host_asks_for_the_counts_once_and_for_nothing_else(name: str) -> None:
    """Tensors without values can then be routed by counts that are given: shapes, and with them memory, are known."""
    asked: list[tuple[tuple[int, ...], int]] = []

    def read_counts(counts: Tensor, rows: int) -> list[list[int]]:
        asked.append((tuple(counts.shape), rows))
        return [[rows // 8] * 8]

    with FakeTensorMode():
        moe_layer = MoE(shrink(name), choose("auto"))
        moe_layer.seams.counts_on_host = read_counts
        x = torch.empty(2, 8, 24, requires_grad=True)
        out, balance = moe_layer(x)
        (out.sum() + balance.sum()).backward()
        assert out.shape == x.shape and x.grad is not None and balance.shape == (2,)
        assert all(parameter.grad is not None for parameter in moe_layer.parameters())
    assert asked == [((1, 8), 16 * moe_layer.moe.top_k)]
