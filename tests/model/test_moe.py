"""Mixture of experts: routing against plain loops over tokens, the balance loss against sums by hand."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from meshwright.kernels import choose
from meshwright.model.moe import MoE
from meshwright.spec import ModelShape
from tests.model.shrunk import model, shrink, tokens

NAMES = ("mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3")


def layer(name: str, kernels: str = "auto", **changes: object) -> MoE:
    """A routed feed-forward alone, with weights of size one."""
    shape: ModelShape = shrink(name)
    assert shape.moe is not None
    found = MoE(replace(shape, moe=replace(shape.moe, **changes)), choose(kernels))  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.normal_(0, 0.4, generator=generator)
        if found.moe.correction_bias:
            found.router.correction_bias.normal_(0, 0.3, generator=generator)
    return found


def states(rows: int = 2, length: int = 9, seed: int = 1) -> Tensor:
    return torch.randn(rows, length, 24, generator=torch.Generator().manual_seed(seed))


def choice(found: MoE, token: Tensor) -> tuple[list[int], list[float], list[float]]:
    """Experts, weights and probabilities of one token by Python's own sorting, as the papers say it."""
    moe = found.moe
    logits = (found.router.weight @ token).tolist()
    scores = torch.tensor(logits).softmax(0) if moe.scoring == "softmax" else torch.tensor(logits).sigmoid()
    ranked = scores + found.router.correction_bias if moe.correction_bias else scores
    each = moe.experts // moe.groups
    groups = sorted(range(moe.groups), key=lambda g: -sum(sorted(ranked[g * each : (g + 1) * each].tolist())[-2:]))
    open_groups = groups[: moe.top_groups] if moe.groups > 1 else groups
    allowed = [expert for group in open_groups for expert in range(group * each, (group + 1) * each)]
    chosen = sorted(allowed, key=lambda expert: -ranked[expert].item())[: moe.top_k]
    total = sum(scores[expert].item() for expert in chosen) if moe.normalize_top_k else 1.0
    weights = [scores[expert].item() / total * moe.routed_scale for expert in chosen]
    return chosen, weights, (scores / scores.sum()).tolist()


def act(found: MoE, up: Tensor, gate: Tensor | None) -> Tensor:
    """As Shazeer 2020 (arXiv:2002.05202) with a gate, and as Hendrycks and Gimpel (arXiv:1606.08415) without."""
    if gate is not None:
        return up * gate * gate.sigmoid()
    if found.experts.approximate == "tanh":
        return up / 2 * (1 + ((2 / math.pi) ** 0.5 * (up + 0.044715 * up**3)).tanh())
    return up / 2 * (1 + (up / 2**0.5).erf())


def by_hand(found: MoE, x: Tensor) -> Tensor:
    experts, rows = found.experts, []
    for token in x.flatten(0, 1):
        chosen, weights, _ = choice(found, token)
        out = torch.zeros_like(token)
        for expert, weight in zip(chosen, weights, strict=True):
            gate = experts.gate[expert] @ token if experts.gated else None
            inner = act(found, experts.up[expert] @ token, gate)
            out = out + weight * (experts.down[expert] @ inner)
        if found.moe.shared_experts:
            shared = found.shared
            gate = shared.gate.weight @ token if experts.gated else None
            inner = act(found, shared.up.weight @ token, gate)
            out = out + shared.down.weight @ inner
        rows.append(out)
    return torch.stack(rows).view_as(x)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("top_k", [1, 3])
@pytest.mark.parametrize("normalize", [True, False])
def test_routing_equals_a_loop_over_tokens(name: str, kernels: str, top_k: int, normalize: bool) -> None:
    found = layer(name, kernels, top_k=top_k, normalize_top_k=normalize)
    with torch.no_grad():
        torch.testing.assert_close(found(states())[0], by_hand(found, states()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mlp", ["gelu", "gelu_tanh"])
def test_experts_without_a_gate_equal_a_loop_over_tokens(name: str, mlp: str) -> None:
    shape = shrink(name)
    assert shape.moe is not None
    found = MoE(replace(shape, mlp=mlp), choose("auto"))  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.normal_(0, 0.4, generator=torch.Generator().manual_seed(parameter.numel()))
        assert not hasattr(found.experts, "gate")
        torch.testing.assert_close(found(states())[0], by_hand(found, states()), rtol=1e-5, atol=1e-5)


def test_no_token_is_dropped_when_all_want_one_expert() -> None:
    found = layer("mixtral-8x7b", top_k=1)
    with torch.no_grad():
        found.router.weight.zero_()
        found.router.weight[5] = 1.0
        x = states().abs()
        assert {choice(found, token)[0][0] for token in x.flatten(0, 1)} == {5}
        torch.testing.assert_close(found(x)[0], by_hand(found, x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_an_expert_without_tokens_gets_a_gradient_of_zero(name: str) -> None:
    """And breaks nothing: the others learn as if it were not there."""
    found = layer(name, top_k=1, correction_bias=False)
    x = states()
    with torch.no_grad():
        found.router.weight.mul_(4)
    out, balance = found(x)
    (out.square().sum() + balance.sum()).backward()
    visited = {choice(found, token)[0][0] for token in x.flatten(0, 1)}
    assert 1 < len(visited) < found.moe.experts, "the case that is meant"
    for stack in (found.experts.gate, found.experts.up, found.experts.down):
        assert stack.grad is not None and torch.isfinite(stack.grad).all()
        assert {expert for expert in range(found.moe.experts) if stack.grad[expert].any()} == visited
    router = found.router.weight.grad
    assert router is not None and torch.isfinite(router).all()


@pytest.mark.parametrize("name", NAMES)
def test_gradients_equal_those_of_the_loop(name: str) -> None:
    """Through experts, inputs and, by the weights, the router."""
    found = layer(name)
    x = states().requires_grad_()
    wanted = [x, *found.parameters()]
    fast = torch.autograd.grad(found(x)[0].square().sum(), wanted, allow_unused=True)
    slow = torch.autograd.grad(_differentiable(found, x).square().sum(), wanted, allow_unused=True)
    for one, other in zip(fast, slow, strict=True):
        assert one is not None and other is not None
        assert (one - other).norm() < 1e-5 * other.norm()


def _differentiable(found: MoE, x: Tensor) -> Tensor:
    """The loop again, its weights as tensors."""
    rows, experts = [], found.experts
    for token in x.flatten(0, 1):
        chosen = choice(found, token.detach())[0]
        logits = found.router.weight @ token
        scores = logits.softmax(0) if found.moe.scoring == "softmax" else logits.sigmoid()
        weights = scores[chosen] / (scores[chosen].sum() if found.moe.normalize_top_k else 1)
        parts = [experts.down[e] @ (F.silu(experts.gate[e] @ token) * (experts.up[e] @ token)) for e in chosen]
        out = (torch.stack(parts) * weights.unsqueeze(1)).sum(0) * found.moe.routed_scale
        rows.append(out + found.shared(token) if found.moe.shared_experts else out)
    return torch.stack(rows).view_as(x)


@pytest.mark.parametrize("name", NAMES)
def test_balance_loss_by_hand(name: str) -> None:
    """X times the sum over experts of (share of the choices) x (mean probability), a sequence at a time."""
    found = layer(name)
    moe, x = found.moe, states(rows=3)
    with torch.no_grad():
        balance = found(x)[1]
        for row in range(3):
            choices, mean = [0] * moe.experts, [0.0] * moe.experts
            for token in x[row]:
                chosen, _, probabilities = choice(found, token)
                for expert in chosen:
                    choices[expert] += 1
                mean = [m + p / 9 for m, p in zip(mean, probabilities, strict=True)]
            shares = [count / (9 * moe.top_k) for count in choices]
            expected = moe.experts * sum(share * m for share, m in zip(shares, mean, strict=True))
            assert balance[row].item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_padding_is_not_in_the_balance_loss(name: str) -> None:
    """Rows of 9, 4 and 0 real tokens: each as if it were alone and ended there."""
    found, lengths = layer(name), (9, 4, 0)
    padding = torch.arange(9) >= torch.tensor(lengths).unsqueeze(1)
    x = states(rows=3)
    balance = found(x, padding)[1]
    alone = [found(x[row : row + 1, :length])[1] for row, length in enumerate(lengths) if length]
    torch.testing.assert_close(balance, torch.cat((*alone, torch.zeros(1))), rtol=1e-5, atol=1e-7)
    gradients = [torch.autograd.grad(one, found.router.weight)[0] for one in (balance.sum(), torch.cat(alone).sum())]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)
    assert (found(x)[1] - balance).abs()[1] > 1e-3


def test_balance_loss_is_one_when_even_and_all_experts_when_lost() -> None:
    found = layer("mixtral-8x7b", top_k=1)
    with torch.no_grad():
        found.router.weight.zero_()
        assert found(states())[1].tolist() == pytest.approx([1.0, 1.0])
        found.router.weight[2] = 50.0
        assert found(states().abs())[1].tolist() == pytest.approx([8.0, 8.0])


@pytest.mark.parametrize("name", NAMES)
def test_balance_loss_knows_no_micro_batches(name: str) -> None:
    found = model(name, louder=4.0)
    given = tokens(4, 12)
    whole = found.loss(given, given).balance
    parts = [found.loss(given[i : i + size], given[i : i + size]).balance for i, size in ((0, 1), (1, 3))]
    assert whole is not None and whole.shape == (4,)
    torch.testing.assert_close(torch.cat([part for part in parts if part is not None]), whole, rtol=1e-5, atol=1e-6)


def test_balance_loss_is_the_mean_over_routed_layers_only() -> None:
    found = model("deepseek-v3")
    assert [found.shape.is_moe_layer(i) for i in range(3)] == [False, True, True]
    seen: list[Tensor] = []
    for block in list(found.layers.values())[1:]:
        block.mlp.register_forward_hook(lambda module, given, out: seen.append(out[1]))
    balance = found.loss(tokens(2, 9), tokens(2, 9)).balance
    assert balance is not None and len(seen) == 2
    torch.testing.assert_close(balance, (seen[0] + seen[1]) / 2)


def test_chosen_groups_bound_the_choice_and_the_bias_only_chooses() -> None:
    """DeepSeek-V3: experts come from the best groups alone, and their weights are the plain scores."""
    found = layer("deepseek-v3")
    moe = found.moe
    assert moe.groups == 4 and moe.top_groups == 2 and moe.correction_bias and moe.scoring == "sigmoid"
    x = states().flatten(0, 1)
    with torch.no_grad():
        weights, experts, probabilities = found.router(x)
        scores = (x @ found.router.weight.T).sigmoid()
    assert all(len({expert // 2 for expert in row}) <= 2 for row in experts.tolist())
    picked = scores.gather(1, experts)
    torch.testing.assert_close(weights, moe.routed_scale * picked / picked.sum(1, keepdim=True))
    torch.testing.assert_close(probabilities, scores / scores.sum(1, keepdim=True))
    with torch.no_grad():
        found.router.correction_bias.zero_()
        found.router.correction_bias[3] = 100.0
        _, forced, _ = found.router(x)
    assert (forced == 3).any(1).all() and not found.router.correction_bias.requires_grad


def test_the_router_stays_fp32_in_a_16_bit_model() -> None:
    found = layer("deepseek-v3").bfloat16()
    weights, _, probabilities = found.router(states().bfloat16().flatten(0, 1))
    assert weights.dtype == probabilities.dtype == torch.float32
    torch.testing.assert_close(probabilities.sum(1), torch.ones(18), rtol=1e-6, atol=1e-6)
    assert found(states().bfloat16())[0].dtype == torch.bfloat16


@pytest.mark.parametrize("name", NAMES)
def test_the_host_asks_for_the_counts_once_and_for_nothing_else(name: str) -> None:
    """Tensors without values can then be routed by counts that are given: shapes, and with them memory, are known."""
    asked: list[tuple[tuple[int, ...], int]] = []

    def given(counts: Tensor, rows: int) -> list[list[int]]:
        asked.append((tuple(counts.shape), rows))
        return [[rows // 8] * 8]

    with FakeTensorMode():
        found = MoE(shrink(name), choose("auto"))
        found.seams.counts_on_host = given
        x = torch.empty(2, 8, 24, requires_grad=True)
        out, balance = found(x)
        (out.sum() + balance.sum()).backward()
        assert out.shape == x.shape and x.grad is not None and balance.shape == (2,)
        assert all(parameter.grad is not None for parameter in found.parameters())
    assert asked == [((1, 8), 16 * found.moe.top_k)]
