"""Products of operands rounded to 8 bits: what is rounded, against the twin, torch's own product, and in training."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright import compat
from meshwright.kernels import fast, in_form, reference
from meshwright.kernels.linear import fp8
from meshwright.kernels.linear.linear import FP8, FP8_ALL, SAME
from meshwright.kernels.linear.weight_gradients import WeightGradients, splitting
from meshwright.observe.dryrun.simulate import dry_run
from meshwright.parallel import build_engine
from meshwright.planner.step.predict import predict
from meshwright.spec import Layout, ModelShape, Plan, Recipe, presets
from meshwright.spec.errors import PlanError
from meshwright.spec.model.shape import MoEShape
from meshwright.training import device
from meshwright.training.optimizer.optimizer import Optimizer
from meshwright.training.step.batches import Batch
from meshwright.training.step.step import train_step
from tests.kernels.exactness import tensors

BF16 = torch.bfloat16


def distance(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


@pytest.mark.parametrize("size", [1e-30, 1e-6, 1.0, 3e5])
def test_a_row_is_scaled_by_a_power_of_two_below_the_largest_number(size: float) -> None:
    (x,) = tensors((40, 64), dtype=BF16)
    actual = fp8.narrow(x * size)
    assert torch.equal(actual.scales, torch.exp2(actual.scales.log2().round()))
    peaks = actual.values.float().abs().amax(-1)
    assert (peaks <= fp8.LARGEST).all() and (size < 1e-9 or (peaks > fp8.LARGEST / 2.2).all())
    if size > 1e-9:
        assert distance(actual.wide(), x * size) < 0.03  # 3 bits of mantissa: 1/16 at most, 2.6 % in the mean square


def test_zeros_and_single_numbers_stay() -> None:
    x = torch.zeros(3, 16, dtype=BF16)
    x[1, 4] = -7.0
    assert torch.equal(fp8.narrow(x).wide(), x.float())


def results(kernels: Any, x: Tensor, weights: list[Tensor], biases: list[Tensor | None]) -> list[Tensor]:
    out = kernels.linears(x, weights, biases)
    gradients = tensors(*(tensor.shape for tensor in out), dtype=BF16, seed=1)
    return [*out, *torch.autograd.grad(out, [x, *weights, *(b for b in biases if b is not None)], gradients)]


def test_as_the_twin_in_value_and_gradients() -> None:
    x, *weights = tensors((6, 5, 64), (32, 64), (48, 64), dtype=BF16)
    leaves = [tensor.requires_grad_() for tensor in (x, *weights)]
    bias = tensors((32,), dtype=BF16)[0].requires_grad_()
    ours, twin = (results(in_form(make(), FP8), leaves[0], leaves[1:], [bias, None]) for make in (fast, reference))
    for a, b in zip(ours, twin, strict=True):
        assert distance(a, b) < 4e-3
    plain = results(fast(), leaves[0], leaves[1:], [bias, None])
    assert 0.02 < distance(ours[0], plain[0]) < 0.06 and 0.02 < distance(ours[2], plain[2]) < 0.06
    assert torch.equal(ours[3], plain[3]), "gradients of weights are made of 16 bit"


def test_gradients_of_weights_too() -> None:
    """Of 30 tokens, which no 8-bit product adds over: zeros behind them change nothing. A column of outliers keeps its
    error to itself."""
    x, *weights = tensors((6, 5, 64), (32, 64), (48, 64), dtype=BF16)
    x[..., 3] *= 1000
    leaves = [tensor.requires_grad_() for tensor in (x, *weights)]
    ours, twin, same = (
        results(in_form(make(), form), leaves[0], leaves[1:], [None, None])
        for make, form in ((fast, FP8_ALL), (reference, FP8_ALL), (fast, SAME))
    )
    for a, b in zip(ours, twin, strict=True):
        assert distance(a, b) < 4e-3
    assert 0.02 < distance(ours[3], same[3]) < 0.06 and 0.02 < distance(ours[4], same[4]) < 0.06
    rest = torch.arange(64) != 3
    assert distance(ours[3][:, rest], same[3][:, rest]) < 0.06


def test_what_waits_of_a_gradient_is_rounded_too() -> None:
    x, weight = (tensor.requires_grad_() for tensor in tensors((8, 32), (16, 32), dtype=BF16))
    kernels = in_form(fast(), FP8_ALL)
    kernels.linear(x, weight).sum().backward()
    right, weight.grad = weight.grad, None
    with splitting():
        loss = kernels.linear(x, weight).sum()
        with WeightGradients() as queue:
            loss.backward()
        queue.run()
    assert weight.grad is not None and right is not None and torch.equal(weight.grad, right)


def test_as_the_product_of_torch() -> None:
    a, b, bias = tensors((32, 64), (48, 64), (48,), dtype=BF16)
    narrow_a, narrow_b = fp8.narrow(a), fp8.narrow(b)
    right = compat.scaled_product(*narrow_a, *narrow_b, bias, BF16)
    assert distance(fp8.product(narrow_a, narrow_b, BF16, bias), right) < 3e-3


def test_the_second_half_of_a_gated_mlp() -> None:
    gate, up, weight = (tensor.requires_grad_() for tensor in tensors((9, 32), (9, 32), (16, 32), dtype=BF16))
    (gradient,) = tensors((9, 16), dtype=BF16, seed=3)
    actual = []
    for make in (fast, reference):
        out = in_form(make(), FP8).swiglu_linear(gate, up, weight)
        actual.append([out, *torch.autograd.grad(out, (gate, up, weight), gradient)])
    assert all(distance(a, b) < 8e-3 for a, b in zip(*actual, strict=True))


def test_gradients_of_weights_can_wait() -> None:
    x, weight = (tensor.requires_grad_() for tensor in tensors((8, 32), (16, 32), dtype=BF16))
    kernels = in_form(fast(), FP8)
    kernels.linear(x, weight).sum().backward()
    right, weight.grad = weight.grad, None
    with splitting():
        loss = kernels.linear(x, weight).sum()
        with WeightGradients() as queue:
            loss.backward()
        assert len(queue) == 1 and weight.grad is None
        queue.run()
    assert weight.grad is not None and right is not None and torch.equal(weight.grad, right)


SMALL = ModelShape(vocab=256, layers=2, hidden=64, heads=4, kv_heads=2, ffn=128, max_positions=64)
ROUTED = replace(SMALL, moe=MoEShape(experts=4, top_k=2, ffn=64))


def losses(
    products: str, precision: torch.dtype = BF16, kernels: str = "auto", compiled: str = "off",
    shape: ModelShape = SMALL,
) -> list[float]:  # fmt: skip
    """40 steps on tokens that follow from those before."""
    layout = Layout(compile=compiled, kernels=kernels)  # type: ignore[arg-type]
    engine = build_engine(shape, layout, dtype=precision, products=products)
    engine.train()
    optimizer = Optimizer(engine.parameters.items(), Recipe())
    generator, actual = torch.Generator().manual_seed(0), []
    for _ in range(40):
        start = torch.randint(256, (4, 1), generator=generator)
        tokens = (start + 7 * torch.arange(65)) % 256
        batch = Batch(tokens=tokens[:, :-1].contiguous(), targets=tokens[:, 1:].contiguous(), valid=256)
        actual.append(train_step(engine, optimizer, [batch], rate=3e-3, clip=1.0, balance_loss=0.0).loss.item())
    return actual


def beside(ours: list[float], plain: list[float]) -> bool:
    """Whether each five steps' mean is within 3 %: one step's loss swings by 6 % with the roundings of a router."""
    means = [[sum(curve[at : at + 5]) / 5 for at in range(0, 40, 5)] for curve in (ours, plain)]
    return ours != plain and all(abs(a - b) < 0.03 * b for a, b in zip(*means, strict=True))


def test_a_curve_of_40_steps_stays_beside_that_of_16_bit() -> None:
    ours, plain, twin = losses("fp8"), losses("same"), losses("fp8", kernels="reference")
    assert plain[-1] < 0.6 * plain[0]
    assert beside(ours, plain) and beside(ours, twin)


@pytest.mark.parametrize("shape", [SMALL, ROUTED], ids=["dense", "routed"])
def test_a_curve_of_40_steps_with_all_products_rounded(shape: ModelShape) -> None:
    ours, plain = losses("fp8-all", shape=shape), losses("same", shape=shape)
    twin = losses("fp8-all", kernels="reference", shape=shape)
    assert plain[-1] < 0.6 * plain[0]
    assert beside(ours, plain) and beside(ours, twin)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler's own, of its own code
@pytest.mark.parametrize("products", ["fp8", "fp8-all"])
def test_compiled_gradients_are_those_of_eager_code(products: str) -> None:
    """But for roundings between operations that the compiler leaves out."""
    tokens = (torch.arange(4)[:, None] + 7 * torch.arange(65)) % 256
    actual = []
    for compiled in ("off", "on"):
        torch._dynamo.reset()
        layout = Layout(compile=compiled)  # type: ignore[arg-type]
        engine = build_engine(replace(SMALL, layers=1), layout, dtype=BF16, products=products)
        engine.model.loss(tokens[:, :-1], tokens[:, 1:]).cross_entropy.backward()
        actual.append({name: tensor.grad for name, tensor in engine.parameters.items()})
    for name, gradient in actual[0].items():
        other = actual[1][name]
        assert gradient is not None and other is not None and distance(other, gradient) < 0.15, name


def test_only_blocks_are_rounded() -> None:
    """A model whose blocks add nothing: embedding, norm and head give the same bits."""
    actual = []
    for products in ("same", "fp8"):
        engine = build_engine(SMALL, Layout(compile="off"), dtype=BF16, products=products)
        with torch.no_grad():
            for name, parameter in engine.parameters.items():
                if name.endswith(("o.weight", "down.weight")):
                    parameter.zero_()
            actual.append(engine.model(torch.arange(10)[None]))
    assert torch.equal(*actual)


def plan(**changes: Any) -> Plan:
    layout = Layout(**changes.pop("layout", {}))
    recipe = Recipe(sequence=4096, global_batch=64, precision="bf16", products="fp8")
    return Plan(model=presets.model("llama-3.1-8b"), layout=layout, recipe=recipe, cluster=presets.cluster("h100x8"))


def test_what_cannot_be_rounded_is_refused() -> None:
    good = plan(layout={"dp_shard": 8, "zero": 2})
    assert not good.violations()
    (violation,) = replace(good, recipe=replace(good.recipe, precision="fp32")).violations()
    assert violation.endswith("take recipe.precision=bf16")
    (violation,) = replace(good, model=replace(SMALL, ffn=120)).violations()
    assert "layers.0.mlp" in violation and "120" in violation and violation.endswith("take recipe.products=same")
    routed = replace(good, model=replace(ROUTED, moe=MoEShape(experts=4, top_k=2, ffn=24)))
    assert not routed.violations()
    (violation,) = replace(routed, recipe=replace(good.recipe, products="fp8-all")).violations()
    assert "experts" in violation and "24" in violation and violation.endswith("take recipe.products=fp8")


def test_a_device_without_such_products_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    with pytest.raises(PlanError, match=r"^A100 \(sm_80\) multiplies no 8-bit numbers: take recipe.products=same$"):
        device.prepare(torch.device("cuda", 0), "bf16", products="fp8")
    assert fp8.missing(torch.device("cpu")) == "a CPU multiplies no 8-bit numbers"


def test_copies_inside_a_block_are_as_large_as_in_a_dry_run() -> None:
    """A split backward pass of few tokens: narrow matrices are the largest thing beside what is kept. No scaled copy of
    them is made, which was 1.5 % of this peak. Gradients of weights add to their sums and take nothing beside them."""
    shape = ModelShape(layers=4, hidden=1024, heads=16, kv_heads=4, ffn=2816, vocab=64, max_positions=8192)
    layout = Layout(pp=2, schedule="zb-h1", micro_batch=1, compile="off")
    actual = []
    for products in ("same", "fp8"):
        recipe = Recipe(sequence=128, global_batch=4, precision="bf16", products=products)  # type: ignore[arg-type]
        planned_run = Plan(model=shape, layout=layout, recipe=recipe, cluster=presets.cluster("h100x8"))
        kinds = predict(planned_run).memory[0].kinds
        planned, held = (
            sum(kinds.values()) - kinds["reserve"],
            dry_run(planned_run, ranks=[0], device="cuda").peak_bytes,
        )
        assert planned == pytest.approx(held, rel=0.01)
        actual.append(held)
    assert actual[0] < actual[1] < 1.01 * actual[0]


def test_a_run_says_what_makes_it_slow() -> None:
    good, cuda, cpu = plan(), torch.device("cuda", 0), torch.device("cpu")
    assert "layout.compile=on" in device.product_notes(good, cuda, compiled=False)[0]
    assert device.product_notes(good, cuda, compiled=True) == []
    assert device.product_notes(good, cpu, compiled=False)[0].startswith("a CPU multiplies no 8-bit numbers")
    bf16 = Plan(model=good.model, layout=good.layout, recipe=Recipe(precision="bf16"), cluster=good.cluster)
    assert device.product_notes(bf16, cuda, compiled=False) == []


def test_the_planner_counts_the_products_and_the_passes_that_round() -> None:
    """Faster than 16 bit, with memory as without. Triton rounds where the compiler does not."""
    ours = plan(layout={"dp_shard": 8, "zero": 2, "compile": "on"})
    same = replace(ours, recipe=replace(ours.recipe, products="same"))
    assert 1.05 < predict(same).step_s / predict(ours).step_s < 1.6
    assert predict(same).peak_bytes == pytest.approx(predict(ours).peak_bytes, rel=1e-3)
    eager = replace(ours, layout=replace(ours.layout, compile="off"))
    assert predict(eager).step_s == pytest.approx(predict(ours).step_s, rel=0.02)
